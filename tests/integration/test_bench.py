"""`dspark bench` from end to end on tiny random models: all ways, resuming, interrupting, refusing."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import typer.testing
from tiny import VOCAB, tiny_drafter, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import dspark_cli
from dspark_hf import record_speculation
from dspark_hf.decoding.observers import observe_rounds
from dspark_hf.errors import UnsupportedGenerationError
from dspark_hf.evaluation.bench import run as module
from dspark_hf.evaluation.bench.runs import Runner, Watch
from dspark_hf.evaluation.loading import load_drafter, load_target
from dspark_hf.fitting import profile_store

WAYS = ["plain, dynamic cache", "plain, static cache", "prompt lookup", "assisted generation"]
DRAFTERS = ["A, full", "A, block", "B, full"]


def run(*arguments):
    """Exit code, stdout and stderr of `dspark bench` with these arguments, in this process."""
    done = typer.testing.CliRunner().invoke(dspark_cli.app, ["bench", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a smaller sibling, two drafters of which one has no confidence head, and prompts."""
    root = tmp_path_factory.mktemp("models")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    target = tiny_target("llama")
    for name, model in {"target": target, "sibling": tiny_target("llama", num_layers=1, seed=5)}.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    tiny_drafter(target).save_pretrained(root / "A")
    tiny_drafter(target, seed=3, markov_rank=0, enable_confidence_head=False).save_pretrained(root / "B")
    tiny_drafter(tiny_target(num_layers=5)).save_pretrained(root / "foreign")
    lines = [{"id": f"set{i % 2}/{i}", "prompt": f"w{i} w{3 * i + 4} w{i + 9}"} for i in range(1, 5)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


@pytest.fixture
def basics(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_HF_CACHE", str(tmp_path / "cache"))
    return (
        *("--target", folders / "target", "--dtype", "float32", "--device", "cpu"),
        *("--prompts-file", folders / "prompts.jsonl", "--output", tmp_path / "bench"),
        *("--drafter", f"A={folders / 'A'}", "--max-new-tokens", 12, "--sweep-new-tokens", 6),
        *("--sweep-repeats", 2, "--profile-repeats", 1),
    )


@pytest.fixture
def small(basics):
    """The least that has a main table."""
    return (*basics, "--batch-size", 0, "--context", 0)


def test_all_ways_in_one_run(folders, basics, tmp_path):
    policies = [word for name in ("full", "block") for word in ("--policy", name)]
    code, out, err = run(
        *basics, *policies, "--drafter", f"B={folders / 'B'}", "--sibling", folders / "sibling",
        *("--batch-size", 3, "--context", 16),
    )  # fmt: skip
    assert code == 0, err
    report = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert report["is_complete"] and [way["name"] for way in report["ways"]] == WAYS + DRAFTERS
    assert [one["name"] for one in report["left_out"]] == ["B, block"]
    cells = {("main" if c["cell"]["kind"] == "main" else f"{c['cell']['kind']} {c['cell']['num_rows']}"): c
             for c in report["cells"]}  # fmt: skip
    assert [way["way"] for way in cells["batch 3"]["ways"]] == WAYS[:2] + DRAFTERS[:2]
    main = {way["way"]: way for way in cells["main"]["ways"]}
    for name, way in main.items():
        assert way["num_identical"] == way["num_texts"] == 4 and way["num_errors"] == 0, name
        assert way["num_new_tokens"] == 48 and way["tokens_per_s"] > 0 and way["first_token_s"] > 0
        assert name == WAYS[0] or way["speed_over"][WAYS[0]]["low"] > 0
    for cell in report["cells"]:
        assert all(way["num_errors"] == 0 for way in cell["ways"])
        for split in cell["latency"]:
            assert sum(split["parts"].values()) == pytest.approx(split["residual_s"], abs=1e-9)
    assert {split["way"] for split in cells["main"]["latency"]} == {WAYS[0], *DRAFTERS}
    assert [(one["drafter"], one["num_rows"]) for one in report["gamma"]] == [("A", 1), ("A", 3), ("B", 1)]
    assert {one["drafter"]: one["num_layers"] for one in report["depth"]} == {"A": 2, "B": 2}
    memory = cells["main"]["memory"]
    assert memory["assisted generation"]["weight_bytes"] > memory[WAYS[0]]["weight_bytes"]
    assert memory["A, full"]["weight_bytes"] > memory[WAYS[0]]["weight_bytes"] > 0
    assert memory["A, full"]["cache_bytes"] > memory[WAYS[0]]["cache_bytes"] > 0
    page = (tmp_path / "bench" / "bench.md").read_text()
    for name in ("ways", "batches", "contexts", "prediction", "gamma"):
        assert (tmp_path / "bench" / f"bench-{name}.png").stat().st_size > 1000
        assert f"bench-{name}.png" in page
    assert "left out: B, block: policy block needs a confidence head" in err
    assert "A, block" in out


def test_what_it_counts_is_what_a_call_alone_reports(folders, small, tmp_path):
    assert run(*small, "--prompt-lookup", 0)[0] == 0
    main = json.loads((tmp_path / "bench" / "bench.json").read_text())["cells"][0]
    found = {way["way"]: way for way in main["ways"]}["A, full"]
    target, tokenizer = load_target(str(folders / "target"), "float32", "cpu")
    drafter = load_drafter(str(folders / "A"), target, "target", tokenizer, seed=0).model
    num_forwards = []
    hook = target.register_forward_hook(lambda *_: num_forwards.append(1))
    with record_speculation() as report:
        for i in range(1, 5):
            ids = torch.tensor([[i, 3 * i + 4, i + 9]])
            target.generate(
                ids, do_sample=False, max_new_tokens=12, assistant_model=drafter, verification_policy="full"
            )
    hook.remove()
    assert found["tau"]["value"] == pytest.approx(report.tau)
    assert found["target_forwards_per_token"]["value"] == pytest.approx(len(num_forwards) / 48)
    assert found["accepted_per_slot"] == report.accepted_per_slot
    assert found["reached_per_slot"] == report.reached_per_slot
    assert len(num_forwards) == report.num_target_forwards


@pytest.fixture
def counted(monkeypatch):
    """Runs that were measured, and after how many Ctrl-C is pressed."""
    real, state = Runner.run, {"runs": 0, "stop": None}

    def counting(self, *args, **kwargs):
        if state["runs"] == state["stop"]:
            raise KeyboardInterrupt
        state["runs"] += 1
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Runner, "run", counting)
    return state


def test_an_interrupted_bench_goes_on(small, tmp_path, counted):
    folder = tmp_path / "bench"
    counted["stop"] = 0
    code, _, err = run(*small)
    assert code == 130 and "interrupted before any run was finished" in err
    assert not (folder / "bench.json").exists()
    counted["stop"] = 2
    code, _, err = run(*small)
    assert code == 130 and "the same command goes on" in err
    report = json.loads((folder / "bench.json").read_text())
    assert not report["is_complete"] and report["cells"][0]["num_done"] == 2
    assert "2 of 4 done" in (folder / "bench.md").read_text()
    counted.update(runs=0, stop=None)
    assert run(*small)[0] == 0
    assert counted["runs"] == 2
    counted.update(runs=0)
    before = (folder / module.MEASUREMENTS).read_bytes()
    assert run(*small)[0] == 0  # nothing is left to measure
    code, _, err = run(*small, "--seed", 4)
    assert code == 2 and "settings.seed was 0, now 4" in err and "name another --output" in err
    assert counted["runs"] == 0 and (folder / module.MEASUREMENTS).read_bytes() == before
    report = json.loads((folder / "bench.json").read_text())
    assert report["is_complete"] and len(report["sessions"]) == 3


@pytest.fixture
def failing(monkeypatch):
    """Ways that fail, by cell and name, with which error; and how often they did."""
    real, state = Runner._generate, {"errors": {}, "times": 0}

    def generate(self, twin, way, ids, mask, cell, max_new_tokens):
        if (cell.name, way.name) in state["errors"]:
            state["times"] += 1
            raise state["errors"][cell.name, way.name]
        return real(self, twin, way, ids, mask, cell, max_new_tokens)

    monkeypatch.setattr(Runner, "_generate", generate)
    return state


def test_a_way_that_fails_at_a_point_is_left_out_there(basics, tmp_path, failing):
    swept = (*basics, "--batch-size", 2, "--batch-size", 3, "--context", 0, "--num-prompts", 2)
    failing["errors"] = {
        ("main", "prompt lookup"): UnsupportedGenerationError("no lookup here"),
        ("batch 2", WAYS[1]): ValueError("no static cache here"),
        ("batch 3", WAYS[0]): torch.OutOfMemoryError("no memory here"),
    }
    for _ in range(2):  # the second reports, and tries nothing again
        code, _, err = run(*swept)
        assert code == 0, err
        report = json.loads((tmp_path / "bench" / "bench.json").read_text())
        ways = {cell["cell"]["num_rows"]: [way["way"] for way in cell["ways"]] for cell in report["cells"]}
        assert ways == {1: [*WAYS[:2], "A, full"], 2: [WAYS[0], "A, full"], 3: []}
        assert report["is_complete"] and failing["times"] == 3
        left_out = {one["name"]: one["reason"] for one in report["left_out"]}
        assert left_out["prompt lookup at main"] == "UnsupportedGenerationError: no lookup here"
        assert left_out[f"{WAYS[1]} at batch 2"] == "ValueError: no static cache here"
        assert left_out["all ways at batch 3"] == "OutOfMemoryError: no memory here"
        assert "no memory here" in (tmp_path / "bench" / "bench.md").read_text()


def test_another_error_leaves_the_report_of_what_is_done(basics, tmp_path, failing):
    swept = (*basics, "--batch-size", 2, "--context", 0, "--num-prompts", 2)
    failing["errors"] = {("main", WAYS[0]): UnsupportedGenerationError("no plain generation")}
    code, _, err = run(*swept)
    assert code == 2 and "no plain generation" in err and not (tmp_path / "bench" / "bench.json").exists()
    failing["errors"] = {("batch 2", "A, full"): OSError("the machine is on fire")}
    code, _, err = run(*swept)
    assert code == 2 and "the machine is on fire" in err
    report = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert [cell["num_done"] for cell in report["cells"]] == [2, 0] and not report["is_complete"]
    failing["errors"] = {}
    assert run(*swept)[0] == 0
    assert json.loads((tmp_path / "bench" / "bench.json").read_text())["is_complete"]


def edited(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_other_weights_or_policy_settings_under_the_same_names_are_refused(folders, basics, tmp_path, counted):
    for name in ("target", "sibling", "A"):
        shutil.copytree(folders / name, tmp_path / name)
    small = (
        *basics, "--batch-size", 0, "--context", 0, "--num-prompts", 1, "--target", tmp_path / "target",
        *("--sibling", tmp_path / "sibling", "--drafter", f"B={tmp_path / 'A'}"),
    )  # fmt: skip
    assert run(*small)[0] == 0
    counted.update(runs=0)
    for name, seed, says in [("target", 7, "target.fingerprint was"), ("sibling", 8, "sibling.fingerprint was")]:
        other = tiny_target("llama", seed=seed) if name == "target" else tiny_target("llama", num_layers=1, seed=seed)
        other.save_pretrained(tmp_path / name)
        code, _, err = run(*small)
        assert code == 2 and says in err, (name, err)
        shutil.copytree(folders / name, tmp_path / name, dirs_exist_ok=True)
    before = (tmp_path / "A" / "config.json").read_text()
    calibration = {"greedy": {"temperatures": [1.5, 1.0, 1.0, 1.0], "platt": None, "settings": {}}}
    for name, value in [("verification_policy", "block"), ("confidence_threshold", 0.7), ("min_drafts_every", 3),
                        ("calibration", calibration)]:  # fmt: skip
        edited(tmp_path / "A", **{name: value})
        code, _, err = run(*small)
        assert code == 2 and f"drafters.B.{name} was" in err, (name, err)
        (tmp_path / "A" / "config.json").write_text(before)
    assert run(*small)[0] == 0  # control: what is as it was goes on
    assert counted["runs"] == 0


def test_a_bench_that_goes_on_keeps_the_profile_it_began_with(small, tmp_path):
    arguments = (*small, "--policy", "goodput", "--num-prompts", 1)
    assert run(*arguments)[0] == 0
    (path,) = (tmp_path / "cache" / "profiles").glob("*.json")
    began_with = json.loads(path.read_text())
    code, _, err = run(*arguments)
    assert code == 0 and "put back" not in err
    path.unlink()
    code, _, err = run(*arguments)
    assert code == 0 and "was missing" in err and json.loads(path.read_text()) == began_with
    profile_store.save_profile(replace(profile_store.load_profile(path), num_repeats=9), path)
    assert json.loads(path.read_text()) != began_with
    code, _, err = run(*arguments)
    assert code == 0 and "was another one" in err and json.loads(path.read_text()) == began_with


def test_sampling_compares_no_texts(small, tmp_path):
    assert run(*small, "--temperature", 1.0, "--top-k", 20)[0] == 0
    main = json.loads((tmp_path / "bench" / "bench.json").read_text())["cells"][0]
    assert all(way["num_identical"] is None and way["num_errors"] is None for way in main["ways"])


def test_a_wrong_text_is_an_error(small, tmp_path, monkeypatch):
    """Control: where a way says something else than plain generation, it is seen, and the command fails."""
    real = Runner._texts

    def texts(self, sequences, num_prompt, cell):
        found = real(self, sequences, num_prompt, cell)
        texts.calls += 1
        return [[(row[0] + texts.calls) % VOCAB, *row[1:]] for row in found]

    texts.calls = 0
    monkeypatch.setattr(Runner, "_texts", texts)
    code, out, _ = run(*small)
    assert code == 1 and "ERRORS" in out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (("--policy", "best"), "policy must be one of"),
        (("--context", 64, "--policy", "full:9"), "can follow none of the policies"),
        (("--context", 1020), "positions of the target"),
        (("--drafter", "A=x"), "two drafters are called 'A'"),
        (("--swept-drafter", "C"), "swept must be among"),
        (("--profile-repeats", 0), "profile_repeats must be >= 1"),
        (("--sibling", "nowhere/at/all"), "is not a folder"),
    ],
)
def test_bad_input_is_refused(basics, changes, says, counted):
    code, _, err = run(*basics, *changes)
    assert code == 2 and says in err
    assert counted["runs"] == 0


