"""PEFT: the adapter that is active counts, call by call, and the drafter borrows adapted modules by calling them."""

import pytest
import torch
from target_builders import lora_second, lora_target
from tiny import greedy, random_ids, tiny_drafter, tiny_target

from dspark_hf import UnsupportedGenerationError

# PEFT asks a model for the attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = random_ids(9)


def check(target, drafter, **options):
    """Plain output, after comparing it with that of the drafter."""
    plain = greedy(target, IDS, max_new_tokens=16, **options)
    assert torch.equal(greedy(target, IDS, max_new_tokens=16, assistant_model=drafter, **options), plain)
    return plain


def test_switching_adapters_between_calls(tmp_path):
    target = lora_second(tmp_path)
    drafter = tiny_drafter(target)
    second = check(target, drafter)
    target.set_adapter("default")
    first = check(target, drafter)
    with target.disable_adapter():
        base = check(target, drafter)
    assert torch.equal(check(target, drafter), first)
    assert torch.equal(base, greedy(tiny_target(), IDS, max_new_tokens=16))
    assert len({tuple(ids[0].tolist()) for ids in (first, second, base)}) == 3


def test_an_adapter_named_in_the_call(tmp_path):
    target = lora_second(tmp_path)
    drafter = tiny_drafter(target)
    second = check(target, drafter)
    first = check(target, drafter, adapter_names=["default"])
    base = check(target, drafter, adapter_names=["__base__"])
    assert len({tuple(ids[0].tolist()) for ids in (first, second, base)}) == 3


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_the_drafter_calls_the_adapted_embedding_and_head(draft_vocab_size):
    target = lora_target("q_proj", "embed_tokens", "lm_head")
    drafter = tiny_drafter(target) if draft_vocab_size is None else reduced_drafter(target, draft_vocab_size)
    calls = {"embedding": 0, "head": 0}

    def count(name):
        def hook(module, args):
            calls[name] += 1

        return hook

    target.get_input_embeddings().register_forward_pre_hook(count("embedding"))
    target.get_output_embeddings().lora_A["default"].register_forward_pre_hook(count("head"))
    plain = greedy(target, IDS, max_new_tokens=16)
    assert calls == {"embedding": 16, "head": 16}
    output = greedy(target, IDS, max_new_tokens=16, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    report = output.speculation
    num_calls = report.num_target_forwards + report.num_rounds - 1  # where one token is left, nothing is drafted
    assert calls["embedding"] - 16 >= num_calls
    assert calls["head"] - 16 >= num_calls


def reduced_drafter(target, size):
    drafter = tiny_drafter(target, draft_vocab_size=size)
    drafter.d2t.copy_(torch.linspace(0, target.config.vocab_size - size, size).long())
    return drafter


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning")
def test_prompt_tuning_is_refused_and_goes_on_without_a_drafter():
    from peft import PromptTuningConfig, get_peft_model

    target = get_peft_model(tiny_target("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    target = target.eval()
    plain = greedy(target, IDS, max_new_tokens=8)
    with pytest.raises(UnsupportedGenerationError, match="12 positions into its cache for a prompt of 9 tokens"):
        greedy(target, IDS, max_new_tokens=8, assistant_model=tiny_drafter(target))
    assert torch.equal(greedy(target, IDS, max_new_tokens=8), plain)
    with target.disable_adapter():
        check(target, tiny_drafter(target))
