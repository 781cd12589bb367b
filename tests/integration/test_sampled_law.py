"""Sampling end to end: what generate() with a drafter draws follows the target's law.

Two kinds of test. Through the stages with thousands of rows at once (every draw is a row), and through generate()
itself with fewer draws. Seeds are fixed: the tests are deterministic, and their level was chosen beforehand.
"""

import itertools
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare
from tiny import random_ids, tiny_drafter, tiny_target
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList

from dspark_hf import record_speculation
from dspark_hf.decoding import draft as draft_stage
from dspark_hf.decoding.accept import accept_sampled
from dspark_hf.decoding.sampling import ScoreProcessor, draw_uniforms, law
from dspark_hf.decoding.schedule import FullPolicy, schedule
from dspark_hf.decoding.types import Confidence

VOCAB = 5
LEVEL = 1e-3
WARPERS = {
    "temperature_1": {},
    "temperature_0.7": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "stacked": {"temperature": 1.3, "top_k": 4, "top_p": 0.8},
    "repetition_penalty": {"repetition_penalty": 1.7},
}


@pytest.fixture(scope="module")
def pair():
    """A target with moderate laws over five tokens, and a drafter with other ones."""
    target = tiny_target(vocab_size=VOCAB, seed=11)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.25)
    drafter = tiny_drafter(target, block_size=3, num_hidden_layers=1)
    return target, drafter


def processors_of(target, options):
    config = GenerationConfig(do_sample=True, top_k=0, **{k: v for k, v in options.items() if k != "top_k"})
    config.top_k = options.get("top_k", 0)
    config._eos_token_tensor = None
    return target._get_logits_processor(
        generation_config=config, input_ids_seq_length=6, encoder_input_ids=None, prefix_allowed_tokens_fn=None,
        logits_processor=LogitsProcessorList(), device="cpu", model_kwargs={},
    )  # fmt: skip


@torch.no_grad()
def exact_law(target, prompt, processors, length):
    """Joint law of `length` tokens after the prompt, by running the target on every prefix."""
    joint = {(): 1.0}
    for _ in range(length):
        prefixes = list(joint)
        ids = torch.cat(
            [
                prompt.expand(len(prefixes), -1),
                torch.tensor(prefixes, dtype=torch.long).view(len(prefixes), -1),
            ],
            1,
        )
        laws = processors(ids, target(ids).logits[:, -1].float()).softmax(-1).double()
        joint = {
            (*prefix, token): joint[prefix] * float(laws[row, token])
            for row, prefix in enumerate(prefixes)
            for token in range(VOCAB)
        }
    return joint


def p_value(counts, joint):
    """Chi-square of counts against a joint law; cells expected fewer than 5 times are pooled; impossible ones fail."""
    total = sum(counts.values())
    assert all(joint[key] > 0 for key in counts), "a sequence of probability 0 was drawn"
    common = [key for key, p in joint.items() if p * total >= 5]
    observed = [counts.get(key, 0) for key in common]
    expected = [joint[key] * total for key in common]
    rest = total - sum(expected)
    if rest > 1e-6 * total:
        observed.append(total - sum(observed))
        expected.append(rest)
    scale = sum(observed) / sum(expected)
    return chisquare(observed, [e * scale for e in expected]).pvalue


@torch.no_grad()
def draw_rounds(pair, prompt, processors, rows, drop_token=None):
    """First two tokens of `rows` independent rounds; `drop_token` plants the bias that must be caught."""
    target, drafter = pair
    processor = ScoreProcessor(processors)
    config = drafter.config
    outputs = target(prompt, output_hidden_states=True)
    features = torch.cat([outputs.hidden_states[i + 1] for i in config.target_layer_ids], -1)[:, :-1]
    anchor = prompt.shape[1] - 1
    block_ids = torch.tensor([[int(prompt[0, -1])] + [config.mask_token_id] * (config.block_size - 1)])
    hidden = drafter(
        drafter.embed(block_ids, target.get_input_embeddings()),
        torch.arange(anchor, anchor + config.block_size)[None],
        context_features=features,
        context_position_ids=torch.arange(anchor)[None],
    ).last_hidden_state.expand(rows, -1, -1)
    base = drafter.base_logits(hidden[:1], target.get_output_embeddings()).expand(rows, -1, -1)
    prefix = prompt.expand(rows, -1)
    block = draft_stage.draft_block(drafter, hidden, base, prefix, processor, draft_ids=None, do_sample=True)
    lengths = schedule(FullPolicy(), block, Confidence(None, None))
    if drop_token is not None:
        lengths[block.tokens[:, 0] == drop_token] = 0
    logits = target(torch.cat([prefix, block.tokens], 1)).logits[:, -config.block_size - 1 :].float()
    target_probs = law(processor.over_block(prefix, block.tokens, logits))
    acceptance = accept_sampled(
        block.tokens, block.draft_probs, target_probs, lengths,
        draw_uniforms(rows, config.block_size, device=logits.device), draw_uniforms(rows, device=logits.device),
    )  # fmt: skip
    return block.tokens, acceptance, target_probs


def two_tokens(tokens, acceptance, target_probs):
    """First two committed tokens of each row, or the one that was committed."""
    counts = Counter()
    n, following = acceptance.num_accepted, acceptance.next_token
    for row in range(len(n)):
        if n[row] >= 2:
            pair = (int(tokens[row, 0]), int(tokens[row, 1]))
        elif n[row] == 1:
            pair = (int(tokens[row, 0]), int(following[row]))
        else:
            pair = (int(following[row]),)
        counts[pair] += 1
    return counts


