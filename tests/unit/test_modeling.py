"""The block forward against the slow float64 reference, and the drafter as a PreTrainedModel."""

import json
import shutil

import pytest
import torch
from reference import block_hidden, double_weights
from tiny import tiny_drafter, tiny_target
from transformers import AutoConfig, AutoModel

from dspark_hf import CheckpointFormatError, DSparkConfig, DSparkDraftModel
from dspark_hf.model.context_cache import DraftContextCache

GQA = [(4, 4), (4, 2), (4, 1)]  # query heads, key/value heads


def features(drafter, length, seed=0):
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    return torch.randn(1, length, width, generator=torch.Generator().manual_seed(seed))


def positions(start, length):
    return torch.arange(start, start + length)[None]


def run_block(drafter, block, context, start, anchor, cache):
    """One cached forward: `context` features from position `start`, block at `anchor`."""
    return drafter(
        inputs_embeds=block,
        position_ids=positions(anchor, block.shape[1]),
        context_features=context,
        context_position_ids=positions(start, context.shape[1]),
        cache=cache,
    ).last_hidden_state[0]


@pytest.mark.parametrize(("heads", "kv_heads"), GQA)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("length", [1, 2, 17, 300])
def test_block_forward_equals_the_slow_reference(length, heads, kv_heads, attention):
    drafter = tiny_drafter(tiny_target(), num_attention_heads=heads, num_key_value_heads=kv_heads)
    drafter.set_attn_implementation(attention)
    context = features(drafter, length)
    block = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(9))
    got = run_block(drafter, block, context, 0, length, DraftContextCache(2))
    expected = block_hidden(double_weights(drafter), drafter.config, context[0].double(), block[0].double(), length)
    assert (got - expected).abs().max() < 1e-5


def test_rounds_with_partial_acceptance_equal_the_slow_reference():
    drafter = tiny_drafter(tiny_target())
    weights = double_weights(drafter)
    everything = features(drafter, 330)
    cache = DraftContextCache(2)
    start, anchor = 0, 260  # the first append grows past the buffer's smallest capacity
    for round_idx, num_committed in enumerate([3, 1, 5, 2, 4]):
        block = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(round_idx))
        got = run_block(drafter, block, everything[:, start:anchor], start, anchor, cache)
        expected = block_hidden(weights, drafter.config, everything[0, :anchor].double(), block[0].double(), anchor)
        assert (got - expected).abs().max() < 1e-5
        start, anchor = anchor, anchor + num_committed
    assert cache.length == start


def test_context_projected_in_chunks_equals_context_projected_at_once():
    drafter = tiny_drafter(tiny_target())
    context = features(drafter, 40)
    block = torch.randn(1, 4, 32)
    whole = run_block(drafter, block, context, 0, 40, DraftContextCache(2))
    cache = DraftContextCache(2)
    for start in (0, 13):
        drafter.extend_cache(context[:, start : start + 13], positions(start, 13), cache)
    assert torch.allclose(run_block(drafter, block, context[:, 26:], 26, 40, cache), whole, atol=1e-6)


def test_without_a_cache_the_given_context_is_the_whole_context():
    drafter = tiny_drafter(tiny_target())
    context, block = features(drafter, 9), torch.randn(1, 4, 32)
    cached = run_block(drafter, block, context, 0, 9, DraftContextCache(2))
    assert torch.allclose(run_block(drafter, block, context, 0, 9, None), cached, atol=1e-6)


def test_slots_see_each_other_in_both_directions():
    drafter = tiny_drafter(tiny_target())
    context, block = features(drafter, 9), torch.randn(1, 4, 32)
    changed = block.clone()
    changed[:, -1] += 1
    before = run_block(drafter, block, context, 0, 9, None)
    after = run_block(drafter, changed, context, 0, 9, None)
    assert (before[0] - after[0]).abs().max() > 1e-4


def test_mask_hides_context():
    drafter = tiny_drafter(tiny_target())
    context, block = features(drafter, 9), torch.randn(1, 4, 32)
    mask = torch.zeros(1, 1, 4, 13)
    mask[..., :3] = -torch.inf
    got = drafter(
        block,
        positions(9, 4),
        context_features=context,
        context_position_ids=positions(0, 9),
        attention_mask=mask,
    ).last_hidden_state
    expected = drafter(
        block,
        positions(9, 4),
        context_features=context[:, 3:],
        context_position_ids=positions(3, 6),
    ).last_hidden_state
    assert torch.allclose(got, expected, atol=1e-6)


