"""End tokens, stop strings, custom criteria and streamers at every offset of a block."""

import pytest
import torch
from tiny import OracleDrafter, greedy, random_ids, tiny_drafter, tiny_target
from tokenizers import Tokenizer, decoders, models
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

PROMPT = 5
# Seeds whose greedy texts use a new token at every place of a block.
SEEDS = {"qwen3": 0, "llama": 1}
OFFSETS = range(1, 18)  # two blocks of 7 drafts and more


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def setup(request):
    target, ids = tiny_target(request.param, seed=SEEDS[request.param]), random_ids(PROMPT)
    whole = greedy(target, ids, max_new_tokens=40)[0]
    return target, ids, whole, OracleDrafter.for_target(target, whole, hit_rate=1.0)


def first_use(whole, offset):
    """A token id whose first occurrence among the new tokens is at `offset`, or None."""
    new = whole[PROMPT:].tolist()
    return new[offset - 1] if new[offset - 1] not in new[: offset - 1] else None


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("offset", OFFSETS)
def test_end_token_at_every_offset(setup, offset, cache):
    target, ids, whole, drafter = setup
    eos = first_use(whole, offset)
    eos = [eos] if eos is not None else []
    eos += [60]  # several end tokens
    expected = greedy(target, ids, max_new_tokens=24, eos_token_id=eos, pad_token_id=0)
    output = greedy(
        target, ids, max_new_tokens=24, eos_token_id=eos, pad_token_id=0, assistant_model=drafter,
        return_dict_in_generate=True, output_scores=True, cache_implementation=cache,
    )  # fmt: skip
    assert torch.equal(output.sequences, expected)
    assert len(output.scores) == expected.shape[1] - PROMPT
    assert output.cache.get_seq_length() == expected.shape[1] - 1


def test_the_offsets_cover_every_place_in_a_block(setup):
    target, ids, whole, drafter = setup
    places = {(offset - 2) % 8 for offset in OFFSETS if offset > 1 and first_use(whole, offset) is not None}
    assert places == set(range(8))


class StopsAtLength(StoppingCriteria):
    """A custom criterion that also notes what it was asked about."""

    def __init__(self, length):
        self.length = length
        self.lengths_seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths_seen.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("offset", OFFSETS)
def test_custom_criterion_sees_each_prefix_once_and_stops_there(setup, offset):
    target, ids, whole, drafter = setup
    plain, speculative = StopsAtLength(PROMPT + offset), StopsAtLength(PROMPT + offset)
    expected = greedy(target, ids, max_new_tokens=24, stopping_criteria=StoppingCriteriaList([plain]))
    got = greedy(
        target,
        ids,
        max_new_tokens=24,
        stopping_criteria=StoppingCriteriaList([speculative]),
        assistant_model=drafter,
    )
    assert torch.equal(got, expected)
    assert speculative.lengths_seen == plain.lengths_seen


def test_custom_criterion_sees_the_scores_of_its_prefix(setup):
    target, ids, whole, drafter = setup

    class CountsScores(StoppingCriteria):
        def __init__(self):
            self.counts = []

        def __call__(self, input_ids, scores, **kwargs):
            self.counts.append((input_ids.shape[1], len(scores)))
            return torch.tensor([False])

    counts = []
    for extra in ({}, {"assistant_model": drafter}):
        criterion = CountsScores()
        greedy(
            target, ids, max_new_tokens=13, stopping_criteria=[criterion], return_dict_in_generate=True,
            output_scores=True, **extra,
        )  # fmt: skip
        counts.append(criterion.counts)
    assert counts[0] == counts[1]


