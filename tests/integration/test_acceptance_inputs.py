"""What acceptance is given by a real generate() call: the laws of the text so far, and fresh random numbers."""

import pytest
import torch
from tiny import OracleDrafter, greedy, random_ids, tiny_drafter, tiny_target

from dspark_hf.decoding import accept as accept_module
from dspark_hf.decoding import batch, candidate_generator
from dspark_hf.decoding.candidate_generator import DSparkCandidateGenerator

PROMPT = 5


def test_sampling_from_the_best_token_only_is_greedy():
    target, ids = tiny_target(), random_ids(PROMPT)
    expected = greedy(target, ids, max_new_tokens=24)
    for drafter in (tiny_drafter(target), OracleDrafter.for_target(target, expected[0])):
        got = target.generate(ids, do_sample=True, top_k=1, max_new_tokens=24, assistant_model=drafter)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("policy", [{}, {"verification_policy": "threshold", "assistant_confidence_threshold": 0.2}])
def test_acceptance_gets_the_processed_laws_and_fresh_numbers(monkeypatch, policy):
    """Every round of a sampled generation, against the target's law of the text so far and the draft laws as drawn."""
    target, ids = tiny_target(seed=4), random_ids(PROMPT)
    drafter = tiny_drafter(target, initializer_range=0.1)
    proposals, calls = [], []
    propose, accept = DSparkCandidateGenerator.propose, accept_module.accept_sampled

    def spy_propose(self, text):
        proposals.append((text.clone(), propose(self, text)))
        return proposals[-1][1]

    def spy_accept(*args):
        calls.append(args)
        return accept(*args)

    monkeypatch.setattr(DSparkCandidateGenerator, "propose", spy_propose)
    monkeypatch.setattr(accept_module, "accept_sampled", spy_accept)
    torch.manual_seed(0)
    options = {"temperature": 3.0, "top_k": 30, "repetition_penalty": 1.4}
    target.generate(ids, do_sample=True, max_new_tokens=30, assistant_model=drafter, **options, **policy)
    calls = calls[1:]  # the first is the prompt's
    assert len(calls) == len(proposals) > 5
    numbers = []
    for (text, proposal), (drafts, draft_probs, target_probs, lengths, uniforms, last) in zip(
        proposals, calls, strict=True
    ):
        numbers += [uniforms.flatten(), last]
        if proposal is None:
            continue
        width = int(proposal.lengths)
        assert lengths.tolist() == [width] == [drafts.shape[1]]
        assert torch.equal(drafts, proposal.block.tokens[:, :width])
        assert torch.equal(draft_probs[:, :width], proposal.block.draft_probs[:, :width])
        logits = target(torch.cat([text, drafts], dim=1)).logits[0, -width - 1 :].float()
        for k in range(width + 1):
            expected = law_by_hand(logits[k], torch.cat([text[0], drafts[0, :k]]), **options)
            torch.testing.assert_close(target_probs[0, k], expected, atol=1e-5, rtol=1e-3)
    numbers = torch.cat(numbers)
    assert len(numbers.unique()) == len(numbers), "no number is used twice"
    assert 0 < numbers.min() < 0.3 < 0.7 < numbers.max() < 1


