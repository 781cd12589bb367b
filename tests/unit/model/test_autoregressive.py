"""Baseline drafters against a plain forward, and unrolled training against step by step decoding."""

import math

import pytest
import torch
from tiny import random_ids, tiny_baseline, tiny_target
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList

from dspark_hf import DSparkConfigError
from dspark_hf.decoding import autoregressive, candidate_generator
from dspark_hf.decoding.autoregressive import AutoregressiveCandidateGenerator
from dspark_hf.model import unrolled
from dspark_hf.training.anchors import build_blocks
from dspark_hf.training.packed_forward import packed_hidden

KINDS = ("mtp", "eagle3")
IDS = random_ids(15, seed=4)


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=4)


def features_of(target, drafter, ids):
    hidden = target(ids, output_hidden_states=True).hidden_states
    return torch.cat([hidden[i + 1] for i in drafter.config.target_layer_ids], dim=-1)


# -- the slow reference: float64, one query at a time, no cache ------------------------------------------------------


def norm(x, weight, eps=1e-6):
    return weight * x / torch.sqrt((x * x).mean() + eps)


def turned(vector, position, theta):
    half = len(vector) // 2
    angle = position * theta ** -(torch.arange(half, dtype=torch.float64) / half)
    first, second = vector[:half], vector[half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
    )  # fmt: skip


