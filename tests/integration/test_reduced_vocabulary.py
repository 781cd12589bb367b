"""A drafter that knows a part of the vocabulary only: it costs acceptance and never exactness.

Tokens outside have draft probability 0. Greedy output is that of plain generate(); the law of sampled output is the
target's, by enumeration and end to end, each next to a broken variant that must fail.
"""

from collections import Counter

import pytest
import torch
from laws import random_laws, round_law, sequence_law, total_variation
from scipy.stats import chisquare
from tiny import greedy, random_ids, tiny_drafter, tiny_target
from torch import nn

from dspark_hf import record_speculation
from dspark_hf.decoding import candidate_generator
from dspark_hf.decoding.accept import accept_sampled
from dspark_hf.model.draft_vocab import offsets_of

POLICIES = [
    {"verification_policy": "full"},
    {"verification_policy": "threshold", "assistant_confidence_threshold": 0.3},
    {"verification_policy": "threshold", "assistant_confidence_threshold": 0.9},
]
IDS = torch.arange(1, 61, 2)  # odd tokens
LEVEL = 1e-3


def reduced_drafter(target, ids=IDS, **overrides):
    drafter = tiny_drafter(target, draft_vocab_size=len(ids), **overrides)
    drafter.d2t.copy_(offsets_of(ids))
    return drafter


@pytest.fixture
def blocks(monkeypatch):
    """Every draft block of the generate() calls in a test."""
    seen = []
    original = candidate_generator.draft_block

    def spy(*args, **kwargs):
        seen.append(original(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(candidate_generator, "draft_block", spy)
    return seen


# -- greedy ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_target():
    return tiny_target()


@pytest.fixture(scope="module")
def plain_outputs(shared_target):
    prompts = [random_ids(3 + seed % 9, seed=seed) for seed in range(6)]
    return [(ids, greedy(shared_target, ids, max_new_tokens=16)) for ids in prompts]


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "rank_0"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: "-".join(map(str, policy.values())))
def test_greedy_output_is_the_plain_one(shared_target, plain_outputs, blocks, head, policy):
    options = {"markov_head_type": head}
    if head == "rank_0":
        options = {"markov_rank": 0, "confidence_head_with_markov": False}
    drafter = reduced_drafter(shared_target, **options)
    for ids, expected in plain_outputs:
        assert torch.equal(greedy(shared_target, ids, max_new_tokens=16, assistant_model=drafter, **policy), expected)
    assert all(bool(torch.isin(block.tokens, IDS).all()) for block in blocks)
    assert len({int(token) for block in blocks for token in block.tokens.flatten()}) > 5


def test_a_drafter_that_is_right_on_its_tokens_saves_forwards(shared_target, plain_outputs):
    """With every token the target says in the draft vocabulary, and none of them, output stays the same."""
    ids, expected = plain_outputs[3]
    said = expected[0, ids.shape[1] :].unique()
    silent = torch.tensor([i for i in range(61) if i not in said])
    for tokens in (said, silent):
        drafter = reduced_drafter(shared_target, tokens)
        output = greedy(shared_target, ids, max_new_tokens=16, assistant_model=drafter, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
    assert output.speculation.tau == 1.0


@torch.no_grad()
def test_greedy_drafts_are_the_best_of_the_draft_vocabulary(shared_target, plain_outputs, blocks):
    """The same drafter without the restriction drafts the best of all; masking its head by hand gives ours."""
    drafter = reduced_drafter(shared_target, markov_rank=0, confidence_head_with_markov=False)
    whole = tiny_drafter(shared_target, markov_rank=0, confidence_head_with_markov=False)
    whole.load_state_dict({k: v for k, v in drafter.state_dict().items() if k != "d2t"})
    ids, _ = plain_outputs[5]
    greedy(shared_target, ids, max_new_tokens=8, assistant_model=drafter)
    own = blocks[0].tokens.clone()
    blocks.clear()
    others = [i for i in range(61) if i not in IDS]
    whole.base_logits = lambda hidden, head: (
        type(whole).base_logits(whole, hidden, head).index_fill(-1, torch.tensor(others), -torch.inf)
    )
    greedy(shared_target, ids, max_new_tokens=8, assistant_model=whole)
    assert torch.equal(own, blocks[0].tokens)


class ScaledHead(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) * 1.5


@pytest.mark.parametrize("kind", ["hook", "subclass", "tied"])
def test_other_kinds_of_target_heads(kind):
    target = tiny_target()
    head = target.lm_head
    if kind == "hook":
        head.register_forward_hook(lambda module, inputs, output: output * 1.5)
    elif kind == "subclass":
        target.lm_head = ScaledHead(32, 61, bias=False)
        target.lm_head.weight = head.weight
    else:
        head.weight = target.get_input_embeddings().weight
    drafter = reduced_drafter(target)
    for seed in range(3):
        ids = random_ids(6, seed=seed)
        expected = greedy(target, ids, max_new_tokens=16)
        assert torch.equal(greedy(target, ids, max_new_tokens=16, assistant_model=drafter), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_drafter_of_another_dtype(shared_target, plain_outputs, dtype):
    drafter = reduced_drafter(shared_target).to(dtype)
    for ids, expected in plain_outputs[:3]:
        assert torch.equal(greedy(shared_target, ids, max_new_tokens=16, assistant_model=drafter), expected)
        shared_target.generate(ids, do_sample=True, max_new_tokens=16, assistant_model=drafter)


# -- logits processors ----------------------------------------------------------------------------------------------

SAMPLING_PROCESSORS = [
    {"top_k": 1}, {"top_k": 3}, {"top_k": 45}, {"top_p": 0.1}, {"top_p": 0.8}, {"min_p": 0.2}, {"typical_p": 0.4},
    {"temperature": 0.1}, {"epsilon_cutoff": 0.05}, {"eta_cutoff": 0.05},
]  # fmt: skip
PROCESSORS = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.6},
    {"bad_words_ids": [[3], [4, 5]]},
    {"bad_words_ids": [[int(i)] for i in IDS]},
    {"suppress_tokens": IDS.tolist()},
    {"begin_suppress_tokens": IDS.tolist()},
    {"suppress_tokens": [i for i in range(61) if i not in IDS]},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 8, "eos_token_id": [2, 7]},
    {"forced_eos_token_id": 8, "eos_token_id": 8},
    {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 8},
]


