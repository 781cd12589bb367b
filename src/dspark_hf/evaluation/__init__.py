"""Measuring what a drafter brings: plain and speculative generation of one target, side by side.

settings     what a comparison is asked for
compare      runs both paths on the same prompts
results      what that gives, and how prompts are pooled
agreement    where two greedy texts part, and whether that is a near-tie or a bug
intervals    bootstrap over prompts
provenance   where numbers come from; JSON reports written in one step
evaluate     several drafters: replayed on texts, or decoding prompts; tables, paired differences, figures
loading      target and drafter by name, for the command line
render       a report as tables
doctor       what is wrong with a pair, how sure that is, and what mends it
"""

from .compare import compare
from .results import ComparisonInterrupted, ComparisonReport
from .settings import ComparisonError, ComparisonSettings

__all__ = [
    "ComparisonError",
    "ComparisonInterrupted",
    "ComparisonReport",
    "ComparisonSettings",
    "compare",
]
