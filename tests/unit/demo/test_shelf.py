"""What the demo loads, keeps and refuses."""

from types import SimpleNamespace

import pytest
from demo_races import word_tokenizer
from tiny import tiny_drafter, tiny_target

from dspark_hf import IncompatibleTargetError
from dspark_hf.demo import shelf as module
from dspark_hf.demo.shelf import BUNDLED, MAX_DRAFTERS, UNTRAINED, Limits, Shelf
from dspark_hf.evaluation import ComparisonError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target = tiny_target()
    target.save_pretrained(root / "target")
    word_tokenizer().save_pretrained(root / "target")
    for name, seed in (("one", 1), ("two", 2)):
        tiny_drafter(target, seed=seed).save_pretrained(root / name)
    tiny_drafter(tiny_target(num_layers=5)).save_pretrained(root / "foreign")
    return root


def shelf_of(limits=None):
    return Shelf("float32", "cpu", limits)


def test_models_are_loaded_once_and_kept(folder):
    shelf = shelf_of()
    target = str(folder / "target")
    assert not shelf.holds(None, target)
    drafter = shelf.drafter(str(folder / "one"), target)
    assert shelf.holds(str(folder / "one"), target) and not shelf.holds(str(folder / "two"), target)
    assert shelf.drafter(str(folder / "one"), target) is drafter
    assert shelf.target(target)[0] is shelf.target(target)[0]


def test_the_drafter_used_longest_ago_leaves_first(folder, monkeypatch):
    shelf = shelf_of()
    target = str(folder / "target")
    monkeypatch.setattr(Shelf, "_load", lambda self, name, *rest: object())
    names = [f"d{i}" for i in range(MAX_DRAFTERS)]
    kept = [shelf.drafter(name, target) for name in names]
    assert shelf.drafter("d0", target) is kept[0]
    shelf.drafter("another", target)
    assert shelf.holds("d0", target) and not shelf.holds("d1", target)


def test_an_untrained_drafter_and_none_shipped(folder):
    shelf = shelf_of()
    target = str(folder / "target")
    assert shelf.drafter(UNTRAINED, target).config.hidden_size == 32
    with pytest.raises(ComparisonError, match="no drafter is shipped for target"):
        shelf.drafter(BUNDLED, target)


def test_wrong_names_and_foreign_drafters_are_refused_and_nothing_is_kept(folder):
    shelf = shelf_of()
    target = str(folder / "target")
    with pytest.raises(ComparisonError, match="is not a folder"):
        shelf.target("/no/such/folder")
    with pytest.raises(IncompatibleTargetError):
        shelf.drafter(str(folder / "foreign"), target)
    assert not shelf.holds(str(folder / "foreign"), target)
    assert shelf.drafter(str(folder / "one"), target) is not None


def test_only_listed_names_are_loaded(folder):
    target, drafter = str(folder / "target"), str(folder / "one")
    shelf = shelf_of(Limits(targets=(target,), drafters=(drafter,)))
    assert shelf.drafter(drafter, target) is not None
    assert shelf.drafter(UNTRAINED, target) is not None
    with pytest.raises(ComparisonError, match="may not be loaded here; choose one of bundled, untrained"):
        shelf.drafter(str(folder / "two"), target)
    with pytest.raises(ComparisonError, match="target 'other' may not be loaded here"):
        shelf.target("other")


def test_too_large_folders_and_repositories_are_refused_before_loading(folder, monkeypatch):
    shelf = shelf_of(Limits(max_gb=1e-6))
    with pytest.raises(ComparisonError, match="GB of weights, and at most 1e-06 GB"):
        shelf.target(str(folder / "target"))
    files = [SimpleNamespace(rfilename="a.safetensors", size=3_000_000_000), SimpleNamespace(rfilename="b.md", size=9)]
    monkeypatch.setattr(module.HfApi, "model_info", lambda self, name, **kw: SimpleNamespace(siblings=files))
    Limits(max_gb=3.5).check("owner/name", "drafter")
    with pytest.raises(ComparisonError, match="has 3.0 GB of weights, and at most 2.5 GB"):
        Limits(max_gb=2.5).check("owner/name", "drafter")
    files[0].rfilename = "pytorch_model.bin"
    with pytest.raises(ComparisonError, match="has 3.0 GB of weights"):
        Limits(max_gb=2.5).check("owner/name", "target")


def test_an_unknown_size_is_refused(monkeypatch):
    def model_info(self, name, **kwargs):
        raise OSError("no route")

    monkeypatch.setattr(module.HfApi, "model_info", model_info)
    with pytest.raises(ComparisonError, match="did not tell the size of target 'owner/name'"):
        Limits(max_gb=1.0).check("owner/name", "target")


def test_limits_from_the_environment():
    assert Limits.of({}) == Limits(None, None, None)
    space = Limits.of({"SPACE_ID": "me/demo"})
    assert (space.targets, space.drafters, space.max_gb) == (("smollm2-135m-instruct",), (), 4.0)
    assert space.names("drafter") == ("bundled", "untrained")
    named = Limits.of({"SPACE_ID": "x", "DSPARK_DEMO_TARGETS": "a/b, c/d", "DSPARK_DEMO_DRAFTERS": "e/f"})
    assert named.targets == ("a/b", "c/d")
    assert named.names("drafter") == ("bundled", "untrained", "e/f")
    assert Limits.of({"DSPARK_DEMO_MAX_GB": "2.5"}).max_gb == 2.5


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan", "much"])
def test_a_size_limit_is_a_number_above_0(value):
    with pytest.raises(ComparisonError, match="DSPARK_DEMO_MAX_GB must be a number of gigabytes above 0"):
        Limits.of({"DSPARK_DEMO_MAX_GB": value})
