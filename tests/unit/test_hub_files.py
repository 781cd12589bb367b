"""What of a folder is shared, what is said about faults, and what checks of weights see."""

import errno
import hashlib
import json

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, LocalTokenNotFoundError, OfflineModeIsEnabled
from safetensors.torch import save_file
from tiny import tiny_drafter, tiny_target

from dspark_hf import CheckpointFormatError, DSparkError, HubError
from dspark_hf.checkpoints.headers import check_finite, read_headers
from dspark_hf.checkpoints.json_files import read_json_object
from dspark_hf.checkpoints.weights import is_hub_id, shard_names
from dspark_hf.hub.faults import is_transient, readable_faults, retrying
from dspark_hf.hub.fetch import content_hash
from dspark_hf.hub.files import SharedFile, choose_files
from dspark_hf.hub.remote import RemoteFile


@pytest.fixture(scope="module")
def drafter():
    return tiny_drafter(tiny_target())


@pytest.fixture
def folder(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    return tmp_path


def names(folder):
    shared, left_out = choose_files(folder)
    return {file.path for file in shared}, {left.path: left.reason for left in left_out}


ALWAYS = {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    "name",
    ["README.md", "LICENSE", "LICENSE.md", "NOTICE", "notes.md", "reports/a.json", "reports/b.png", "reports/c.svg"],
)
def test_what_belongs_to_a_drafter_is_shared(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    assert names(folder) == (ALWAYS | {name}, {})


@pytest.mark.parametrize(
    ("name", "shown", "reason"),
    [
        ("optimizer.pt", "optimizer.pt", "a pickle, which may run any code"),
        ("training_args.bin", "training_args.bin", "a pickle, which may run any code"),
        (".gitconfig", ".gitconfig", "hidden"),
        (".cache/x", ".cache/", "hidden"),
        ("checkpoints/checkpoint-5/model.safetensors", "checkpoints/", "no part of a drafter"),
        ("checkpoint-5/model.safetensors", "checkpoint-5/", "no part of a drafter"),
        ("features/0.safetensors", "features/", "no part of a drafter"),
        ("answers.jsonl", "answers.jsonl", "no part of a drafter"),
        ("trainer_state.json", "trainer_state.json", "no part of a drafter"),
        ("model-00001-of-00002.safetensors", "model-00001-of-00002.safetensors", "weights that are not loaded"),
        ("optimizer.safetensors", "optimizer.safetensors", "weights that are not loaded"),
        ("run.py", "run.py", "code that no auto_map in config.json asks for"),
        ("reports/.secret.json", "reports/.secret.json", "hidden"),
        ("reports/answers.jsonl", "reports/answers.jsonl", "no part of a drafter"),
        ("reports/deep/a.json", "reports/deep/", "no part of a drafter"),
        ("reports/proposals.pt", "reports/proposals.pt", "a pickle, which may run any code"),
        ("calibration/report.json", "calibration/", "no part of a drafter"),
        ("reports/a\x1b[2K.json", "'reports/a\\x1b[2K.json'", "no part of a drafter"),
    ],
)
def test_what_does_not_stays_and_is_named(folder, name, shown, reason):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("x")
    assert names(folder) == (ALWAYS, {shown: reason})


def test_code_is_shared_where_the_config_asks_for_it(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_dspark.X"}}))
    for name in ("modeling_dspark.py", ".hidden.py", "x.sh"):
        (folder / name).write_text("x")
    assert names(folder) == (ALWAYS | {"modeling_dspark.py"}, {".hidden.py": "hidden", "x.sh": "no part of a drafter"})


def test_beside_our_own_code_no_other_is_shared(drafter, tmp_path, monkeypatch):
    monkeypatch.setattr(type(drafter), "_auto_class", "AutoModel")
    drafter.save_pretrained(tmp_path)
    ours = {path.name for path in tmp_path.glob("*.py")}
    assert "modeling_dspark.py" in ours
    (tmp_path / "train.py").write_text("print()")
    assert names(tmp_path) == (ALWAYS | ours, {"train.py": "code that no auto_map in config.json asks for"})


@pytest.mark.parametrize("name", ["README.md", "notes.md", "LICENSE", "reports/a.json", "reports/a.png"])
def test_a_link_to_something_elsewhere_is_not_shared(folder, tmp_path_factory, name):
    secret = tmp_path_factory.mktemp("home") / "id_rsa"
    secret.write_text("private")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(secret)
    assert names(folder) == (ALWAYS, {name: "a link to something outside of the folder"})


def test_a_folder_of_reports_elsewhere_is_not_shared(folder, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    (home / "config.json").write_text('{"auths": "secret"}')
    (folder / "reports").symlink_to(home)
    assert names(folder) == (ALWAYS, {"reports/config.json": "a link to something outside of the folder"})


def test_links_within_the_folder_or_huggingface_hubs_cache_and_weights_elsewhere_are_shared(folder, tmp_path_factory):
    cache = tmp_path_factory.mktemp("models--acme--drafter")
    (cache / "blobs").mkdir()
    (cache / "blobs" / "1").write_text("notes")
    snapshot = cache / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    (snapshot / "notes.md").symlink_to("../../blobs/1")
    (snapshot / "LICENSE").symlink_to("notes.md")
    assert names(snapshot) == (ALWAYS | {"notes.md", "LICENSE"}, {})


TOKENS = ["hf_" + "aB3" * 11, "github_pat_" + "a1_" * 12, "AKIA" + "A1" * 8, "-----BEGIN OPENSSH PRIVATE KEY-----"]


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("name", ["README.md", "notes.md", "reports/a.json"])
def test_a_text_that_holds_a_token_is_not_shared(folder, name, token):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(f"log in with {token} first")
    with pytest.raises(HubError, match=f"{folder.name}.*: {name.rpartition('/')[2]} holds what looks like a token"):
        choose_files(folder)


def test_weights_that_are_none_are_not_shared(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(CheckpointFormatError, match=r"model\.safetensors cannot be read"):
        choose_files(folder)


def test_of_sharded_weights_the_index_and_what_it_names_are_shared(drafter, tmp_path):
    drafter.save_pretrained(tmp_path, max_shard_size="20kB")
    shards = {path.name for path in tmp_path.glob("model-*.safetensors")}
    assert len(shards) > 1
    assert names(tmp_path) == (shards | {"config.json", "model.safetensors.index.json"}, {})


def test_a_folder_without_a_config_is_not_shared(folder):
    (folder / "config.json").unlink()
    with pytest.raises(HubError, match=r"it has no config\.json; pass the folder of a drafter"):
        choose_files(folder)


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OfflineModeIsEnabled("off"), "HF_HUB_OFFLINE is set; unset it"),
        (LocalTokenNotFoundError("none"), "there is no token; log in with `hf auth login`"),
        (LocalEntryNotFoundError("none"), "it is not in the cache"),
        (OSError(errno.ENOSPC, "No space left on device"), "no space is left on the disk"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x may not be written or read"),
        (ValueError("strange\nindeed"), "strange; correct that"),
        (KeyError("sha"), "the answer is not the Hub's .KeyError: 'sha'.; check HF_ENDPOINT"),
        (OSError(), "OSError; correct that"),
    ],
)
def test_every_fault_is_one_line_with_a_way_out_and_its_cause(error, message):
    with (
        pytest.raises(HubError, match=f"cannot fetch acme/drafter: {message}") as raised,
        readable_faults("acme/drafter", "fetch"),
    ):
        raise error
    assert raised.value.__cause__ is error and "\n" not in str(raised.value)
    assert isinstance(raised.value, OSError) and isinstance(raised.value, DSparkError)


def test_errors_of_ours_pass_as_they_are():
    ours = CheckpointFormatError("ours")
    with pytest.raises(CheckpointFormatError) as raised, readable_faults("acme/drafter", "fetch"):
        raise ours
    assert raised.value is ours


def test_only_what_may_pass_is_tried_again(monkeypatch):
    monkeypatch.setattr("dspark_hf.hub.faults.time.sleep", lambda seconds: None)
    calls = []

    def fails():
        calls.append(1)
        raise ValueError("for good")

    assert not is_transient(ValueError())
    with pytest.raises(ValueError, match="for good"):
        retrying(fails)
    assert len(calls) == 1


# -- content ----------------------------------------------------------------------------------------------------------


def test_hashes_are_those_of_git_and_of_large_files(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"hello\n")
    assert content_hash(path, is_lfs=False) == "ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object
    assert content_hash(path, is_lfs=True) == hashlib.sha256(b"hello\n").hexdigest()
    for is_lfs in (False, True):
        there = RemoteFile(content_hash(path, is_lfs=is_lfs), is_lfs)
        assert there.is_same(SharedFile("x", path)) and there.is_same(SharedFile("x", b"hello\n"))
        assert not there.is_same(SharedFile("x", b"hello"))


@pytest.mark.parametrize("name", ["drafter", "acme/drafter"])
def test_hub_ids_are_told_from_paths(name):
    assert is_hub_id(name)


@pytest.mark.parametrize("name", ["", "/x", "./x", "../x", "~/x", "a/b/c"])
def test_paths_are_told_from_hub_ids(name):
    assert not is_hub_id(name)


@pytest.mark.parametrize("name", ["../x.safetensors", "a/x.safetensors", "C:x.safetensors", "a\\x.safetensors"])
@pytest.mark.parametrize("wrap", [lambda name: name, lambda name: f"{name}\0", lambda name: [name]])
def test_an_index_leads_nowhere_else(name, wrap):
    with pytest.raises(CheckpointFormatError, match="may only name .safetensors files beside itself"):
        shard_names({"metadata": {}, "weight_map": {"w": wrap(name)}}, "index")


@pytest.mark.parametrize("index", [{}, {"weight_map": {"w": "a.safetensors"}}, {"metadata": {}, "weight_map": ["a"]}])
def test_an_index_without_its_parts_is_refused(index):
    with pytest.raises(CheckpointFormatError, match="has no weight_map from weights to files, or no metadata"):
        shard_names(index, "index")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "must hold one JSON object, got a list"),
        ("{", "is not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "is not valid JSON"),
        ("\udcff", "is not valid JSON"),
        ("{}" + " " * 100, "has 102 bytes, and no drafter's has more than 64"),
        ('{"a":' * 9, "is not valid JSON"),
    ],
)
def test_damaged_json_is_told_in_one_line(tmp_path, content, message):
    path = tmp_path / "x.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointFormatError, match=message):
        read_json_object(path, 64 if "102" in message else 10**6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_are_found(dtype, broken):
    weight = torch.ones(1000, dtype=dtype)
    check_finite("x", [("w", weight)])
    weight[77] = broken
    with pytest.raises(CheckpointFormatError, match=r"1 weights of x hold NaN or infinity, among them \['w'\]"):
        check_finite("x", [("fine", torch.ones(3)), ("w", weight)])


def test_numbers_that_are_none_are_found_in_8_bits():
    weight = torch.ones(10).to(torch.float8_e4m3fn)
    check_finite("x", [("w", weight)])
    weight[3] = torch.tensor(float("nan"))
    with pytest.raises(CheckpointFormatError, match="hold NaN or infinity"):
        check_finite("x", [("w", weight)])


def test_large_weights_integers_and_weights_elsewhere_are_no_fault():
    largest = torch.full((10,), torch.finfo(torch.float32).max)  # their sum overflows
    check_finite("x", [("w", largest), ("i", torch.ones(2, dtype=torch.long)), ("m", torch.ones(2, device="meta"))])


def test_headers_name_every_tensor(tmp_path):
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int64)}, tmp_path / "x.safetensors")
    found = read_headers([str(tmp_path / "x.safetensors")])
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        "a": ((2, 3), "F32"),
        "b": ((4,), "I64"),
    }
