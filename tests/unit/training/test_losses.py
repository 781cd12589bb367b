"""The chunked loss against autograd on probability tables, and against the paper's worked numbers (V12)."""

import math

import pytest
import torch
from tiny import tiny_drafter, tiny_target
from torch.nn import functional as F

from dspark_hf.training import losses
from dspark_hf.training.anchors import position_weights
from dspark_hf.training.head_rows import HeadRows
from dspark_hf.training.losses import LossWeights, draft_loss, reference_losses

V12_DRAFT = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1]], dtype=torch.float64)
V12_TARGET = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.6, 0.3]], dtype=torch.float64)
V12_CONFIDENCE = torch.tensor([0.85, 0.75], dtype=torch.float64)


@pytest.mark.parametrize(
    ("decay", "sums", "mean"),
    [
        (2.0, (0.909481, 0.442612, 0.643735, 1.133035), 0.705268),
        (4.0, (0.970926, 0.511520, 0.731146, 1.288607), 0.724425),
    ],
)
def test_worked_numbers(decay, sums, mean):
    weight = position_weights(2, decay).double()
    terms = reference_losses(V12_DRAFT, V12_TARGET, torch.tensor([0, 1]), V12_CONFIDENCE)
    ce, tv, confidence = (float((weight * term).sum()) for term in terms)
    total = 0.1 * ce + 0.9 * tv + 1.0 * confidence
    assert [ce, tv, confidence, total] == pytest.approx(sums, abs=1e-6)
    assert total / float(weight.sum()) == pytest.approx(mean, abs=1e-6)


def test_position_weights_are_the_papers():
    paper = [1, 0.866878, 0.751477, 0.651439, 0.564718, 0.489542, 0.424373]
    code = [1, 0.778801, 0.606531, 0.472367, 0.367879, 0.286505, 0.223130]
    assert position_weights(7, 7).tolist() == pytest.approx(paper, abs=1e-6)
    assert position_weights(7, 4.0).tolist() == pytest.approx(code, abs=1e-6)


def problem(*, token_ids=None, multiplier=1.0, cap=None, rank=3, seed=0):
    """Random inputs of the loss, in float64 for the comparison."""
    g = torch.Generator().manual_seed(seed)
    n, vocab, width = 17, 11, 6
    config = tiny_drafter(tiny_target()).config
    config.vocab_size, config.logit_multiplier, config.final_logit_softcapping = vocab, multiplier, cap
    weight = torch.randn(vocab, width, generator=g).double()
    hidden = torch.randn(n, width, generator=g).double().requires_grad_()
    num_draft = vocab if token_ids is None else len(token_ids)
    codes = torch.randn(n, rank, generator=g).double().requires_grad_() if rank else None
    w2 = torch.randn(num_draft, rank, generator=g).double().requires_grad_() if rank else None
    target_hidden = torch.randn(n, width, generator=g).double()
    tokens = torch.randint(0, vocab, (n,), generator=g)
    position_weight = torch.rand(n, generator=g).double()
    return config, weight, hidden, codes, w2, target_hidden, tokens, position_weight


def treated(logits, multiplier, cap):
    logits = logits * multiplier
    return logits if cap is None else torch.tanh(logits / cap) * cap


@pytest.mark.parametrize("chunk_bytes", [1, 200, 2**20])
@pytest.mark.parametrize("token_ids", [None, [0, 2, 3, 7, 10]])
@pytest.mark.parametrize(("multiplier", "cap"), [(1.0, None), (0.5, 2.0)])
@pytest.mark.parametrize("rank", [0, 3])
def test_chunked_loss_and_gradients_equal_the_reference(monkeypatch, chunk_bytes, token_ids, multiplier, cap, rank):
    monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_bytes)
    # The pass computes in float32; in float64 the comparison is sharp.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    config, weight, hidden, codes, w2, target_hidden, tokens, position_weight = problem(
        token_ids=token_ids, multiplier=multiplier, cap=cap, rank=rank
    )
    ids = None if token_ids is None else torch.tensor(token_ids)
    rows = weight if ids is None else weight[ids]
    target_logits = treated(target_hidden @ weight.T, multiplier, cap)
    weights = LossWeights(0.1, 0.9, 1.0)
    loss, terms = draft_loss(
        hidden,
        codes,
        w2,
        head=HeadRows(rows, None, ids, config),
        target_hidden=target_hidden,
        log_normalizer=target_logits.logsumexp(-1),
        next_tokens=tokens,
        position_weight=position_weight,
        weights=weights,
    )
    inputs = [tensor for tensor in (hidden, codes, w2) if tensor is not None]
    grads = torch.autograd.grad(3.0 * loss, inputs)

    logits = treated(hidden @ rows.T, multiplier, cap) + (codes @ w2.T if rank else 0.0)
    whole = torch.full((len(tokens), 11), -torch.inf, dtype=torch.float64)
    whole[:, ids if ids is not None else slice(None)] = logits
    draft_probs = whole.softmax(-1)
    can_be_drafted = draft_probs.detach().gather(1, tokens[:, None]) > 0
    # The reference's cross-entropy is infinite where the pass has no such term.
    certain = torch.where(can_be_drafted, draft_probs, F.one_hot(tokens, 11))
    confidence = torch.full((17,), 0.5).double()
    _, tv, _ = reference_losses(draft_probs, target_logits.softmax(-1), tokens, confidence)
    ce, _, _ = reference_losses(certain, target_logits.softmax(-1), tokens, confidence)
    expected = (position_weight * (0.1 * ce + 0.9 * tv)).sum()
    expected_grads = torch.autograd.grad(3.0 * expected, inputs)

    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-10)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-10, rtol=0)
    torch.testing.assert_close(terms.total_variation, tv.detach(), atol=1e-10, rtol=0)
    torch.testing.assert_close(terms.acceptance, 1 - 0.5 * tv.detach(), atol=1e-10, rtol=0)
    assert torch.equal(terms.is_best_token, whole.argmax(-1) == tokens)


