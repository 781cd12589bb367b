"""Every form of target in `target_forms`: with a drafter it says what it says without one."""

import pytest
import torch
from target_forms import TARGET_FORMS
from tiny import OracleDrafter, tiny_drafter

# PEFT asks a model for the attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

NUM_NEW = 16


@pytest.fixture(autouse=True)
def _no_compiled_code_is_left():
    """Dynamo keeps graphs by code object and gives up after a few, whichever model they were made for."""
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "form",
    [pytest.param(form, id=form.name, marks=[pytest.mark.full] if form.is_slow else []) for form in TARGET_FORMS],
)
def test_output_with_a_drafter_is_the_targets_own(form, tmp_path):
    with form.build(tmp_path) as target:
        prompt = form.inputs() | {"max_new_tokens": NUM_NEW}
        plain = target.generate(**prompt, do_sample=False)
        oracle = OracleDrafter.for_target(target, plain[0], hit_rate=0.8).to(form.drafter_dtype)
        untrained = tiny_drafter(target).to(form.drafter_dtype)
        for drafter in (untrained, oracle):
            output = target.generate(**prompt, do_sample=False, assistant_model=drafter, return_dict_in_generate=True)
            assert output.speculation.num_verified > output.speculation.num_rounds
            agree(form, target, output.sequences, plain)
            # a law with one token left is greedy's choice
            sampled = target.generate(**prompt, do_sample=True, top_k=1, assistant_model=drafter)
            agree(form, target, sampled, plain)
        assert output.speculation.tau > 2
        free = target.generate(**prompt, do_sample=True, temperature=3.0, assistant_model=untrained)
        assert free.shape == plain.shape
        assert not torch.equal(free, plain)


def agree(form, target, ids, plain):
    """Equal; where the target rounds coarsely, a first difference must be a near-tie of the two best logits."""
    assert ids.shape == plain.shape
    differing = (ids != plain)[0].nonzero()
    if form.is_exact or len(differing) == 0:
        assert torch.equal(ids, plain)
        return
    with torch.no_grad():
        logits = target(input_ids=plain[:, : int(differing[0])]).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    assert best - second < 8 * torch.finfo(torch.bfloat16).eps * abs(best)
