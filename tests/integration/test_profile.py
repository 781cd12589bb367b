"""`dspark profile` on tiny models: what decoding runs is what is timed, and the profile is found again."""

import inspect
import json
import time
from types import SimpleNamespace

import pytest
import torch
import typer.testing
from tiny import VOCAB, tiny_drafter, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import dspark_cli
from dspark_cli.profile import profile_command
from dspark_hf import DSparkDraftModel, ThroughputProfileError, zoo
from dspark_hf.errors import IncompatibleTargetError
from dspark_hf.evaluation.profiling import PairBench, profile_pair
from dspark_hf.fitting.measuring import ProfilePlan
from dspark_hf.fitting.profile_store import find_profile

# Far above what a step of a tiny target takes, also where other processes hold the cores.
DELAY_S = 0.05


def run(*arguments):
    """Exit code, stdout and stderr of `dspark profile` with these arguments, in this process."""
    done = typer.testing.CliRunner().invoke(dspark_cli.app, ["profile", *map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_HF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def basics(tmp_path_factory):
    """Arguments that name a tiny target and its drafter on disk, and few points."""
    root = tmp_path_factory.mktemp("models")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    target = tiny_target("llama")
    target.save_pretrained(root / "target")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w1").save_pretrained(root / "target")
    tiny_drafter(target).save_pretrained(root / "drafter")
    names = ("--target", root / "target", "--drafter", root / "drafter")
    points = ("--batch-size", 3, "--batch-size", 1, "--context", 12, "--repeats", 2)
    return (*names, *points, "--dtype", "float32", "--device", "cpu")


def test_the_command_measures_stores_and_shows(basics, cache, tmp_path):
    code, out, err = run(*basics, "--json", tmp_path / "own.json", "--plot", tmp_path / "own.png")
    assert (code, err) == (0, "")
    (path,) = (cache / "profiles").iterdir()
    assert json.loads(path.read_text()) == json.loads((tmp_path / "own.json").read_text())
    assert (tmp_path / "own.png").read_bytes().startswith(b"\x89PNG")
    for text in ("context 12: milliseconds", "step, 5/row", "plain step", "clear rises", str(path)):
        assert text in out
    target, drafter = zoo.load_target(str(basics[1]), "float32"), DSparkDraftModel.from_pretrained(basics[3])
    profile = find_profile(target, drafter)
    assert profile.grid.num_rows == (1, 3)
    assert f"{1000 * profile.step_s(3, 15, 12):.1f}" in out
    assert profile.provenance["n"] == 2
    assert profile.target == str(basics[1])


def test_the_picture_lies_beside_the_profile(basics, cache):
    assert run(*basics)[0] == 0
    assert sorted(file.suffix for file in (cache / "profiles").iterdir()) == [".json", ".png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-size", 0), "num_rows (--batch-size) must be one or more whole numbers >= 1"),
        (("--context", 1020), "make 1025 tokens, and the target has positions for 1024; choose a smaller context"),
        (("--repeats", 0), "num_repeats must be >= 1"),
        (("--threads", 0), "--threads must be from 1 to"),
        (("--json", "/nowhere/x.json"), "its folder does not exist"),
        (("--plot", "/nowhere/x.png"), "its folder does not exist"),
        (("--plot", "x.doc"), "plot must be a file that ends in .png or .pdf or .svg, got 'x.doc'"),
    ],
)
def test_bad_options_end_in_one_line(basics, cache, arguments, message):
    code, out, err = run(*basics, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dspark: error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(cache.rglob("*.*"))


def test_a_cache_that_cannot_be_written_is_found_before_measuring(basics, cache, monkeypatch):
    cache.write_text("a file where the folder would be")
    monkeypatch.setattr(PairBench, "open", lambda *_: pytest.fail("it began to measure"))
    code, out, err = run(*basics)
    assert (code, out) == (2, "")
    assert str(cache) in err


def test_interrupted_it_leaves_the_older_profile(basics, cache, monkeypatch):
    assert run(*basics)[0] == 0
    before = {file: file.read_bytes() for file in (cache / "profiles").iterdir()}

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(PairBench, "draft_s", interrupted)
    code, out, err = run(*basics)
    assert (code, out) == (130, "")
    assert "an older profile is as it was" in err
    assert {file: file.read_bytes() for file in (cache / "profiles").iterdir()} == before


def test_defaults_are_those_of_the_plan():
    parameters = inspect.signature(profile_command).parameters
    plan = ProfilePlan()
    assert tuple(parameters["batch_size"].default) == plan.num_rows
    assert tuple(parameters["context"].default) == plan.contexts
    assert parameters["repeats"].default == plan.num_repeats
    assert parameters["seed"].default == plan.seed


# --- what is timed


def profile_with(target, drafter, **plan):
    plan = ProfilePlan(**({"num_rows": (1, 3), "contexts": (12,), "num_repeats": 3} | plan))
    return profile_pair(target, drafter, plan, target_name="tiny", drafter_name=None)


def slow(module, is_slow):
    """Makes a module's forward sleep when its arguments say so."""
    hook = lambda _, args, kwargs: time.sleep(DELAY_S * is_slow(args, kwargs))  # noqa: E731
    module.register_forward_pre_hook(hook, with_kwargs=True)


def test_time_is_booked_where_it_is_spent(target, drafter):
    """A target that is slow for 3 tokens a row, and a drafter that is slow for 3 rows."""
    slow(target, lambda _, kwargs: kwargs.get("input_ids", torch.empty(0, 0)).shape[1] == 3)
    slow(drafter, lambda _, kwargs: len(kwargs["inputs_embeds"]) == 3)
    profile = profile_with(target, drafter)
    steps = profile.step.median_s[..., 0]
    assert (steps > DELAY_S).tolist() == [[False, False, True, False, False]] * 2
    assert (profile.draft.median_s > DELAY_S).tolist() == [[False], [True]]
    assert bool((profile.plain.median_s < DELAY_S).all())
    assert bool((profile.overhead.median_s < DELAY_S).all())


def test_steps_are_those_of_a_batch(target, drafter):
    """Tokens, columns and positions of the forwards that are timed."""
    seen = []

    def note(_, args, kwargs):
        if "attention_mask" in kwargs and kwargs["attention_mask"].ndim == 4:
            positions = kwargs["position_ids"]
            seen.append((*kwargs["input_ids"].shape, kwargs["attention_mask"].shape[-1], int(positions[0, 0])))

    bench = PairBench(target, drafter, max_context=12)
    bench.open(3)
    target.register_forward_pre_hook(note, with_kwargs=True)
    bench.step_s(2, 12)
    bench.step_s(5, 4)
    assert seen == [(3, 2, 14, 12), (3, 5, 9, 4)]


def test_the_random_state_and_hooks_are_left_as_they_were(target, drafter):
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    profile_with(target, drafter, num_rows=(1,), num_repeats=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not target._forward_hooks


def test_targets_whose_rows_share_nothing_are_refused(target, drafter):
    target.config.model_type = "other"
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ThroughputProfileError, match="do not share forwards .*flash_attention_2"):
        profile_with(target, drafter)


def test_a_foreign_drafter_is_refused(target):
    with pytest.raises(IncompatibleTargetError):
        profile_with(target, tiny_drafter(tiny_target(num_layers=5)))


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "mps"])
def test_seconds_of_any_accelerator_are_its_own(device, monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    bench = PairBench(SimpleNamespace(device=torch.device(device)), tiny_drafter(tiny_target()), max_context=12)
    assert bench._seconds(lambda: None) >= 0
    assert waited == ([] if device == "cpu" else [torch.device(device)] * 2)
