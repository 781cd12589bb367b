"""A drafter's own code beside its weights: without the package, beside it, and never run by our loader."""

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from remote_code_process import outputs
from tiny import greedy, random_ids, tiny_drafter, tiny_target
from transformers import AutoConfig, AutoModel, GenerationConfig, dynamic_module_utils
from transformers.generation import GenerationMixin

import dspark_hf
from dspark_hf import CheckpointFormatError, DSparkConfig, DSparkDraftModel
from dspark_hf.evaluation.calibration_files import write_calibrated
from dspark_hf.fitting.fingerprint import Fingerprint
from dspark_hf.hub import remote_code
from dspark_hf.model.row_attention import NAME

PROGRAM = Path(__file__).parents[1] / "remote_code_process.py"
AUTO_MAP = {"AutoConfig": "configuration_dspark.DSparkConfig", "AutoModel": "modeling_dspark.DSparkDraftModel"}


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(DSparkDraftModel, "_auto_class", None)
    DSparkDraftModel.register_for_auto_class()


@pytest.fixture
def folder(registered, drafter, tmp_path):
    """A drafter with its code."""
    drafter.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def code_in(folder):
    return {path.name for path in folder.glob("*.py")}


def config_in(folder):
    return json.loads((folder / "config.json").read_text())


# -- what is written ------------------------------------------------------------------------------------------------


def test_transformers_finds_every_file_and_needs_nothing_that_this_package_does_not_need(folder):
    names = code_in(folder)
    assert names == set(remote_code.code_files())
    for entry in ("configuration_dspark", "modeling_dspark"):
        found = dynamic_module_utils.get_relative_import_files(folder / f"{entry}.py")
        assert {Path(name).name for name in found} | {f"{entry}.py"} == names
    required = {name for path in folder.glob("*.py") for name in dynamic_module_utils.get_imports(path)}
    assert required - sys.stdlib_module_names <= {
        "huggingface_hub",
        "numpy",
        "packaging",
        "safetensors",
        "torch",
        "transformers",
    }
    assert not [
        name for name in names if any(part in name for part in ("training", "evaluation", "cli", "zoo", "drift"))
    ]
    assert config_in(folder)["auto_map"] == AUTO_MAP


def test_files_say_where_they_come_from_and_are_the_modules_but_for_their_imports(folder):
    source = Path(dspark_hf.__file__).parent
    text = (folder / "dspark_decoding_policies_pool.py").read_text()
    header, _, rest = text.partition("\n")
    assert header.startswith(f"# Written by dspark_hf {dspark_hf.__version__} from its decoding/policies/pool.py")
    here = [line for line in rest.splitlines() if not line.startswith("from .")]
    there = (source / "decoding/policies/pool.py").read_text().splitlines()
    assert here == [line for line in there if not line.startswith("from .")]
    assert "from .dspark_decoding_types import Confidence" in rest.splitlines()


