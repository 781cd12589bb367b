"""Features on disk: the target's own, whole after an interruption, and refused when they are another's or damaged."""

import json
import pickle

import pytest
import torch
from tiny import random_ids, tiny_baseline, tiny_drafter, tiny_target

from dspark_hf.errors import IncompatibleTargetError, TrainingDataError
from dspark_hf.training import feature_cache, features
from dspark_hf.training.feature_cache import (
    MANIFEST_NAME,
    FeatureCache,
    build_feature_cache,
    feature_bytes,
    layers_to_cache,
)
from dspark_hf.training.features import TargetReader
from dspark_hf.training.records import TrainingSequence

LAYERS = [0, 2]
BYTES_PER_TOKEN = 3 * 32 * 4 + 4


def sequences(count=7, seed=0):
    lengths = [9, 4, 15, 2, 11, 7, 12, 3, 8][:count]
    return [
        TrainingSequence(str(i), random_ids(n, seed=seed + i)[0], torch.arange(n) >= n // 3)
        for i, n in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def reader(target):
    return TargetReader(target, tiny_drafter(target, target_layer_ids=LAYERS).config)


@pytest.fixture
def build(tmp_path, target, reader, monkeypatch):
    """Builds the cache of `sequences()` in shards of at most 20 tokens."""
    monkeypatch.setattr(feature_cache, "SHARD_BYTES", 20 * BYTES_PER_TOKEN)
    monkeypatch.setattr(feature_cache, "tqdm", QuietBar)

    def function(data=None, *, max_bytes=10**9, target=target, reader=reader, layer_ids=LAYERS):
        data = sequences() if data is None else data
        return build_feature_cache(tmp_path / "cache", target, reader, data, layer_ids=layer_ids, max_bytes=max_bytes)

    function.folder = tmp_path / "cache"
    return function


class QuietBar:
    """A progress bar that counts."""

    total_updates = 0

    def __init__(self, *, initial=0, **options):
        self.n = initial

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def update(self, count):
        self.n += count
        QuietBar.total_updates += count


def content(cache):
    return [torch.cat([f.features[0], f.final_hidden[0], f.log_normalizer[0, :, None]], -1) for f in cache]


def same(cache, expected):
    return len(cache) == len(expected) and all(map(torch.equal, content(cache), expected))


def files(build):
    return {path.name: path.stat().st_mtime_ns for path in build.folder.iterdir()}


@torch.no_grad()
def slow_features(target, sequence):
    """The target on one sequence alone, all hidden states."""
    outputs = target.model(sequence.input_ids[None], output_hidden_states=True)
    states = outputs.hidden_states
    return torch.cat([states[i + 1] for i in LAYERS], -1), outputs.last_hidden_state


# -- content --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_cached_features_are_the_targets(build, target, reader, monkeypatch):
    monkeypatch.setattr(feature_cache, "BATCH_TOKENS", 20)  # several batches a shard, some of several rows
    cache = build()
    assert len(cache) == 7
    assert len(list(build.folder.glob("*.safetensors"))) >= 4
    for i, sequence in enumerate(sequences()):
        got, (wanted, hidden) = cache[i], slow_features(target, sequence)
        length = len(sequence)
        assert got.features.shape == (1, length, 64) and got.final_hidden.shape == (1, length, 32)
        assert got.log_normalizer.shape == (1, length) and got.log_normalizer.dtype == torch.float32
        torch.testing.assert_close(got.features, wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got.final_hidden, hidden, atol=1e-5, rtol=1e-5)
        online = reader.read(sequence.input_ids[None])
        torch.testing.assert_close(got.features, online.features, atol=1e-5, rtol=1e-5)
        needed = torch.cat([sequence.loss_mask[1:], torch.tensor([False])])
        torch.testing.assert_close(
            got.log_normalizer[0, needed], online.log_normalizer[0, needed], atol=1e-5, rtol=1e-5
        )
        assert bool((got.log_normalizer[0, ~needed] == 0).all())


@pytest.mark.parametrize("options", [{}, {"logit_multiplier": 0.5, "final_logit_softcapping": 3.0}], ids=str)
@torch.no_grad()
def test_normalizer_and_head_give_the_targets_law(target, options, monkeypatch):
    monkeypatch.setattr(features, "NORMALIZER_CHUNK_POSITIONS", 5)
    config = tiny_drafter(target, target_layer_ids=LAYERS).config
    for name, value in options.items():
        setattr(config, name, value)
    ids = random_ids(17)
    read = TargetReader(target, config).read(ids)
    logits = target.lm_head(read.final_hidden) * config.logit_multiplier
    expected = target(ids).logits * config.logit_multiplier
    if (cap := config.final_logit_softcapping) is not None:
        logits, expected = (cap * torch.tanh(x / cap) for x in (logits, expected))
    law = (logits - read.log_normalizer[..., None]).exp()
    torch.testing.assert_close(law, expected.softmax(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(law.sum(-1), torch.ones(1, 17), atol=1e-5, rtol=0)


def test_padding_and_neighbours_change_nothing(target, reader):
    long, short = random_ids(12, seed=1)[0], random_ids(5, seed=2)[0]
    padded = torch.stack([long, torch.cat([short, torch.full((7,), 60)])])
    together, alone = reader.read(padded), reader.read(short[None])
    for name in ("features", "final_hidden", "log_normalizer"):
        torch.testing.assert_close(getattr(together, name)[1:, :5], getattr(alone, name), atol=1e-5, rtol=1e-5)


def test_only_needed_normalizers_are_computed(reader):
    needed = torch.zeros(1, 9, dtype=torch.bool)
    assert bool((reader.read(random_ids(9), needed).log_normalizer == 0).all())
    needed[0, 4] = True
    assert (reader.read(random_ids(9), needed).log_normalizer != 0).tolist() == needed.tolist()


def test_a_config_for_another_target_is_refused(target):
    config = tiny_drafter(tiny_target(num_layers=8), target_layer_ids=[1, 6]).config
    with pytest.raises(IncompatibleTargetError, match="from_target"):
        TargetReader(target, config).read(random_ids(5))


def test_dtype_of_the_target_is_kept(build):
    target = tiny_target().to(torch.bfloat16)
    reader = TargetReader(target, tiny_drafter(target, target_layer_ids=LAYERS).config)
    cache = build(target=target, reader=reader)
    assert cache[0].features.dtype == cache[0].final_hidden.dtype == torch.bfloat16
    assert cache[0].log_normalizer.dtype == torch.float32


def test_size_is_computed_as_it_is(build):
    build()
    stored = sum(path.stat().st_size for path in build.folder.glob("*.safetensors"))
    wanted = feature_bytes(sum(map(len, sequences())), 2, 32, torch.float32)
    assert wanted == sum(map(len, sequences())) * BYTES_PER_TOKEN
    assert wanted <= stored <= wanted + 1000 * len(list(build.folder.glob("*.safetensors")))


def test_a_cache_travels_to_workers(build):
    cache = build()
    expected = content(cache)
    assert same(pickle.loads(pickle.dumps(cache)), expected)


# -- interruptions --------------------------------------------------------------------------------------------------


def test_a_finished_cache_is_not_built_again(build):
    expected = content(build())
    before, updates = files(build), QuietBar.total_updates
    assert same(build(), expected)
    assert files(build) == before and QuietBar.total_updates == updates


@pytest.mark.parametrize("num_lost", [1, 2, 3])
def test_an_interrupted_build_goes_on(build, num_lost):
    expected = content(build())
    manifest = json.loads((build.folder / MANIFEST_NAME).read_text())
    lost = manifest["shards"][-num_lost:]
    kept = manifest["shards"][:-num_lost]
    (build.folder / MANIFEST_NAME).write_text(json.dumps(manifest | {"shards": kept}))
    (build.folder / lost[-1]["file"]).unlink()
    (build.folder / "features-00009.partial").write_bytes(b"half a file")
    before, updates = files(build), QuietBar.total_updates
    assert same(build(), expected)
    assert all(files(build)[shard["file"]] == before[shard["file"]] for shard in kept)
    assert QuietBar.total_updates - updates == sum(shard["num_tokens"] for shard in lost)


@pytest.mark.parametrize("at", [0, 2])
def test_a_build_that_was_stopped_goes_on(build, monkeypatch, at):
    expected = content(build())
    for path in build.folder.iterdir():
        path.unlink()
    original, calls = TargetReader.read, []

    def stopping(self, *args):
        calls.append(args)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(TargetReader, "read", stopping)
        with pytest.raises(KeyboardInterrupt):
            build()
    assert len(list(build.folder.glob("*.safetensors"))) == at
    assert same(build(), expected)


def test_an_unfinished_cache_cannot_be_read(build):
    build()
    manifest = json.loads((build.folder / MANIFEST_NAME).read_text())
    manifest["shards"].pop()
    (build.folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(TrainingDataError, match=r"of 7 sequences"):
        FeatureCache(build.folder, manifest["identity"])


def full_disk(tensors, path):
    path.write_bytes(b"what fitted")
    raise OSError(28, "No space left on device")


def test_a_full_disk_loses_nothing(build, monkeypatch):
    expected = content(build())
    for path in build.folder.iterdir():
        path.unlink()
    original, written = feature_cache.save_file, []

    def fills_up(tensors, path):
        if len(written) == 2:
            full_disk(tensors, path)
        written.append(path)
        original(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "save_file", fills_up)
        with pytest.raises(TrainingDataError, match="No space left.*free some space") as caught:
            build()
    assert str(build.folder) in str(caught.value)
    assert sorted(files(build)) == ["features-00000.safetensors", "features-00001.safetensors", MANIFEST_NAME]
    before = files(build)
    assert same(build(), expected)
    assert all(files(build)[name] == before[name] for name in before if name != MANIFEST_NAME)


def test_a_full_disk_at_the_list_is_said_too(build, monkeypatch):
    """The list is small, but the last block of a disk may be gone by then."""

    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "write_json", fails)
        with pytest.raises(TrainingDataError, match="No space left"):
            build()
    assert len(build()) == 7


# -- limits ---------------------------------------------------------------------------------------------------------


def test_a_limit_that_is_too_small_is_said_before_the_target_runs(build, monkeypatch):
    needed = sum(map(len, sequences())) * BYTES_PER_TOKEN
    with monkeypatch.context() as patch:
        patch.setattr(TargetReader, "read", None)
        with pytest.raises(TrainingDataError, match="the limit is"):
            build(max_bytes=needed - 1)
    assert not list(build.folder.glob("*.safetensors"))
    assert len(build(max_bytes=needed)) == 7


def test_a_disk_that_is_too_small_is_said_before_the_target_runs(build, monkeypatch):
    class Usage:
        free = 100

    monkeypatch.setattr(feature_cache.shutil, "disk_usage", lambda folder: Usage)
    monkeypatch.setattr(TargetReader, "read", None)
    with pytest.raises(TrainingDataError, match="free; raise the limit"):
        build()


def test_a_folder_that_is_a_file_is_said(build):
    build.folder.write_text("a file")
    with pytest.raises(TrainingDataError, match="cache"):
        build()


# -- something else, or damaged -------------------------------------------------------------------------------------


def test_features_of_something_else_are_refused(build, target, reader):
    expected = content(build())
    before = files(build)
    other_target = tiny_target(seed=5)
    other_reader = TargetReader(other_target, tiny_drafter(other_target, target_layer_ids=LAYERS).config)
    with pytest.raises(TrainingDataError, match=r"different: target\)"):
        build(target=other_target, reader=other_reader)
    with pytest.raises(TrainingDataError, match=r"different: data\)"):
        build(sequences(seed=50))
    with pytest.raises(TrainingDataError, match=r"different: data, num_sequences\)"):
        build(sequences(6))
    with pytest.raises(TrainingDataError, match="different: target_layer_ids"):
        build(layer_ids=[1, 2])
    with pytest.raises(TrainingDataError, match="different: data"):
        build(list(reversed(sequences())))
    assert files(build) == before and same(build(), expected)


def test_a_target_that_was_trained_further_is_another_one(build):
    build()
    target = tiny_target()
    with torch.no_grad():
        target.model.norm.weight[0] += 1e-3
    with pytest.raises(TrainingDataError, match=r"different: target\)"):
        build(target=target)


def test_other_treatment_of_logits_is_another_cache(build, target):
    """The normalizer depends on multiplier and cap, which are the drafter config's."""
    build()
    config = tiny_drafter(target, target_layer_ids=LAYERS).config
    config.final_logit_softcapping = 2.0
    with pytest.raises(TrainingDataError, match="different"):
        build(reader=TargetReader(target, config))


@pytest.mark.parametrize("where", [0, 0.3, 0.6, -1])
def test_a_damaged_shard_is_found(build, where):
    build()
    path = sorted(build.folder.glob("*.safetensors"))[1]
    data = bytearray(path.read_bytes())
    data[int(where * len(data)) if where != -1 else -1] ^= 1
    path.write_bytes(data)
    with pytest.raises(TrainingDataError, match=rf"{path.name} is damaged"):
        build()


def test_a_cut_and_a_missing_shard_are_found(build):
    build()
    path = sorted(build.folder.glob("*.safetensors"))[1]
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(TrainingDataError, match=rf"{path.name} is damaged"):
        build()
    path.unlink()
    with pytest.raises(TrainingDataError, match=rf"{path.name} is missing"):
        build()
    path.write_bytes(data)
    assert len(build()) == 7


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"identity": {"num_sequences": 1}, "shards": [{}]}',
        '{"identity": 3, "shards": []}',
        "\xff{",
    ],
    ids=repr,
)
def test_a_damaged_list_is_found(build, text):
    build()
    (build.folder / MANIFEST_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(TrainingDataError, match=MANIFEST_NAME):
        build()


@pytest.mark.parametrize(("layer_ids", "columns"), [([0], slice(0, 32)), ([2], slice(32, 64)), ([0, 2], slice(0, 64))])
def test_some_of_its_layers_can_be_read(build, layer_ids, columns):
    whole = build()
    identity = json.loads((build.folder / MANIFEST_NAME).read_text())["identity"]
    some = FeatureCache(build.folder, identity, layer_ids)
    for i in range(len(whole)):
        assert torch.equal(some[i].features, whole[i].features[..., columns])
        assert torch.equal(some[i].log_normalizer, whole[i].log_normalizer)
    assert not torch.equal(whole[0].features[..., :32], whole[0].features[..., 32:])


def test_the_final_states_can_be_read_as_features(build):
    whole = build()
    identity = json.loads((build.folder / MANIFEST_NAME).read_text())["identity"]
    final = FeatureCache(build.folder, identity, [])
    assert all(torch.equal(final[i].features, whole[i].final_hidden) for i in range(len(whole)))


def test_a_cache_that_holds_more_layers_is_shared(build, target):
    config = tiny_drafter(target, target_layer_ids=[2]).config
    assert layers_to_cache(build.folder, config) == [2]
    build()
    assert layers_to_cache(build.folder, config) == LAYERS
    assert layers_to_cache(build.folder, tiny_drafter(target, target_layer_ids=[1, 2]).config) == [1, 2]
    assert layers_to_cache(build.folder, tiny_baseline(target, "mtp").config) == LAYERS
    assert layers_to_cache(build.folder.parent, tiny_baseline(target, "mtp").config) == [0, 1, 2]
