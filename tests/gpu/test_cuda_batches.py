"""Batches on CUDA: the equality suite of the CPU in float32, one wait for the device a round, graphs that replay."""

import pytest
import torch
from batches import POLICIES, check_layout, check_plain_and_solo, on_device_of, prefixes_of_one_text, ragged
from device_reads import READ_ONCE
from machines import LINEAR_MACHINE
from sampled_law import LEVEL, OPTIONS, exact_law, law_p_value, small_drafter, small_target
from tiny import OracleDrafter, greedy, tiny_drafter, tiny_target
from torch._dynamo.utils import counters
from transformers.generation.logits_process import LogitsProcessor

from dspark_hf.decoding.batch import BatchRun

pytestmark = pytest.mark.gpu

NUM_NEW = 16
EAGER = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}


@pytest.fixture
def target():
    return tiny_target().to("cuda")


@pytest.mark.parametrize("cache", EAGER.values(), ids=EAGER)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["verification_policy"])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 17])
def test_rows_say_what_plain_batches_and_solo_runs_say(target, num_rows, policy, cache):
    check_plain_and_solo(target, num_rows, NUM_NEW, **policy, **cache)


@pytest.mark.parametrize("cache", EAGER.values(), ids=EAGER)
@pytest.mark.parametrize("layout", ["flat", "padded", "auto"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["verification_policy"])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 17])
def test_layouts_say_what_plain_batches_say(target, num_rows, policy, layout, cache):
    check_layout(target, num_rows, NUM_NEW, layout, **policy, **cache)


@pytest.mark.parametrize("policy", ["full", "threshold", "prefix"])
def test_prompts_may_be_on_the_host(target, policy, monkeypatch):
    monkeypatch.setattr("dspark_hf.decoding.scheduler.find_profile", lambda target, drafter: LINEAR_MACHINE)
    inputs = ragged([3, 9, 5])
    expected = greedy(target, **inputs, max_new_tokens=NUM_NEW)
    temperatures = {"temperatures": [1.5] * 6, "platt": None, "settings": {}}
    drafter = tiny_drafter(target, block_size=6, calibration={"greedy": temperatures}).to("cuda")
    got = greedy(target, **inputs, max_new_tokens=NUM_NEW, verification_policy=policy, assistant_model=drafter)
    assert got.device.type == "cpu"
    assert torch.equal(got, expected)


# -- compiled, as generate() compiles by itself on CUDA -----------------------------------------------------------


# Warnings of inductor about a machine that is not known here.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("_no_compiled_code_is_left")
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["verification_policy"])
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_compiled_batches_say_what_plain_batches_say(num_rows, policy):
    target = tiny_target(num_layers=2).to("cuda")
    whole, inputs = prefixes_of_one_text(target, num_rows)
    expected = greedy(target, **inputs, max_new_tokens=NUM_NEW)
    oracle = OracleDrafter.for_target(target, whole, hit_rate=0.7).to("cuda")
    for drafter in (tiny_drafter(target).to("cuda"), oracle):
        for _ in range(2):  # graphs are recorded, then replayed
            got = greedy(
                target, **inputs, **policy, max_new_tokens=NUM_NEW, cache_implementation="static",
                assistant_model=drafter,
            )  # fmt: skip
            assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("_no_compiled_code_is_left")
def test_compiled_rounds_are_cuda_graphs():
    target = tiny_target(num_layers=2).to("cuda")
    inputs = on_device_of(target, ragged([3, 9, 5]))
    from torch._inductor import cudagraph_trees  # warns when it is imported

    counters.clear()
    for num_new in (30, 20):
        greedy(
            target, **inputs, max_new_tokens=num_new, cache_implementation="static",
            assistant_model=tiny_drafter(target).to("cuda"),
        )  # fmt: skip
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None and any(manager.roots.values()), "nothing was recorded"


# -- one wait a round -----------------------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch):
    """Starts to watch; gives how often each round waits by `.cpu()`. What else waits in it raises RuntimeError."""
    counts, run_round, read = [], BatchRun._round, torch.Tensor.cpu

    def allowed(self):
        torch.cuda.set_sync_debug_mode("default")
        counts[-1] += 1
        try:
            return read(self)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    def watched(self):
        counts.append(0)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "cpu", allowed)
            torch.cuda.set_sync_debug_mode("error")
            try:
                run_round(self)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    # Rows that have ended stay: taking them out is no round's work.
    monkeypatch.setattr("dspark_hf.decoding.batch.COMPACT_SHARE", 2.0)

    def start():
        monkeypatch.setattr(BatchRun, "_round", watched)
        return counts

    return start


def run_batch(target, **options):
    inputs = on_device_of(target, ragged([3, 9, 5]))
    return target.generate(**inputs, max_new_tokens=20, assistant_model=tiny_drafter(target).to("cuda"), **options)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("options", READ_ONCE, ids=str)
def test_a_round_waits_for_the_device_once(target, waits, options):
    run_batch(target, **options)  # libraries start, which may wait
    counts = waits()
    run_batch(target, **options)
    assert len(counts) > 3
    assert set(counts) == {1}


class Reads(LogitsProcessor):
    """Control: looks at a value."""

    def __call__(self, input_ids, scores):
        return scores if bool(scores[0, 0] > 0) else scores + 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_control_another_wait_is_seen(target, waits):
    waits()
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        run_batch(target, do_sample=False, logits_processor=[Reads()])


# -- sampled ----------------------------------------------------------------------------------------------------------

SAMPLED = ["temperature_1", "top_k", "repetition_penalty"]


@pytest.mark.parametrize("layout", ["padded", "flat"])
@pytest.mark.parametrize("name", SAMPLED)
def test_rows_follow_the_target_law(name, layout):
    target = small_target()
    joint = exact_law(target, OPTIONS[name])  # on the host
    drafter = small_drafter(target).to("cuda")
    value = law_p_value(target.to("cuda"), drafter, OPTIONS[name], 1, joint=joint, verification_layout=layout)
    assert value > LEVEL / (2 * len(SAMPLED))
