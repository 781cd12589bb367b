"""Faults of transformers' own assisted loop that ours must not have, one test each, and transformers' loop on our
candidate generator."""

from pathlib import Path

import pytest
import torch
from refusals import REFUSALS, attempt
from tiny import OracleDrafter, greedy, random_ids, tiny_drafter, tiny_target
from transformers import DynamicCache, GenerationConfig
from transformers.generation import GenerationMixin
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from dspark_hf import DSparkCandidateGenerator, UnsupportedGenerationError
from dspark_hf.decoding.prompt_inputs import warn_of_second_run
from dspark_hf.decoding.route import _ROUTE_MARK
from dspark_hf.evaluation.agreement import explain_difference


def test_1_a_used_cache_is_run_again_from_the_whole_sequence(target, drafter, caplog):
    warn_of_second_run.cache_clear()
    ids = random_ids(7)
    cache = DynamicCache(config=target.config)
    first = greedy(target, ids, max_new_tokens=6, cache=cache, assistant_model=drafter)
    assert cache.get_seq_length() == 12
    longer = torch.cat([first, random_ids(4, seed=5)], dim=1)
    expected = greedy(target, longer, max_new_tokens=10)
    got = greedy(target, longer, max_new_tokens=10, cache=cache, assistant_model=drafter)
    assert torch.equal(got, expected)
    assert caplog.text.count("run again") == 1
    # and what comes back is right for plain generation too
    again = torch.cat([got, random_ids(3, seed=6)], dim=1)
    assert torch.equal(
        greedy(target, again, max_new_tokens=10, cache=cache),
        greedy(target, again, max_new_tokens=10),
    )


def test_1_only_new_tokens_with_a_used_cache_are_refused(target, drafter):
    ids = random_ids(7)
    cache = DynamicCache(config=target.config)
    greedy(target, ids, max_new_tokens=6, cache=cache)
    before = cache.get_seq_length()
    with pytest.raises(UnsupportedGenerationError, match="Pass the whole sequence"):
        greedy(
            target, random_ids(3, seed=5), attention_mask=torch.ones(1, before + 3, dtype=torch.long),
            max_new_tokens=4, cache=cache, assistant_model=drafter,
        )  # fmt: skip
    with pytest.raises(UnsupportedGenerationError, match="Pass the whole sequence"):
        greedy(target, random_ids(3, seed=5), max_new_tokens=4, cache=cache, assistant_model=drafter)
    assert cache.get_seq_length() == before


