"""Baseline drafters through generate(): losslessness, batches, refusals, and what is saved and loaded."""

import itertools
import json
import logging
from pathlib import Path

import pytest
import torch
from families import FAMILIES, NAMED_FAMILIES
from laws import round_law, sequence_law, total_variation
from sampled_law import (
    ALONE,
    CAUGHT,
    LEVEL,
    OPTIONS,
    PROMPT,
    VOCAB,
    generated_p_value,
    laws_after,
    processors_of,
    small_baseline,
    small_target,
    staged_p_value,
    tree_of_logits,
)
from tiny import greedy, random_ids, tiny_baseline, tiny_drafter, tiny_target
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationConfig
from transformers.generation import GenerationMixin
from transformers.generation.logits_process import LogitsProcessorList

from dspark_hf import (
    AutoregressiveConfig,
    AutoregressiveDraftModel,
    CheckpointFormatError,
    DSparkConfig,
    DSparkDraftModel,
    UnsupportedGenerationError,
    record_speculation,
)
from dspark_hf.decoding import draft as draft_stage
from dspark_hf.decoding import loop
from dspark_hf.decoding.accept import accept_sampled
from dspark_hf.decoding.autoregressive import AutoregressiveCandidateGenerator
from dspark_hf.decoding.sampling import law
from dspark_hf.evaluation.loading import load_as_stored