@pytest.mark.parametrize("options", PROCESSORS, ids=lambda options: str(options)[:40])
def test_greedy_with_processors(shared_target, options):
    drafter = reduced_drafter(shared_target)
    for seed in range(2):
        ids = random_ids(7, seed=seed)
        expected = greedy(shared_target, ids, max_new_tokens=12, **options)
        for policy in POLICIES[:2]:
            got = greedy(shared_target, ids, max_new_tokens=12, assistant_model=drafter, **policy, **options)
            assert torch.equal(got, expected)


@pytest.mark.parametrize("options", PROCESSORS + SAMPLING_PROCESSORS, ids=lambda options: str(options)[:40])
@pytest.mark.parametrize("policy", POLICIES[:2], ids=lambda policy: policy["verification_policy"])
def test_sampling_with_processors(shared_target, blocks, options, policy):
    drafter = reduced_drafter(shared_target)
    torch.manual_seed(0)
    ids = random_ids(7, seed=1)
    options = {"top_k": 0} | options
    output = shared_target.generate(
        ids, do_sample=True, max_new_tokens=10, assistant_model=drafter, **policy, **options
    )
    assert output.min() >= 0 and output.max() < 61
    banned = set(options.get("suppress_tokens", []))
    assert not banned & set(output[0, 7:].tolist())
    outside = [i for i in range(61) if i not in IDS]
    for block in blocks:
        usable = int(block.num_usable[0])
        probs = block.draft_probs[0, :usable]
        torch.testing.assert_close(probs.sum(-1), torch.ones(usable), atol=1e-5, rtol=0)
        if "forced_eos_token_id" not in options:  # it moves all mass to its token
            assert (probs[:, outside] == 0.0).all()


