"""Sampling against the target's exact law: draws through generate(), and through its stages with many rows at once.

Everything happens after one prompt on a vocabulary of five tokens. generate() draws four: the first comes before any
draft, the next two are drafted in slots 1 and 2 of the first round, and those two are compared. Seeds are fixed, so a
test gives the same answer each time; levels were chosen beforehand.
"""

import functools
import itertools
from collections import Counter
from unittest import mock

import torch
from scipy.stats import chisquare
from tiny import random_ids, tiny_baseline, tiny_drafter, tiny_target
from transformers import GenerationConfig, WatermarkingConfig
from transformers.generation.logits_process import LogitsProcessorList

from dspark_hf.decoding import candidate_generator
from dspark_hf.decoding.accept import accept_sampled
from dspark_hf.decoding.autoregressive import AutoregressiveCandidateGenerator, generator_class
from dspark_hf.decoding.draft import draw_slots, num_before_first
from dspark_hf.decoding.sampling import ScoreProcessor, draw_uniforms, law
from dspark_hf.decoding.types import DraftBlock
from dspark_hf.model.draft_vocab import offsets_of

VOCAB = 5
NUM_NEW = 4
NUM_DRAWS = 4000
PROMPT = random_ids(6, vocab_size=VOCAB)
LEVEL = 1e-3  # false alarms of a whole file, shared among its tests
CAUGHT = 1e-6  # a planted bias must reach this


class Watermark(WatermarkingConfig):
    """Builds its processor once: each one shuffles a million numbers, and draws are many."""

    def construct_processor(self, vocab_size, device):
        return _watermark(self.greenlist_ratio, self.bias, vocab_size, device)


@functools.cache
def _watermark(greenlist_ratio, bias, vocab_size, device):
    return WatermarkingConfig(greenlist_ratio=greenlist_ratio, bias=bias).construct_processor(vocab_size, device)


HEADS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "rank_0": {"markov_rank": 0, "confidence_head_with_markov": False},
}
# What generate() builds stateless processors from; ids of a prompt of six and four new tokens over five ids.
ALONE = {
    "temperature_1": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.5},
    "top_h": {"top_h": 0.8},
    "typical_p": {"typical_p": 0.4},
    "epsilon_cutoff": {"epsilon_cutoff": 0.2},
    "eta_cutoff": {"eta_cutoff": 0.5},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 4.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[3], [0, 2]]},
    "sequence_bias": {"sequence_bias": [[[1], 1.0], [[2, 4], -2.0]]},
    "suppress_tokens": {"suppress_tokens": [1]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [1]},
    "min_new_tokens": {"min_new_tokens": 2, "eos_token_id": 4},
    "min_length": {"min_length": 8, "eos_token_id": 4},
    "forced_eos_token_id": {"forced_eos_token_id": 3, "eos_token_id": 3},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (0, 2.5), "eos_token_id": 2},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [0, 1, 3, 4] if ids[-1] else [1, 2]},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True, "sequence_bias": [[[1], 1.0]]},
    "watermarking_config": {"watermarking_config": Watermark(greenlist_ratio=0.4, bias=1.0)},
}
STACKED = {
    "temperature+top_k+top_p": {"temperature": 1.3, "top_k": 4, "top_p": 0.8},
    "penalties+min_p+renormalize": {
        "repetition_penalty": 2.0, "no_repeat_ngram_size": 3, "temperature": 0.7, "min_p": 0.3,
        "renormalize_logits": True,
    },
    "bias+lengths+typical+watermark": {
        "sequence_bias": [[[1], 0.5]], "min_new_tokens": 2, "eos_token_id": 4, "typical_p": 0.9, "eta_cutoff": 0.05,
        "exponential_decay_length_penalty": (2, 1.2),
        "watermarking_config": Watermark(greenlist_ratio=0.4, bias=1.0),
    },
}  # fmt: skip
OPTIONS = ALONE | STACKED


