"""Folders that other projects' own code saved draft here what they draft there."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList

from dspark_hf import DSparkCandidateGenerator, DSparkDraftModel

CHECKPOINTS = Path(__file__).parents[3] / "shared" / "data" / "checkpoints"
pytestmark = pytest.mark.skipif(
    not CHECKPOINTS.is_dir(), reason="needs the foreign-made fixtures of ../shared/data/checkpoints"
)
FOLDERS = ["deepspec_dspark_vanilla", "deepspec_dflash", "speculators_dspark", "specforge_dspark", "zlab_dflash"]


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "target_qwen3").eval()


def load(name):
    drafter = DSparkDraftModel.from_pretrained(CHECKPOINTS / name, dtype=torch.float32).eval()
    expected = json.loads((CHECKPOINTS / name / "expected.json").read_text())
    return drafter, expected


@pytest.mark.parametrize("name", FOLDERS)
def test_layout_and_drafts_per_round(name):
    drafter, expected = load(name)
    assert drafter.config.draft_layout == expected["layout"]
    assert drafter.config.block_size == expected["drafts_per_round"]
    if "draft_vocab_target_ids" in expected:
        assert drafter.draft_token_ids.tolist() == expected["draft_vocab_target_ids"]


@pytest.mark.parametrize("name", FOLDERS)
@torch.no_grad()
def test_every_round_drafts_the_expected_tokens(target, name):
    drafter, expected = load(name)
    for prompt in expected["prompts"]:
        text = prompt["prompt"] + [prompt["first_token"]]
        text += [t for r in prompt["rounds"] for t in (*r["draft_ids"][: r["accepted"]], r["bonus"])]
        config = GenerationConfig(do_sample=False, max_length=10_000)
        generator = DSparkCandidateGenerator(drafter, target, config, LogitsProcessorList(), {})
        hidden = target(torch.tensor([text]), **generator.model_kwargs_overrides).hidden_states
        seen = 0
        for number, r in enumerate(prompt["rounds"]):
            position = r["anchor_position"]
            assert text[position] == r["anchor"]
            fresh = type("Outputs", (), {"hidden_states": [h if h is None else h[:, seen:] for h in hidden]})
            generator.observe(fresh, position - seen)
            seen = position
            block = generator.propose(torch.tensor([text[: position + 1]])).block
            assert block.tokens[0].tolist() == r["draft_ids"]
            if r["confidence_logits"] is None:
                assert block.confidence_logits is None
            else:
                logits = torch.tensor([r["confidence_logits"]])
                assert torch.allclose(block.confidence_logits, logits, atol=1e-4)
            if number == 0:
                check_logits(target, drafter, r, hidden, position)


def check_logits(target, drafter, r, hidden, position):
    """The first round's draft logits after the Markov bias, in the drafter's own vocabulary."""
    config = drafter.config
    features = torch.cat([hidden[i + 1][:, :position] for i in config.target_layer_ids], -1)
    block_ids = torch.tensor([[r["anchor"]] + [config.mask_token_id] * (config.num_block_tokens - 1)])
    states = drafter(
        drafter.embed(block_ids, target.get_input_embeddings()),
        torch.arange(position, position + config.num_block_tokens)[None],
        context_features=features,
        context_position_ids=torch.arange(position)[None],
    ).last_hidden_state[:, config.first_draft_slot :]
    head = drafter.borrow_head(target.get_output_embeddings(), config.vocab_size)
    logits = drafter.base_logits(states, head)[0]
    if drafter.markov_head is not None:
        previous = torch.tensor([r["anchor"], *r["draft_ids"][:-1]])
        bias, _ = drafter.markov_head.step(drafter.markov_head.embed(previous), states[0], None)
        logits = logits + bias
    assert torch.allclose(logits, torch.tensor(r["draft_logits"]), atol=1e-4)


@pytest.mark.parametrize("name", FOLDERS)
def test_generation_accepts_what_was_accepted_there(target, name):
    drafter, expected = load(name)
    for prompt in expected["prompts"]:
        output = target.generate(
            torch.tensor([prompt["prompt"]]), do_sample=False, max_new_tokens=24, assistant_model=drafter,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert output.sequences[0, len(prompt["prompt"]) :].tolist() == prompt["greedy"]
        # the last round is shorter here, since it may not draft past max_length
        full_rounds = [r["accepted"] for r in prompt["rounds"][:-1]]
        assert output.speculation.num_rounds == len(prompt["rounds"])
        assert output.speculation.num_accepted >= sum(full_rounds)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_batch_drafts_what_its_rows_draft(target, name):
    drafter, expected = load(name)
    prompts = [torch.tensor(prompt["prompt"]) for prompt in expected["prompts"]]
    longest = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([(torch.arange(longest) >= longest - len(prompt)).long() for prompt in prompts])
    for layout in ("padded", "flat"):
        output = target.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=24, assistant_model=drafter, pad_token_id=0,
            return_dict_in_generate=True, verification_layout=layout,
        )  # fmt: skip
        assert [row[longest:].tolist() for row in output.sequences] == [p["greedy"] for p in expected["prompts"]]
        rounds = [report.num_rounds for report in output.speculation_by_row]
        assert rounds == [len(prompt["rounds"]) for prompt in expected["prompts"]]


@pytest.mark.parametrize("name", FOLDERS)
def test_saved_again_it_is_ours_without_copies_of_embedding_and_head(target, name, tmp_path):
    drafter, _ = load(name)
    assert not any("embed_tokens" in name or "lm_head" in name for name in drafter.state_dict())
    drafter.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "dspark"
    again = DSparkDraftModel.from_pretrained(tmp_path)
    assert drafter.config.to_dict() | {"_name_or_path": ""} == again.config.to_dict() | {"_name_or_path": ""}
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in drafter.state_dict().items())


def test_a_folder_that_is_no_drafter_is_refused():
    with pytest.raises(ValueError, match=r"no drafter.*this release reads"):
        DSparkDraftModel.from_pretrained(CHECKPOINTS / "target_qwen3")
