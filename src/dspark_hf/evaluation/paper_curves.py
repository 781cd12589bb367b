"""Curves of the paper's offline figures, to be drawn beside measured ones."""

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def paper_offline_curves() -> dict[str, Any]:
    """Of arXiv 2607.05147, Figures 2 to 6, read from the figures; `setting` says what they were measured on.

    Keys: `conditional_acceptance` (group, drafter: by slot), `tau_by_depth` (drafter, layers, data set),
    `tau_by_draft_length` (`num_draft_tokens`; group, drafter), `threshold_sweep` (`threshold`; group: tokens per
    round), `reliability` (slot, before or after calibration: predicted and realised survival).
    """
    text = resources.files("dspark_hf").joinpath("data", "paper_offline_curves.json").read_text(encoding="utf-8")
    curves: dict[str, Any] = json.loads(text)
    return curves
