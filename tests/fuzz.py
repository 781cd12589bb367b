"""Random generate() calls, compared with plain generate, each printed as a snippet that can be run.

A case is source code: what is drawn are the arguments as Python writes them, so the snippet that is printed is the
snippet that failed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from families import FAMILIES, VOCAB
from generate_options import Collects, assert_same, letter_tokenizer, prompt
from tiny import OracleDrafter, tiny_drafter
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteria

ONE_BY_ONE = ("Bloom", "LFM2")  # whose rows cannot share forwards
MAX_GAP = 1e-4  # of the target's two best logits where a first difference counts as agreement


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        family: Of the target; its weights are those of `FAMILIES[family].build()`.
        prompt_length, prompt_seed, num_padding: The prompt, and the padding on its left.
        more_lengths: Of further prompts of the batch, each padded or cut to the first one's length.
        drafter: Keyword arguments of `tiny_drafter`, or of `OracleDrafter.for_target` where `hit_rate` is among them.
        call: Keyword arguments of generate(), without the drafter's.
        knobs: The drafter's own arguments of generate().
        stop_at: New tokens after which a criterion of the caller's stops; None: there is none.
        streams: Whether there is a streamer; what it is given is compared as well.
    """

    family: str
    prompt_length: int
    prompt_seed: int
    num_padding: int
    more_lengths: tuple[int, ...]
    drafter: dict[str, Any]
    call: dict[str, Any]
    knobs: dict[str, Any]
    stop_at: int | None = None
    streams: bool = False


@functools.cache
def target_of(family: str) -> PreTrainedModel:
    return FAMILIES[family].build()


class StopsAt(StoppingCriteria):
    """Stops at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def generate(case: Case, assistant: Any = None) -> Any:
    """What generate() returns for a case."""
    target = target_of(case.family)
    ids = prompt(case.prompt_length, seed=case.prompt_seed)
    kwargs: dict[str, Any] = {"max_new_tokens": 12, "return_dict_in_generate": True, "pad_token_id": 0} | case.call
    if case.more_lengths or "num_return_sequences" in case.call:
        kwargs["suppress_tokens"] = [0, *kwargs.get("suppress_tokens", [])]  # so that padding is told from text
    if case.num_padding or case.more_lengths:
        width = case.num_padding + case.prompt_length
        lengths = [case.prompt_length, *(min(length, width) for length in case.more_lengths)]
        rows = [prompt(length, seed=case.prompt_seed + row)[0] for row, length in enumerate(lengths)]
        ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
        starts = width - torch.tensor(lengths)[:, None]
        kwargs["attention_mask"] = (torch.arange(width) >= starts).long()
    if case.stop_at is not None:
        kwargs["stopping_criteria"] = [StopsAt(ids.shape[1] + case.stop_at)]
    if "stop_strings" in kwargs:
        kwargs["tokenizer"] = letter_tokenizer()
    if case.streams:
        kwargs["streamer"] = Collects()
    if assistant is not None:
        kwargs |= {"assistant_model": assistant} | case.knobs
    torch.manual_seed(0)
    output = target.generate(ids, **kwargs)
    output.streamed = kwargs["streamer"].puts if case.streams else None
    return output


def drafter_of(case: Case, continuation: Tensor) -> Any:
    """The case's drafter; an oracle follows `continuation` int64 `[length]`."""
    make = OracleDrafter.for_target if "hit_rate" in case.drafter else tiny_drafter
    args = (continuation,) if "hit_rate" in case.drafter else ()
    return make(target_of(case.family), *args, **case.drafter)


def check(case: Case) -> bool:
    """Compare a case with and without its drafter; True unless a near tie was left to chance.

    Raises:
        AssertionError: they differ.
    """
    try:
        expected = generate(case)
    except (ValueError, RuntimeError):  # arguments that contradict each other, or that the target cannot take
        _refused_as_well(case)
        return True
    got = generate(case, drafter_of(case, expected.sequences[0, case.num_padding :]))
    if not torch.equal(got.sequences, expected.sequences) and _is_near_tie(case, got.sequences, expected.sequences):
        return False
    if len(expected.sequences) > 1:
        _forget_ended_rows(case, expected)
    assert_same(got, expected)
    assert_same(got.streamed, expected.streamed, "streamed")
    if len(expected.sequences) == 1:
        assert got.cache.get_seq_length() == expected.cache.get_seq_length(), "the caches hold different lengths"
    return True