def small_target():
    """A target with moderate laws over five tokens."""
    target = tiny_target(vocab_size=VOCAB, num_layers=2, seed=11)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.25)
    return target


def small_drafter(target, head="vanilla", *, ids=None, **overrides):
    """A drafter with other laws than the target; `ids` are its draft vocabulary, by default all."""
    reduced = {} if ids is None else {"draft_vocab_size": len(ids)}
    settings = {"block_size": 3, "num_hidden_layers": 1} | HEADS[head] | reduced | overrides
    drafter = tiny_drafter(target, **settings)
    if ids is not None:
        drafter.d2t.copy_(offsets_of(torch.tensor(ids)))
    return drafter


def small_baseline(target, kind, *, ids=None, seed=3):
    """As [`small_drafter`], MTP or Eagle3."""
    reduced = {} if ids is None else {"draft_vocab_size": len(ids)}
    slots = {"block_size": 3} if kind == "eagle3" else {}
    drafter = tiny_baseline(target, kind, seed=seed, **slots | reduced)
    if kind == "eagle3":
        with torch.no_grad():
            drafter.lm_head.weight.mul_(0.25)
    if ids is not None:
        drafter.d2t.copy_(offsets_of(torch.tensor(ids)))
    return drafter


def arguments(options):
    """generate()'s arguments for draws under `options`."""
    return {"do_sample": True, "top_k": 0, "max_new_tokens": NUM_NEW, "pad_token_id": 0} | options


def processors_of(target, options):
    """The processors that plain generate() builds for [`arguments`]."""
    built = []
    build = target._get_logits_processor

    def spy(*args, **kwargs):
        built.append(build(*args, **kwargs))
        return built[-1]

    with mock.patch.object(target, "_get_logits_processor", spy):
        target.generate(PROMPT, **arguments(options))
    return built[0]


@torch.no_grad()
def laws_after(target, start, prefixes, processors):
    """The target's law float64 `[vocab]` after `start` `[1, length]` and each prefix of one length.

    Processors see one row at a time, as in plain sampling.
    """
    ids = torch.cat([start.expand(len(prefixes), -1), torch.tensor(prefixes, dtype=torch.long)], 1)
    logits = target(ids).logits[:, -1].float()
    return {
        prefix: processors(ids[i : i + 1], logits[i : i + 1].clone()).softmax(-1)[0].double()
        for i, prefix in enumerate(prefixes)
    }


def exact_law(target, options):
    """Joint law of the tokens that generate() adds, cut at the end-of-sequence token."""
    processors, eos = processors_of(target, options), options.get("eos_token_id")
    joint, done = {(): 1.0}, {}
    for _ in range(NUM_NEW):
        laws = laws_after(target, PROMPT, list(joint), processors)
        longer = {
            (*prefix, token): joint[prefix] * p
            for prefix, step in laws.items()
            for token, p in enumerate(step.tolist())
        }
        done |= {tokens: mass for tokens, mass in longer.items() if tokens[-1] == eos and mass > 0.0}
        joint = {tokens: mass for tokens, mass in longer.items() if tokens[-1] != eos and mass > 0.0}
    return done | joint


def p_value(counts, joint):
    """Chi-square of counts against a law; cells expected fewer than 5 times are pooled; impossible ones fail."""
    total = sum(counts.values())
    assert all(joint.get(key, 0.0) > 0.0 for key in counts), "what has probability 0 was drawn"
    common = [key for key, p in joint.items() if p * total >= 5]
    observed, expected = [counts.get(key, 0) for key in common], [joint[key] * total for key in common]
    if total - sum(expected) > 1e-6 * total:
        observed.append(total - sum(observed))
        expected.append(total - sum(expected))
    if len(expected) == 1:  # nothing is left to chance
        return 1.0
    return float(chisquare(observed, [e * sum(observed) / sum(expected) for e in expected]).pvalue)


# -- through generate() ---------------------------------------------------------------------------------------------