MODULES = {
    "configuration_dspark": '"""Doc."""\n\nimport os\nfrom .errors import A\n',
    "modeling_dspark": (
        "from typing import TYPE_CHECKING\n\n"
        "from .model.parts import (\n    B,\n    C as D,\n)\n\n"
        "if TYPE_CHECKING:\n    from .model.types import E\n\n"
        "def push():\n    from .hub.publish import (\n        send,\n        ask as query,\n    )\n"
        "    return send, query\n\n"
        "def late():\n    from .errors import A\n    return A\n"
    ),
    "model.parts": "from ..errors import A\nfrom .types import E\nB = C = A\n",
    "model.types": "import importlib\nE = 1\ndef load():\n    return importlib.import_module('dspark_hf.hub')\n",
    "errors": "A = 1\n",
    "_compat": "check_version = print\n",
    "decoding.route": "from ..modeling_dspark import push\ninstall = print\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package in place of ours; a function that writes one and returns its flat files."""
    monkeypatch.setattr(remote_code, "_ROOT", tmp_path)

    def flat(**changed):
        for name, text in (MODULES | changed).items():
            path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return remote_code.code_files.__wrapped__()

    return flat


def test_imports_in_every_form_are_written_flat(package):
    files = package()
    assert set(files) == {
        "configuration_dspark.py",
        "modeling_dspark.py",
        "dspark_model_parts.py",
        "dspark_model_types.py",
        "dspark_errors.py",
        "dspark_compat.py",
        "dspark_decoding_route.py",
    }
    for text in files.values():
        ast.parse(text)
    model = files["modeling_dspark.py"]
    assert "from .dspark_model_parts import (\n    B,\n    C as D,\n)\n" in model
    assert "    from .dspark_model_types import E\n" in model
    assert "def late():\n    from .dspark_errors import A\n    return A\n" in model
    assert "    try:\n        from dspark_hf.hub.publish import send, ask as query\n    except ImportError" in model
    assert "    return send, query\n" in model
    assert (
        files["dspark_model_parts.py"].count("from .dspark_errors import A\nfrom .dspark_model_types import E\n") == 1
    )
    config = files["configuration_dspark.py"]
    assert config.index('"""Doc."""') < config.index("check_version()") < config.index("import os")


def test_what_is_left_out_asks_for_the_package_when_it_is_called(package):
    names = {}
    text = package()["modeling_dspark.py"]
    tree = ast.parse(text)
    [push] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "push"]
    exec(compile(ast.Module([push], []), "modeling_dspark.py", "exec"), names)
    with pytest.raises(ImportError, match="needs the package dspark_hf"):
        names["push"]()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from . import x\n", "line 1: write `from .name import`"),
        ("import dspark_hf.errors\n", "imports the package by its name"),
        ("from dspark_hf.errors import A\n", "imports the package by its name"),
        ("import importlib\nimportlib.import_module(f'.{E}', __package__)\n", "line 2: imports by a relative string"),
        ("from .model import parts\n", "imports from model.model, which is no module"),
        ("x = 1; from .types import E\n", "line 1: `from ... import` does not begin it"),
        ("from ..training.run import train\n", "a drafter's code is without training.run"),
    ],
)
def test_imports_that_cannot_be_written_flat_are_not_overlooked(package, text, message):
    with pytest.raises(AssertionError, match=message):
        package(**{"model.types": text})


# -- saving ---------------------------------------------------------------------------------------------------------


def test_without_registering_nothing_is_written(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    assert not code_in(tmp_path)
    assert "auto_map" not in config_in(tmp_path)


def test_saving_again_after_unregistering_leaves_no_code_but_that_of_others(folder, monkeypatch):
    (folder / "mine.py").write_text("# mine\n")
    (folder / "dspark_old.py").write_text("# Written by dspark_hf 0.0.1 from its old.py\n")
    (folder / "linked.py").symlink_to(folder / "modeling_dspark.py")
    again = DSparkDraftModel.from_pretrained(folder)
    again.save_pretrained(folder)
    assert code_in(folder) == {*remote_code.code_files(), "mine.py", "linked.py"}  # nothing of an earlier release
    monkeypatch.setattr(DSparkDraftModel, "_auto_class", None)
    again.save_pretrained(folder)
    assert code_in(folder) == {"mine.py", "linked.py"}
    assert "auto_map" not in config_in(folder)
    assert not hasattr(DSparkDraftModel.from_pretrained(folder).config, "auto_map")


def test_code_of_others_under_our_names_is_not_replaced(registered, drafter, tmp_path):
    (tmp_path / "modeling_dspark.py").write_text("# somebody's\n")
    with pytest.raises(CheckpointFormatError, match=r"modeling_dspark.py was not written by dspark_hf.*another folder"):
        drafter.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"modeling_dspark.py"}
    assert (tmp_path / "modeling_dspark.py").read_text() == "# somebody's\n"


