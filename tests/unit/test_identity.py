"""What reports say about drafter, target and prompts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, tiny_drafter, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from dspark_hf import zoo
from dspark_hf.checkpoints.digest import checkpoint_facts
from dspark_hf.errors import CheckpointFormatError
from dspark_hf.evaluation import identity
from dspark_hf.evaluation.identity import checkpoint_folder, pair_facts
from dspark_hf.prompts import ChatTemplate, chat_template_of
from dspark_hf.training import answer_facts
from dspark_hf.training.response_writer import settings_path


@pytest.fixture
def drafter(tmp_path):
    made = tiny_drafter(tiny_target(), draft_vocab_size=20)
    made.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def tokenizer(template=None):
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w1")
    made.chat_template = template
    return made


# --- weights


def test_facts_are_of_the_drafters_own_tensors(drafter):
    weights = load_file(drafter / "model.safetensors")
    facts = checkpoint_facts(drafter)
    floating = [w for w in weights.values() if w.is_floating_point()]
    assert facts.num_parameters == sum(w.numel() for w in floating) and len(floating) < len(weights)
    assert facts.num_bytes == sum(w.numel() * w.element_size() for w in weights.values())
    assert facts.dtype == "float32"
    copies = weights | {"embed_tokens.weight": torch.ones(3), "lm_head.weight": torch.ones(3)}
    save_file(copies, drafter / "model.safetensors")
    assert checkpoint_facts(drafter) == facts


def test_a_drafter_in_several_files_is_the_same_drafter(drafter):
    facts, weights = checkpoint_facts(drafter), load_file(drafter / "model.safetensors")
    (drafter / "model.safetensors").unlink()
    names = sorted(weights)
    places = {}
    for i, part in enumerate((names[:3], names[3:]), start=1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, drafter / file)
        places |= dict.fromkeys(part, file)
    (drafter / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert checkpoint_facts(drafter) == facts


def test_one_changed_weight_or_dtype_makes_another_drafter(drafter):
    weights = load_file(drafter / "model.safetensors")
    before = checkpoint_facts(drafter)
    weights["norm.weight"][0] += 1
    save_file(weights, drafter / "model.safetensors")
    changed = checkpoint_facts(drafter)
    weights["norm.weight"] = weights["norm.weight"].bfloat16()
    save_file(weights, drafter / "model.safetensors")
    mixed = checkpoint_facts(drafter)
    assert len({before.sha256, changed.sha256, mixed.sha256}) == 3 and mixed.dtype == "mixed"


def test_a_folder_without_config_or_with_broken_weights(drafter):
    (drafter / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointFormatError, match="model.safetensors cannot be read"):
        checkpoint_facts(drafter)
    (drafter / "config.json").unlink()
    with pytest.raises(CheckpointFormatError, match="no config.json"):
        checkpoint_facts(drafter)


# --- names


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("org/name", "org/name"),
        ("/abs/path", None),
        ("a/b/c", None),
    ],
)
def test_hub_ids(name, hub_id, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert zoo.hub_id(name) == hub_id
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "smollm2-135m-instruct").mkdir()
    assert zoo.hub_id("org/name") is None and zoo.hub_id("smollm2-135m-instruct") is None


def test_facts_of_a_pair(drafter, tmp_path, monkeypatch):
    target = tiny_target()
    found = pair_facts("org/target", target, tokenizer(), drafter)
    assert found.drafter_sha256 == checkpoint_facts(drafter).sha256
    assert found.target_num_parameters == target.num_parameters() and found.target_hub_id == "org/target"
    assert found.target_num_bytes == 4 * target.num_parameters() and found.target_folder is None
    assert found.chat_template == ChatTemplate(None, "absent")
    monkeypatch.setenv("HOME", str(tmp_path))
    local = pair_facts(str(drafter), target, tokenizer(), None)
    assert (local.target_hub_id, local.target_folder, local.drafter_sha256) == (None, "~/drafter", None)


def test_where_a_drafter_was_loaded_from(drafter, monkeypatch):
    assert checkpoint_folder(str(drafter), None) == drafter
    cached = {("org/name", "config.json", "abc"): str(drafter / "config.json")}
    monkeypatch.setattr(
        identity, "try_to_load_from_cache", lambda repo, file, revision: cached.get((repo, file, revision))
    )
    assert checkpoint_folder("org/name", "abc") == drafter
    assert checkpoint_folder("org/name", "other") is None


# --- prompts

SWITCH = "{% if enable_thinking is defined and enable_thinking is false %}<no>{% endif %}w2"


@pytest.mark.parametrize(
    ("template", "thinking"),
    [
        ("w2 {{ messages[0]['content'] }}", "absent"),
        (SWITCH, "on"),
        ("{% if thinking %}<think>{% endif %}w2", "off"),
        ("{% if thinking is not defined %}a{% elif thinking %}b{% else %}c{% endif %}", "own"),
        ("{# thinking #}w2", "absent"),
    ],
)
def test_thinking_modes_of_templates(template, thinking):
    found = chat_template_of(tokenizer(template))
    assert found.thinking == thinking and len(found.sha256) == 64


def test_answers_tell_how_they_were_made(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("{}\n")
    run = {
        "target_name": "org/target",
        "command": "dspark train data --prompts org/data",
        "chat_template": {"sha256": "a", "thinking": "on"},
        "prompt_sources": [{"name": "org/data", "is_on_hub": True}],
    }
    content = {"identity": {"temperatures": [0.0], "max_new_tokens": 64}, "runs": [run, run]}
    settings_path(path).write_text(json.dumps(content))
    (found,) = answer_facts.answer_facts([path])
    assert found == answer_facts.AnswerFacts(
        "answers.jsonl",
        "org/target",
        [0.0],
        64,
        [ChatTemplate("a", "on")],
        [answer_facts.PromptSource("org/data", True)],
        ["dspark train data --prompts org/data"],
    )
    content["runs"].append({"target_name": "org/target"})  # of an older release
    settings_path(path).write_text(json.dumps(content))
    (found,) = answer_facts.answer_facts([path])
    assert (found.chat_templates, found.prompt_sources, found.commands) == (None, None, None)


@pytest.mark.parametrize("content", ["{", "[]", '{"identity": 3, "runs": []}', '{"identity": {}, "runs": []}'])
def test_answers_from_elsewhere_tell_nothing(tmp_path, content):
    path = tmp_path / "answers.jsonl"
    path.write_text("{}\n")
    settings_path(path).write_text(content)
    assert answer_facts.answer_facts([path]) == [answer_facts.AnswerFacts(path.name, *[None] * 6)]


def test_sources_are_named_without_their_folders(tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").write_text("")
    assert answer_facts.prompt_source(tmp_path / "prompts.jsonl") == answer_facts.PromptSource("prompts.jsonl", False)
    assert answer_facts.prompt_source("org/data:config") == answer_facts.PromptSource("org/data:config", True)