def test_custom_criterion_sees_the_scores_of_its_row_of_a_batch(setup):
    target, ids, _, drafter = setup
    seen = []

    class CountsScores(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            assert all(len(step) == len(input_ids) for step in scores)
            seen.extend([(input_ids.shape[1] - PROMPT, len(scores))] * len(input_ids))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    greedy(
        target, ids.expand(2, -1), max_new_tokens=13, stopping_criteria=[CountsScores()], assistant_model=drafter,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    assert sorted(seen) == sorted(2 * [(n, n) for n in range(1, 14)])


@pytest.fixture(scope="module")
def tokenizer():
    """61 tokens: letters and some pairs of letters, so that stop strings can span tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in "abcde" for b in "pqrstuv"]
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in pairs)])}
    backend = Tokenizer(models.BPE(vocab, pairs))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("prompt_length", [1, PROMPT, 60])
def test_stop_string_at_every_offset(tokenizer, prompt_length):
    target, ids = tiny_target(), random_ids(prompt_length)
    whole = greedy(target, ids, max_new_tokens=40)[0]
    drafter = OracleDrafter.for_target(target, whole, hit_rate=1.0)
    words = tokenizer.convert_ids_to_tokens(whole[prompt_length:].tolist())
    stopped_after = set()
    for offset in range(2, 18):
        stop = words[offset - 2][-1] + words[offset - 1]  # the end of one token and the whole next one
        common = {"max_new_tokens": 24, "stop_strings": [stop], "tokenizer": tokenizer}
        expected = greedy(target, ids, **common)
        assert torch.equal(greedy(target, ids, assistant_model=drafter, **common), expected)
        stopped_after.add(expected.shape[1] - prompt_length)
    assert len(stopped_after) > 7, "the stop strings must end generation at many different places"


class Collects(BaseStreamer):
    def __init__(self):
        self.puts = []
        self.ended = 0

    def put(self, value):
        self.puts.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("eos_offset", [None, 4, 9])
def test_streamer_gets_one_token_at_a_time_and_nothing_behind_a_stop(setup, eos_offset):
    target, ids, whole, drafter = setup
    eos = {} if eos_offset is None else {"eos_token_id": first_use(whole, eos_offset), "pad_token_id": 0}
    puts = []
    for extra in ({}, {"assistant_model": drafter}):
        streamer = Collects()
        greedy(target, ids, max_new_tokens=20, streamer=streamer, **eos, **extra)
        assert streamer.ended == 1
        puts.append(streamer.puts)
    assert puts[0] == puts[1]


def test_max_length_smaller_than_a_block(setup):
    target, ids, whole, drafter = setup
    for max_length in range(PROMPT + 1, PROMPT + 12):
        got = greedy(target, ids, max_length=max_length, assistant_model=drafter)
        assert torch.equal(got[0], whole[:max_length])


@pytest.mark.parametrize("num_new", [2, 5, 9, 12])
def test_a_batch_drafts_no_more_than_its_rows_alone(setup, num_new):
    """Near max_length a draft must leave room for the target's token; one that does not is thrown away."""
    target, ids, _, drafter = setup
    common = {"max_new_tokens": num_new, "assistant_model": drafter, "return_dict_in_generate": True}
    alone = greedy(target, ids, **common).speculation
    both = greedy(target, ids.expand(2, -1), **common).speculation
    counts = ("num_rounds", "num_drafted", "num_verified", "num_accepted", "num_new_tokens")
    assert [getattr(both, name) for name in counts] == [2 * getattr(alone, name) for name in counts]


def test_shorter_rows_of_a_batch_are_filled_with_the_given_token(setup):
    target, _, _, _ = setup
    ids = random_ids(4 * PROMPT, seed=2).view(4, PROMPT)
    eos = greedy(target, ids, max_new_tokens=12)[:3, [PROMPT + 2, PROMPT + 6]].flatten().tolist()
    common = {"max_new_tokens": 24, "eos_token_id": eos, "pad_token_id": 9}
    expected = greedy(target, ids, **common)
    assert (expected[:, -1] == 9).any()
    assert torch.equal(greedy(target, ids, assistant_model=tiny_drafter(target), **common), expected)


def test_max_time_stops_generation(setup):
    target, ids, whole, drafter = setup
    got = greedy(target, ids, max_new_tokens=500, max_time=0.0, assistant_model=drafter)
    assert got.shape[1] == PROMPT + 1


def test_untrained_drafter_with_stops(setup):
    target, ids, whole, _ = setup
    drafter = tiny_drafter(target)
    for offset in OFFSETS:
        if (eos := first_use(whole, offset)) is not None:
            expected = greedy(target, ids, max_new_tokens=24, eos_token_id=eos, pad_token_id=0)
            got = greedy(
                target,
                ids,
                max_new_tokens=24,
                eos_token_id=eos,
                pad_token_id=0,
                assistant_model=drafter,
            )
            assert torch.equal(got, expected)


# -- what comes back ----------------------------------------------------------------------------------------------


def test_only_what_was_asked_for_comes_back_and_keeps_no_block_alive(setup):
    target, ids, whole, drafter = setup
    asked = ("scores", "logits", "hidden_states")
    for name in ("nothing", *asked):
        options = {} if name == "nothing" else {f"output_{name}": True}
        output = greedy(
            target, ids, max_new_tokens=12, assistant_model=drafter, return_dict_in_generate=True, **options
        )
        assert [other for other in asked if getattr(output, other) is not None] == [name] * (name != "nothing")
        steps = [] if name == "nothing" else getattr(output, name)[1:]  # the first holds the prompt
        for tensor in (t for step in steps for t in ((step,) if isinstance(step, torch.Tensor) else step)):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def sliding_target():
    config = Gemma3TextConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8, max_position_embeddings=256, initializer_range=0.2,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["sliding", "static"])
def test_attentions_have_the_keys_that_plain_generation_sees(kind):
    target = sliding_target() if kind == "sliding" else tiny_target(num_layers=2)
    target.set_attn_implementation("eager")
    ids = random_ids(PROMPT)
    whole = greedy(target, ids, max_new_tokens=24)[0]
    common = {"max_new_tokens": 14, "return_dict_in_generate": True, "output_attentions": True}
    if kind == "static":
        common["cache_implementation"] = "static"
    expected = greedy(target, ids, **common).attentions
    drafter = OracleDrafter.for_target(target, whole, hit_rate=1.0, target_layer_ids=[0])
    got = greedy(target, ids, assistant_model=drafter, **common).attentions
    assert len(got) == len(expected) == 14
    for mine, theirs in zip(got, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