def _refused_as_well(case: Case) -> None:
    try:
        generate(case, drafter_of(case, prompt(case.prompt_length, seed=case.prompt_seed)[0]))
    except (ValueError, RuntimeError):
        return
    raise AssertionError("plain generation fails with these arguments")


def _forget_ended_rows(case: Case, output: Any) -> None:
    """Set a batch's per-step numbers to 0 where a row had ended: plain generation goes on with padding there.

    Padding is id 0, which these calls never generate.
    """
    had_ended = output.sequences[:, case.prompt_length + case.num_padding :] == 0
    for name in ("scores", "logits", "hidden_states"):
        for step, numbers in enumerate(getattr(output, name, None) or ()):
            for tensor in [numbers] if isinstance(numbers, Tensor) else numbers:
                tensor[had_ended[:, step]] = 0.0


def _is_near_tie(case: Case, got: Tensor, expected: Tensor) -> bool:
    """Whether each row that differs does so first between the two best tokens, with equal scores but for rounding."""
    width = case.prompt_length + case.num_padding
    again = Case(**{**vars(case), "call": case.call | {"output_scores": True}})
    scores = generate(again).scores
    shorter = min(got.shape[1], expected.shape[1])
    if not bool((got[:, :shorter] != expected[:, :shorter]).any()):
        return False
    for row in range(len(got)):
        differs = (got[row, :shorter] != expected[row, :shorter]).nonzero()
        if len(differs):
            first = int(differs[0])
            best = scores[first - width][row].topk(2)
            two = {int(got[row, first]), int(expected[row, first])}
            if set(best.indices.tolist()) != two or float(best.values[0] - best.values[1]) >= MAX_GAP:
                return False
    return True


def snippet(case: Case) -> str:
    """The case as a program, to be run from the repository's root."""
    lines = ["import sys", 'sys.path.insert(0, "tests")', "from fuzz import Case, check", "", "case = Case("]
    lines += [f"    {name}={value!r}," for name, value in vars(case).items()]
    return "\n".join([*lines, ")", "check(case)"])


def check_and_print(case: Case) -> bool:
    """[`check`], whose failure shows the snippet."""
    try:
        return check(case)
    except Exception as error:
        raise AssertionError(f"{error}\n\nTo run this case alone:\n\n{snippet(case)}\n") from error


# -- drawing cases ----------------------------------------------------------------------------------------------------

_token = st.integers(1, VOCAB - 1)
_tokens = st.lists(_token, min_size=1, max_size=3, unique=True)

