"""What share of a draft one draft layer is: layers of a drafter, timed by hooks while it drafts on random tokens.

A share, since a profile measured at another moment says what a whole draft takes.
"""

import time
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..profiling import PairBench

_WARM_UPS = 2


def layers_of(drafter: Any) -> nn.ModuleList | None:
    """The draft layers; None where a drafter does not keep them in `layers`."""
    layers = getattr(drafter, "layers", None)
    return layers if isinstance(layers, nn.ModuleList) and len(layers) else None


def layer_share(target: PreTrainedModel, drafter: Any, *, num_rows: int, context: int, num_repeats: int) -> float:
    """Seconds of one layer over those of the whole draft, both medians.

    Args:
        drafter: One with [`layers_of`].
        num_rows, context: Where.
        num_repeats: Drafts that are timed.
    """
    layers = layers_of(drafter)
    assert layers is not None, "asked for where there are layers"
    started: dict[int, float] = {}
    seconds: list[float] = []

    def wait() -> None:
        if target.device.type != "cpu":
            torch.accelerator.synchronize(target.device)

    def begin(layer: nn.Module, *_: Any) -> None:
        wait()
        started[id(layer)] = time.perf_counter()

    def end(layer: nn.Module, *_: Any) -> None:
        wait()
        seconds.append(time.perf_counter() - started[id(layer)])

    hooks = [layer.register_forward_pre_hook(begin) for layer in layers]
    hooks += [layer.register_forward_hook(end) for layer in layers]
    try:
        with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []), torch.no_grad():
            bench = PairBench(target, drafter, context)
            bench.open(num_rows)
            for _ in range(_WARM_UPS):
                bench.draft_s(context)
            seconds.clear()
            drafts_s = [bench.draft_s(context) for _ in range(num_repeats)]
    finally:
        for hook in hooks:
            hook.remove()
    return median(seconds) / median(drafts_s)
