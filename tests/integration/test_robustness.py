"""generate() twice in a row, after an exception, from threads, across dtypes, in inference mode; and broken drafts."""

import copy
import threading

import pytest
import torch
from tiny import OracleDrafter, greedy, random_ids, tiny_drafter, tiny_target
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaForCausalLM,
)
from transformers.generation.stopping_criteria import StoppingCriteria

from dspark_hf import (
    DSparkConfig,
    DSparkDraftModel,
    IncompatibleTargetError,
    UnsupportedGenerationError,
    record_speculation,
)


def test_twice_in_a_row_and_with_other_prompts(target, drafter):
    for length in (9, 9, 3, 20):
        ids = random_ids(length, seed=length)
        assert torch.equal(
            greedy(target, ids, max_new_tokens=20, assistant_model=drafter),
            greedy(target, ids, max_new_tokens=20),
        )


class Fails(StoppingCriteria):
    def __init__(self, calls):
        self.calls = calls

    def __call__(self, input_ids, scores, **kwargs):
        self.calls -= 1
        if self.calls == 0:
            raise RuntimeError("planted")
        return torch.tensor([False])


@pytest.mark.parametrize("calls", [1, 2, 5, 9])
def test_after_an_exception_in_the_middle(target, drafter, calls):
    ids = random_ids(7)
    cache = DynamicCache(config=target.config)
    with pytest.raises(RuntimeError, match="planted"):
        greedy(
            target,
            ids,
            max_new_tokens=20,
            cache=cache,
            stopping_criteria=[Fails(calls)],
            assistant_model=drafter,
        )
    # the user's cache holds committed tokens only: plain generation can go on from it
    assert cache.get_seq_length() <= 7 + calls
    expected = greedy(target, ids, max_new_tokens=20)
    assert torch.equal(greedy(target, ids, max_new_tokens=20, assistant_model=drafter), expected)
    prefix = expected[:, : max(8, cache.get_seq_length() + 1)]
    assert torch.equal(greedy(target, prefix, max_length=27, cache=cache), expected)


@pytest.mark.parametrize("fail_at", [1, 2, 6])
def test_after_an_exception_inside_a_target_layer(target, drafter, fail_at):
    ids = random_ids(7)
    calls = []

    def hook(*args):
        calls.append(1)
        if len(calls) == fail_at:
            raise RuntimeError("planted")

    handle = target.model.layers[2].register_forward_pre_hook(hook)
    cache = DynamicCache(config=target.config)
    with pytest.raises(RuntimeError, match="planted"):
        greedy(target, ids, max_new_tokens=20, cache=cache, assistant_model=drafter)
    handle.remove()
    assert len({layer.get_seq_length() for layer in cache.layers}) == 1
    expected = greedy(target, ids, max_new_tokens=20)
    prefix = expected[:, : max(7, cache.get_seq_length() + 1)]
    assert torch.equal(greedy(target, prefix, max_length=27, cache=cache), expected)


@pytest.mark.parametrize("num_targets", [1, 2])
def test_two_threads_share_a_drafter(target, drafter, num_targets):
    targets = [target, target if num_targets == 1 else tiny_target(seed=5)]
    prompts = [random_ids(length, seed=length) for length in (4, 11)]
    expected = [greedy(one, ids, max_new_tokens=40) for one, ids in zip(targets, prompts, strict=True)]
    got = [[], []]
    reports = [None, None]

    def work(index):
        with record_speculation() as report:
            for _ in range(3):
                got[index].append(greedy(targets[index], prompts[index], max_new_tokens=40, assistant_model=drafter))
        reports[index] = report

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert len(got[index]) == 3
        assert all(torch.equal(output, expected[index]) for output in got[index])
        assert (reports[index].num_calls, reports[index].num_new_tokens) == (3, 120)


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafter_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("do_sample", [False, True])
def test_dtypes_may_differ(target_dtype, drafter_dtype, do_sample):
    target = tiny_target().to(target_dtype)
    drafter = tiny_drafter(target).to(drafter_dtype)
    output = target.generate(random_ids(7), do_sample=do_sample, max_new_tokens=12, assistant_model=drafter)
    assert output.shape == (1, 19)
    if target_dtype == torch.float32 and not do_sample:
        assert torch.equal(output, greedy(target, random_ids(7), max_new_tokens=12))


def test_inference_mode_and_plain_use_after_it(target, drafter):
    ids = random_ids(7)
    expected = greedy(target, ids, max_new_tokens=20)
    with torch.inference_mode():
        assert torch.equal(greedy(target, ids, max_new_tokens=20, assistant_model=drafter), expected)
    assert torch.equal(greedy(target, ids, max_new_tokens=20, assistant_model=drafter), expected)


