"""From measuring a drafter to its card, with the commands that a user types, on a tiny target."""

import json
import subprocess
import sys

import pytest
import typer.testing
from tiny import VOCAB, tiny_drafter, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import dspark_cli
from dspark_hf.hub.card import render_card

pytest.importorskip("datasets", reason="answers are written with the train extra")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with tokenizer and chat template, its drafter, another drafter, and prompts of two data sets."""
    root = tmp_path_factory.mktemp("card")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w1")
    tokenizer.chat_template = "{% for m in messages %}w2 {{ m['content'] }} {% endfor %}w3"
    target = tiny_target("llama")
    target.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    tiny_drafter(target).save_pretrained(root / "drafter")
    tiny_drafter(target, seed=2).save_pretrained(root / "other")
    lines = [{"id": f"{name}/{i}", "prompt": f"w{i} w{3 * i + 4}"} for name in "ab" for i in range(1, 4)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def run(*arguments):
    done = typer.testing.CliRunner().invoke(dspark_cli.app, [*map(str, arguments)])
    assert done.exit_code in (0, 2), done.output
    return done.exit_code, done.stdout + done.stderr


def test_measured_numbers_come_into_the_card(folders, tmp_path):
    pair = ("--target", folders / "target", "--drafter", folders / "drafter", "--dtype", "float32", "--device", "cpu")
    answers = ("--max-new-tokens", 12, "--temperature", 0, "--output", tmp_path / "texts.jsonl")
    prompts = folders / "prompts.jsonl"
    assert run("train", "data", *pair[:2], *pair[4:], "--prompts", prompts, *answers)[0] == 0
    assert run("eval", *pair, "--texts", tmp_path / "texts.jsonl", "--json", tmp_path / "found.json")[0] == 0
    speed = ("--prompts-file", prompts, "--max-new-tokens", 8, "--json", tmp_path / "speed.json")
    assert run("compare", *pair, *speed)[0] == 0
    reports = ("--report", tmp_path / "found.json", "--report", tmp_path / "speed.json")
    code, output = run("card", folders / "drafter", *reports)
    assert code == 0, output
    text = (folders / "drafter" / "README.md").read_text()
    assert text == render_card(folders / "drafter")
    score = json.loads((tmp_path / "found.json").read_text())["scores"][0]
    low, high = score["tau"]["a"]["low"], score["tau"]["a"]["high"]
    assert f"| a | {score['tau']['a']['n']}" in text
    assert f"{score['tau']['a']['value']:.2f} ({low:.2f} to {high:.2f})" in text
    ratio = json.loads((tmp_path / "speed.json").read_text())["domains"]["b"]["speed_ratio"]
    assert f"| b | 3 | {ratio['value']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f}) |" in text
    assert "of the time of the target's verifying forwards" in text and "the template has no thinking mode" in text
    code, output = run("card", folders / "other", *reports)
    assert code == 2 and "is a report of other weights" in output


def test_help_needs_no_torch():
    code = (
        "import sys, typer.testing, dspark_cli\n"
        "done = typer.testing.CliRunner().invoke(dspark_cli.app, ['card', '--help'])\n"
        "assert done.exit_code == 0 and '--report' in done.stdout, done.output\n"
        "assert not {'torch', 'transformers', 'dspark_hf', 'jinja2'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"COLUMNS": "200", "PYTHONPATH": ":".join(sys.path)})