def test_where_the_whole_draft_vocabulary_is_banned_nothing_is_verified(shared_target):
    drafter = reduced_drafter(shared_target)
    options = {"max_new_tokens": 12, "assistant_model": drafter, "suppress_tokens": IDS.tolist()}
    with record_speculation() as report:
        shared_target.generate(random_ids(7), do_sample=True, **options)
    assert report.num_accepted == 0 and report.num_new_tokens == 12


# -- the law by enumeration -----------------------------------------------------------------------------------------


def accept(*args):
    acceptance = accept_sampled(*args)
    return acceptance.num_accepted, acceptance.next_token


def zero_outside(laws, draftable):
    """The laws renormalised on `draftable` tokens."""
    keep = torch.zeros(len(laws[()]), dtype=torch.float64)
    keep[draftable] = 1.0
    return {prefix: law * keep / (law * keep).sum() for prefix, law in laws.items()}


def enumerated_tv(draftable, seed, *, vocab=4, num_slots=2, target_outside_only=False, accept=accept, length_of=None):
    draft = zero_outside(random_laws(vocab, num_slots, seed, sharpness=1.5), draftable)
    target = random_laws(vocab, num_slots, seed + 1000, sharpness=1.5)
    if target_outside_only:
        target = zero_outside(target, [i for i in range(vocab) if i not in draftable])
    got = round_law(accept, draft, target, vocab, num_slots, length_of or (lambda tokens: num_slots))
    assert sum(got.values()) == pytest.approx(1.0, abs=1e-12)
    return total_variation(got, sequence_law(target, vocab, num_slots + 1))


@pytest.mark.parametrize("draftable", [[0], [3], [1, 2], [0, 3], [0, 1, 3]], ids=str)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("length", [1, 2])
def test_a_round_commits_the_target_law(draftable, seed, length):
    assert enumerated_tv(draftable, seed, length_of=lambda tokens: length) < 1e-12
    assert enumerated_tv(draftable, seed, target_outside_only=True, length_of=lambda tokens: length) < 1e-12


def renormalised(draftable):
    """The planted mistake: the target's law is compared, and drawn from, on the draft vocabulary only."""

    def function(tokens, draft_probs, target_probs, *rest):
        keep = torch.zeros(target_probs.shape[-1], dtype=target_probs.dtype)
        keep[draftable] = 1.0
        kept = target_probs * keep
        return accept(tokens, draft_probs, kept / kept.sum(-1, keepdim=True), *rest)

    return function


def without_residual(tokens, draft_probs, target_probs, *rest):
    """Another: after a rejection the draw is from the target's law outside the draft vocabulary."""
    num_accepted, _ = accept(tokens, draft_probs, target_probs, *rest)
    rows = torch.arange(len(tokens))
    law = target_probs[rows, num_accepted] * (draft_probs[rows, num_accepted.clamp(max=1)] == 0)
    cumulative = law.cumsum(-1)
    point = rest[-1] * cumulative[:, -1]
    return num_accepted, torch.searchsorted(cumulative, point[:, None], right=True).squeeze(1).clamp(max=3)


def test_control_a_target_law_renormalised_on_the_draft_vocabulary_is_biased():
    assert enumerated_tv([0, 3], 0, accept=renormalised([0, 3])) > 1e-1


def test_control_a_residual_outside_the_draft_vocabulary_only_is_biased():
    assert enumerated_tv([0, 3], 0, accept=without_residual) > 1e-2


# -- the law end to end ---------------------------------------------------------------------------------------------

