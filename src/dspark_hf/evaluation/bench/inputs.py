"""Prompts as the batches of a cell; real text cut to a context length."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...prompts import Prompt, encode_prompt
from ..settings import ComparisonError
from .settings import BenchSettings, Cell

# A sweep needs no more of single prompts than this: each repeat visits all of them.
MOST_SWEEP_PROMPTS = 4


@dataclass(frozen=True)
class Batch:
    """Prompts that run together.

    Attributes:
        ids: Of the prompts.
        tokens: Token ids of each.
    """

    ids: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.tokens))


def encode_all(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> dict[str, tuple[int, ...]]:
    """Token ids by prompt id.

    Raises:
        ComparisonError: there is no prompt, or one has no tokens.
    """
    encoded = {prompt.id: tuple(encode_prompt(tokenizer, prompt)[0].tolist()) for prompt in prompts}
    empty = [name for name, tokens in encoded.items() if not tokens]
    if not encoded or empty:
        what = f"prompt {empty[0]!r} has no tokens after encoding" if empty else "the list of prompts is empty"
        raise ComparisonError(f"{what}; a bench needs prompts with text")
    return encoded


def batches_of(cell: Cell, encoded: dict[str, tuple[int, ...]]) -> list[Batch]:
    """The batches of a cell, in the order of the prompts.

    The main table takes each prompt alone. A point of a sweep takes the first `MOST_SWEEP_PROMPTS` prompts, in as many
    batches as they fill, or one batch of more prompts; a batch larger than the list takes prompts again.
    """
    names = list(encoded)
    if cell.kind == "main":
        return [Batch((name,), (encoded[name],)) for name in names]
    if cell.context is not None:
        texts = at_context(encoded, cell.context)
        return [Batch((name,), (texts[name],)) for name in names[:MOST_SWEEP_PROMPTS]]
    num_batches = max(1, min(len(names), MOST_SWEEP_PROMPTS) // cell.num_rows)
    chosen = [names[i % len(names)] for i in range(num_batches * cell.num_rows)]
    parts = [chosen[start : start + cell.num_rows] for start in range(0, len(chosen), cell.num_rows)]
    return [Batch(tuple(part), tuple(encoded[name] for name in part)) for part in parts]


def at_context(encoded: dict[str, tuple[int, ...]], context: int) -> dict[str, tuple[int, ...]]:
    """Each prompt as the last `context` tokens of real text that ends with it.

    Longer prompts lose their beginning. Before shorter ones stand the prompts before them in the list, which is read in
    a ring, as if a conversation had gone on.
    """
    names = list(encoded)
    texts = {}
    for place, name in enumerate(names):
        tokens: tuple[int, ...] = encoded[name]
        back = 1
        while len(tokens) < context:
            tokens = encoded[names[(place - back) % len(names)]] + tokens
            back += 1
        texts[name] = tokens[-context:]
    return texts


def check_lengths(settings: BenchSettings, encoded: dict[str, tuple[int, ...]], target: PreTrainedModel) -> None:
    """Whether the target has positions for every cell.

    Raises:
        ComparisonError: it has not.
    """
    most = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for cell in settings.cells():
        longest = cell.context or max(map(len, encoded.values()))
        if most is not None and longest + cell.max_new_tokens > most:
            raise ComparisonError(
                f"{cell.name}: {longest} tokens and {cell.max_new_tokens} new ones are more than the {most} positions "
                "of the target; choose a smaller --context, shorter prompts or fewer new tokens"
            )