@pytest.mark.parametrize("place", range(1, 9))
def test_2_stop_strings_and_criteria_inside_an_accepted_block(target, place):
    """Every place of a block of eight, in the second round; the streamer sees nothing behind the stop."""
    ids = random_ids(7)
    whole = greedy(target, ids, max_new_tokens=40)[0]
    drafter = OracleDrafter.for_target(target, whole, hit_rate=1.0)
    stop = 7 + 1 + 8 + place  # prompt, the prompt's own token, one round
    asked, streamed = [], []

    class Stops(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            asked.append(input_ids.shape[1])
            return torch.tensor([input_ids.shape[1] >= stop])

    class Collects(BaseStreamer):
        def put(self, value):
            streamed.extend(value.flatten().tolist())

        def end(self):
            streamed.append("end")

    output = greedy(
        target, ids, max_new_tokens=30, stopping_criteria=[Stops()], assistant_model=drafter, streamer=Collects(),
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    assert torch.equal(output.sequences[0], whole[:stop])
    assert asked == list(range(8, stop + 1))
    assert streamed == [*whole[:stop].tolist(), "end"]
    assert len(output.scores) == stop - 7
    assert output.cache.get_seq_length() == stop - 1


@pytest.mark.parametrize("flags", [{"output_hidden_states": True}, {"output_attentions": True}, {}], ids=str)
def test_3_all_outputs_have_the_counts_and_values_of_plain_generation(flags):
    target = tiny_target()
    target.set_attn_implementation("eager")
    ids = random_ids(7)
    whole = greedy(target, ids, max_new_tokens=30)[0]
    drafter = OracleDrafter.for_target(target, whole, hit_rate=0.7)
    common = {
        "max_new_tokens": 20, "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
        "repetition_penalty": 1.2,
    } | flags  # fmt: skip
    expected = greedy(target, ids, **common)
    got = greedy(target, ids, assistant_model=drafter, **common)
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        mine, theirs = getattr(got, name), getattr(expected, name)
        assert len(mine) == len(theirs) == 20
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(mine, theirs, strict=True))
    for name in ("hidden_states", "attentions"):
        mine, theirs = getattr(got, name), getattr(expected, name)
        assert (mine is None) == (theirs is None)
        for a, b in zip(mine or (), theirs or (), strict=True):
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                assert x.shape == y.shape
                assert torch.allclose(x, y, atol=1e-4)


def test_4_a_static_cache_of_exactly_the_needed_size_does_not_overflow(target):
    ids = random_ids(7)
    whole = greedy(target, ids, max_new_tokens=40)[0]
    drafter = OracleDrafter.for_target(target, whole, hit_rate=1.0)
    for num_new in (2, 5, 8, 9, 10, 16, 17):
        target._previous_max_cache_length = -1
        output = greedy(
            target, ids, max_new_tokens=num_new, assistant_model=drafter, cache_implementation="static",
            return_dict_in_generate=True,
        )  # fmt: skip
        assert output.cache.get_max_length() == 7 + num_new - 1
        assert torch.equal(output.sequences[0], whole[: 7 + num_new])


def entries(fault):
    return pytest.mark.parametrize(
        "refusal", [r for r in REFUSALS if fault in r.faults], ids=lambda refusal: refusal.name
    )


def assert_refused(refusal):
    error, num_forwards = attempt(refusal)
    assert isinstance(error, refusal.error)
    assert num_forwards == 0


@entries(fault=5)
def test_5_processors_with_state_are_refused_before_any_forward(refusal):
    assert_refused(refusal)


def test_6_the_prompt_is_run_in_the_chunks_asked_for(target, drafter):
    ids = random_ids(17)
    widths = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    got = greedy(target, ids, max_new_tokens=8, assistant_model=drafter, prefill_chunk_size=6)
    assert widths[:3] == [6, 6, 5]
    assert torch.equal(got, greedy(target, ids, max_new_tokens=8))


def test_7_the_law_given_to_transformers_is_float32_and_matches_the_ids(target):
    drafter = tiny_drafter(target).to(torch.bfloat16)
    generator, outputs, ids = _generator(target, drafter, do_sample=True)
    candidates, logits = generator.get_candidates(
        ids, model_kwargs={}, model_outputs=outputs, is_first_iteration=False, n_last_matches=0
    )
    assert logits.dtype == torch.float32
    assert logits.shape[1] == candidates.shape[1] - ids.shape[1] == 4


def test_7_no_draft_means_no_logits(target, drafter):
    generator, outputs, ids = _generator(target, drafter, do_sample=True, max_length=8)
    candidates, logits = generator.get_candidates(
        ids, model_kwargs={}, model_outputs=outputs, is_first_iteration=False, n_last_matches=0
    )
    assert torch.equal(candidates, ids)
    assert logits is None


def _generator(target, drafter, *, do_sample, max_length=50):
    from transformers import GenerationConfig
    from transformers.generation.logits_process import LogitsProcessorList

    prompt = random_ids(6)
    config = GenerationConfig(do_sample=do_sample, max_length=max_length)
    generator = DSparkCandidateGenerator(drafter, target, config, LogitsProcessorList(), {})
    outputs = target(prompt, **generator.model_kwargs_overrides)
    return generator, outputs, torch.cat([prompt, outputs.logits[:, -1:].argmax(-1)], dim=1)


def test_8_embeddings_without_ids_are_refused(target, drafter):
    with pytest.raises(UnsupportedGenerationError, match="pass input_ids"):
        greedy(
            target,
            None,
            inputs_embeds=torch.randn(1, 5, 32),
            max_new_tokens=4,
            assistant_model=drafter,
        )


@entries(fault=9)
def test_9_targets_that_cannot_go_back_are_refused_before_any_forward(refusal):
    assert_refused(refusal)


@entries(fault=10)
def test_10_beams_are_refused_before_any_forward(refusal):
    assert_refused(refusal)


def test_10_several_sequences_and_prompts_are_run(target, drafter):
    ids = torch.cat([random_ids(5), random_ids(5, seed=1)])
    common = {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "max_new_tokens": 12, "pad_token_id": 0}
    output = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **common)
    assert torch.equal(output.sequences, target.generate(ids, **common))
    assert output.speculation.num_calls == 4


