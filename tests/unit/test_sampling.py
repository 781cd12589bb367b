"""Draws by inversion, logits processors applied to whole blocks, and the drafts that are drawn with both."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_drafter, tiny_target
from transformers.generation import logits_process as lp
from transformers.generation.logits_process import LogitsProcessorList

from dspark_hf.decoding import draft as draft_stage
from dspark_hf.decoding import sampling
from dspark_hf.decoding.draft import draft_block
from dspark_hf.decoding.prefixes import Prefixes
from dspark_hf.decoding.sampling import ScoreProcessor, draw_uniforms, law, sample

CPU = torch.device("cpu")


def test_inversion_gives_each_token_its_share():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25]])
    points = [0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 1e-16]
    drawn = [int(sample(probs, torch.tensor([p], dtype=torch.float64))) for p in points]
    assert drawn == [1, 1, 3, 3, 4, 4]


@settings(max_examples=100, deadline=None)
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


def test_points_are_not_rounded_to_the_dtype_of_the_law():
    probs = torch.tensor([[1.0, 2**-30, 0.0]])
    point = torch.tensor([1 - 2**-32], dtype=torch.float64)  # 1 in float32, and behind the first token in float64
    assert int(sample(probs, point)) == 1
    assert int(sample(probs, torch.tensor([1 - 2**-29], dtype=torch.float64))) == 0


def test_a_law_may_sum_to_anything():
    probs = torch.tensor([[0.2, 0.2], [3.0, 3.0]])
    assert sample(probs, torch.tensor([0.49, 0.49])).tolist() == [0, 0]
    assert sample(probs, torch.tensor([0.51, 0.51])).tolist() == [1, 1]


def test_without_float64_a_point_that_rounds_up_to_the_end_draws_a_possible_token(monkeypatch):
    assert sampling._sum_dtype(torch.device("mps")) == torch.float32
    monkeypatch.setattr(sampling, "_sum_dtype", lambda device: torch.float32)
    almost_one = torch.tensor([1 - 2**-53], dtype=torch.float64)  # 1 in float32
    assert int(sample(torch.tensor([[0.3, 0.4, 0.0]]), almost_one)) == 1


def test_uniforms_come_from_the_global_generator():
    torch.manual_seed(3)
    first, second = draw_uniforms(2, 3, device=CPU), draw_uniforms(2, 3, device=CPU)
    torch.manual_seed(3)
    assert torch.equal(first, draw_uniforms(2, 3, device=CPU))
    assert first.shape == (2, 3)
    # no number twice: rows, slots and calls are independent
    assert len(torch.cat([first, second]).unique()) == 12
    # 53 random bits: with 24 every number would be a multiple of 2**-24
    assert (first * 2**24 % 1 != 0).all()


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


def test_a_processor_may_write_in_place():
    def forbids_the_last(ids, scores):
        return scores.scatter_(1, ids[:, -1:], -torch.inf)

    logits = torch.zeros(1, 3, 4)
    got = ScoreProcessor(LogitsProcessorList([forbids_the_last])).over_block(
        torch.tensor([[1]]), torch.tensor([[2, 3]]), logits
    )
    assert got.isinf().nonzero()[:, 2].tolist() == [1, 2, 3]
    assert not logits.any(), "the raw logits are what output_logits gives back"


def test_rows_of_several_lengths_are_processed_as_each_alone():
    """Behind a row's text its buffer holds junk; row numbers are those of the batch, whose row 0 has left."""
    texts, rows = [[3, 5, 7], [9, 2], [9, 2, 4, 6], [1, 8]], (1, 2, 3, 4)
    buffer = torch.tensor([text + [11] * (6 - len(text)) for text in texts])
    drafts = torch.tensor([[1, 4], [7, 7], [0, 2], [12, 3]])
    logits = torch.randn(4, 3, 13, generator=torch.Generator().manual_seed(3))
    prefixes = Prefixes(buffer, torch.tensor([len(text) for text in texts]), tuple(map(len, texts)), rows)

    def for_rows(rows):
        return LogitsProcessorList([lambda ids, scores: scores + places(ids, torch.tensor(rows))])

    def places(ids, rows):
        """Numbers that depend on every token, on their order and on the row."""
        weights = torch.arange(1, ids.shape[1] + 1)
        return torch.sin((ids * weights).sum(1) + 100 * rows)[:, None]

    batch = LogitsProcessorList([lambda ids, scores: scores / 0])
    got = ScoreProcessor(batch, for_rows).over_block(prefixes, drafts, logits)
    for r, text in enumerate(texts):
        for i in range(3):
            ids = torch.tensor([text + drafts[r, :i].tolist()])
            expected = logits[r : r + 1, i] + places(ids, torch.tensor([rows[r]]))
            torch.testing.assert_close(got[r : r + 1, i], expected)
    assert prefixes.last.tolist() == [7, 2, 6, 8]
    assert prefixes.followed_by(drafts).last.tolist() == [4, 7, 2, 3]
    assert torch.equal(prefixes.ids, buffer)