VOCAB = 5


@pytest.fixture(scope="module")
def small_pair():
    """A target with moderate laws over five tokens, and a drafter that knows two of them."""
    target = tiny_target(vocab_size=VOCAB, seed=11)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.25)
    drafter = reduced_drafter(target, torch.tensor([1, 4]), block_size=3, num_hidden_layers=1)
    return target, drafter


@torch.no_grad()
def exact_law(target, prompt, length, change=lambda logits: logits):
    joint = {(): 1.0}
    for _ in range(length):
        prefixes = list(joint)
        ids = torch.cat([prompt.expand(len(prefixes), -1), torch.tensor(prefixes).long().view(len(prefixes), -1)], 1)
        laws = change(target(ids).logits[:, -1].float()).softmax(-1).double()
        joint = {(*p, t): joint[p] * float(laws[i, t]) for i, p in enumerate(prefixes) for t in range(VOCAB)}
    return joint


def top_3(logits):
    return logits.masked_fill(logits < logits.topk(3).values[:, -1:], -torch.inf)


def p_value(counts, joint):
    """Chi-square; cells expected fewer than 5 times are pooled, impossible ones fail."""
    total = sum(counts.values())
    assert all(joint[key] > 0 for key in counts), "a sequence of probability 0 was drawn"
    common = [key for key, p in joint.items() if p * total >= 5]
    observed, expected = [counts.get(key, 0) for key in common], [joint[key] * total for key in common]
    if total - sum(expected) > 1e-6 * total:
        observed.append(total - sum(observed))
        expected.append(total - sum(expected))
    return chisquare(observed, [e * sum(observed) / sum(expected) for e in expected]).pvalue


def draw(pair, num_draws, seed, **options):
    """Tokens 2 and 3 of many generate() calls, and their exact law; token 1 comes before any draft."""
    target, drafter = pair
    prompt = random_ids(6, vocab_size=VOCAB)
    torch.manual_seed(seed)
    counts, law = Counter(), Counter()
    for _ in range(num_draws):
        output = target.generate(
            prompt, do_sample=True, max_new_tokens=4, assistant_model=drafter, **{"top_k": 0} | options
        )
        counts[tuple(output[0, 7:9].tolist())] += 1
    change = top_3 if "top_k" in options else lambda logits: logits
    for tokens, p in exact_law(target, prompt, 3, change).items():
        law[tokens[1:]] += p
    return counts, law


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 3}, {"verification_policy": "threshold", "assistant_confidence_threshold": 0.12}],
    ids=["full", "top_k", "threshold"],
)
def test_generate_follows_the_target_law(small_pair, options):
    with record_speculation() as report:
        assert p_value(*draw(small_pair, 300, seed=1, **options)) > LEVEL
    assert 0 < report.num_accepted < report.num_verified <= report.num_drafted


@pytest.mark.full
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_generate_follows_the_target_law_with_many_draws(small_pair, head):
    ids = torch.tensor([0, 1, 4])
    drafter = reduced_drafter(small_pair[0], ids, block_size=3, num_hidden_layers=1, markov_head_type=head)
    assert p_value(*draw((small_pair[0], drafter), 3000, seed=2)) > LEVEL


def test_control_a_renormalised_target_law_is_caught_at_this_sample_size(small_pair, monkeypatch):
    from dspark_hf.decoding import accept

    original = accept.accept_sampled

    def biased(tokens, draft_probs, target_probs, *rest):
        keep = torch.zeros(VOCAB)
        keep[[1, 4]] = 1.0
        # A little mass outside stays, so that no drawn sequence is impossible.
        kept = target_probs * (keep + 0.2)
        return original(tokens, draft_probs, kept / kept.sum(-1, keepdim=True), *rest)

    monkeypatch.setattr(accept, "accept_sampled", biased)
    assert p_value(*draw(small_pair, 300, seed=1)) < 1e-6