def test_models_that_do_not_fit_are_refused(folders, small, tmp_path, counted):
    code, _, err = run(*small, "--drafter", f"F={folders / 'foreign'}")
    assert code == 2 and counted["runs"] == 0
    tiny_target("llama", vocab_size=VOCAB + 3).save_pretrained(tmp_path / "other")
    PreTrainedTokenizerFast.from_pretrained(folders / "target").save_pretrained(tmp_path / "other")
    code, _, err = run(*small, "--sibling", tmp_path / "other")
    assert code == 2 and f"a vocabulary of {VOCAB + 3} tokens" in err


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_a_watch_knows_streams_from_grids(folders, layout):
    target, tokenizer = load_target(str(folders / "target"), "float32", "cpu")
    drafter = load_drafter(str(folders / "A"), target, "target", tokenizer, seed=0).model
    watch, shown = Watch(target, [3, 3]), []
    ids = torch.tensor([[1, 4, 5], [7, 8, 9]])
    with watch, observe_rounds(watch.hear), observe_rounds(lambda ended: shown.append(ended.num_verified)):
        target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0,
            assistant_model=drafter, verification_policy="survival", verification_layout=layout,
        )  # fmt: skip
    pairs = [(one.num_flat, sum(verified) + 2) for one, verified in zip(watch.rounds, shown, strict=True)
             if one.num_rows == 2]  # fmt: skip
    assert pairs and all(num_flat == (total if layout == "flat" else None) for num_flat, total in pairs)


