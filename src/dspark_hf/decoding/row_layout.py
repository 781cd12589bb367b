"""How a round's drafts are put before the target: how many slots wide, as a grid or as one stream."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig

from .._compat import TargetModel
from ..errors import UnsupportedGenerationError
from .row_target import why_not_flat

LAYOUTS = ("auto", "padded", "flat")

# A stream pays when it holds at most this share of the grid's tokens: cutting and joining costs something.
FLAT_SHARE = 0.95


@dataclass(frozen=True)
class Layout:
    """One round's.

    Attributes:
        width: Slots of the grid.
        num_flat: Tokens of the stream, anchors counted; None: the grid runs as it is.
    """

    width: int
    num_flat: int | None


def layout_asked_for(generation_config: GenerationConfig) -> str:
    """The call's `verification_layout`, one of `LAYOUTS`.

    Raises:
        UnsupportedGenerationError: it is none.
    """
    asked = getattr(generation_config, "verification_layout", None) or "auto"
    if asked not in LAYOUTS:
        raise UnsupportedGenerationError(
            f"verification_layout must be one of {LAYOUTS}, got {asked!r}; leave it out to let it be chosen"
        )
    return asked


def _is_compiled_by_its_user(model: TargetModel) -> bool:
    return getattr(model, "_compiled_call_impl", None) is not None or hasattr(
        model.forward, "_torchdynamo_orig_callable"
    )


class LayoutChooser:
    """Chooses for one generate() call.

    Args:
        is_compiled: The target's forward is compiled, so that widths come from a small fixed set.
        num_slots: Most drafts of a round.
        verifies_all: No policy shortens drafts, so that only the last rounds would have another width.

    Raises:
        UnsupportedGenerationError: `verification_layout` is "flat" where rows cannot be one stream, or no layout.
    """

    def __init__(
        self,
        model: TargetModel,
        generation_config: GenerationConfig,
        *,
        is_compiled: bool,
        num_slots: int,
        verifies_all: bool,
    ) -> None:
        asked = layout_asked_for(generation_config)
        reason = why_not_flat(model)
        if asked == "flat" and reason is not None:
            raise UnsupportedGenerationError(
                f"verification_layout='flat' needs attention that can be told rows apart, and {type(model).__name__} "
                f"has none: {reason}; leave it out"
            )
        self._always_flat = asked == "flat"
        # A stream has another number of tokens in each round, and a compiled forward would be compiled for each.
        self._may_be_flat = (
            asked != "padded" and reason is None and not (is_compiled or _is_compiled_by_its_user(model))
        )
        # Of a compiled forward, which sees powers of two tokens a row, or all. One width where shorter rounds are few:
        # each more is compiled for longer than it can save.
        shorter = () if verifies_all else (0, *(2**i - 1 for i in range(1, num_slots.bit_length())))
        self._widths = sorted({num_slots, *shorter})
        self._is_compiled = is_compiled

    def grid_of_prompts(self, is_real: Tensor, num_real: int) -> int | None:
        """`num_flat` for prompts with `num_real` tokens in bool `is_real` `[rows, length]`."""
        return num_real if self._pays(num_real, is_real.numel()) else None

    def choose(self, host_shown: list[int], is_live: list[bool]) -> Layout:
        """The layout for a round in which the target runs so many drafts of each row."""
        width = max(host_shown, default=0)
        if self._is_compiled:
            width = next(w for w in self._widths if w >= width)
        num_real = sum(1 + length for length, live in zip(host_shown, is_live, strict=True) if live)
        is_flat = self._pays(num_real, len(host_shown) * (1 + width))
        return Layout(width, num_real if is_flat else None)

    def _pays(self, num_real: int, num_places: int) -> bool:
        if not num_real:  # a chunk of padding only
            return False
        return self._always_flat or (self._may_be_flat and num_real <= FLAT_SHARE * num_places)


def padded_to(blocks: Tensor, width: int) -> Tensor:
    """`blocks` `[rows, slots, ...]` cut or filled with zeros to `[rows, width, ...]`."""
    rows, num_slots = blocks.shape[:2]
    if num_slots >= width:
        return blocks[:, :width]
    return torch.cat([blocks, blocks.new_zeros(rows, width - num_slots, *blocks.shape[2:])], dim=1)
