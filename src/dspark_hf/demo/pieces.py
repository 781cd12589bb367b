"""Token ids as text, one by one, and what became of each draft of a round."""

import copy
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from .events import Piece

# A character has at most so many tokens of a byte-level vocabulary; what is still broken then stays broken.
MAX_TOKENS_PER_CHARACTER = 4

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text that each token adds.

    Tokens are decoded behind a few of their predecessors, since many tokenizers treat the first token apart; a token
    that ends inside a character adds nothing, and the one that completes it adds the character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = []  # the last tokens whose text is out
        self._held: list[int] = []  # tokens after them whose text is not

    def add(self, token: int) -> str:
        """Append a token; what it adds to the text, special tokens nothing."""
        self._held.append(token)
        before = self._decode(self._before)
        text = self._decode(self._before + self._held)[len(before) :]
        if text.endswith(_BROKEN) and len(self._held) < MAX_TOKENS_PER_CHARACTER:
            return ""
        self._before, self._held = self._held, []
        return text

    def would_add(self, token: int) -> str:
        """What a token would add, which is not appended."""
        other = copy.copy(self)
        other._held = list(self._held)
        return other.add(token)

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), "one sequence is one text"
        return text


def pieces_of_round(
    text: Detokenizer,
    new_ids: Sequence[int],
    drafts: Sequence[int],
    confidences: Sequence[float | None],
    num_verified: int,
    num_accepted: int,
) -> tuple[Piece, ...]:
    """The tokens of one round in reading order: accepted drafts, the rejected one, the target's own token.

    Args:
        new_ids: Tokens that the round committed; fewer than `num_accepted` + 1 where a stop cut it.
        drafts, confidences: One for each slot.
    """
    pieces = [
        Piece(text.add(token), "accepted", slot + 1, confidences[slot])
        for slot, token in enumerate(new_ids[:num_accepted])
    ]
    if len(new_ids) <= num_accepted:
        return tuple(pieces)
    if num_accepted < num_verified:
        rejected = text.would_add(drafts[num_accepted])
        num_fallen = num_verified - num_accepted - 1
        pieces.append(Piece(rejected, "rejected", num_accepted + 1, confidences[num_accepted], num_fallen))
    pieces.append(Piece(text.add(new_ids[num_accepted]), "own"))
    return tuple(pieces)


def conditional(survival: Sequence[float]) -> list[float | None]:
    """`c_k` from `a_k`, the products of all up to slot k; None behind a slot that surely fails."""
    before = [1.0, *survival]
    return [a / b if b > 0 else None for a, b in zip(survival, before, strict=False)]
