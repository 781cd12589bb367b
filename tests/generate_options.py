"""Ways to call generate() that must say the same with a drafter as without, and what the compatibility table says.

An option is a function of a [`Setup`] and of `call`, which stands for `target.generate` (greedy, 16 new tokens unless
told otherwise). It is run once plainly and once per drafter, and everything it returns must agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from families import VOCAB, Family
from tiny import OracleDrafter, tiny_drafter
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

NUM_NEW = 16
MASK = VOCAB - 2  # also in the vocabulary when that is cut by one
PROMPT_LENGTH = 9
OFFSETS = range(1, 11)  # of a stop, so that it falls on every place of a block of 8

Call = Callable[..., Any]


class Setup:
    """A family's target, a prompt, and what plain generation makes of it."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.target = family.build()
        self.ids = prompt(PROMPT_LENGTH)

    @cached_property
    def whole(self) -> Tensor:
        """int64 `[length]`, prompt and 24 greedy tokens."""
        return self.target.generate(self.ids, do_sample=False, max_new_tokens=24)[0]


@functools.cache
def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Letters and pairs of letters, so that a stop string can span tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in "abcdef" for b in "jklmnopqrstuvwxyz"]
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in pairs)])}
    assert len(vocab) == VOCAB
    backend = Tokenizer(models.BPE(vocab, pairs))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def prompt(length: int, seed: int = 0) -> Tensor:
    """int64 `[1, length]` without id 0."""
    return torch.randint(1, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


Run = Callable[[Setup, Call], Any]


@dataclass(frozen=True)
class Option:
    """One way to call generate().

    Attributes:
        name: As the table prints it.
        run: Makes the calls.
        note: What a user should know.
    """

    name: str
    run: Run
    note: str = ""


_OPTIONS: list[Option] = []


def option(name: str, note: str = "") -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        _OPTIONS.append(Option(name, run, note))
        return run

    return register


# -- prompts ----------------------------------------------------------------------------------------------------------


@option("prompts of any length, `max_new_tokens`, `max_length`")
def lengths(setup: Setup, call: Call) -> Any:
    for length in (1, 2, 5, 30):
        yield call(prompt(length, seed=length))
    for num_new in range(1, 11):
        yield call(setup.ids, max_new_tokens=num_new)
    yield call(setup.ids, max_new_tokens=None, max_length=PROMPT_LENGTH + 12)


@option("left padding", "the drafter sees real tokens at their real positions")
def left_padding(setup: Setup, call: Call) -> Any:
    for num_padding in (1, 6):
        ids = torch.cat([torch.zeros(1, num_padding, dtype=torch.long), setup.ids], dim=1)
        yield call(ids, attention_mask=(torch.arange(ids.shape[1]) >= num_padding).long()[None], pad_token_id=0)


@option("no prompt (starts from `bos_token_id`)")
def no_prompt(setup: Setup, call: Call) -> Any:
    yield call(None, bos_token_id=5)


@option("`prefill_chunk_size`")
def prefill_chunks(setup: Setup, call: Call) -> Any:
    for size in (1, 4, 100):
        yield call(setup.ids, prefill_chunk_size=size)


# -- logits processors ------------------------------------------------------------------------------------------------


@option("repetition penalty")
def repetition_penalty(setup: Setup, call: Call) -> Any:
    yield call(setup.ids, repetition_penalty=1.5)


@option("`no_repeat_ngram_size`")
def no_repeat_ngram(setup: Setup, call: Call) -> Any:
    yield call(setup.ids.repeat(1, 2), no_repeat_ngram_size=2)
    yield call(setup.ids, no_repeat_ngram_size=1)


@option("`bad_words_ids`, `sequence_bias`, `suppress_tokens`, `begin_suppress_tokens`")
def forbidden_tokens(setup: Setup, call: Call) -> Any:
    own = setup.whole[PROMPT_LENGTH:].tolist()
    yield call(setup.ids, bad_words_ids=[[own[0]], own[2:4], own[5:8]])
    yield call(setup.ids, sequence_bias=[[[own[1]], -9.0], [[7], 3.0], [own[3:5], -9.0]])
    yield call(setup.ids, suppress_tokens=own[2:5], begin_suppress_tokens=own[:1])


@option("`min_new_tokens`, `min_length`")
def at_least(setup: Setup, call: Call) -> Any:
    for token in setup.whole[PROMPT_LENGTH : PROMPT_LENGTH + 6].tolist():
        yield call(setup.ids, eos_token_id=token, pad_token_id=0, min_new_tokens=10)
        yield call(setup.ids, eos_token_id=token, pad_token_id=0, min_length=PROMPT_LENGTH + 5)


@option("`forced_eos_token_id`, `forced_bos_token_id`, `exponential_decay_length_penalty`")
def forced_tokens(setup: Setup, call: Call) -> Any:
    for num_new in (1, 7, 12):
        yield call(setup.ids, forced_eos_token_id=7, eos_token_id=7, pad_token_id=0, max_new_tokens=num_new)
    yield call(setup.ids[:, :1], forced_bos_token_id=9)
    yield call(setup.ids, eos_token_id=7, pad_token_id=0, exponential_decay_length_penalty=(4, 1.5))


@option("`renormalize_logits`, `remove_invalid_values`, `watermarking_config` (green lists)")
def other_processors(setup: Setup, call: Call) -> Any:
    yield call(setup.ids, renormalize_logits=True, repetition_penalty=1.3)
    yield call(setup.ids, remove_invalid_values=True)
    yield call(setup.ids, watermarking_config={"bias": 4.0, "seeding_scheme": "selfhash"})


@option("`prefix_allowed_tokens_fn` and processors of your own", "they must depend on their arguments only")
def own_processors(setup: Setup, call: Call) -> Any:
    def allowed(row: int, ids: Tensor) -> list[int]:
        return [token for token in range(VOCAB) if (token + int(ids[-1])) % 3]

    def favours_next(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_add(1, (ids[:, -1:] + 1) % VOCAB, torch.full((len(ids), 1), 2.0))

    yield call(setup.ids, prefix_allowed_tokens_fn=allowed)
    yield call(setup.ids, logits_processor=[favours_next])


@option("sampling where one token is left (`top_k=1`)")
def sampling_of_one_token(setup: Setup, call: Call) -> Any:
    yield call(setup.ids, do_sample=True, top_k=1, temperature=0.7)


# -- stops ------------------------------------------------------------------------------------------------------------


@option("an end token at every offset of a block")
def end_token(setup: Setup, call: Call) -> Any:
    for offset in OFFSETS:
        yield call(setup.ids, eos_token_id=int(setup.whole[PROMPT_LENGTH + offset - 1]), pad_token_id=0)


@option("several end tokens")
def several_end_tokens(setup: Setup, call: Call) -> Any:
    for offset in OFFSETS:
        own = setup.whole[PROMPT_LENGTH + offset - 1 : PROMPT_LENGTH + offset + 3].tolist()
        yield call(setup.ids, eos_token_id=sorted({*own, 3}), pad_token_id=0)


@option("`stop_strings` at every offset", "they may span tokens")
def stop_strings(setup: Setup, call: Call) -> Any:
    tokenizer = letter_tokenizer()
    words = tokenizer.convert_ids_to_tokens(setup.whole[PROMPT_LENGTH:].tolist())
    for offset in OFFSETS:
        stop = words[offset - 1][-1] + words[offset]
        yield call(setup.ids, stop_strings=[stop, "zzzz"], tokenizer=tokenizer)


class StopsAt(StoppingCriteria):
    """Stops at a length, and notes what it was asked about."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[tuple[int, int]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.asked.append((input_ids.shape[1], -1 if scores is None else len(scores)))
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@option("stopping criteria of your own, at every offset", "asked once about every new token")
def own_criteria(setup: Setup, call: Call) -> Any:
    for offset in OFFSETS:
        criterion = StopsAt(PROMPT_LENGTH + offset)
        yield call(
            setup.ids, stopping_criteria=[criterion], return_dict_in_generate=True, output_scores=offset % 2 == 0
        )
        yield criterion.asked


class Collects(BaseStreamer):
    """Notes what it is given."""

    def __init__(self) -> None:
        self.puts: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.puts.append("end")


@option("streamers", "one token at a time, nothing behind a stop")
def streamers(setup: Setup, call: Call) -> Any:
    for options in ({}, {"eos_token_id": int(setup.whole[PROMPT_LENGTH + 5]), "pad_token_id": 0}):
        streamer = Collects()
        yield call(setup.ids, streamer=streamer, **options)
        yield streamer.puts


# -- outputs ----------------------------------------------------------------------------------------------------------


@option("`output_scores`, `output_logits`")
def scores_and_logits(setup: Setup, call: Call) -> Any:
    for num_new in (1, NUM_NEW):
        yield call(
            setup.ids, return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.2,
            max_new_tokens=num_new,
        )  # fmt: skip


@option("`output_hidden_states`, `output_attentions`", 'attentions need `attn_implementation="eager"`, as ever')
def hidden_states_and_attentions(setup: Setup, call: Call) -> Any:
    yield call(setup.ids, return_dict_in_generate=True, output_hidden_states=True)
    target = setup.family.build(attention="eager")
    yield call(
        setup.ids, target=target, return_dict_in_generate=True, output_attentions=True, output_hidden_states=True
    )


@option("a batch of prompts", "no cache comes back; streamers are refused")
def batch(setup: Setup, call: Call) -> Any:
    # All rows go on as the same text, so that one oracle knows what each will say.
    lengths = (PROMPT_LENGTH, PROMPT_LENGTH + 5, PROMPT_LENGTH + 1, PROMPT_LENGTH + 3)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = setup.whole[:length]
        mask[row, -length:] = 1
    ends = sorted({*setup.whole[PROMPT_LENGTH + 3 : PROMPT_LENGTH + 9].tolist(), *range(3, 20)})
    common = {"attention_mask": mask, "pad_token_id": 0}
    for options in ({}, {"eos_token_id": ends}, {"repetition_penalty": 1.3, "prefill_chunk_size": 5}):
        yield call(ids, **common, **options)
    yield call(ids, return_dict_in_generate=True, output_scores=True, output_logits=True, **common)


@option("`num_return_sequences`", "a batch; with hidden states or attentions its rows run one after the other")
def several_sequences(setup: Setup, call: Call) -> Any:
    common = {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    yield call(setup.ids, **common)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), setup.ids], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    eos = int(setup.whole[PROMPT_LENGTH + 5])
    yield call(padded, attention_mask=mask, pad_token_id=0, eos_token_id=eos, prefill_chunk_size=4, **common)
    yield call(
        setup.ids, return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True,
        **common,
    )  # fmt: skip


# -- vocabularies and caches ------------------------------------------------------------------------------------------


@option(
    "resized vocabulary (tokens added since the drafter was made, or padding rows)",
    "up to 1/64 more; fewer as long as the drafter's mask token stays",
)
def resized_vocabulary(setup: Setup, call: Call) -> Any:
    for size in (VOCAB + VOCAB // 64, VOCAB + 1, MASK + 1):
        target = setup.family.build()
        target.resize_token_embeddings(size, mean_resizing=False)
        ids = setup.ids.clamp(max=size - 1)
        if size > VOCAB:
            ids[0, -1] = size - 1  # the anchor is a token that the drafter does not know
        yield call(ids, target=target)


@option(
    "a cache passed over several turns", "the whole text is run again, with one warning; only new tokens are refused"
)
def cache_over_turns(setup: Setup, call: Call) -> Any:
    cache = DynamicCache(config=setup.target.config)
    text = setup.ids
    for turn in range(3):
        text = call(torch.cat([text, prompt(3, seed=turn)], dim=1), cache=cache, max_new_tokens=7)
        yield text
        yield cache.get_seq_length()


@option('`cache_implementation="static"`', "with sliding windows, for texts up to the window; refused for longer ones")
def static_cache(setup: Setup, call: Call) -> Any:
    # Windows that hold the text; short ones are in the table of refusals.
    windowed = {"sliding_window": 64} if "sliding_window" in setup.family.overrides else {}
    target = setup.family.build(**windowed) if setup.family.overrides.get("sliding_window") else setup.target
    yield call(setup.ids, target=target, cache_implementation="static")
    yield call(setup.ids, target=target, cache_implementation="static", max_new_tokens=9)


OPTIONS = {each.name: each for each in _OPTIONS}


# -- running one ------------------------------------------------------------------------------------------------------


def results(setup: Setup, run: Run, drafter_of: Callable[[PreTrainedModel, Tensor], Any] | None) -> list[Any]:
    """Everything an option returns, plainly or with the drafter that `drafter_of(target, continuation)` makes."""
    expected = iter(setup.__dict__.setdefault("sequences", {}).setdefault(run, []))
    made: list[Tensor] = []

    def call(ids: Tensor | None, *, target: PreTrainedModel | None = None, **kwargs: Any) -> Any:
        target = target or setup.target
        if drafter_of is not None:
            kwargs["assistant_model"] = drafter_of(setup.target, next(expected))
        output = target.generate(ids, **({"do_sample": False, "max_new_tokens": NUM_NEW} | kwargs))
        sequences = output if isinstance(output, Tensor) else output.sequences
        row = 0
        if (mask := kwargs.get("attention_mask")) is not None:
            row = int(mask.sum(dim=1).argmax())  # the longest prompt's text goes furthest
        start = 0 if mask is None else int((mask[row] == 0).sum())
        made.append(sequences[row, start:])
        return output

    returned: Iterator[Any] = run(setup, call)
    collected = list(returned)
    if drafter_of is None:
        setup.sequences[run] = made
    return collected


def untrained(target: PreTrainedModel, continuation: Tensor) -> Any:
    """Wrong nearly always."""
    return tiny_drafter(target, mask_token_id=MASK)


def oracle(target: PreTrainedModel, continuation: Tensor) -> Any:
    """Right with probability 0.8, in blocks of 7."""
    return OracleDrafter.for_target(target, continuation, hit_rate=0.8, mask_token_id=MASK)


def assert_same(got: Any, expected: Any, where: str = "result") -> None:
    """Raise AssertionError unless two results of generate() agree: tokens exactly, numbers within 1e-4."""
    if isinstance(expected, Tensor):
        assert got.shape == expected.shape, f"{where}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
        if expected.is_floating_point():
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4, msg=lambda text: f"{where}: {text}")
        else:
            assert torch.equal(got, expected), f"{where}: {got.tolist()} instead of {expected.tolist()}"
    elif hasattr(expected, "sequences"):
        for name in ("sequences", "scores", "logits", "hidden_states", "attentions"):
            assert_same(getattr(got, name, None), getattr(expected, name, None), f"{where}.{name}")
    elif isinstance(expected, tuple | list):
        assert isinstance(got, tuple | list) and len(got) == len(expected), f"{where}: another number of items"
        for i, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            assert_same(mine, theirs, f"{where}[{i}]")
    else:
        assert got == expected, f"{where}: {got} instead of {expected}"