def generated(target, drafter, num_draws, seed, **options):
    """Counts of what generate() adds, one call per draw."""
    torch.manual_seed(seed)
    counts = Counter()
    for _ in range(num_draws):
        output = target.generate(PROMPT, assistant_model=drafter, **arguments(options))
        counts[tuple(output[0, PROMPT.shape[1] :].tolist())] += 1
    return counts


def drafted_part(law):
    """Counts or masses of the tokens behind the first, which come from slots 1 and 2."""
    part = Counter()
    for tokens, amount in law.items():
        part[tokens[1:3]] += amount
    return part


def generated_p_value(target, drafter, options, num_draws, seed, *, joint=None, **knobs):
    """Chi-square of generate() with a drafter; `knobs` are arguments that do not change the law."""
    counts = generated(target, drafter, num_draws, seed, **options, **knobs)
    joint = exact_law(target, options) if joint is None else joint
    assert all(tokens in joint for tokens in counts), "a sequence of probability 0 was drawn"
    return p_value(drafted_part(counts), drafted_part(joint))


# -- through one call of generate(), the draws side by side ----------------------------------------------------------


def draws(target, drafter, options, seed, **knobs):
    """New tokens int64 `[NUM_DRAWS, NUM_NEW]` of one call."""
    torch.manual_seed(seed)
    output = target.generate(
        PROMPT.to(target.device), assistant_model=drafter, num_return_sequences=NUM_DRAWS, **arguments(options) | knobs
    )
    return output[:, PROMPT.shape[1] :].cpu()


def law_p_value(target, drafter, options, seed, *, joint=None, **knobs):
    """Chi-square of the texts, cut at the end token, against the exact law."""
    eos = options.get("eos_token_id")
    counts = Counter()
    for tokens in draws(target, drafter, options, seed, **knobs).tolist():
        end = tokens.index(eos) + 1 if eos in tokens else len(tokens)
        counts[tuple(tokens[:end])] += 1
    return p_value(counts, exact_law(target, options) if joint is None else joint)


# -- through the stages ---------------------------------------------------------------------------------------------


def tree_of_logits(generator, ids, num_slots):
    """An autoregressive drafter's logits `[draftable]` after each draft prefix, along the way that drafting takes."""
    logits, drafter = {}, generator.drafter

    def visit(prefix, outputs):
        hidden = outputs.last_hidden_state[:, -1:]
        logits[prefix] = drafter.base_logits(hidden, generator._head)[0, 0]
        for token in range(VOCAB) if len(prefix) < num_slots - 1 else ():
            state = outputs.hidden_states[0][:, -1:]
            visit((*prefix, token), generator._read(torch.tensor([[token]]), generator._cache.length, states=state))
            generator._cache.forget(1)

    visit((), generator._read_committed(ids))
    return logits


def propose_autoregressive_rows(generator, ids, rows):
    """As [`propose_rows`]: the prefixes of a small vocabulary are few, so each is run once and rows look theirs up."""
    num_slots = min(generator.drafter.config.block_size, generator._max_length - ids.shape[1] - 1)
    logits, drawn = tree_of_logits(generator, ids, num_slots), []

    def slot_logits(k, previous):
        if k:
            drawn.append(previous)
        prefixes = torch.stack(drawn, 1).tolist() if drawn else [()] * rows
        return torch.stack([logits[tuple(prefix)] for prefix in prefixes])

    slots = draw_slots(
        slot_logits, num_slots, ids.expand(rows, -1), generator.processor,
        draft_ids=generator._draft_ids, do_sample=generator.do_sample, vocab_size=VOCAB,
    )  # fmt: skip
    block = DraftBlock(slots.tokens, slots.draft_probs, None, num_before_first(~slots.is_usable))
    return generator._scheduled(block, row_ids=range(rows))