def test_11_a_seed_repeats_a_sample_but_is_not_plain_samplings(target, drafter):
    ids = random_ids(7)

    def drawn(**extra):
        torch.manual_seed(3)
        return target.generate(ids, do_sample=True, max_new_tokens=30, **extra)

    assert torch.equal(drawn(assistant_model=drafter), drawn(assistant_model=drafter))
    assert not torch.equal(drawn(assistant_model=drafter), drawn())
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert "not the same draw as plain generate" in " ".join(readme.split())


def test_12_bfloat16_parts_from_plain_generate_only_at_near_ties():
    """Rounding flips near-ties: what is promised is a small gap at the first difference, and identity in float32."""
    target = tiny_target().to(torch.bfloat16)
    config = GenerationConfig(do_sample=False, max_new_tokens=40, eos_token_id=None)
    num_same = 0
    for seed in range(12):
        ids = random_ids(7, seed=seed)
        plain = target.generate(ids, generation_config=config)
        oracle = OracleDrafter.for_target(target, plain[0], hit_rate=0.7)
        got = target.generate(ids, generation_config=config, assistant_model=oracle)
        difference = explain_difference(target, config, ids, plain[0, 7:].tolist(), got[0, 7:].tolist())
        num_same += difference is None
        assert difference is None or (not difference.is_error and difference.token_gap < 0.25)
    assert num_same >= 3


# -- transformers' own loop on our generator ------------------------------------------------------------------------


@pytest.fixture
def stock_loop(monkeypatch):
    ours = GenerationMixin._assisted_decoding
    assert getattr(ours, _ROUTE_MARK) is ours
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", ours.__wrapped__)


@pytest.mark.parametrize("policy", ["full", "threshold"])
@pytest.mark.parametrize("padding", [0, 3])
def test_the_stock_loop_runs_our_generator_losslessly(stock_loop, target, policy, padding):
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), random_ids(9)], dim=1)
    mask = (torch.arange(9 + padding) >= padding).long()[None]
    common = {"attention_mask": mask, "max_new_tokens": 30, "pad_token_id": 0}
    expected = greedy(target, ids, **common)
    for drafter in (
        tiny_drafter(target),
        OracleDrafter.for_target(target, expected[0, padding:], hit_rate=0.7),
    ):
        got = greedy(target, ids, assistant_model=drafter, verification_policy=policy, **common)
        assert torch.equal(got, expected)


def test_the_stock_loop_drafts_what_ours_drafts(target, monkeypatch):
    ids = random_ids(9)
    expected = greedy(target, ids, max_new_tokens=30)
    drafter = OracleDrafter.for_target(target, expected[0], hit_rate=0.7)
    rounds = greedy(
        target, ids, max_new_tokens=30, assistant_model=drafter, return_dict_in_generate=True
    ).speculation.num_rounds
    forwards = []
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", GenerationMixin._assisted_decoding.__wrapped__)
    target.register_forward_pre_hook(lambda *args: forwards.append(1))
    greedy(target, ids, max_new_tokens=30, assistant_model=drafter)
    assert len(forwards) == rounds + 1
