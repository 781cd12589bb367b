"""Sequential heads and confidence head against the paper's vectors and slow references."""

import pytest
import torch
from tiny import tiny_target

from dspark_hf import DSparkConfig
from dspark_hf.model.confidence_head import ConfidenceHead
from dspark_hf.model.sequential_heads import build_sequential_head


def config(**overrides):
    return DSparkConfig.from_target(tiny_target().config, **overrides)


def minimal(**overrides):
    sizes = {"vocab_size": 3, "hidden_size": 1, "mask_token_id": 2, "markov_rank": 2}
    return config(**sizes | overrides)


def test_v13_markov_law_for_each_previous_token():
    head = build_sequential_head(minimal())
    head.load_state_dict(
        {
            "markov_w1.weight": torch.tensor([[1.0, 0], [0, 1], [1, 1]]),
            "markov_w2.weight": torch.tensor([[0.5, -1, 0], [2, 0, -1]]).T,
        }
    )
    logits = torch.tensor([0, 1, 0.5])
    bias, _ = head.step(head.embed(torch.arange(3)), torch.zeros(3, 1), head.start(3))
    expected = [
        [0.383652, 0.232697, 0.383652],
        [0.689672, 0.253716, 0.056612],
        [0.883492, 0.072521, 0.043986],
    ]
    assert torch.allclose((logits + bias).softmax(-1), torch.tensor(expected), atol=1e-6)


def test_v14_recurrent_state_and_bias():
    head = build_sequential_head(minimal(vocab_size=2, mask_token_id=1, markov_rank=1, markov_head_type="rnn"))
    joint = torch.tensor([[0.2, 0.4, 0.1], [0.3, -0.5, 0.6], [0.1, 0.2, 0.3]])
    head.load_state_dict(
        {
            "markov_w1.weight": torch.zeros(2, 1),
            "markov_w2.weight": torch.tensor([[1.0], [-2.0]]),
            "joint_proj.weight": joint,
            "joint_proj.bias": torch.zeros(3),
        }
    )
    state = head.start(1)
    for (embedding, hidden), expected_state, expected_bias in [
        ((0.5, -1.0), -0.328272, (-0.197375, 0.394751)),
        ((-0.25, 2.0), 0.246603, (0.475515, -0.951030)),
    ]:
        bias, state = head.step(torch.tensor([[embedding]]), torch.tensor([[hidden]]), state)
        assert state.item() == pytest.approx(expected_state, abs=1e-6)
        assert bias[0].tolist() == pytest.approx(expected_bias, abs=1e-6)


def test_gated_head_equals_its_formula():
    torch.manual_seed(0)
    head = build_sequential_head(config(markov_rank=4, markov_head_type="gated"))
    previous, hidden = torch.tensor([5, 9]), torch.randn(2, 32)
    bias, state = head.step(head.embed(previous), hidden, head.start(2))
    for row in range(2):
        embedding = head.markov_w1.weight[previous[row]]
        gate = torch.sigmoid(head.gate_proj.weight @ torch.cat([hidden[row], embedding]) + head.gate_proj.bias)
        assert torch.allclose(bias[row], head.markov_w2.weight @ (gate * embedding), atol=1e-6)
    assert state is None


def test_rank_zero_has_no_head():
    assert build_sequential_head(config(markov_rank=0, confidence_head_with_markov=False)) is None


def test_confidence_reads_hidden_state_and_previous_token():
    head = ConfidenceHead(config(markov_rank=4))
    hidden, embedding = torch.randn(2, 3, 32), torch.randn(2, 3, 4)
    expected = torch.cat([hidden, embedding], -1) @ head.proj.weight[0] + head.proj.bias
    assert torch.allclose(head(hidden, embedding), expected, atol=1e-6)
    assert head(hidden, embedding).shape == (2, 3)


def test_confidence_without_markov_reads_the_hidden_state_only():
    head = ConfidenceHead(config(confidence_head_with_markov=False))
    assert head.proj.in_features == 32
    assert head(torch.randn(2, 3, 32), None).shape == (2, 3)