def test_a_broken_law_gives_no_id_outside_the_vocabulary():
    probs = torch.tensor([[float("nan")] * 3, [0.0] * 3])
    assert sample(probs, torch.tensor([0.5, 0.5])).max() <= 2


def test_law_is_float32():
    assert law(torch.zeros(1, 4, dtype=torch.bfloat16)).dtype == torch.float32


# -- drafts -------------------------------------------------------------------------------------------------------

PREFIX = torch.tensor([[7, 2, 5], [7, 3, 4]])
SLOTS = 4


def part_of_a_block(slots=SLOTS, vocab=61):
    """Backbone output and parallel logits for two rows."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, slots, 32, generator=generator), torch.randn(2, slots, vocab, generator=generator)


def draft(drafter, hidden, base, processors=(), *, do_sample=True, prefix=PREFIX):
    processor = ScoreProcessor(LogitsProcessorList(processors))
    return draft_block(drafter, hidden, base, prefix, processor, draft_ids=None, do_sample=do_sample)


def leans_on_the_last_token(ids, scores):
    return scores + 3 * torch.cos(ids[:, -1:] * torch.arange(scores.shape[-1]))


READS_PREFIX = [lp.RepetitionPenaltyLogitsProcessor(3.0), leans_on_the_last_token]
WARPS = [lp.TemperatureLogitsWarper(0.5), lp.TopKLogitsWarper(9)]


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=2)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("processors", [[], WARPS, READS_PREFIX + WARPS], ids=["none", "warpers", "prefix"])
@pytest.mark.parametrize("do_sample", [False, True])
@torch.no_grad()
def test_each_draft_is_drawn_from_the_law_that_is_kept(target, monkeypatch, head, processors, do_sample):
    drafter = tiny_drafter(target, target_layer_ids=[0], num_hidden_layers=1, markov_head_type=head)
    hidden, base = part_of_a_block()
    uniforms = torch.rand(SLOTS, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    monkeypatch.setattr(draft_stage, "draw_uniforms", lambda *shape, device: uniforms.clone().view(shape))
    block = draft(drafter, hidden, base, processors, do_sample=do_sample)
    markov, ids = drafter.markov_head, PREFIX
    for k in range(SLOTS):
        tokens = torch.cat([PREFIX[:, -1:], block.tokens[:, :k]], dim=1)
        codes = markov.codes(markov.embed(tokens), hidden[:, : k + 1])
        scores = LogitsProcessorList(processors)(ids, base[:, k] + markov.markov_w2(codes[:, -1]))
        if do_sample:
            torch.testing.assert_close(block.draft_probs[:, k], law(scores))
            assert torch.equal(block.tokens[:, k], sample(block.draft_probs[:, k], uniforms[k]))
        else:
            assert torch.equal(block.tokens[:, k], scores.argmax(-1))
        ids = torch.cat([ids, block.tokens[:, k : k + 1]], dim=1)
    assert (block.draft_probs is None) is not do_sample
    assert len(block.tokens.unique()) > 2, "rows and slots must differ, or mixing them up would pass"


@torch.no_grad()
def test_a_draft_follows_its_law_to_the_last_bit_of_it(target, monkeypatch):
    """A uniform just below and just above a boundary of the kept law gives the tokens on either side."""
    drafter = tiny_drafter(target, target_layer_ids=[0], num_hidden_layers=1)
    hidden, base = part_of_a_block(1)
    boundary = draft(drafter, hidden, base).draft_probs[:, 0].double().cumsum(-1)
    for side, shift in ((30, -1e-7), (31, 1e-7)):
        points = (boundary[:, 30] / boundary[:, -1] + shift)[None]
        monkeypatch.setattr(draft_stage, "draw_uniforms", lambda *shape, device, points=points: points)
        assert draft(drafter, hidden, base).tokens[:, 0].tolist() == [side, side]


@torch.no_grad()
def test_rows_of_equal_drafts_are_drawn_independently(target):
    drafter = tiny_drafter(target, target_layer_ids=[0], num_hidden_layers=1, markov_rank=0,
                           confidence_head_with_markov=False)  # fmt: skip
    torch.manual_seed(0)
    tokens = draft(drafter, torch.zeros(2, 16, 32), torch.zeros(2, 16, 61)).tokens
    # of 16 uniform draws among 61 tokens, rows or slots that share their numbers would agree in all
    assert (tokens[0] == tokens[1]).sum() < 4
    assert all(len(row.unique()) > 8 for row in tokens)


def raises_at_nan(ids, scores):
    if scores.isnan().any() or (scores == torch.inf).any():
        raise ValueError("as some processors do")
    return scores


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("do_sample", [False, True])
@torch.no_grad()
def test_slots_are_usable_up_to_the_first_broken_one(target, do_sample, number):
    drafter = tiny_drafter(target, target_layer_ids=[0], num_hidden_layers=1)
    hidden, base = part_of_a_block()
    base[0, 2, 7] = number
    base[1, :, :5] = -torch.inf  # a head that rules ids out is sound
    block = draft(drafter, hidden, base, [raises_at_nan], do_sample=do_sample)
    assert block.num_usable.tolist() == [2, 4]
    assert block.tokens.max() < 61


@torch.no_grad()
def test_a_slot_whose_processors_forbid_all_is_not_usable(target):
    def forbids_all_of_row_1(ids, scores):
        third = ids.shape[1] == PREFIX.shape[1] + 2
        return scores.index_fill(0, torch.tensor([1]), -torch.inf) if third else scores

    drafter = tiny_drafter(target, target_layer_ids=[0], num_hidden_layers=1)
    assert draft(drafter, *part_of_a_block(), [forbids_all_of_row_1]).num_usable.tolist() == [4, 2]


@torch.no_grad()
def test_a_broken_confidence_cuts_the_block_at_its_slot(target):
    drafter = tiny_drafter(target, target_layer_ids=[0], num_hidden_layers=1)
    hidden, base = part_of_a_block()
    hidden[1, 2] = float("inf")  # of this drafter, only the confidence head reads it
    block = draft(drafter, hidden, base, do_sample=False)
    assert block.num_usable.tolist() == [4, 2]


@torch.no_grad()
def test_confidences_read_the_token_before_and_are_float32(target):
    drafter = tiny_drafter(target, target_layer_ids=[0], num_hidden_layers=1)
    hidden, base = part_of_a_block()
    block = draft(drafter, hidden, base)
    before = torch.cat([PREFIX[:, -1:], block.tokens[:, :-1]], dim=1)
    expected = drafter.confidence_head(hidden, drafter.markov_head.embed(before))
    torch.testing.assert_close(block.confidence_logits, expected)
    assert draft(drafter.to(torch.bfloat16), hidden.bfloat16(), base).confidence_logits.dtype == torch.float32
