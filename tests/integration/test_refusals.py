"""What a drafter cannot serve is refused before any work and without a trace; what is not refused has its effect."""

import ast
import copy
import inspect
import logging
import re
import traceback
from pathlib import Path

import pytest
import torch
from refusals import REFUSALS, attempt, attempt_with, working_pair
from tiny import greedy, random_ids, tiny_drafter
from tokenizers import Tokenizer, decoders, models
from transformers import CompileConfig, DynamicCache, GenerationConfig, PreTrainedTokenizerFast
from transformers.generation import GenerationMixin

from dspark_hf import DSparkError
from dspark_hf.decoding import prompt_inputs, settings, target_refusals, verify
from dspark_hf.decoding import refusals as source
from dspark_hf.decoding import rows as batch_rows
from dspark_hf.decoding.policies import simple

WAYS_OUT = ("leave ", "set ", "pass ", "use ", "load ", "call ", "remove ", "resize ", "Leave ", "Pass ")


def traces(target, assistant, cache):
    """What a refused call must leave alone."""
    states = [
        {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for model in (target, assistant)
        if isinstance(model, torch.nn.Module)
    ]
    return states, copy.deepcopy(target.generation_config), cache and cache.get_seq_length()


def same_states(before, after):
    return all(
        torch.equal(a[name], b[name])
        for a, b in zip(before, after, strict=True)
        for name in a
        if b[name].device.type != "meta"
    )


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_refused_before_any_forward_and_without_a_trace(refusal):
    target, assistant, options = refusal.build()
    plain = {"do_sample": False, "max_new_tokens": 6}
    expected = target.generate(random_ids(5), **plain) if refusal.runs_plainly else None
    cache = options.get("cache")
    if cache is None and refusal.pair is None and "cache_implementation" not in options:
        cache = options["cache"] = DynamicCache(config=target.config)
        target.generate(random_ids(3, seed=9), cache=cache, **plain)
    before = traces(target, assistant, cache)
    error, num_forwards = attempt_with(target, assistant, options)
    assert type(error) is refusal.error
    assert num_forwards == 0
    assert re.search(refusal.message, str(error), re.DOTALL)
    if isinstance(error, DSparkError):
        assert any(way_out in str(error) for way_out in WAYS_OUT)
    after = traces(target, assistant, cache)
    assert same_states(before[0], after[0])
    assert before[1:] == after[1:]
    assert expected is None or torch.equal(target.generate(random_ids(5), **plain), expected)
    if refusal.pair is None:
        assert torch.equal(target.generate(random_ids(5), assistant_model=assistant, **plain), expected)


def test_no_entry_is_listed_twice():
    names = [refusal.name for refusal in REFUSALS]
    assert len(set(names)) == len(names)


# Raised where no table entry can: tests of their own.
WITH_TESTS_OF_THEIR_OWN = {
    "refuse_cached_media": "test_target_media.py::test_a_cache_that_holds_an_image_is_refused_and_kept",
    "prefill": "test_target_adapters.py::test_prompt_tuning_is_refused_and_goes_on_without_a_drafter",
    "_require_roll_back": "test_robustness.py::test_a_static_sliding_cache_shorter_than_the_text_is_refused",
    "refuse_criteria": "test_batches.py::test_a_time_limit_is_refused_where_rows_run_one_by_one",
}
MODULES = (batch_rows, prompt_inputs, settings, simple, source, target_refusals, verify)


def test_every_refusal_of_the_source_has_an_entry():
    """Each `raise` of a refusal is reached by an entry of the table, or by a test that is named here."""
    reached = set()
    for refusal in REFUSALS:
        error, _ = attempt(refusal)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reached.add((Path(frame.filename).name, frame.name))
    raising = {
        (Path(module.__file__).name, function.name)
        for module in MODULES
        for function in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(function))
    }
    missing = {name for name in raising - reached if name[1] not in WITH_TESTS_OF_THEIR_OWN}
    assert missing == set()
    for test in WITH_TESTS_OF_THEIR_OWN.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")


def test_every_conflicting_option_and_stateful_processor_has_an_entry():
    asked = {name for refusal in REFUSALS if isinstance(refusal.options, dict) for name in refusal.options}
    assert set(source._CONFLICTING_OPTIONS) <= asked
    assert {name for name, _ in source._SEARCH_OPTIONS} - asked == {"constraints"}  # transformers makes it a search
    messages = " ".join(refusal.message for refusal in REFUSALS)
    assert all(f"{processor.__name__} keeps state" in messages for processor in source.STATEFUL_PROCESSORS)


