"""Smaller optimiser steps for some columns of a weight, whatever the optimiser."""

from typing import Any

import torch
from torch import Tensor


def scale_steps(optimizer: torch.optim.Optimizer, weight: Tensor, scale: Tensor) -> None:
    """Multiply every change of `weight` `[out, in]` by `scale` `[in]`, whatever the optimiser does."""
    before: list[Tensor] = []

    def remember(*_: Any) -> None:
        before.append(weight.detach().clone())

    def shorten(*_: Any) -> None:
        with torch.no_grad():
            old = before.pop()
            weight.sub_(old).mul_(scale).add_(old)

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(shorten)