KINDS = ("mtp", "eagle3")
REDUCED = (0, 1, 4)
VOCABULARIES = {"whole": None, "reduced": REDUCED}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# -- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", NAMED_FAMILIES)
def test_greedy_equals_plain_generation(family, kind):
    target, ids = FAMILIES[family].build(), random_ids(9, vocab_size=128)
    expected = greedy(target, ids, max_new_tokens=24)
    for seed in (1, 2):
        drafter = tiny_baseline(target, kind, seed=seed)
        output = greedy(target, ids, max_new_tokens=24, assistant_model=drafter, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
        assert output.speculation.num_rounds > 0


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[3], [4, 5]]},
        {"min_new_tokens": 20, "eos_token_id": 7},
        {"suppress_tokens": [1, 2, 3]},
        {"cache_implementation": "static"},
        {"num_assistant_tokens": 1},
        {"prefill_chunk_size": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_greedy_options(kind, options):
    target, ids = tiny_target(), random_ids(9)
    plain = {k: v for k, v in options.items() if k not in ("num_assistant_tokens", "prefill_chunk_size")}
    expected = greedy(target, ids, max_new_tokens=32, **plain)
    assert torch.equal(
        greedy(target, ids, max_new_tokens=32, assistant_model=tiny_baseline(target, kind), **options), expected
    )


def test_greedy_in_a_batch_runs_row_by_row_with_a_warning(kind, caplog):
    target = tiny_target()
    drafter = tiny_baseline(target, kind)
    rows = [random_ids(n, seed=n)[0] for n in (9, 5, 7)]
    ids = torch.stack([torch.nn.functional.pad(row, (9 - len(row), 0)) for row in rows])
    mask = torch.stack([(torch.arange(9) >= 9 - len(row)).long() for row in rows])
    common = {"attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": 60}
    expected = greedy(target, ids, **common)
    loop._warn_of_rows.cache_clear()
    with caplog.at_level(logging.WARNING, logger="dspark_hf"):
        got = greedy(target, ids, assistant_model=drafter, **common)
    assert torch.equal(got, expected)
    assert "one after the other: 'dspark_autoregressive' drafters draft for one row" in caplog.text


def test_it_drafts_and_reports_one_or_gamma_tokens_a_round(kind):
    target, ids = tiny_target(), random_ids(9)
    drafter = tiny_baseline(target, kind)
    output = greedy(target, ids, max_new_tokens=20, assistant_model=drafter, return_dict_in_generate=True)
    report = output.speculation
    assert len(report.verified_per_slot) == (1 if kind == "mtp" else 4)
    assert report.num_verified == report.num_drafted > 0


@pytest.mark.parametrize("policy", ["threshold", "prefix", "smoothed", "block", "lagged"])
def test_policies_that_need_confidences_are_refused(kind, policy):
    target = tiny_target()
    with pytest.raises(UnsupportedGenerationError, match="none; use verification_policy='full'"):
        greedy(
            target, random_ids(5), assistant_model=tiny_baseline(target, kind), verification_policy=policy,
            max_new_tokens=4,
        )  # fmt: skip


def test_a_policy_that_needs_step_times_is_refused_and_no_profile_is_asked_for(kind):
    target = tiny_target()
    with pytest.raises(UnsupportedGenerationError, match="draft for one row at a time; use verification_policy='full'"):
        greedy(
            target, random_ids(5), assistant_model=tiny_baseline(target, kind), verification_policy="goodput",
            max_new_tokens=4,
        )  # fmt: skip


# -- sampled --------------------------------------------------------------------------------------------------------

NUM_ROWS = 2000
EACH = LEVEL / (len(OPTIONS) * len(KINDS) * len(VOCABULARIES) + 20)


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.mark.parametrize("name", OPTIONS)
def test_rounds_follow_the_target_law(target, name):
    processors = processors_of(target, OPTIONS[name])
    for kind in KINDS:
        for vocabulary, ids in VOCABULARIES.items():
            drafter = small_baseline(target, kind, ids=ids)
            p = staged_p_value(target, drafter, {}, NUM_ROWS, seed=1, processors=processors)
            assert p > EACH, (kind, vocabulary)


CASES = {
    "temperature_1": {},
    "top_k": {"top_k": 2},
    "typical_p": {"typical_p": 0.4},
    "eos": {"eos_token_id": 4, "repetition_penalty": 1.5},
}
NUM_DRAWS = 200


@pytest.mark.parametrize("case", CASES)
def test_generate_follows_the_target_law(target, kind, case):
    drafter = small_baseline(target, kind)
    with record_speculation() as report:
        assert generated_p_value(target, drafter, CASES[case], NUM_DRAWS, seed=1) > EACH
    assert 0 < report.num_accepted < report.num_verified


def test_control_acceptance_with_the_unprocessed_draft_law_is_caught(target, kind, monkeypatch):
    draw = draft_stage._draw

    def biased(logits, *args):
        unprocessed = law(logits.clone())
        return draw(logits, *args)._replace(probs=unprocessed)

    monkeypatch.setattr(draft_stage, "_draw", biased)
    processors = processors_of(target, CASES["top_k"])
    drafter = small_baseline(target, kind)
    assert staged_p_value(target, drafter, {}, NUM_ROWS, seed=1, processors=processors) < CAUGHT


@pytest.mark.parametrize("name", ["temperature_1", "top_k", "repetition_penalty", "sequence_bias"])
@torch.no_grad()
def test_a_round_commits_exactly_the_target_law(target, kind, name):
    """No random numbers: the drafter's and the target's own laws, enumerated, through the acceptance that decodes."""
    processors = processors_of(target, ALONE[name])
    drafter = small_baseline(target, kind)
    config = GenerationConfig(do_sample=True, max_length=PROMPT.shape[1] + 4)
    generator = AutoregressiveCandidateGenerator(drafter, target, config, processors, {})
    generator.observe(target(PROMPT, **generator.model_kwargs_overrides))
    ids = torch.cat([PROMPT, torch.tensor([[1]])], dim=1)
    num_slots = min(drafter.config.block_size, 2)
    draft_laws = {}
    for prefix, logits in tree_of_logits(generator, ids, num_slots).items():
        text = torch.cat([ids, torch.tensor([prefix], dtype=torch.long)], dim=1)
        draft_laws[prefix] = processors(text, logits[None].clone())[0].double().softmax(-1)
    target_laws = {}
    for length in range(num_slots + 1):
        prefixes = list(itertools.product(range(VOCAB), repeat=length))
        target_laws |= laws_after(target, ids, prefixes, processors)
    target_laws = {prefix: own / own.sum() for prefix, own in target_laws.items()}  # they were rounded to float32

    def accept(*args):
        acceptance = accept_sampled(*args)
        return acceptance.num_accepted, acceptance.next_token

    expected = sequence_law(target_laws, VOCAB, num_slots + 1)
    got = round_law(accept, draft_laws, target_laws, VOCAB, num_slots, lambda tokens: num_slots)
    assert total_variation(got, expected) < 1e-12
    # the control: acceptance that takes the draft law for a flatter one
    flat = {prefix: (own + 0.2) / (own + 0.2).sum() for prefix, own in draft_laws.items()}

    def biased(tokens, draft_probs, *rest):
        probs = torch.stack([torch.stack([flat[tuple(row[:k])] for k in range(num_slots)]) for row in tokens.tolist()])
        return accept(tokens, probs, *rest)

    wrong = round_law(biased, draft_laws, target_laws, VOCAB, num_slots, lambda tokens: num_slots)
    assert total_variation(wrong, expected) > 1e-3


def test_the_stock_loop_runs_our_generator(target, kind, monkeypatch):
    ours = GenerationMixin._assisted_decoding
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", ours.__wrapped__)
    drafter = small_baseline(target, kind)
    with record_speculation() as report:
        assert generated_p_value(target, drafter, {}, NUM_DRAWS, seed=5) > EACH
    assert report.num_rounds == 0, "this was to be transformers' loop"


# -- saved and loaded -----------------------------------------------------------------------------------------------


def test_a_saved_drafter_loads_as_what_it_is(kind, tmp_path):
    target = tiny_target()
    drafter = tiny_baseline(target, kind, draft_vocab_size=20)
    drafter.d2t.copy_(torch.arange(20))
    drafter.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded = [
        AutoregressiveDraftModel.from_pretrained(tmp_path),
        DSparkDraftModel.from_pretrained(tmp_path),
        AutoModel.from_pretrained(tmp_path),
        load_as_stored(str(tmp_path), None)[0],
    ]
    for again in loaded:
        assert type(again) is AutoregressiveDraftModel
        assert again.config.to_dict() | {"_name_or_path": ""} == drafter.config.to_dict() | {"_name_or_path": ""}
        assert all(torch.equal(t, again.state_dict()[n]) for n, t in drafter.state_dict().items())
    assert type(AutoConfig.from_pretrained(tmp_path)) is AutoregressiveConfig
    ids = random_ids(7)
    assert torch.equal(
        greedy(target, ids, max_new_tokens=16, assistant_model=loaded[1]), greedy(target, ids, max_new_tokens=16)
    )
    assert type(DSparkConfig.from_pretrained(tmp_path)) is AutoregressiveConfig
    with_config = DSparkDraftModel.from_pretrained(tmp_path, config=AutoregressiveConfig.from_pretrained(tmp_path))
    assert type(with_config) is AutoregressiveDraftModel


def test_a_drafter_with_missing_weights_is_refused(kind, tmp_path):
    drafter = tiny_baseline(tiny_target(), kind)
    drafter.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"intermediate_size": 48}))
    with pytest.raises(CheckpointFormatError, match="lacks 3 of the drafter's weights"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_a_dspark_drafter_is_no_autoregressive_one(tmp_path):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path)
    with pytest.raises(CheckpointFormatError, match="is of a drafter with model_type 'dspark'"):
        AutoregressiveDraftModel.from_pretrained(tmp_path)