@pytest.mark.parametrize("name", ["Qwen3-Next targets", "Falcon-H1 targets"])
def test_a_recurrent_target_that_does_not_say_so_is_told_by_its_layers(name, monkeypatch):
    refusal = next(refusal for refusal in REFUSALS if refusal.name == name)
    target, _, options = refusal.build()
    monkeypatch.setattr(type(target), "_is_stateful", False)
    error, num_forwards = attempt_with(target, tiny_drafter(target), options)
    assert isinstance(error, DSparkError)
    assert re.search("is a recurrent model|cannot be rolled back", str(error))
    assert num_forwards == 0


# -- the rest of generate()'s arguments -----------------------------------------------------------------------------


def tokenizer():
    """Letters and pairs of letters: a prompt that ends in "a" may be healed to "ap"."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in "abcde" for b in "pqrstuv"]
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in pairs)])}
    backend = Tokenizer(models.BPE(vocab, pairs))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="y", pad_token="z")


def allowed_after(row, ids):
    return list(range(4 + int(ids[-1]) % 3, 61))


def own_loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
    return torch.cat([input_ids, input_ids], dim=1)


# Each says the same with a drafter as without: a processor without state, or something that plain generation ignores.
HARMLESS = [
    {"encoder_repetition_penalty": 1.7},
    {"encoder_no_repeat_ngram_size": 2},
    {"top_p": 0.9, "top_k": 1, "min_p": 0.05, "typical_p": 0.9, "do_sample": True},
    {"top_h": 0.5, "top_k": 1, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "do_sample": True},
    {"low_memory": True},
    {"early_stopping": True, "length_penalty": 2.0},
    {"num_beam_groups": 2, "diversity_penalty": 0.5},
    {"penalty_alpha": 0.6, "top_k": 1},  # with the default top_k of 50 it is contrastive search
    {"negative_prompt_ids": random_ids(4), "negative_prompt_attention_mask": torch.ones(1, 4)},
    {"max_matching_ngram_size": 3, "assistant_lookbehind": 3, "target_lookbehind": 3},
    {"decoder_start_token_id": 3},
    {"num_return_sequences": 2, "do_sample": True, "top_k": 1,
     "prefix_allowed_tokens_fn": allowed_after},
    {"cache_implementation": "hybrid"},
    {"cache_implementation": "sliding_window"},
    {"cache_implementation": "static", "max_cache_len": 40},
    {"compile_config": CompileConfig(), "disable_compile": True},
    {"custom_generate": own_loop},
    {"token_healing": True, "tokenizer": tokenizer(), "inputs": torch.tensor([[12, 13, 14, 0]])},
    {"max_time": 100.0},
]  # fmt: skip


@pytest.mark.parametrize("options", HARMLESS, ids=lambda options: "-".join(options))
def test_what_is_not_refused_says_the_same(options):
    target, drafter = working_pair()
    call = {"inputs": random_ids(9), "do_sample": False, "max_new_tokens": 12} | options
    assert torch.equal(target.generate(assistant_model=drafter, **call), target.generate(**call))


def test_a_schedule_of_draft_lengths_is_said_to_have_no_effect(caplog):
    target, drafter = working_pair()
    source._warn_of_schedule.cache_clear()
    for _ in range(2):
        got = greedy(
            target, random_ids(5), max_new_tokens=6, assistant_model=drafter, num_assistant_tokens_schedule="heuristic"
        )
    assert torch.equal(got, greedy(target, random_ids(5), max_new_tokens=6))
    assert [record.levelno for record in caplog.records if "'heuristic' has no effect" in record.message] == [
        logging.WARNING
    ]


# Arguments that other tests cover: lengths, ends, processors, outputs, caches, prompts, knobs of the drafter.
ELSEWHERE = re.findall(
    r"\w+",
    """
    max_length max_new_tokens min_length min_new_tokens stop_strings do_sample temperature repetition_penalty
    no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias output_attentions
    output_hidden_states output_scores output_logits return_dict_in_generate pad_token_id bos_token_id eos_token_id
    logits_processor stopping_criteria streamer inputs generation_config assistant_model
    """,
)
# Not about what is generated.
NOTES = {"transformers_version", "continuous_batching_config", "self", "kwargs"}


def test_every_argument_of_generate_is_accounted_for():
    """A new one of transformers must be thought about: does it say the same with a drafter, or is it refused?"""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    arguments = set(inspect.signature(GenerationMixin.generate).parameters)
    refused = {
        name
        for refusal in REFUSALS
        for name in (refusal.options if isinstance(refusal.options, dict) else refusal.build()[2])
    }
    harmless = {name for options in HARMLESS for name in options}
    known = refused | harmless | set(ELSEWHERE) | NOTES | {"num_assistant_tokens_schedule", "constraints"}
    assert fields | arguments <= known
    assert set(ELSEWHERE) <= fields | arguments
