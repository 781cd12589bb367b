"""Targets that are built differently: what is read off them, what is copied from them, and what is refused."""

import copy

import pytest
import torch
from tiny import random_ids, tiny_drafter, tiny_target
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.errors import IncompatibleTargetError, TrainingDataError
from dspark_hf.model.draft_vocab import is_plain_linear
from dspark_hf.training.feature_cache import target_fingerprint
from dspark_hf.training.features import TargetReader
from dspark_hf.training.head_rows import HeadRows
from dspark_hf.training.initialise import feature_rms, initialise_from_target

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
IDS = random_ids(20)


def drafter_for(target, **overrides):
    settings = {"num_hidden_layers": 2, "block_size": 3, "markov_rank": 4}
    return DSparkDraftModel(DSparkConfig.from_target(target.config, **settings | overrides))


def build(cls, config_cls, **more):
    torch.manual_seed(0)
    return cls(config_cls(**SIZES, **more)).eval()


@pytest.mark.parametrize(
    "target",
    [
        build(CohereForCausalLM, CohereConfig, logit_scale=0.3),
        build(GraniteForCausalLM, GraniteConfig, logits_scaling=3.0, embedding_multiplier=2.0),
        build(Gemma2ForCausalLM, Gemma2Config, final_logit_softcapping=2.0, head_dim=8),
        build(Qwen2ForCausalLM, Qwen2Config),
    ],
    ids=lambda target: type(target).__name__,
)
def test_the_law_is_read_with_what_the_forward_does_to_logits(target):
    reader = TargetReader(target, DSparkConfig.from_target(target.config))
    reader.check_law(IDS)
    read = reader.read(IDS)
    logits = target(IDS).logits.float()
    torch.testing.assert_close(read.log_normalizer, logits.logsumexp(-1), atol=1e-4, rtol=0)


def test_a_law_that_the_config_does_not_know_is_refused():
    bert = BertLMHeadModel(BertConfig(is_decoder=True, **{k: v for k, v in SIZES.items() if "key" not in k})).eval()
    with pytest.raises(IncompatibleTargetError, match="are not its output head"):
        TargetReader(bert, tiny_drafter(tiny_target()).config).check_law(IDS)
    target = build(CohereForCausalLM, CohereConfig, logit_scale=0.3)
    wrong = DSparkConfig.from_target(target.config, logit_multiplier=1.0)
    with pytest.raises(IncompatibleTargetError, match="logit_multiplier"):
        TargetReader(target, wrong).check_law(IDS)


def test_an_adapted_target_is_read_through_its_wrapper():
    class Adapted(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.base_model = nn.Identity()  # of such wrappers this is not the model
            self.inner, self.config, self.device = inner, inner.config, inner.device
            self.get_input_embeddings = inner.get_input_embeddings
            self.get_output_embeddings = inner.get_output_embeddings

        def get_base_model(self):
            return self.inner

    target = tiny_target()
    config = tiny_drafter(target).config
    ours, theirs = TargetReader(Adapted(target), config).read(IDS), TargetReader(target, config).read(IDS)
    assert torch.equal(ours.features, theirs.features) and torch.equal(ours.final_hidden, theirs.final_hidden)
    assert initialise_from_target(drafter_for(target), Adapted(target), IDS)


def test_layers_that_compute_the_same_are_copied():
    for kind in ("qwen3", "llama"):
        target = tiny_target(kind)
        drafter = drafter_for(target)
        assert initialise_from_target(drafter, target, IDS)
        for ours, theirs in zip(drafter.layers, target.model.layers[-2:], strict=True):
            assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight)
            assert torch.equal(ours.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight)
        assert torch.equal(drafter.norm.weight, target.model.norm.weight)
        assert not drafter.markov_head.markov_w2.weight.any()


def test_biases_of_the_projections_are_copied():
    target = build(Qwen2ForCausalLM, Qwen2Config)
    nn.init.normal_(target.model.layers[-1].self_attn.q_proj.bias)
    drafter = drafter_for(target, attention_bias=True)
    assert initialise_from_target(drafter, target, IDS)
    assert torch.equal(drafter.layers[-1].self_attn.q_proj.bias, target.model.layers[-1].self_attn.q_proj.bias)
    assert not drafter.layers[-1].self_attn.o_proj.bias.any()


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (build(Gemma2ForCausalLM, Gemma2Config, head_dim=8), "another norm|more parts|activation"),
        (build(GraniteForCausalLM, GraniteConfig, attention_multiplier=0.7), "another scale"),
        (build(GraniteForCausalLM, GraniteConfig, residual_multiplier=0.5), "scaled|another scale"),
        (build(Qwen2ForCausalLM, Qwen2Config), "has a bias"),
    ],
    ids=["gemma2", "granite-attention", "granite-residual", "qwen2"],
)
def test_layers_that_compute_something_else_are_left_alone(target, why, caplog):
    drafter = drafter_for(target)
    before = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    assert not initialise_from_target(drafter, target, IDS)
    assert any(part in caplog.text for part in why.split("|")), caplog.text
    changed = [name for name, weight in drafter.state_dict().items() if not torch.equal(weight, before[name])]
    assert changed == ["markov_head.markov_w2.weight"]


def test_the_scale_of_features_does_not_follow_outliers():
    target = tiny_target()
    config = tiny_drafter(target).config
    plain = feature_rms(target, config, IDS)
    assert plain.shape == (len(config.target_layer_ids),) and bool((plain > 0).all())
    features = TargetReader(target, config).read(IDS).features[0, :, : config.hidden_size]
    by_token = features.pow(2).mean(-1).sqrt()
    assert float(by_token.min()) <= float(plain[0]) <= float(by_token.max())


@pytest.mark.parametrize("change", ["weight", "rope", "eps"])
def test_a_fingerprint_sees_weights_and_config(change):
    target = tiny_target()
    other = copy.deepcopy(target)
    assert target_fingerprint(other) == target_fingerprint(target)
    if change == "weight":
        with torch.no_grad():
            other.model.embed_tokens.weight[17, 3] += 1e-3
    elif change == "rope":
        other.config.rope_parameters = dict(other.config.rope_parameters) | {"rope_theta": 77.0}
    else:
        other.config.rms_norm_eps = 1e-3
    assert target_fingerprint(other) != target_fingerprint(target)


def test_heads_that_are_more_than_a_product_are_refused():
    target = tiny_target()
    drafter = tiny_drafter(target)
    assert HeadRows.of(target, drafter, torch.float32).weight.shape == (61, 32)

    class Quantised(nn.Linear):
        pass

    head = Quantised(32, 61, bias=False)
    integers = nn.Linear(32, 61, bias=False)
    integers.weight = nn.Parameter(torch.zeros(61, 32, dtype=torch.int8), requires_grad=False)
    hooked = nn.Linear(32, 61, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    for odd in (head, integers, hooked):
        assert not is_plain_linear(odd)
        target.lm_head = odd
        with pytest.raises(TrainingDataError, match="plain linear layer"):
            HeadRows.of(target, drafter, torch.float32)