def propose_rows(generator, ids, rows):
    """Stages 1 to 3 of `rows` independent rounds after `ids` `[1, length]`."""
    if isinstance(generator, AutoregressiveCandidateGenerator):
        return propose_autoregressive_rows(generator, ids, rows)
    draft_block = candidate_generator.draft_block

    def many(drafter, hidden, base_logits, prefix_ids, *args, anchor_hidden=None, **kwargs):
        if anchor_hidden is not None:
            kwargs["anchor_hidden"] = anchor_hidden.expand(rows, -1)
        return draft_block(
            drafter, *(tensor.expand(rows, *tensor.shape[1:]) for tensor in (hidden, base_logits, prefix_ids)),
            *args, **kwargs,
        )  # fmt: skip

    with mock.patch.object(candidate_generator, "draft_block", many):
        return generator.propose(ids)


@torch.no_grad()
def staged_rounds(target, drafter, options, rows, seed, *, first=1, processors=None, lengths_of=None, **knobs):
    """One round of each of many rows after the prompt and its `first` new token.

    Args:
        lengths_of: `(tokens, lengths)` to the lengths verified; plants a bias.
        knobs: Of the policy.

    Returns:
        `(counts, joint, proposal, acceptance)` of three tokens; what a round left open is drawn from the target.
    """
    processors = processors_of(target, options) if processors is None else processors
    processors = LogitsProcessorList(processors)
    config = GenerationConfig(do_sample=True, max_length=PROMPT.shape[1] + NUM_NEW, **knobs)
    generator = generator_class(drafter)(drafter, target, config, processors, {})
    generator.observe(target(PROMPT, **generator.model_kwargs_overrides))
    ids = torch.cat([PROMPT, torch.tensor([[first]])], 1)
    torch.manual_seed(seed)
    proposal = propose_rows(generator, ids, rows)
    tokens, lengths = proposal.block.tokens, proposal.lengths
    if lengths_of is not None:
        lengths = lengths_of(tokens, lengths)
    # Every block that could be drafted, verified once; rows look theirs up.
    slots = tokens.shape[1]
    blocks = torch.tensor(list(itertools.product(range(VOCAB), repeat=slots)))
    prefix = ids.expand(len(blocks), -1)
    logits = target(torch.cat([prefix, blocks], 1)).logits[:, -slots - 1 :].float()
    target_probs = law(ScoreProcessor(processors).over_block(prefix, blocks, logits))
    target_probs = target_probs[(tokens * VOCAB ** torch.arange(slots - 1, -1, -1)).sum(1)]
    acceptance = accept_sampled(
        tokens, proposal.block.draft_probs, target_probs, lengths,
        draw_uniforms(rows, slots, device=tokens.device), draw_uniforms(rows, device=tokens.device),
    )  # fmt: skip
    laws = {}
    for length in range(slots + 1):
        laws |= laws_after(target, ids, list(itertools.product(range(VOCAB), repeat=length)), processors)
    return _completed(tokens, acceptance, laws, slots + 1), _joint(laws, slots + 1), proposal, acceptance


def _joint(laws, length):
    joint = {(): 1.0}
    for _ in range(length):
        joint = {(*key, token): mass * float(laws[key][token]) for key, mass in joint.items() for token in range(VOCAB)}
    return {key: mass for key, mass in joint.items() if mass > 0.0}


def _completed(tokens, acceptance, laws, length):
    starts = Counter()
    for row, kept, following in zip(
        tokens.tolist(), acceptance.num_accepted.tolist(), acceptance.next_token.tolist(), strict=True
    ):
        starts[(*row[:kept], following)] += 1
    while any(len(key) < length for key in starts):
        longer = Counter()
        for key, count in starts.items():
            if len(key) == length:
                longer[key] += count
                continue
            for token in torch.multinomial(laws[key], count, replacement=True).tolist():
                longer[*key, token] += 1
        starts = longer
    return starts


def staged_p_value(*args, **kwargs):
    """Chi-square of [`staged_rounds`]."""
    counts, joint, _, _ = staged_rounds(*args, **kwargs)
    return p_value(counts, joint)
