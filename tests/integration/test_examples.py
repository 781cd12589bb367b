"""Every program in examples/ runs as a program: on the real pair where it names it, else on a tiny one."""

import io
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from near_pair import save_tokenizer, write_pair
from tiny import tiny_drafter, tiny_target

from dspark_hf.decoding.observers import observe_rounds
from dspark_hf.evaluation import calibration_quality
from dspark_hf.fitting import sts

EXAMPLES = Path(__file__).parents[2] / "examples"
FOREIGN = Path(__file__).parents[3] / "shared" / "data" / "checkpoints"

real = pytest.mark.real_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    write_pair(root)
    return root


@pytest.fixture
def run(monkeypatch):
    def run(name, *arguments):
        """The program's global variables after it has run."""
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with torch.set_grad_enabled(True):  # what a program switches off comes back
            return runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_is_run_here(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60
    assert re.search(r'\brun\(\s*"' + re.escape(path.name) + '"', Path(__file__).read_text(encoding="utf-8"))


@real
def test_generate(run, capsys):
    found = run("generate.py", "--max-new-tokens", 16)
    assert found["output"].speculation.num_new_tokens == 16
    assert "16 tokens in" in capsys.readouterr().out


def test_generate_with_models_of_your_own(run, pair, capsys):
    names = ("--target", pair / "target", "--drafter", pair / "my-drafter")
    found = run("generate.py", *names, "--temperature", 0.7, "--max-new-tokens", 12)
    assert found["drafter"].config.block_size == 2
    assert "12 tokens in" in capsys.readouterr().out


def test_generate_with_a_base_model(run, pair, tmp_path, capsys):
    shutil.copytree(pair / "target", tmp_path / "base")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        path = tmp_path / "base" / name
        if name.endswith(".jinja"):
            path.unlink(missing_ok=True)
        else:
            settings = json.loads(path.read_text())
            settings.pop("chat_template", None)
            path.write_text(json.dumps(settings))
    run("generate.py", "w5 w8", "--target", tmp_path / "base", "--drafter", pair / "my-drafter", "--max-new-tokens", 6)
    assert "6 tokens in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("push_and_pull.py", ["absent-folder/x/y", "owner/name"]),
        ("public_drafter.py", ["--target", "/absent/model", "--drafter", "/absent/drafter"]),
    ],
)
def test_what_cannot_be_reached_is_one_line(run, name, arguments):
    with pytest.raises(SystemExit, match="^error: "):
        run(name, *arguments)