def test_a_copied_drafter_and_one_drafter_for_two_targets(drafter):
    for seed in (0, 5):
        target, ids = tiny_target(seed=seed), random_ids(7)
        expected = greedy(target, ids, max_new_tokens=20)
        for one in (drafter, copy.deepcopy(drafter)):
            assert torch.equal(greedy(target, ids, max_new_tokens=20, assistant_model=one), expected)


def test_the_drafter_stores_nothing_of_a_generation(target, drafter):
    before = set(vars(drafter)), set(drafter.state_dict()), {n for n, _ in drafter.named_modules()}
    greedy(target, random_ids(7), max_new_tokens=20, assistant_model=drafter)
    assert (
        set(vars(drafter)),
        set(drafter.state_dict()),
        {n for n, _ in drafter.named_modules()},
    ) == before


@pytest.mark.parametrize("broken", ["nan", "inf"])
@pytest.mark.parametrize("part", ["logits", "confidence"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_broken_numbers_cost_speed_only(target, drafter, part, broken, do_sample, caplog):
    ids = random_ids(7)
    weight = drafter.norm.weight if part == "logits" else drafter.confidence_head.proj.bias
    with torch.no_grad():
        weight.fill_(float(broken))
    output = target.generate(
        ids,
        do_sample=do_sample,
        max_new_tokens=12,
        assistant_model=drafter,
        return_dict_in_generate=True,
    )
    assert output.speculation.num_verified == 0
    assert output.speculation.num_unusable_rounds == output.speculation.num_rounds - 1 == 10
    assert output.sequences.max() < target.config.vocab_size
    assert caplog.text.count("NaN or infinite") == 1
    if not do_sample:
        assert torch.equal(output.sequences, greedy(target, ids, max_new_tokens=12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden_size 64"),
        ({"vocab_size": 80}, "vocab_size 80"),
        ({"num_target_layers": 9}, "decoder layers 9"),
    ],
)
def test_a_drafter_of_another_target_is_refused(target, change, message):
    drafter = DSparkDraftModel(DSparkConfig.from_target(target.config, num_hidden_layers=1, **change))
    with pytest.raises(IncompatibleTargetError, match=message):
        greedy(target, random_ids(5), max_new_tokens=4, assistant_model=drafter)


@pytest.mark.parametrize("with_drafter", [False, True])
def test_a_law_without_mass_raises_as_plain_sampling_does(target, drafter, with_drafter):
    def forbid_all(input_ids, scores):
        return torch.full_like(scores, -torch.inf) if input_ids.shape[1] > 9 else scores

    extra = {"assistant_model": drafter} if with_drafter else {}
    with pytest.raises(RuntimeError, match=r"probability tensor .*contains"):
        target.generate(random_ids(7), do_sample=True, max_new_tokens=12, logits_processor=[forbid_all], **extra)


def test_a_head_that_rules_ids_out_is_not_broken(target, drafter):
    class Head(torch.nn.Linear):
        def forward(self, hidden):
            logits = super().forward(hidden)
            logits[..., 5] = -torch.inf
            return logits

    head = Head(32, 61, bias=False)
    head.weight = target.lm_head.weight
    target.set_output_embeddings(head)
    output = greedy(target, random_ids(7), max_new_tokens=12, assistant_model=drafter, return_dict_in_generate=True)
    assert output.speculation.num_unusable_rounds == 0
    assert output.speculation.num_verified > 0


def test_a_refused_call_leaves_the_users_cache_alone(target, drafter):
    cache, ids = DynamicCache(config=target.config), random_ids(7)
    text = greedy(target, ids, max_new_tokens=6, cache=cache)
    held = cache.get_seq_length()
    refused = [
        {"verification_policy": "nope"},
        {"num_assistant_tokens": 0},
        {"num_return_sequences": 2},
        {"prefill_chunk_size": -1},
    ]
    for options in refused:
        with pytest.raises(ValueError, match=next(iter(options))):
            greedy(target, text, max_new_tokens=4, cache=cache, assistant_model=drafter, **options)
        assert cache.get_seq_length() == held


def test_a_target_without_hidden_states_is_refused_by_name(target, drafter, monkeypatch):
    forward = target.forward

    def without(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs.hidden_states = None
        return outputs

    monkeypatch.setattr(target, "forward", without)
    with pytest.raises(IncompatibleTargetError, match="output_hidden_states"):
        greedy(target, random_ids(5), max_new_tokens=4, assistant_model=drafter)


def test_a_head_of_another_width_is_refused(target, drafter):
    target.set_output_embeddings(torch.nn.Linear(32, 70, bias=False))
    with pytest.raises(IncompatibleTargetError, match=r"output head .*\[70, 32\]"):
        greedy(target, random_ids(5), max_new_tokens=4, assistant_model=drafter)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_targets_whose_rope_changes_with_the_length_are_refused_beyond_it(rope_type):
    config = tiny_target("llama").config
    config.max_position_embeddings = 24
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    if rope_type == "longrope":
        config.rope_parameters |= {
            "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 24,
        }  # fmt: skip
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).eval()
    drafter = tiny_drafter(target, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    ids = random_ids(9)
    expected = greedy(target, ids, max_length=24)
    assert torch.equal(greedy(target, ids, max_length=24, assistant_model=drafter), expected)
    with pytest.raises(UnsupportedGenerationError, match=f"{rope_type}.*within 24"):
        greedy(target, ids, max_length=25, assistant_model=drafter)


def test_soft_prompts_are_refused(target, drafter, monkeypatch):
    prepare = target.prepare_inputs_for_generation

    def with_virtual_tokens(input_ids, is_first_iteration=False, **kwargs):
        inputs = prepare(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        if is_first_iteration:
            embeds = target.get_input_embeddings()(inputs.pop("input_ids"))
            inputs["inputs_embeds"] = torch.cat([torch.ones(1, 3, 32), embeds], dim=1)
            inputs["position_ids"] = torch.arange(embeds.shape[1] + 3)[None]
        return inputs

    monkeypatch.setattr(target, "prepare_inputs_for_generation", with_virtual_tokens)
    with pytest.raises(UnsupportedGenerationError, match="8 positions into its cache for a prompt of 5 tokens"):
        greedy(target, random_ids(5), max_new_tokens=4, assistant_model=drafter)


def test_a_drafter_without_weights_is_refused(target, drafter):
    with pytest.raises(IncompatibleTargetError, match="meta device"):
        greedy(target, random_ids(5), max_new_tokens=4, assistant_model=drafter.to("meta"))


def hybrid_target():
    """Attention and short convolutions, whose state can be rolled back."""
    config = Lfm2Config(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=256, pad_token_id=None,
        eos_token_id=None, bos_token_id=None, layer_types=["conv", "full_attention"] * 2,
    )  # fmt: skip
    torch.manual_seed(0)
    return Lfm2ForCausalLM(config).eval()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("prompt_length", [1, 2, 3, 9])
def test_convolution_hybrids(prompt_length, cache):
    target, ids = hybrid_target(), random_ids(prompt_length)
    for num_new in (1, 24):
        expected = greedy(target, ids, max_new_tokens=num_new, cache_implementation=cache)
        oracle = OracleDrafter.for_target(target, expected[0], hit_rate=0.7)
        for drafter in (tiny_drafter(target), oracle):
            output = greedy(
                target, ids, max_new_tokens=num_new, assistant_model=drafter, cache_implementation=cache,
                return_dict_in_generate=True,
            )  # fmt: skip
            assert torch.equal(output.sequences, expected)
            # plain generation goes on from the cache that is handed back
            onward = greedy(target, expected, max_new_tokens=5, cache=output.cache) if cache == "dynamic" else None
            assert onward is None or torch.equal(onward, greedy(target, expected, max_new_tokens=5))


def sliding_target():
    config = Gemma3TextConfig(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8, max_position_embeddings=256, initializer_range=0.2,
        layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("prompt_length", [3, 7, 8, 30])
def test_sliding_window_targets_roll_back_past_the_window(prompt_length):
    target, ids = sliding_target(), random_ids(prompt_length)
    cache = DynamicCache(config=target.config)
    expected = greedy(target, ids, max_new_tokens=40)
    oracle = OracleDrafter.for_target(target, expected[0], hit_rate=0.7)
    for drafter in (tiny_drafter(target), oracle):
        assert torch.equal(greedy(target, ids, max_new_tokens=40, assistant_model=drafter), expected)
    greedy(target, ids, max_new_tokens=40, assistant_model=oracle, cache=cache)
    # no layer is left recording, which would let a later plain run grow without bound
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    assert {layer.keys.shape[-2] for layer in cache.layers if layer.is_sliding} == {7}


@pytest.mark.parametrize("calls", [1, 2, 9, 20])
@pytest.mark.parametrize("kind", ["sliding", "hybrid"])
def test_after_an_exception_other_cache_layers_can_go_on(kind, calls):
    target, ids = sliding_target() if kind == "sliding" else hybrid_target(), random_ids(11)
    cache = DynamicCache(config=target.config)
    with pytest.raises(RuntimeError, match="planted"):
        greedy(
            target, ids, max_new_tokens=30, cache=cache, stopping_criteria=[Fails(calls)],
            assistant_model=tiny_drafter(target),
        )  # fmt: skip
    expected = greedy(target, ids, max_new_tokens=30)
    prefix = expected[:, : max(11, cache.get_seq_length() + 1)]
    assert torch.equal(greedy(target, prefix, max_length=41, cache=cache), expected)


def test_a_static_sliding_cache_shorter_than_the_text_is_refused():
    target = sliding_target()
    with pytest.raises(ValueError, match="cannot be rolled back"):
        greedy(
            target,
            random_ids(3),
            max_new_tokens=40,
            assistant_model=tiny_drafter(target),
            cache_implementation="static",
        )