def test_acceptance_gets_each_rows_laws_and_numbers_of_its_own(monkeypatch):
    """The same for a batch, where rows accept different numbers of drafts."""
    target, ids = tiny_target(seed=4), random_ids(3 * PROMPT).view(3, PROMPT)
    rounds, calls = [], []
    decide, accept = batch.BatchRun._accept_and_commit, accept_module.accept_sampled

    def spy_decide(self, outputs, drafts, lengths, proposal, **kwargs):
        rounds.append((self._prefixes().ids.clone(), [row.num_text for row in self._rows], proposal))
        return decide(self, outputs, drafts, lengths, proposal, **kwargs)

    def spy_accept(*args):
        calls.append(args)
        return accept(*args)

    monkeypatch.setattr(batch.BatchRun, "_accept_and_commit", spy_decide)
    monkeypatch.setattr(accept_module, "accept_sampled", spy_accept)
    torch.manual_seed(0)
    options = {"temperature": 3.0, "top_k": 30, "repetition_penalty": 1.4}
    drafter = tiny_drafter(target, initializer_range=0.1)
    target.generate(ids, do_sample=True, max_new_tokens=16, assistant_model=drafter, **options)
    numbers = []
    for (texts, num_text, proposal), (drafts, draft_probs, target_probs, lengths, uniforms, last) in zip(
        rounds, calls, strict=True
    ):
        numbers += [uniforms.flatten(), last]
        width = drafts.shape[1]
        if proposal is not None:
            assert torch.equal(draft_probs, proposal.block.draft_probs[:, :width])
        for row, length in enumerate(num_text):
            text, num_drafts = texts[row, :length], int(lengths[row])
            seen = torch.cat([text, drafts[row, :num_drafts]])
            logits = target(seen[None]).logits[0, -num_drafts - 1 :].float()
            for k in range(num_drafts + 1 if length < PROMPT + 16 else 0):
                expected = law_by_hand(logits[k], seen[: length + k], **options)
                torch.testing.assert_close(target_probs[row, k], expected, atol=1e-5, rtol=1e-3)
    assert len({tuple(num_text) for _, num_text, _ in rounds if len(set(num_text)) > 1}) > 1
    numbers = torch.cat(numbers)
    assert len(numbers.unique()) == len(numbers), "no number is used twice"


def test_rows_of_a_batch_are_given_the_drafts_of_their_solo_runs(monkeypatch):
    """Rows of different lengths, padded, on a small vocabulary, where a random drafter is right now and then."""
    target, lengths, padded_to = tiny_target(vocab_size=5, seed=3), (3, 9, 6), 9
    drafter = tiny_drafter(target)
    drafts = {}
    draft = candidate_generator.draft_block

    def spy(drafter, hidden, base_logits, prefix, *args, **kwargs):
        block = draft(drafter, hidden, base_logits, prefix, *args, **kwargs)
        if isinstance(prefix, torch.Tensor):
            drafts[tuple(prefix[0].tolist())] = block.tokens[0].tolist()
        else:
            for ids, length, row, tokens in zip(prefix.ids, prefix.lengths, prefix.rows, block.tokens, strict=True):
                text = tuple(ids[padded_to - lengths[row] : length].tolist())
                seen.append((drafts.get(text), tokens.tolist()))
        return block

    monkeypatch.setattr(candidate_generator, "draft_block", spy)
    prompts = [random_ids(length, vocab_size=5, seed=length) for length in lengths]
    seen, common = [], {"max_new_tokens": 40, "assistant_model": drafter}
    accepted = [greedy(target, ids, return_dict_in_generate=True, **common).speculation.num_accepted for ids in prompts]
    batch_ids = torch.cat([torch.nn.functional.pad(ids, (padded_to - ids.shape[1], 0)) for ids in prompts])
    mask = torch.cat([(torch.arange(padded_to) >= padded_to - length).long()[None] for length in lengths])
    greedy(target, batch_ids, attention_mask=mask, pad_token_id=0, **common)
    compared = [(alone, together) for alone, together in seen if alone is not None]
    assert len(compared) > 30
    assert min(accepted) > 3
    for alone, together in compared:
        num_slots = min(len(alone), len(together))  # fewer near max_length
        assert together[:num_slots] == alone[:num_slots]


def law_by_hand(logits, text, *, temperature, top_k, repetition_penalty):
    """The target's law after `text`, written out."""
    scores = logits.clone()
    for token in set(text.tolist()):
        scores[token] *= repetition_penalty if scores[token] < 0 else 1 / repetition_penalty
    scores = scores / temperature
    scores[scores < scores.sort(descending=True).values[top_k - 1]] = -torch.inf
    return scores.softmax(-1)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_forbidden_position_is_named(num_rows):
    target, ids = tiny_target(), random_ids(PROMPT)
    whole = greedy(target, ids, max_new_tokens=24)[0]

    def forbids_all_at_11(text, scores):
        return torch.full_like(scores, -torch.inf) if text.shape[1] == 11 else scores

    drafter = OracleDrafter.for_target(target, whole, hit_rate=1.0)
    with pytest.raises(RuntimeError, match="probability tensor at position 11 contains"):
        target.generate(
            ids.expand(num_rows, -1), do_sample=True, top_k=1, max_new_tokens=24, logits_processor=[forbids_all_at_11],
            assistant_model=drafter,
        )  # fmt: skip