@real
def test_chat(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 2 + 2?\nAnd twice that?\n\n"))
    found = run("chat.py", "--max-new-tokens", 12)
    assert [message["role"] for message in found["messages"]] == ["user", "assistant"] * 2
    out = capsys.readouterr().out
    assert out.count("tokens a round]") == 2
    assert all(message["content"] in out for message in found["messages"][1::2])


@real
def test_pipeline(run, capsys):
    found = run("pipeline.py", "--max-new-tokens", 12)
    assert all(found["answers"]) and len(found["answers"]) == 2
    assert "2 calls, " in capsys.readouterr().out


@real
def test_batch(run, capsys):
    found = run("batch.py", "--max-new-tokens", 8)
    assert len(found["output"].speculation_by_row) == 4
    assert found["output"].sequences.shape == found["plain"].sequences.shape
    assert "tokens/s with the drafter" in capsys.readouterr().out


@real
def test_walk_through_a_round_comes_to_what_generate_does(run, capsys):
    found = run("walk_through_a_round.py")
    length, rounds = found["num_context"], []
    with observe_rounds(rounds.append):
        ids = found["target"].generate(
            found["ids"][:, :length],
            attention_mask=torch.ones(1, length, dtype=torch.long),
            assistant_model=found["drafter"],
            verification_policy="full",
            do_sample=False,
            max_new_tokens=12,
        )
    assert ids[0, : length + 1].tolist() == found["ids"][0].tolist()
    assert ids[0, length + 1 :].tolist()[: len(found["new"])] == [int(token) for token in found["new"]]
    assert torch.allclose(rounds[0].survival, found["confidence"].survival, atol=1e-4)
    num_accepted = min(rounds[0].num_accepted[0], int(found["lengths"]))
    assert int(found["accepted"].num_accepted) == num_accepted > 0
    stages = re.findall(r"^[1-5] (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert stages == ["draft", "calibrate", "schedule", "verify", "accept"]


def test_train(run, pair, tmp_path, capsys):
    prompts = pair / "my-prompts.jsonl"
    arguments = ("--target", pair / "target", "--prompts", prompts, "--output", tmp_path / "made")
    found = run("train.py", *arguments, "--max-new-tokens", 12, "--max-steps", 3)
    assert found["outcome"].is_finished and found["outcome"].num_steps == 3
    assert len((tmp_path / "made-answers.jsonl").read_text().splitlines()) == 48
    assert "3 steps; " in capsys.readouterr().out


@pytest.fixture
def few_rounds_will_do(monkeypatch, tmp_path):
    monkeypatch.setattr(sts, "MIN_PROPOSALS", 50)
    monkeypatch.setattr(sts, "MIN_OUTCOMES", 1)
    monkeypatch.setattr(calibration_quality, "NUM_RESAMPLES", 50)
    monkeypatch.setenv("DSPARK_HF_CACHE", str(tmp_path / "cache"))


def test_calibrate_and_schedule(run, pair, tmp_path, capsys, few_rounds_will_do):
    found = run(
        "calibrate_and_schedule.py",
        *("--target", pair / "target", "--drafter", pair / "my-drafter", "--prompts", pair / "my-prompts.jsonl"),
        *("--output", tmp_path / "calibrated", "--num-proposals", 300, "--batch-size", 3),
    )
    assert found["drafter"].config.calibration["greedy"]["num_proposals"] > 50
    (profile,) = (tmp_path / "cache" / "profiles").iterdir()
    out = capsys.readouterr().out
    assert f"profile in {profile}" in out and "of them verified" in out


def test_push_and_pull(run, pair, tmp_path, monkeypatch, capsys, pushed):
    monkeypatch.chdir(tmp_path)
    run("push_and_pull.py", pair / "my-drafter", "owner/name")
    assert pushed == {"owner/name": {"private": True, "create_pr": False}}
    assert "pulled owner/name: the same drafter" in capsys.readouterr().out
    run("push_and_pull.py", pair / "my-drafter", "owner/name", "--create-pr", "--public")
    assert pushed == {"owner/name": {"private": False, "create_pr": True}}


def deepspec_folder(root):
    """A tiny drafter as DeepSpec writes it: flat keys under the target's model_type."""
    target = tiny_target()
    target.save_pretrained(root / "target")
    drafter = tiny_drafter(target)
    drafter.save_pretrained(root / "drafter")
    ours = {"draft_layout", "model_type", "qk_norm", "architectures"}
    config = {key: value for key, value in drafter.config.to_dict().items() if key not in ours}
    foreign = {"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "use_cache": True}
    (root / "drafter" / "config.json").write_text(json.dumps(config | foreign))
    return target.config.vocab_size


@pytest.mark.parametrize("origin", ["written here", "written by DeepSpec"])
def test_public_drafter(run, origin, tmp_path, capsys):
    if origin == "written here":
        vocab_size = deepspec_folder(tmp_path)
    elif not FOREIGN.is_dir():
        pytest.skip("needs the foreign-made fixtures of ../shared/data/checkpoints")
    else:
        for source, name in (("target_qwen3", "target"), ("deepspec_dspark_vanilla", "drafter")):
            shutil.copytree(FOREIGN / source, tmp_path / name, copy_function=shutil.copyfile)
        vocab_size = 64
    (tmp_path / "target").chmod(0o755)
    save_tokenizer(tmp_path / "target", vocab_size)
    names = ("--target", tmp_path / "target", "--drafter", tmp_path / "drafter", "--prompt", "w3 w4 w5")
    found = run("public_drafter.py", *names, "--max-new-tokens", 12)
    assert found["output"].speculation.num_new_tokens == 12
    assert "sequential head vanilla, rank 8" in capsys.readouterr().out
