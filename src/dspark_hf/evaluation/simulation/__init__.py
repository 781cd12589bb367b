"""A simulated server with continuous batching: what systems of drafting give under load, from recorded rounds.

request     what a simulation is asked for
bank        recorded rounds as arrays
workload    requests, lengths, arrivals
machine     what rounds take: measured profiles and formulas
systems     plain steps, MTP-1, fixed lengths, the policies of generate()
estimates   what the confidence head says, right or wrong
server      the events
measures    numbers of a run, and of several seeds
setting     all of these put together
loads, series, study    loads; changes over time; everything
paper       the paper's curves
render, figures         Markdown and pictures
"""

from .request import SimulationRequest
from .study import SimulationReport, simulate

__all__ = ["SimulationReport", "SimulationRequest", "simulate"]
