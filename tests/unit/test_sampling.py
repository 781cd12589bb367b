"""Draws by inversion, and logits processors applied to whole blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as lp
from transformers.generation.logits_process import LogitsProcessorList

from dspark_hf.decoding.sampling import ScoreProcessor, draw_uniforms, law, sample


def test_inversion_gives_each_token_its_share():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25]])
    points = [0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 1e-16]
    drawn = [int(sample(probs, torch.tensor([p], dtype=torch.float64))) for p in points]
    assert drawn == [1, 1, 3, 3, 4, 4]


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 0.1, 1.0, 7.0]), min_size=1, max_size=8).filter(any),
    point=st.floats(0, 1, exclude_max=True),
)
def test_a_drawn_token_is_possible(weights, point):
    probs = torch.tensor([weights])
    for dtype in (torch.float32, torch.float64):
        token = int(sample(probs, torch.tensor([point], dtype=dtype).clamp(max=1 - 2**-24)))
        assert weights[token] > 0


def test_rare_tokens_survive_a_large_vocabulary():
    probs = torch.full((1, 50_000), 1e-9)
    probs[0, 0] = 1.0
    point = torch.tensor([(1.0 + 49_998.5e-9) / (1.0 + 49_999e-9)], dtype=torch.float64)
    assert int(sample(probs, point)) == 49_999


def test_uniforms_come_from_the_global_generator():
    torch.manual_seed(3)
    first = draw_uniforms(2, 3, device=torch.device("cpu"))
    torch.manual_seed(3)
    assert torch.equal(first, draw_uniforms(2, 3, device=torch.device("cpu")))
    assert first.shape == (2, 3)


PROCESSORS = {
    "none": [],
    "temperature": [lp.TemperatureLogitsWarper(0.7)],
    "stacked": [lp.TemperatureLogitsWarper(1.3), lp.TopKLogitsWarper(5), lp.TopPLogitsWarper(0.8)],
    "min_p": [lp.MinPLogitsWarper(0.1)],
    "typical": [lp.TypicalLogitsWarper(0.8)],
    "epsilon": [lp.EpsilonLogitsWarper(0.05)],
    "eta": [lp.EtaLogitsWarper(0.05)],
    "top_h": [lp.TopHLogitsWarper(0.5)],
    "repetition": [lp.RepetitionPenaltyLogitsProcessor(1.5)],
    "ngram": [lp.NoRepeatNGramLogitsProcessor(2)],
    "min_length": [lp.MinLengthLogitsProcessor(9, eos_token_id=3)],
    "mixed": [
        lp.RepetitionPenaltyLogitsProcessor(1.5),
        lp.TemperatureLogitsWarper(0.7),
        lp.TopKLogitsWarper(3),
    ],
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_block_is_processed_as_token_by_token(name):
    generator = torch.Generator().manual_seed(1)
    prefix = torch.randint(0, 13, (2, 6), generator=generator)
    drafts = torch.randint(0, 13, (2, 3), generator=generator)
    logits = torch.randn(2, 4, 13, generator=generator)
    before = logits.clone()
    processors = LogitsProcessorList(PROCESSORS[name])
    got = ScoreProcessor(processors).over_block(prefix, drafts, logits)
    ids = torch.cat([prefix, drafts], dim=1)
    for i in range(4):
        assert torch.allclose(got[:, i], processors(ids[:, : 6 + i], before[:, i].clone()), atol=0, rtol=0)
    assert torch.equal(logits, before)


def test_a_subclass_of_a_known_warper_is_asked_per_prefix():
    class Reads(lp.TemperatureLogitsWarper):
        def __call__(self, input_ids, scores):
            return scores + input_ids[:, -1:]

    processor = ScoreProcessor(LogitsProcessorList([Reads(1.0)]))
    assert processor.reads_prefix
    got = processor.over_block(torch.tensor([[1, 2]]), torch.tensor([[5]]), torch.zeros(1, 2, 4))
    assert got[0, :, 0].tolist() == [2.0, 5.0]


def test_a_broken_law_gives_no_id_outside_the_vocabulary():
    probs = torch.tensor([[float("nan")] * 3, [0.0] * 3])
    assert sample(probs, torch.tensor([0.5, 0.5])).max() <= 2


def test_law_is_float32():
    assert law(torch.zeros(1, 4, dtype=torch.bfloat16)).dtype == torch.float32