def test_features_and_positions_belong_together():
    drafter = tiny_drafter(tiny_target())
    with pytest.raises(ValueError, match="pass both or neither"):
        drafter(torch.randn(1, 4, 32), positions(9, 4), context_features=features(drafter, 9))


def test_save_and_load_keep_every_tensor_and_only_what_was_trained(tmp_path):
    drafter = tiny_drafter(tiny_target(), markov_head_type="rnn")
    drafter.save_pretrained(tmp_path)
    again = DSparkDraftModel.from_pretrained(tmp_path)
    assert not [name for name in drafter.state_dict() if "embed_tokens" in name or "lm_head" in name]
    assert drafter.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    assert drafter.config.to_dict() | {"_name_or_path": ""} == again.config.to_dict() | {"_name_or_path": ""}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_auto_classes_find_the_drafter(tmp_path):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is DSparkConfig
    assert type(AutoModel.from_pretrained(tmp_path)) is DSparkDraftModel


def test_loading_in_another_dtype(tmp_path):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path)
    assert DSparkDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "overrides",
    [
        {"qk_norm": False},
        {"attention_bias": True},
        {"markov_rank": 0, "confidence_head_with_markov": False},
    ],
)
def test_variants_run(overrides):
    drafter = tiny_drafter(tiny_target(), **overrides)
    hidden = run_block(drafter, torch.randn(1, 4, 32), features(drafter, 3), 0, 3, None)
    assert hidden.shape == (4, 32)
    assert hidden.isfinite().all()


@pytest.mark.parametrize(
    "rope",
    [
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_scaled_rope_changes_the_result(rope):
    target = tiny_target()
    plain, scaled = tiny_drafter(target), tiny_drafter(target, rope_parameters=rope)
    block, context = torch.randn(1, 4, 32), features(plain, 50)
    assert not torch.allclose(
        run_block(plain, block, context, 0, 50, None),
        run_block(scaled, block, context, 0, 50, None),
    )


def test_logits_get_the_multiplier_and_the_soft_cap_of_the_target():
    target = tiny_target()
    plain = tiny_drafter(target)
    treated = tiny_drafter(target, logit_multiplier=0.5, final_logit_softcapping=2.0, embedding_multiplier=3.0)
    hidden, head = torch.randn(1, 4, 32), target.get_output_embeddings()
    raw = plain.base_logits(hidden, head)
    assert torch.allclose(treated.base_logits(hidden, head), 2 * torch.tanh(raw * 0.5 / 2))
    ids, embedding = torch.tensor([[1, 2]]), target.get_input_embeddings()
    assert torch.allclose(treated.embed(ids, embedding), 3 * plain.embed(ids, embedding))


def test_a_drafter_cannot_generate_alone():
    assert not DSparkDraftModel.can_generate()
    with pytest.raises(NotImplementedError, match="borrows its target's embedding"):
        tiny_drafter(tiny_target()).get_input_embeddings()


def test_a_checkpoint_without_some_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_drafter(tiny_target()).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["fc.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointFormatError, match=r"lacks 1 .*fc\.weight"):
        DSparkDraftModel.from_pretrained(tmp_path)
    tensors["fc.weight"] = torch.zeros(3, 3)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointFormatError, match=r"another shape.*fc\.weight"):
        DSparkDraftModel.from_pretrained(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointFormatError, match="download them again"):
        DSparkDraftModel.from_pretrained(tmp_path)


def _pickle_only(folder, drafter):
    torch.save(drafter.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _without_model_type(folder, drafter):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_pickle_only, "only pytorch_model.bin, and a pickle may run any code; save it again"),
        (lambda folder, drafter: (folder / "model.safetensors").unlink(), "no model.safetensors; download it again"),
        (lambda folder, drafter: (folder / "config.json").write_text("{", encoding="utf-8"), "is not valid JSON"),
        (lambda folder, drafter: shutil.rmtree(folder), "is not a folder; pass a drafter's folder"),
        (_without_model_type, 'add "model_type": "dspark"'),
    ],
    ids=["pickle", "no_weights", "broken_json", "no_folder", "no_model_type"],
)
def test_damaged_folders_are_named_with_a_way_out(tmp_path, damage, message):
    folder = tmp_path / "drafter"
    drafter = tiny_drafter(tiny_target())
    drafter.save_pretrained(folder)
    damage(folder, drafter)
    with pytest.raises(CheckpointFormatError, match=message):
        DSparkDraftModel.from_pretrained(folder)


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises((CheckpointFormatError, OSError), match=r"config\.json"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_loading_info_can_be_asked_for(tmp_path):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path)
    drafter, info = DSparkDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(drafter, DSparkDraftModel)
    assert not info["missing_keys"]