# -- DeepSpec's Eagle3 ----------------------------------------------------------------------------------------------

FIXTURE = Path(__file__).parents[3] / "shared" / "data" / "checkpoints"
needs_fixture = pytest.mark.skipif(
    not FIXTURE.is_dir(), reason="needs the foreign-made fixtures of ../shared/data/checkpoints"
)


@needs_fixture
@torch.no_grad()
def test_deepspecs_eagle3_drafts_what_it_drafts_there():
    target = AutoModelForCausalLM.from_pretrained(FIXTURE / "target_qwen3").eval()
    drafter = DSparkDraftModel.from_pretrained(FIXTURE / "deepspec_eagle3", dtype=torch.float32).eval()
    expected = json.loads((FIXTURE / "deepspec_eagle3" / "expected.json").read_text())
    assert drafter.config.block_size == expected["drafts_per_round"]
    for prompt in expected["prompts"]:
        text = prompt["prompt"] + [prompt["first_token"]]
        text += [t for r in prompt["rounds"] for t in (*r["draft_ids"][: r["accepted"]], r["bonus"])]
        config = GenerationConfig(do_sample=False, max_length=10_000)
        generator = AutoregressiveCandidateGenerator(drafter, target, config, LogitsProcessorList(), {})
        hidden = target(torch.tensor([text]), **generator.model_kwargs_overrides).hidden_states
        seen = 0
        for r in prompt["rounds"]:
            position = r["anchor_position"]
            fresh = type("Outputs", (), {"hidden_states": [h if h is None else h[:, seen:] for h in hidden]})
            generator.observe(fresh, position - seen)
            seen = position
            ids = torch.tensor([text[: position + 1]])
            assert generator.propose(ids).block.tokens[0].tolist() == r["draft_ids"]
        check_first_logits(target, drafter, prompt, text)
        output = target.generate(
            torch.tensor([prompt["prompt"]]), do_sample=False, max_new_tokens=24, assistant_model=drafter,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert output.sequences[0, len(prompt["prompt"]) :].tolist() == prompt["greedy"]
        assert output.speculation.num_rounds == len(prompt["rounds"])


def check_first_logits(target, drafter, prompt, text):
    r = prompt["rounds"][0]
    config = GenerationConfig(do_sample=False, max_length=10_000)
    generator = AutoregressiveCandidateGenerator(drafter, target, config, LogitsProcessorList(), {})
    ids = torch.tensor([text[: r["anchor_position"] + 1]])
    generator.observe(target(ids, **generator.model_kwargs_overrides), r["anchor_position"])
    logits = generator._slot_logits(ids)
    tokens = [r["anchor"], *r["draft_ids"][:-1]]
    got = torch.cat([logits(k, torch.tensor([token])) for k, token in enumerate(tokens)])
    assert torch.allclose(got, torch.tensor(r["draft_logits"]), atol=1e-4)


@needs_fixture
def test_deepspecs_eagle3_saved_again_is_ours(tmp_path):
    drafter = DSparkDraftModel.from_pretrained(FIXTURE / "deepspec_eagle3", dtype=torch.float32)
    drafter.save_pretrained(tmp_path)
    again = DSparkDraftModel.from_pretrained(tmp_path)
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in drafter.state_dict().items())
    assert "lm_head.weight" in again.state_dict()
    assert "embed_tokens.weight" not in again.state_dict()
