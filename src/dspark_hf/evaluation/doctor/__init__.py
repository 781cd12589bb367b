"""What is wrong with a pair of target and drafter, how sure that is, and what mends it.

examine     the table of checks, in order; the report
findings    what a check says
evidence    intervals over prompts, with the number of drafts behind them
case        the pair, its prompts, and what decoding them gave; each made once, when first asked for
probes      the same drafter with one setting changed, on the same texts
weights, fit, drafting, prompting, calibration, machine    the checks
"""

from .examine import examine_pair
from .findings import Examination, Finding, Outcome

__all__ = ["Examination", "Finding", "Outcome", "examine_pair"]