# Each argument with the values it may take; a case takes a few of them.
_ARGUMENTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "repetition_penalty": st.sampled_from([0.8, 1.2, 2.0]).map(lambda value: {"repetition_penalty": value}),
    "no_repeat_ngram_size": st.integers(1, 3).map(lambda value: {"no_repeat_ngram_size": value}),
    "bad_words_ids": st.lists(_tokens, min_size=1, max_size=3).map(lambda value: {"bad_words_ids": value}),
    "sequence_bias": st.tuples(_tokens, st.sampled_from([-20.0, 3.0])).map(
        lambda pair: {"sequence_bias": [list(pair)]}
    ),
    "suppress_tokens": _tokens.map(lambda value: {"suppress_tokens": value}),
    "begin_suppress_tokens": _tokens.map(lambda value: {"begin_suppress_tokens": value}),
    "eos_token_id": st.lists(_token, min_size=1, max_size=40, unique=True).map(lambda value: {"eos_token_id": value}),
    "min_new_tokens": st.tuples(_tokens, st.integers(1, 12)).map(
        lambda pair: {"eos_token_id": pair[0], "min_new_tokens": pair[1]}
    ),
    "forced_eos_token_id": _token.map(lambda value: {"forced_eos_token_id": value, "eos_token_id": value}),
    "exponential_decay": st.tuples(_token, st.integers(0, 8)).map(
        lambda pair: {"eos_token_id": pair[0], "exponential_decay_length_penalty": (pair[1], 1.5)}
    ),
    "watermarking_config": st.sampled_from(["lefthash", "selfhash"]).map(
        lambda value: {"watermarking_config": {"bias": 4.0, "seeding_scheme": value}}
    ),
    "renormalize_logits": st.just({"renormalize_logits": True}),
    "one_token_left": st.sampled_from(
        [{"top_k": 1}, {"top_k": 1, "temperature": 0.3}, {"top_k": 0, "top_p": 1e-6}, {"top_k": 0, "min_p": 1.0}]
    ).map(lambda value: {"do_sample": True} | value),
    "several": st.integers(2, 3).map(lambda value: {"do_sample": True, "top_k": 1, "num_return_sequences": value}),
    "prefill_chunk_size": st.integers(1, 8).map(lambda value: {"prefill_chunk_size": value}),
    "output_scores": st.just({"output_scores": True, "output_logits": True}),
    "output_hidden_states": st.just({"output_hidden_states": True}),
    "stop_strings": st.lists(st.text("abcdefjkl", min_size=1, max_size=2), min_size=1, max_size=3).map(
        lambda value: {"stop_strings": value}
    ),
    "cache_implementation": st.just({"cache_implementation": "static"}),
    "max_new_tokens": st.integers(1, 24).map(lambda value: {"max_new_tokens": value}),
}
_KNOBS = st.sampled_from(
    [
        {},
        {"num_assistant_tokens": 1},
        {"num_assistant_tokens": 3},
        {"verification_policy": "full"},
        *({"verification_policy": "threshold", "assistant_confidence_threshold": t} for t in (0.0, 0.3, 0.9, 1.0)),
    ]
)


@st.composite
def drafters(draw: st.DrawFn) -> dict[str, Any]:
    if draw(st.booleans()):
        return {"hit_rate": draw(st.sampled_from([0.3, 0.8, 1.0])), "block_size": draw(st.integers(1, 9))}
    kwargs: dict[str, Any] = {"seed": draw(st.integers(0, 9)), "block_size": draw(st.integers(1, 6))}
    head = draw(st.sampled_from(["vanilla", "gated", "rnn", None]))
    kwargs |= {"markov_rank": 0, "confidence_head_with_markov": False} if head is None else {"markov_head_type": head}
    if draw(st.booleans()):
        kwargs["draft_vocab_size"] = draw(st.sampled_from([1, 40, VOCAB - 1]))
    return kwargs


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A random case."""
    names = draw(st.lists(st.sampled_from(sorted(_ARGUMENTS)), max_size=4, unique=True))
    call: dict[str, Any] = {"do_sample": False}
    for name in names:
        call |= draw(_ARGUMENTS[name])
    family = draw(st.sampled_from(sorted(FAMILIES)))
    if FAMILIES[family].overrides.get("sliding_window"):  # shorter than some texts, and refused there
        call.pop("cache_implementation", None)
    more_lengths = draw(st.sampled_from([(), (), (), (1,), (3, 8), (5, 2, 20)]))
    is_batch = bool(more_lengths) or "num_return_sequences" in call
    if is_batch and (family in ONE_BY_ONE or "output_hidden_states" in call):
        call.setdefault("eos_token_id", [3])  # other criteria need one there, and are refused without
    return Case(
        family=family,
        prompt_length=draw(st.integers(1, 20)),
        prompt_seed=draw(st.integers(0, 99)),
        num_padding=draw(st.sampled_from([0, 0, 1, 5])),
        more_lengths=more_lengths,
        drafter=draw(drafters()),
        call=call,
        knobs=draw(_KNOBS),
        stop_at=draw(st.one_of(st.none(), st.integers(1, 12))),
        streams=not is_batch and draw(st.booleans()),
    )