@pytest.mark.parametrize("chunk_bytes", [200, 2**20])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_head_of_its_own_stands_alone(monkeypatch, chunk_bytes, cap):
    """Its logits are neither added to the target head's nor capped as those are."""
    monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    config, weight, hidden, _, _, target_hidden, tokens, position_weight = problem(cap=cap, rank=0)
    own = torch.randn(11, 6, generator=torch.Generator().manual_seed(9)).double().requires_grad_()
    target_logits = treated(target_hidden @ weight.T, 1.0, cap)
    loss, terms = draft_loss(
        None,
        hidden,
        own,
        head=HeadRows(weight, None, None, config),
        target_hidden=target_hidden,
        log_normalizer=target_logits.logsumexp(-1),
        next_tokens=tokens,
        position_weight=position_weight,
        weights=LossWeights(0.1, 0.9, 1.0),
    )
    ce, tv, _ = reference_losses(
        (hidden @ own.T).softmax(-1), target_logits.softmax(-1), tokens, torch.full((17,), 0.5).double()
    )
    expected = (position_weight * (0.1 * ce + 0.9 * tv)).sum()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-10)
    torch.testing.assert_close(terms.total_variation, tv.detach(), atol=1e-10, rtol=0)
    got, wanted = (torch.autograd.grad(value, [hidden, own]) for value in (loss, expected))
    for grad, expected_grad in zip(got, wanted, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-10, rtol=0)


def test_a_wrong_gradient_would_be_seen():
    config, *inputs = problem()
    weight, hidden, codes, w2, target_hidden, tokens, position_weight = (
        x.detach().float().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs
    )
    loss, _ = draft_loss(
        hidden,
        codes,
        w2,
        head=HeadRows(weight, None, None, config),
        target_hidden=target_hidden,
        log_normalizer=(target_hidden @ weight.T).logsumexp(-1),
        next_tokens=tokens,
        position_weight=position_weight,
        weights=LossWeights(0.1, 0.9, 1.0),
    )
    (grad,) = torch.autograd.grad(loss, hidden)
    only_ce = F.cross_entropy(hidden @ weight.T + codes @ w2.T, tokens, reduction="sum")
    (other,) = torch.autograd.grad(only_ce, hidden)
    assert not torch.allclose(grad, other, atol=1e-2)


def test_laws_at_their_ends_stay_finite():
    """One-hot and disjoint laws: c* is 0 or 1, and no gradient is NaN."""
    config = tiny_drafter(tiny_target()).config
    config.vocab_size = 3
    weight = torch.eye(3)
    hidden = torch.tensor([[200.0, 0, 0], [200.0, 0, 0]], requires_grad=True)
    target_hidden = torch.tensor([[200.0, 0, 0], [0, 200.0, 0]])
    loss, terms = draft_loss(
        hidden,
        None,
        None,
        head=HeadRows(weight, None, None, config),
        target_hidden=target_hidden,
        log_normalizer=target_hidden.logsumexp(-1),
        next_tokens=torch.tensor([0, 1]),
        position_weight=torch.ones(2),
        weights=LossWeights(),
    )
    loss.backward()
    assert terms.acceptance.tolist() == pytest.approx([1.0, 0.0])
    assert math.isfinite(float(loss.detach())) and bool(hidden.grad.isfinite().all())


def test_a_batch_without_positions_costs_nothing():
    config = tiny_drafter(tiny_target()).config
    hidden = torch.zeros(0, 4, requires_grad=True)
    loss, terms = draft_loss(
        hidden,
        None,
        None,
        head=HeadRows(torch.zeros(61, 4), None, None, config),
        target_hidden=torch.zeros(0, 4),
        log_normalizer=torch.zeros(0),
        next_tokens=torch.zeros(0, dtype=torch.long),
        position_weight=torch.zeros(0),
        weights=LossWeights(),
    )
    loss.backward()
    assert float(loss.detach()) == 0 and hidden.grad.shape == (0, 4) and len(terms.acceptance) == 0