class Reference:
    """Pairs go in one after the other; each adds a key and a value and looks at all there are."""

    def __init__(self, drafter):
        self.config = drafter.config
        self.w = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
        self.keys, self.values = [], []

    def mat(self, name):
        return self.w[f"{name}.weight"]

    def state(self, features):
        return self.mat("fc") @ features if self.config.drafter_type == "eagle3" else features

    def read(self, embedding, state, position):
        layer = "layers.0."
        if self.config.drafter_type == "eagle3":
            parts = norm(embedding, self.mat(layer + "input_layernorm")), norm(state, self.mat(layer + "hidden_norm"))
            inputs = torch.cat(parts)
        else:
            parts = norm(embedding, self.mat(layer + "enorm")), norm(state, self.mat(layer + "hnorm"))
            state = self.mat(layer + "eh_proj") @ torch.cat(parts)
            inputs = norm(state, self.mat(layer + "input_layernorm"))
        state = state + self.mat(layer + "self_attn.o_proj") @ self.attended(inputs, position)
        middle = norm(state, self.mat(layer + "post_attention_layernorm"))
        gate = self.mat(layer + "mlp.gate_proj") @ middle
        return state + self.mat(layer + "mlp.down_proj") @ (
            gate * gate.sigmoid() * (self.mat(layer + "mlp.up_proj") @ middle)
        )

    def attended(self, inputs, position):
        config, at = self.config, "layers.0.self_attn."
        theta, dim = config.rope_parameters["rope_theta"], config.head_dim

        def heads(name, weight=None):
            vectors = (self.mat(f"{at}{name}_proj") @ inputs).view(-1, dim)
            if weight is None:
                return list(vectors)
            return [turned(norm(vector, self.mat(at + weight)), position, theta) for vector in vectors]

        self.keys.append(heads("k", "k_norm"))
        self.values.append(heads("v"))
        group = config.num_attention_heads // config.num_key_value_heads
        result = []
        for h, query in enumerate(heads("q", "q_norm")):
            scores = torch.stack([query @ keys[h // group] for keys in self.keys]) / math.sqrt(dim)
            values = torch.stack([values[h // group] for values in self.values])
            result.append(scores.softmax(0) @ values)
        return torch.cat(result)

    def logits(self, target, state):
        head = self.w["lm_head.weight"] if self.config.drafter_type == "eagle3" else target.lm_head.weight.double()
        return head @ norm(state, self.mat("norm"))


@torch.no_grad()
def reference_logits(target, drafter, ids, anchor, drafted):
    """Logits of each slot after `anchor` where the slots before drafted `drafted`, float64 `[slots, vocab]`."""
    reference = Reference(drafter)
    embedding = target.get_input_embeddings().weight.double()
    features = features_of(target, drafter, ids)[0].double()
    for i in range(anchor):
        state = reference.read(embedding[ids[0, i + 1]], reference.state(features[i]), i)
    logits = [reference.logits(target, state)]
    for k, token in enumerate(drafted):
        state = reference.read(embedding[token], state, anchor + k)
        logits.append(reference.logits(target, state))
    return torch.stack(logits)


# -- decoding -------------------------------------------------------------------------------------------------------


def generator_for(target, drafter, mask=None):
    config = GenerationConfig(do_sample=False, max_length=1000)
    kwargs = {} if mask is None else {"attention_mask": mask}
    return AutoregressiveCandidateGenerator(drafter, target, config, LogitsProcessorList(), kwargs)


@torch.no_grad()
def decoded_logits(target, drafter, ids, anchor, drafted, mask=None):
    """As [`reference_logits`], along the way that generate() takes."""
    generator = generator_for(target, drafter, mask)
    generator.observe(target(ids, attention_mask=mask, **generator.model_kwargs_overrides), anchor)
    slot_logits = generator._slot_logits(ids[:, : anchor + 1])
    tokens = [ids[:, anchor], *(torch.tensor([token]) for token in drafted)]
    return torch.cat([slot_logits(k, token) for k, token in enumerate(tokens)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_drafting_equals_the_plain_forward(target, kind, attention):
    drafter = tiny_baseline(target, kind)
    drafter.set_attn_implementation(attention)
    drafted = [7, 3, 9] if kind == "eagle3" else []
    for anchor in (1, 2, 9):
        got = decoded_logits(target, drafter, IDS, anchor, drafted)
        expected = reference_logits(target, drafter, IDS, anchor, drafted)
        assert torch.allclose(got.double(), expected, atol=2e-4), anchor
    if drafted:  # later slots do depend on what was drafted
        other = reference_logits(target, drafter, IDS, 9, [8, 3, 9])
        assert torch.equal(other[0], expected[0])
        assert not torch.allclose(other[1:], expected[1:], atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_read_each_committed_pair_once_and_forget_their_own(target, kind):
    """Round after round, with whatever was accepted, a cache that grew says what one made at once says."""
    drafter = tiny_baseline(target, kind)
    generator = generator_for(target, drafter)
    outputs = target(IDS, **generator.model_kwargs_overrides)
    seen = 0
    for anchor in (3, 4, 8, 13):
        fresh = type("Outputs", (), {"hidden_states": [h if h is None else h[:, seen:] for h in outputs.hidden_states]})
        generator.observe(fresh, anchor - seen)
        seen = anchor
        tokens = generator.propose(IDS[:, : anchor + 1]).block.tokens
        alone = generator_for(target, drafter)
        alone.observe(outputs, anchor)
        assert torch.equal(tokens, alone.propose(IDS[:, : anchor + 1]).block.tokens)
        assert generator._cache.length == anchor


@pytest.mark.parametrize("kind", KINDS)
def test_long_prompts_are_read_in_chunks_and_padding_is_left_out(target, kind, monkeypatch):
    drafter = tiny_baseline(target, kind)
    drafted = [7, 3] if kind == "eagle3" else []
    whole = decoded_logits(target, drafter, IDS, 12, drafted)
    for module in (autoregressive, candidate_generator):
        monkeypatch.setattr(module, "CONTEXT_CHUNK_TOKENS", 5)
    assert torch.allclose(decoded_logits(target, drafter, IDS, 12, drafted), whole, atol=1e-4)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), IDS[:, :13]], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    generator = generator_for(target, drafter, mask)
    generator.observe(
        target(padded, attention_mask=mask, position_ids=positions, **generator.model_kwargs_overrides), 15
    )
    logits = generator._slot_logits(padded)
    tokens = [padded[:, 15], *(torch.tensor([token]) for token in drafted)]
    assert torch.allclose(torch.cat([logits(k, t) for k, t in enumerate(tokens)]), whole, atol=1e-4)


# -- training-time test ---------------------------------------------------------------------------------------------


@torch.no_grad()
def unrolled_logits(target, drafter, anchors, ids=IDS):
    """Training's logits `[anchors, slots, vocab]` on the text's own tokens."""
    mask = torch.ones_like(ids, dtype=torch.bool)
    blocks = build_blocks(ids, mask, torch.tensor([anchors]), drafter.config.block_size, drafter.first_anchor)
    features = features_of(target, drafter, ids)
    hidden, _ = packed_hidden(drafter, drafter, target.get_input_embeddings(), features, blocks)
    head = drafter.borrow_head(target.get_output_embeddings(), drafter.config.vocab_size)
    return drafter.base_logits(hidden, head)


ANCHORS = [1, 2, 5, 6, 9]


@pytest.mark.parametrize("kind", KINDS)
def test_training_logits_equal_decoding_on_the_same_prefix(target, kind):
    drafter = tiny_baseline(target, kind)
    got = unrolled_logits(target, drafter, ANCHORS)
    for anchor, logits in zip(ANCHORS, got, strict=True):
        drafted = IDS[0, anchor + 1 : anchor + drafter.config.block_size].tolist()
        expected = decoded_logits(target, drafter, IDS, anchor, drafted)
        assert torch.allclose(logits, expected, atol=2e-4), anchor


def test_control_a_step_that_sees_one_pair_too_many_differs(target, monkeypatch):
    drafter = tiny_baseline(target, "eagle3")
    right = unrolled_logits(target, drafter, ANCHORS)
    made = unrolled.UnrolledSteps.__init__

    def shifted(self, anchor_positions):
        made(self, anchor_positions + 1)

    monkeypatch.setattr(unrolled.UnrolledSteps, "__init__", shifted)
    wrong = unrolled_logits(target, drafter, ANCHORS)
    assert torch.equal(wrong[:, 0], right[:, 0])  # the first step reads the text itself
    assert not torch.allclose(wrong[:, 1:], right[:, 1:], atol=1e-3)


def test_an_anchor_does_not_see_the_steps_of_others_nor_later_tokens(target):
    drafter = tiny_baseline(target, "eagle3")
    together = unrolled_logits(target, drafter, [5, 9])
    assert torch.allclose(together[0], unrolled_logits(target, drafter, [5])[0], atol=1e-5)
    changed = IDS.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 61
    assert torch.allclose(together[0], unrolled_logits(target, drafter, [5, 9], changed)[0], atol=1e-5)
    assert not torch.allclose(together[1], unrolled_logits(target, drafter, [5, 9], changed)[1], atol=1e-2)


def test_gradients_reach_the_first_step_through_later_ones(target):
    drafter = tiny_baseline(target, "eagle3")
    mask = torch.ones_like(IDS, dtype=torch.bool)
    blocks = build_blocks(IDS, mask, torch.tensor([[4]]), 4)
    features = features_of(target, drafter, IDS).detach().requires_grad_()
    hidden, _ = packed_hidden(drafter, drafter, target.get_input_embeddings(), features, blocks)
    (grad,) = torch.autograd.grad(hidden[0, 3].sum(), features)
    assert bool((grad[0, :4].abs().sum(-1) > 0).all())
    assert bool((grad[0, 4:] == 0).all())


def test_the_first_position_of_a_text_supervises_nothing():
    mask = torch.ones_like(IDS, dtype=torch.bool)
    blocks = build_blocks(IDS, mask, torch.tensor([[0, 1, -1]]), 4, first_anchor=1)
    assert blocks.is_supervised.any(-1).tolist() == [[False, True, False]]


# -- its forward's arguments -----------------------------------------------------------------------------------------


def test_a_pair_is_made_of_features_or_of_states(target):
    drafter = tiny_baseline(target, "eagle3")
    embeds, positions = torch.zeros(1, 2, 32), torch.arange(2)[None]
    for states in ({}, {"states": embeds, "context_features": torch.zeros(1, 2, 96)}):
        with pytest.raises(ValueError, match="pass one of them"):
            drafter(embeds, positions, **states)


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        ("ngram", {}, "drafter_type must be one of"),
        ("mtp", {"block_size": 3}, "block_size must be 1"),
        ("mtp", {"target_layer_ids": [1]}, r"target_layer_ids must be \[3\]"),
        ("eagle3", {"target_layer_ids": [3]}, "target_layer_ids must lie between"),
        ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
        ("eagle3", {"enable_confidence_head": True}, "enable_confidence_head must be False"),
        ("eagle3", {"markov_rank": 8}, "markov_rank must be 0"),
        ("eagle3", {"markov_ranks": 8}, "AutoregressiveConfig has no argument"),
    ],
)
def test_bad_configs_name_the_field_and_the_rule(target, kind, overrides, message):
    with pytest.raises(DSparkConfigError, match=message):
        tiny_baseline(target, kind, **overrides)
