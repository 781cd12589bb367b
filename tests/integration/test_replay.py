"""Replaying a drafter on the target's text gives the rounds of really generating it."""

import pytest
import torch
from tiny import greedy, random_ids, tiny_drafter, tiny_target

from dspark_hf import DSparkDraftModel, record_speculation
from dspark_hf.evaluation import replay as replay_module
from dspark_hf.evaluation.replay import Replay, TargetText
from dspark_hf.model.draft_vocab import offsets_of

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def drafter_near(target, **overrides) -> DSparkDraftModel:
    """A drafter that is right now and then: random ones of wide weights on a small vocabulary agree by chance."""
    return tiny_drafter(target, initializer_range=0.05, **overrides)


def drafters(target):
    yield drafter_near(target)
    yield drafter_near(target, markov_head_type="rnn")
    yield drafter_near(target, markov_rank=0, confidence_head_with_markov=False)
    yield drafter_near(
        target,
        draft_layout="fill_in",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=5,
        causal_layers="all",
    )
    reduced = drafter_near(target, draft_vocab_size=20)
    reduced.d2t.copy_(offsets_of(torch.arange(0, 60, 3)))
    yield reduced


def test_greedy_rounds_are_those_of_generate(target):
    for drafter in drafters(target):
        for seed in range(6):
            ids = random_ids(7, seed=seed)
            with record_speculation() as report:
                text = target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=NEW_TOKENS)
            assert torch.equal(text, greedy(target, ids, max_new_tokens=NEW_TOKENS))
            (replayed,) = Replay(target, [TargetText("p/0", text[0], 7, 0.0)]).run(drafter)
            assert replayed.num_rounds == report.num_rounds
            assert replayed.num_tokens == report.num_new_tokens - 1
            assert replayed.tau == pytest.approx(report.tau)


def test_sampled_rounds_have_the_expectation_of_generate(target):
    """Mean rounds of many real runs against the mean of replays of texts that the target sampled by itself."""
    drafter = tiny_drafter(target, initializer_range=0.05, block_size=3)
    runs, ids = 150, random_ids(5)
    law = {"do_sample": True, "temperature": 1.3, "top_k": 0, "max_new_tokens": 8}
    torch.manual_seed(0)
    real, replayed = [], []
    for _ in range(runs):
        with record_speculation() as report:
            target.generate(ids, assistant_model=drafter, **law)
        real.append(report.num_rounds)
        text = target.generate(ids, **law)
        replayed.append(Replay(target, [TargetText("p/0", text[0], 5, 1.3)]).run(drafter)[0].num_rounds)
    real, replayed = torch.tensor(real).double(), torch.tensor(replayed).double()
    noise = float((real.var() / runs + replayed.var() / runs).sqrt())
    assert abs(float(real.mean() - replayed.mean())) < 4 * noise
    # Something was accepted, or the test could not fail.
    assert float(real.mean()) < 7 - 10 * noise
    assert float(replayed.var()) < float(real.var())


def test_cut_into_chunks_a_replay_is_the_same(target, monkeypatch):
    drafter = drafter_near(target)
    text = TargetText("p/0", greedy(target, random_ids(6), max_new_tokens=20)[0], 6, 1.0)
    (whole,) = Replay(target, [text]).run(drafter)
    monkeypatch.setattr(replay_module, "TABLE_NUMBERS", 3 * drafter.config.block_size * drafter.config.vocab_size)
    (cut,) = Replay(target, [text]).run(drafter)
    assert cut.num_rounds == pytest.approx(whole.num_rounds, abs=1e-5)
    for name in ("confidence", "acceptance", "label", "weight"):
        torch.testing.assert_close(getattr(cut, name), getattr(whole, name), atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", ["anchor_first", "fill_in"])
def test_slots_are_those_of_a_block_forward_in_either_layout(target, layout):
    drafter = drafter_near(target, markov_rank=0, confidence_head_with_markov=False)
    drafter.config.draft_layout = layout
    length, text = 6, greedy(target, random_ids(6), max_new_tokens=12)
    (replayed,) = Replay(target, [TargetText("p/0", text[0], length, 0.0)]).run(drafter)
    states = target(text, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    first, gamma = int(layout == "fill_in"), drafter.config.block_size
    for block in range(len(replayed.acceptance)):
        anchor = length + block
        ids = torch.full((1, first + gamma), drafter.config.mask_token_id)
        ids[0, 0] = text[0, anchor]
        hidden = drafter(
            drafter.embed(ids, target.get_input_embeddings()),
            torch.arange(anchor, anchor + first + gamma)[None],
            features[:, :anchor],
            torch.arange(anchor)[None],
        ).last_hidden_state[:, first:]
        best = target.get_output_embeddings()(hidden)[0].argmax(dim=-1)
        tokens = text[0, anchor + 1 : anchor + 1 + gamma]
        hits = (best[: len(tokens)] == tokens).double()
        assert torch.equal(replayed.acceptance[block, : len(hits)], hits)


def test_altered_features_are_what_drafters_see(target):
    drafter, text = drafter_near(target), TargetText("p/0", greedy(target, random_ids(6), max_new_tokens=20)[0], 6, 1.0)
    (own,) = Replay(target, [text]).run(drafter)
    (same,) = Replay(target, [text], alter_features=lambda features: features.clone()).run(drafter)
    (other,) = Replay(target, [text], alter_features=torch.zeros_like).run(drafter)
    assert torch.equal(own.acceptance, same.acceptance) and not torch.allclose(own.acceptance, other.acceptance)
