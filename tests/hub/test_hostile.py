"""Repositories and folders that want harm: refused before anything large is allocated, and before anything runs."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_drafter, tiny_target
from transformers import PreTrainedModel

from dspark_hf import CheckpointFormatError, DSparkConfigError, DSparkDraftModel, HubError
from dspark_hf.checkpoints import headers, json_files

MOST_PEAK_BYTES = 96 * 2**20


class Bomb:
    """A pickle that would leave a trace."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (os.mkdir, (str(self.trace),))


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_weights(folder, **changes):
    weights = load_file(folder / "model.safetensors")
    weights.update(changes)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder, **weight_map):
    names = {name: "model-00001-of-00001.safetensors" for name in load_file(folder / "model.safetensors")}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": names | weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def header_of(length, content=b"{}"):
    return length.to_bytes(8, "little") + content


def pickle_only(folder):
    torch.save({"fc.weight": Bomb(folder.parent / "trace")}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def nan_weight(folder):
    replace_weights(folder, **{"norm.weight": torch.full((32,), float("nan"))})


def infinite_weight(folder):
    weight = load_file(folder / "model.safetensors")["fc.weight"].clone()
    weight[3, 4] = -float("inf")
    replace_weights(folder, **{"fc.weight": weight})


def huge_json(folder):
    (folder / "config.json").write_text("[" + "0," * 3 * 2**20 + "0]")


def deep_json(folder):
    (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)


def huge_header(folder):
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header_of(headers.LARGEST_HEADER_BYTES + 1))
        file.truncate(headers.LARGEST_HEADER_BYTES + 100)


def lying_offsets(folder):
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
    (folder / "model.safetensors").write_bytes(header_of(len(header), header) + b"\0" * 64)


def overlong_header(folder):
    (folder / "model.safetensors").write_bytes(header_of(2**62))


def index_outside(folder):
    shard(folder, **{"fc.weight": "../other/model.safetensors"})


def absolute_index(folder):
    shard(folder, **{"fc.weight": "/etc/model.safetensors"})


def index_of_pickles(folder):
    shard(folder, **{"fc.weight": "pytorch_model.bin"})


def index_without_files(folder):
    shard(folder, **{"fc.weight": "model-00007-of-00009.safetensors"})


