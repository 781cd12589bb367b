"""What a slot of a draft layer sees, where that is not everything: windows, and slots that do not look ahead."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..configuration_dspark import DSparkConfig
from ..layer_rules import SLIDING
from .row_slots import attention_mask_for


@dataclass(frozen=True)
class DraftWindow:
    """The rule of one layer, on absolute positions.

    Attributes:
        size: W of a sliding layer; None: the whole context.
        starts_at_anchor: Every slot sees the W positions before the anchor, and the block; else a slot sees W
            positions, its own the last of them, and the slots behind it.
        is_causal: Slots do not see later slots of their block.
    """

    size: int | None
    starts_at_anchor: bool
    is_causal: bool

    @classmethod
    def of_layer(cls, config: DSparkConfig, layer_idx: int) -> "DraftWindow | None":
        """A layer's rule; None: slots see everything."""
        slides = config.layer_types is not None and config.layer_types[layer_idx] == SLIDING
        is_causal = config.causal_layers == "all" or (slides and config.causal_layers == "sliding")
        if not slides and not is_causal:
            return None
        return cls(config.sliding_window if slides else None, config.window_start == "anchor", is_causal)

    def sees(self, slots: Tensor, anchors: Tensor, keys: Tensor) -> Tensor:
        """Whether the slots at positions `slots`, of blocks that start at `anchors`, see `keys`; shapes broadcast.

        A key behind its block is not told from one of the block: that is the other mask's business.
        """
        seen = keys <= slots if self.is_causal else torch.ones_like(keys <= slots)
        if self.size is not None:
            first = anchors - self.size if self.starts_at_anchor else slots - (self.size - 1)
            seen = seen & (keys >= first)
        return seen


def masks_by_layer(
    windows: Sequence[DraftWindow | None],
    mask: Tensor | None,
    slots: Tensor,
    keys: Tensor,
    implementation: str | None,
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Each layer's attention mask: `mask`, less what its window hides.

    Args:
        mask: bool or additive `[rows, 1, T, columns]`; None: everything is seen.
        slots: int64 `[rows, T]`, positions of a block; the first is the anchor's.
        keys: int64 `[rows or 1, columns]`, positions of what attention is paid to.
        implementation: Of the attention; decides the kind of a mask that is made here.
    """
    made: dict[DraftWindow, Tensor] = {}
    for window in set(windows) - {None}:
        assert window is not None
        is_seen = window.sees(slots[:, :, None], slots[:, :1, None], keys[:, None, :])[:, None]
        if mask is None:
            made[window] = attention_mask_for(implementation, is_seen, dtype)
        elif mask.dtype == torch.bool:
            made[window] = mask & is_seen
        else:
            made[window] = mask.masked_fill(~is_seen, torch.finfo(mask.dtype).min)
    return [mask if window is None else made[window] for window in windows]