def test_a_disk_that_is_full_leaves_whole_files_only(folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write = Path.write_text
    written = []

    def full(self, text, **kwargs):
        written.append(self.name)
        if len(written) > 3:
            write(self, text[:10], **kwargs)
            raise OSError(28, "No space left on device")
        return write(self, text, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        remote_code.write_code(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_config_that_names_our_code_is_saved_with_it(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(DSparkDraftModel, "_auto_class", None)
    config = DSparkConfig.from_pretrained(folder)
    config.save_pretrained(tmp_path / "loaded")
    assert code_in(tmp_path / "loaded") == code_in(folder)
    assert config_in(tmp_path / "loaded")["auto_map"] == AUTO_MAP
    plain = DSparkConfig.from_target(tiny_target().config)
    monkeypatch.setattr(DSparkConfig, "_auto_class", None)
    DSparkConfig.register_for_auto_class()
    plain.save_pretrained(tmp_path / "registered")
    assert code_in(tmp_path / "registered") == code_in(folder)
    assert config_in(tmp_path / "registered")["auto_map"] == {"AutoConfig": AUTO_MAP["AutoConfig"]}
    assert not hasattr(plain, "auto_map")


def test_a_config_that_does_not_name_our_code_leaves_none(folder):
    DSparkConfig.from_target(tiny_target().config).save_pretrained(folder)
    assert not code_in(folder)


def test_calibrating_in_place_keeps_the_code(folder, monkeypatch):
    monkeypatch.setattr(DSparkDraftModel, "_auto_class", None)
    write_calibrated(str(folder), folder, {"greedy": {"temperatures": [1.5] * 4, "platt": None, "settings": {}}})
    assert DSparkDraftModel.from_pretrained(folder).config.calibration["greedy"]["temperatures"] == [1.5] * 4
    assert code_in(folder) == set(remote_code.code_files())
    assert config_in(folder)["auto_map"] == AUTO_MAP


def test_a_registered_config_that_is_pushed_goes_with_its_code(tmp_path, monkeypatch):
    config = DSparkConfig.from_target(tiny_target().config)
    monkeypatch.setattr(DSparkConfig, "_auto_class", "AutoConfig")
    pushed = {}

    def push(self, repo_id, **kwargs):
        pushed.update(repo_id=repo_id, auto_map=self.auto_map, **kwargs)

    monkeypatch.setattr(DSparkConfig, "push_to_hub", push)
    config.save_pretrained(tmp_path / "name", push_to_hub=True, private=True)
    assert pushed == {"repo_id": "name", "auto_map": {"AutoConfig": AUTO_MAP["AutoConfig"]}, "private": True}
    assert config_in(tmp_path / "name")["auto_map"] == pushed["auto_map"]


# -- our own loader -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "auto_map",
    [
        AUTO_MAP,
        {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"},
        {"AutoModel": "../../evil.Model"},
        {"AutoModel": "org/other--evil.Model"},
        {"AutoModel": "org/other--modeling_dspark.DSparkDraftModel"},
        {"AutoModel": None},
        ["evil.Model"],
        "evil",
        7,
    ],
    ids=str,
)
@pytest.mark.parametrize("trust", [None, True])
def test_our_loader_runs_no_code_of_a_folder(target, drafter, tmp_path, auto_map, trust):
    drafter.save_pretrained(tmp_path)
    bomb = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nraise SystemExit('code ran')\n"
    for name in ("evil", "configuration_dspark", "modeling_dspark", "__init__", "torch", "dspark_errors"):
        (tmp_path / f"{name}.py").write_text(bomb)
    (tmp_path / "config.json").write_text(json.dumps(config_in(tmp_path) | {"auto_map": auto_map}))
    options = {} if trust is None else {"trust_remote_code": trust}
    loaded = DSparkDraftModel.from_pretrained(tmp_path, **options).eval()
    assert type(loaded) is DSparkDraftModel
    assert getattr(loaded.config, "auto_map", None) == (AUTO_MAP if auto_map == AUTO_MAP else None)
    assert not (tmp_path / "ran").exists()
    assert torch.equal(
        greedy(target, random_ids(5), max_new_tokens=8, assistant_model=loaded),
        greedy(target, random_ids(5), max_new_tokens=8),
    )


@pytest.mark.parametrize("trust", [None, False, True])
def test_beside_the_package_auto_classes_take_its_class_whatever_the_trust(folder, trust, dynamic_modules):
    assert type(AutoConfig.from_pretrained(folder, trust_remote_code=trust)) is DSparkConfig
    assert type(AutoModel.from_pretrained(folder, trust_remote_code=trust)) is DSparkDraftModel
    assert not dynamic_modules()


# -- several copies in a process --------------------------------------------------------------------------------------


@pytest.fixture
def dynamic_modules(tmp_path, monkeypatch):
    """transformers' folder for code that it loads, empty; afterwards nobody knows what was loaded from it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def loaded():
        return sorted(name for name in sys.modules if name.split(".")[0] == "transformers_modules")

    yield loaded
    for name in loaded():
        module = sys.modules.pop(name)
        if name.endswith(".dspark_decoding_route"):
            module.uninstall()
    importlib.invalidate_caches()


def load_with_its_code(folder):
    """As AutoModel does where the package is not installed."""
    cls = dynamic_module_utils.get_class_from_dynamic_module(AUTO_MAP["AutoModel"], folder)
    cls.register_for_auto_class()
    return cls.from_pretrained(folder).eval()


def module_of(drafter, name):
    return sys.modules[f"{drafter.package_copy}.dspark_{name}"]


def of_another_release(folder):
    """The same drafter with code in which what loop and drafter say to each other has another name."""
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    for path in other.glob("*.py"):
        text = path.read_text().replace("base_logits", "first_logits").replace("__version__ = ", '__version__ = "9" + ')
        path.write_text(text)
    return other


def test_each_copy_serves_its_own_drafters(folder, target, drafter, dynamic_modules):
    method = GenerationMixin._assisted_decoding
    remote, newer = load_with_its_code(folder), load_with_its_code(of_another_release(folder))
    assert len({one.package_copy for one in (drafter, remote, newer)}) == 3
    assert not hasattr(newer, "base_logits")
    assert GenerationMixin._assisted_decoding is method
    expected = outputs(target, drafter)
    assert outputs(target, remote) == expected
    assert outputs(target, newer) == expected
    # Attention that copies share belongs to one release.
    assert module_of(remote, "model_row_attention").NAME == NAME != module_of(newer, "model_row_attention").NAME
    # A profile of the pair is found, whoever measured it.
    theirs = module_of(remote, "fitting_fingerprint").Fingerprint.of(target, remote)
    assert theirs.key == Fingerprint.of(target, tiny_drafter(target)).key


@pytest.mark.parametrize("first", [0, 1, 2])
def test_uninstalling_one_copy_leaves_the_others_right(folder, target, drafter, dynamic_modules, first):
    drafters = [drafter, load_with_its_code(folder), load_with_its_code(of_another_release(folder))]
    switches = [dspark_hf, *(module_of(one, "decoding_route") for one in drafters[1:])]
    ids, expected = random_ids(5), greedy(target, random_ids(5), max_new_tokens=8)

    def is_served(one):
        try:
            output = greedy(target, ids, max_new_tokens=8, assistant_model=one, return_dict_in_generate=True)
        except AttributeError:  # as any assistant that cannot generate
            return False
        assert torch.equal(output.sequences, expected)
        return output.speculation.num_rounds > 0

    left = [0, 1, 2]
    for number in (first, (first + 1) % 3):
        switches[number].uninstall()
        switches[number].uninstall()
        left.remove(number)
        assert [number for number, one in enumerate(drafters) if is_served(one)] == left
        assert hasattr(GenerationConfig, "verification_policy")
    switches[left[0]].uninstall()
    assert not hasattr(GenerationMixin._assisted_decoding, "__wrapped__")
    assert not hasattr(GenerationConfig, "verification_policy")
    switches[first].install()
    assert [number for number, one in enumerate(drafters) if is_served(one)] == [first]


def test_reports_reach_a_block_whichever_copy_runs(folder, target, dynamic_modules):
    remote = load_with_its_code(folder)
    with dspark_hf.record_speculation() as report:
        greedy(target, random_ids(5), max_new_tokens=8, assistant_model=remote)
    assert (report.num_calls, report.num_new_tokens) == (1, 8)


def test_a_drafter_with_its_own_code_is_saved_with_that_code(folder, tmp_path, dynamic_modules, monkeypatch):
    remote = load_with_its_code(of_another_release(folder))
    remote.save_pretrained(tmp_path / "again")
    assert code_in(tmp_path / "again") == code_in(folder)
    for name in code_in(folder):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / "other" / name).read_text()
    assert config_in(tmp_path / "again")["auto_map"] == AUTO_MAP
    ours = DSparkDraftModel.from_pretrained(tmp_path / "again")  # and with the package
    ours.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/dspark_version.py").read_text() == (folder / "dspark_version.py").read_text()
    monkeypatch.setattr(type(remote), "_auto_class", None)
    remote.save_pretrained(tmp_path / "again")
    assert not code_in(tmp_path / "again")


def test_a_transformers_that_is_too_old_is_named_before_anything_else(folder, dynamic_modules, monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.23.0")
    with pytest.raises(ImportError, match=r"transformers 5\.23\.0 is too old.*pip install") as caught:
        dynamic_module_utils.get_class_from_dynamic_module(AUTO_MAP["AutoConfig"], folder)
    assert type(caught.value).__name__ == "UnsupportedTransformersError"


# -- without the package --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """What the other interpreter wrote, and what this one makes of the same calls with the package."""
    root = tmp_path_factory.mktemp("remote")
    target = tiny_target()
    drafter = tiny_drafter(target, draft_vocab_size=40)
    target.save_pretrained(root / "target")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DSparkDraftModel, "_auto_class", "AutoModel")
        drafter.save_pretrained(root / "drafter")
    # A repository as the Hub's client keeps it.
    repository = root / "home/hub/models--org--drafter"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(root / "drafter", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    environment |= {
        "HF_HOME": str(root / "home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(dspark_hf.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, PROGRAM, root], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads((root / "results.json").read_text()), outputs(target, drafter)


@pytest.mark.parametrize("which", ["drafter", "saved again", "of the Hub"])
def test_without_the_package_the_tokens_and_counts_are_the_same(process, which):
    found, expected = process
    assert found["without"]["modules of the package"] == []
    assert found["without"][which] == expected
    assert all(output["counts"]["num_rounds"] > 0 for output in expected.values())


def test_without_the_package_nothing_runs_without_trust(process):
    found, _ = process
    assert "trust_remote_code=True" in found["without"]["refused"]
    copies = found["without"]["copies"]
    assert len(set(copies)) == 3
    assert all(name.startswith("transformers_modules.") for name in copies)
    assert copies[2] == "transformers_modules.org.drafter.0123456789abcdef0123456789abcdef01234567"


def test_the_package_comes_into_a_process_with_such_a_drafter(process):
    found, expected = process
    beside = found["beside"]
    assert beside["copies"] == ["dspark_hf", found["without"]["copies"][0]]
    assert beside["package"] == beside["remote"] == beside["remote after uninstall"] == expected
    assert beside["recorded calls"] == 2 * sum(output["counts"]["num_calls"] for output in expected.values())
    assert beside["is wrapped once"]
    assert beside["has argument"]
    assert beside["package after uninstall"] == "not served"
