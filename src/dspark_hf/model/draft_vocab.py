"""A reduced draft vocabulary: which tokens can be drafted, and the rows of the target's head that score them.

Stored as offsets, as speculators and EAGLE-3 do: draft id `i` is token `i + d2t[i]`. Tokens outside have draft
probability 0; speculative sampling is exact for any draft law, so only acceptance depends on the choice.
"""

import torch
from torch import Tensor, nn

from ..errors import CheckpointFormatError


def offsets_of(token_ids: Tensor) -> Tensor:
    """`d2t` int64 `[draft_vocab]` for token ids in increasing order."""
    return token_ids - torch.arange(token_ids.shape[0], device=token_ids.device)


def token_ids_of(offsets: Tensor) -> Tensor:
    """Token ids int64 `[draft_vocab]`, of `d2t`."""
    return offsets + torch.arange(offsets.shape[0], device=offsets.device)


def draft_index(token_ids: Tensor, vocab_size: int) -> Tensor:
    """int64 `[vocab]`: each token's draft id, -1 for tokens that cannot be drafted."""
    index = torch.full((vocab_size,), -1, dtype=torch.long, device=token_ids.device)
    index[token_ids] = torch.arange(token_ids.shape[0], device=token_ids.device)
    return index


def check_offsets(offsets: Tensor, vocab_size: int) -> None:
    """Raise CheckpointFormatError unless `d2t` names different tokens of the vocabulary, in increasing order."""
    ids = token_ids_of(offsets)
    if not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise CheckpointFormatError(
            f"d2t must name different tokens in increasing order, each below vocab_size {vocab_size}, and gives ids "
            f"from {int(ids.min())} to {int(ids.max())}; download the drafter again, or train it with this package"
        )


class DraftVocabHead:
    """The target's output head, restricted to the draft vocabulary; made per generation and never kept longer.

    Of a plain linear head only the rows of the draft vocabulary are multiplied. Any other kind (adapters, quantised,
    offloaded, hooked) is called as it is, and the entries are picked from its output.

    Args:
        head: The target's.
        token_ids: int64 `[draft_vocab]`.
    """

    def __init__(self, head: nn.Module, token_ids: Tensor) -> None:
        self._head = head
        self._token_ids = token_ids
        self._rows = _rows_of(head, token_ids)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[..., draft_vocab]` of `hidden` `[..., hidden]`."""
        if self._rows is not None:
            return nn.functional.linear(hidden, *self._rows)
        logits = self._head(hidden)
        picked: Tensor = logits.index_select(-1, self._token_ids.to(logits.device))
        return picked


def is_plain_linear(head: nn.Module) -> bool:
    """Whether a head is just `hidden @ weight.T + bias`: no subclass, hook, special tensor type or integer weight."""
    if type(head) is not nn.Linear or "forward" in vars(head):
        return False
    weight = head.weight
    is_plain_weight = type(weight.data) is Tensor and weight.is_floating_point() and not weight.is_meta
    return is_plain_weight and not (head._forward_hooks or head._forward_pre_hooks or hasattr(head, "_hf_hook"))


def _rows_of(head: nn.Module, token_ids: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias rows of a plain linear head; None for any other."""
    if not is_plain_linear(head):
        return None
    assert isinstance(head, nn.Linear)
    ids = token_ids.to(head.weight.device)
    return head.weight.detach()[ids], None if head.bias is None else head.bias.detach()[ids]