@pytest.mark.real_model
def test_the_bundled_drafter_on_the_real_target(tmp_path, monkeypatch):
    """In float32 every way says what plain generation says, and the drafter needs fewer forwards."""
    monkeypatch.setattr(profile_store, "cache_root", lambda: tmp_path)  # the zoo keeps its own
    code, out, err = run(
        *("--output", tmp_path / "bench", "--dtype", "float32", "--device", "cpu", "--num-prompts", 2),
        *("--max-new-tokens", 16, "--batch-size", 0, "--context", 0, "--profile-repeats", 1),
    )
    assert code == 0, err
    report = json.loads((tmp_path / "bench" / "bench.json").read_text())
    main = {way["way"]: way for way in report["cells"][0]["ways"]}
    assert list(main) == [*WAYS[:3], "drafter, full"]
    assert all(way["num_identical"] == 2 for way in main.values())
    assert main["drafter, full"]["tau"]["value"] > 1.2
    assert main["drafter, full"]["target_forwards_per_token"]["value"] < 0.9
    split = {one["way"]: one for one in report["cells"][0]["latency"]}["drafter, full"]
    assert sum(split["parts"].values()) == pytest.approx(split["residual_s"], abs=1e-9)
    assert split["draft_s"] < split["step_s"]
    assert report["depth"][0]["num_layers"] == 2 and 0 < report["depth"][0]["layer_share"] < 0.2