def first_token_p_value(pair, options, rows, drop_token=None, seed=0):
    target, _ = pair
    prompt = random_ids(6, vocab_size=VOCAB)
    processors = processors_of(target, options)
    torch.manual_seed(seed)
    drawn = two_tokens(*draw_rounds(pair, prompt, processors, rows, drop_token))
    counts = Counter()
    for tokens, count in drawn.items():
        counts[tokens[:1]] += count
    single = p_value(counts, exact_law(target, prompt, processors, 1))
    # given that a draft was accepted first, the second token must follow the target's conditional law
    both = exact_law(target, prompt, processors, 2)
    return single, drawn, both


@pytest.mark.parametrize("name", WARPERS)
def test_rows_follow_the_target_law(pair, name):
    single, drawn, both = first_token_p_value(pair, WARPERS[name], 20_000)
    assert single > LEVEL
    for first in range(VOCAB):
        seconds = {key: count for key, count in drawn.items() if len(key) == 2 and key[0] == first}
        if sum(seconds.values()) < 200:
            continue
        mass = sum(p for key, p in both.items() if key[0] == first)
        conditional = {key: p / mass for key, p in both.items() if key[0] == first}
        assert p_value(seconds, conditional) > LEVEL


def test_a_token_that_breaks_the_drafter_does_not_bias_the_law(pair):
    target, _ = pair
    drafter = tiny_drafter(target, block_size=3, num_hidden_layers=1)
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight[2] = float("nan")
    prompt = random_ids(6, vocab_size=VOCAB, seed=8)
    assert int(prompt[0, -1]) != 2, "the anchor itself must not break the drafter"
    torch.manual_seed(5)
    tokens, acceptance, target_probs = draw_rounds((target, drafter), prompt, LogitsProcessorList(), 20_000)
    counts = Counter()
    for drawn, count in two_tokens(tokens, acceptance, target_probs).items():
        counts[drawn[:1]] += count
    assert acceptance.num_accepted[tokens[:, 0] == 2].max() == 1
    assert p_value(counts, exact_law(target, prompt, LogitsProcessorList(), 1)) > LEVEL


def test_control_dropping_a_draft_by_its_value_is_caught_at_this_sample_size(pair):
    values = [first_token_p_value(pair, {}, 20_000, drop_token=token)[0] for token in range(VOCAB)]
    assert min(values) < 1e-6


def generated_p_value(target, drafter, name, num_draws, seed, **options):
    """Chi-square of three tokens drawn by generate(), one call per draw."""
    prompt = random_ids(6, vocab_size=VOCAB)
    options = {"top_k": 0} | WARPERS[name] | options
    torch.manual_seed(seed)
    counts = Counter()
    for _ in range(num_draws):
        output = target.generate(prompt, do_sample=True, max_new_tokens=3, assistant_model=drafter, **options)
        counts[tuple(output[0, 6:].tolist())] += 1
    return p_value(counts, exact_law(target, prompt, processors_of(target, WARPERS[name]), 3))


@pytest.mark.parametrize("name", ["temperature_1", "top_k", "top_p", "temperature_0.7"])
def test_generate_follows_the_target_law(pair, name):
    assert generated_p_value(*pair, name, 700, seed=1) > LEVEL


@pytest.mark.parametrize("name", ["temperature_1", "repetition_penalty"])
def test_generate_follows_the_target_law_under_a_threshold(pair, name):
    threshold = {"verification_policy": "threshold", "assistant_confidence_threshold": 0.12}
    with record_speculation() as report:
        assert generated_p_value(*pair, name, 700, seed=3, **threshold) > LEVEL
    assert 0 < report.num_verified < report.num_drafted


@pytest.mark.full
@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_generate_follows_the_target_law_with_many_draws(pair, name, head):
    drafter = tiny_drafter(pair[0], block_size=3, num_hidden_layers=1, markov_head_type=head)
    assert generated_p_value(pair[0], drafter, name, 2000, seed=2) > LEVEL


def test_control_plain_sampling_passes_and_another_temperature_fails(pair):
    target, _ = pair
    prompt = random_ids(6, vocab_size=VOCAB)
    torch.manual_seed(4)
    rows = target.generate(prompt.expand(3000, -1), do_sample=True, top_k=0, max_new_tokens=3)[:, 6:]
    counts = Counter(map(tuple, rows.tolist()))
    assert p_value(counts, exact_law(target, prompt, processors_of(target, {}), 3)) > LEVEL
    assert p_value(counts, exact_law(target, prompt, processors_of(target, {"temperature": 0.7}), 3)) < 1e-6


def test_seeded_sampling_repeats_itself(pair):
    target, drafter = pair
    prompt = random_ids(6, vocab_size=VOCAB)
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append(target.generate(prompt, do_sample=True, max_new_tokens=20, assistant_model=drafter))
    assert torch.equal(*runs)


def test_exact_law_sums_to_one(pair):
    joint = exact_law(pair[0], random_ids(6, vocab_size=VOCAB), processors_of(pair[0], {"top_p": 0.7}), 2)
    assert sum(joint.values()) == pytest.approx(1.0)
    assert set(joint) == set(itertools.product(range(VOCAB), repeat=2))