def index_of_nothing(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')


def index_with_another_dtype(folder):
    shard(folder)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metadata": {"dtype": "load"}}))


def deep_index(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").write_text("[" * 200_000)


def reduced(folder, offsets):
    edit(folder, draft_vocab_size=30)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if weights[name].shape[:1] == (61,) and "markov_w2" in name]:
        weights[name] = weights[name][:30].clone()
    save_file(weights | {"d2t": offsets}, folder / "model.safetensors", metadata={"format": "pt"})


def overflowing_d2t(folder):
    reduced(folder, torch.full((30,), torch.iinfo(torch.long).max))


def falling_d2t(folder):
    reduced(folder, -torch.arange(30))


def far_d2t(folder):
    reduced(folder, torch.arange(30) + 20)


def float_d2t(folder):
    reduced(folder, torch.zeros(30))


def integer_weight(folder):
    replace_weights(folder, **{"norm.weight": torch.ones(32, dtype=torch.int64)})


HOSTILE = {
    pickle_only: (CheckpointFormatError, "only pytorch_model.bin, and a pickle may run any code"),
    no_weights: (CheckpointFormatError, "has a config.json and n.*model.safetensors"),
    nan_weight: (CheckpointFormatError, r"1 weights of .* hold NaN or infinity, among them \['norm.weight'\]"),
    infinite_weight: (CheckpointFormatError, r"hold NaN or infinity, among them \['fc.weight'\]"),
    huge_json: (CheckpointFormatError, "config.json.* bytes, and no drafter's has more than"),
    deep_json: (CheckpointFormatError, "nested too deeply"),
    huge_header: (CheckpointFormatError, "the header of .* bytes, and no drafter's has more than"),
    lying_offsets: (CheckpointFormatError, "cannot be read"),
    overlong_header: (CheckpointFormatError, "the file ends before its header does"),
    index_outside: (CheckpointFormatError, "names '../other/model.safetensors', and may only name"),
    absolute_index: (CheckpointFormatError, "names '/etc/model.safetensors', and may only name"),
    index_of_pickles: (CheckpointFormatError, "names 'pytorch_model.bin', and may only name"),
    index_without_files: (CheckpointFormatError, "model-00007-of-00009.safetensors"),
    index_of_nothing: (CheckpointFormatError, "has no weight_map"),
    index_with_another_dtype: (CheckpointFormatError, "dtype in .* must be one of"),
    deep_index: (CheckpointFormatError, "nested too deeply"),
    overflowing_d2t: (CheckpointFormatError, "d2t must name different tokens"),
    falling_d2t: (CheckpointFormatError, "d2t must name different tokens"),
    far_d2t: (CheckpointFormatError, "d2t must name different tokens"),
    float_d2t: (CheckpointFormatError, "d2t of .* is stored as F32"),
    integer_weight: (CheckpointFormatError, "norm.weight of .* is stored as I64"),
}
CONFIGS = {
    "huge_hidden": ({"hidden_size": 10**15}, DSparkConfigError, "hidden_size must be <="),
    "huge_head": ({"head_dim": 2**40}, DSparkConfigError, "head_dim must be <="),
    "huge_vocabulary": ({"vocab_size": 10**18}, DSparkConfigError, "vocab_size must be <="),
    "huge_rank": ({"markov_rank": 10**12}, DSparkConfigError, "markov_rank must be <="),
    "many_layers": (
        {"num_hidden_layers": 10**9, "layer_types": None},
        DSparkConfigError,
        "num_hidden_layers must be <=",
    ),
    "larger_than_its_weights": ({"intermediate_size": 2**19}, CheckpointFormatError, "in another shape"),
    "a_function_for_dtype": ({"dtype": "load"}, CheckpointFormatError, "dtype in config.json must be one of"),
    "integers_for_dtype": ({"dtype": "int8"}, CheckpointFormatError, "dtype in config.json must be one of"),
    "no_dtype": ({"torch_dtype": [1], "dtype": None}, CheckpointFormatError, "dtype in config.json must be one of"),
    "no_quantiser": ({"quantization_config": {}}, CheckpointFormatError, "must be an object with a quant_method"),
    "contradictory": ({"num_key_value_heads": 3}, DSparkConfigError, "must divide"),
    "other_files": ({"configuration_files": ["../x/config.5.0.0.json"]}, CheckpointFormatError, "configuration_files"),
    "quantised": (
        {"intermediate_size": 2**19, "quantization_config": {"quant_method": "quanto", "weights": "int8"}},
        CheckpointFormatError,
        "bytes of weights, and its config.json describes a drafter of",
    ),
}


# Only the numbers themselves tell about these.
TOLD_BY_WEIGHTS = {nan_weight, infinite_weight, overflowing_d2t, falling_d2t, far_d2t}


@pytest.fixture
def saved(target, tmp_path):
    folder = tmp_path / "drafter"
    tiny_drafter(target).save_pretrained(folder)
    return folder


@pytest.fixture
def loads(monkeypatch):
    """Calls of transformers' loader, which allocates what a config asks for."""
    calls = []
    load = PreTrainedModel.from_pretrained.__func__

    def recorded(cls, *args, **kwargs):
        calls.append(args)
        return load(cls, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(recorded))
    return calls


def assert_refused(source, error, message, trace=None):
    """With little memory, and without a trace."""
    tracemalloc.start()
    try:
        with pytest.raises(error, match=message) as raised:
            DSparkDraftModel.from_pretrained(source)
        assert tracemalloc.get_traced_memory()[1] < MOST_PEAK_BYTES
    finally:
        tracemalloc.stop()
    assert "\n" not in str(raised.value)
    assert trace is None or not trace.exists()


def upload(hub, folder):
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.make("evil/drafter", files)
    hub.requests.clear()
    return "evil/drafter"


@pytest.mark.parametrize("harm", HOSTILE, ids=lambda harm: harm.__name__)
def test_hostile_files_are_refused(hub, saved, harm, loads):
    harm(saved)
    assert_refused(saved, *HOSTILE[harm], trace=saved.parent / "trace")
    assert_refused(upload(hub, saved), *HOSTILE[harm], trace=saved.parent / "trace")
    assert len(loads) == (2 if harm in TOLD_BY_WEIGHTS else 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_hostile_configs_are_refused(hub, saved, name, loads):
    changes, error, message = CONFIGS[name]
    edit(saved, **changes)
    assert_refused(saved, error, message)
    assert_refused(upload(hub, saved), error, message)
    assert loads == []
    if error is DSparkConfigError:
        assert not any("model.safetensors" in request for request in hub.requests), "judged before weights are fetched"


def test_a_config_too_large_is_not_even_fetched(hub, saved):
    edit(saved, padding="x" * json_files.LARGEST_CONFIG_BYTES)
    assert_refused(upload(hub, saved), CheckpointFormatError, "config.json of evil/drafter has .* bytes")
    assert all(request.startswith("HEAD") for request in hub.requests)


def test_weights_far_larger_than_the_drafter_are_not_fetched(hub, saved, monkeypatch):
    monkeypatch.setattr("dspark_hf.checkpoints.source._SPARE_BYTES", -(10**6))
    assert_refused(upload(hub, saved), CheckpointFormatError, "model.safetensors of evil/drafter has .* bytes")
    assert not any(request.startswith("GET") and "model.safetensors" in request for request in hub.requests)


def test_numbers_beside_the_weights_are_looked_at_too(saved):
    drafter = tiny_drafter(tiny_target(), layer_style="gemma4")
    drafter.layers[1].layer_scalar.fill_(float("nan"))
    drafter.save_pretrained(saved)
    assert_refused(saved, CheckpointFormatError, r"hold NaN or infinity, among them \['layers.1.layer_scalar'\]")


def test_labels_are_not_made_up_by_the_billion(saved):
    edit(saved, num_labels=10**9, id2label={"a": 1}, problem_type="regression")
    assert DSparkDraftModel.from_pretrained(saved).config.num_labels == 2


def test_an_adapter_or_a_distributed_checkpoint_beside_the_drafter_is_not_loaded(saved):
    (saved / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/other"}')
    assert_refused(saved, CheckpointFormatError, "adapter_config.json, and transformers would load an adapter")
    (saved / "config.json").rename(saved.parent / "config.json")
    assert_refused(saved, CheckpointFormatError, "adapter_config.json, and transformers would load an adapter")
    (saved.parent / "config.json").rename(saved / "config.json")
    (saved / "adapter_config.json").unlink()
    (saved / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"")
    assert_refused(saved, CheckpointFormatError, "distributed checkpoint")


def test_code_in_a_repository_is_neither_fetched_nor_run(hub, saved):
    edit(saved, auto_map={"AutoModel": "evil.Drafter", "AutoConfig": "evil.Config"})
    (saved / "evil.py").write_text(f"import os\nos.mkdir({str(saved.parent / 'trace')!r})\n")
    DSparkDraftModel.from_pretrained(saved)
    DSparkDraftModel.from_pretrained(upload(hub, saved))
    assert not (saved.parent / "trace").exists()
    assert not any("evil.py" in request for request in hub.requests)


def test_a_config_does_not_choose_how_attention_is_computed(saved):
    edit(saved, attn_implementation="evil/kernel", experts_implementation="evil/kernel")
    assert DSparkDraftModel.from_pretrained(saved).config._attn_implementation == "sdpa"


def test_pickles_are_not_asked_for_nor_converted_by_anybody(hub, saved):
    pickle_only(saved)
    upload(hub, saved)
    with pytest.raises(CheckpointFormatError):
        DSparkDraftModel.from_pretrained("evil/drafter", use_safetensors=None)
    assert not any(request.startswith(("POST", "GET")) and "pytorch_model" in request for request in hub.requests)
    assert not any("discussions" in request or "safetensors-convert" in request for request in hub.requests)


@pytest.mark.parametrize("name", ["../drafter", "/nowhere/drafter", "a/b/c", "~/drafter"])
def test_names_that_are_paths_are_never_asked_for_at_the_hub(hub, name):
    with pytest.raises(CheckpointFormatError, match="is not a folder"):
        DSparkDraftModel.from_pretrained(name)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["evil/..", "a b/c", "evil/x" + "y" * 200])
def test_names_that_no_repository_has_are_refused(hub, name):
    with pytest.raises(HubError, match="cannot fetch config.json of"):
        DSparkDraftModel.from_pretrained(name)
    assert hub.requests == []


def test_nothing_is_written_outside_of_the_cache(hub, saved, cache):
    index_outside(saved)
    with pytest.raises(CheckpointFormatError):
        DSparkDraftModel.from_pretrained(upload(hub, saved))
    assert not (Path(cache) / "other").exists()
    assert not any("other" in request for request in hub.requests)
