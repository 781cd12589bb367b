"""The equality suite's core on CUDA: float32 greedy output equals plain generate there."""

import pytest
import torch
from tiny import OracleDrafter, greedy, random_ids, tiny_drafter, tiny_target

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ids_device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    "cache", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=["dynamic", "static"]
)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_agrees_with_plain(kind, cache, ids_device):
    target, ids = tiny_target(kind).to("cuda"), random_ids(9).to(ids_device)
    expected = greedy(target, ids, max_new_tokens=32)
    whole = greedy(target, ids, max_new_tokens=40)[0].cpu()
    for drafter in (tiny_drafter(target), OracleDrafter.for_target(target, whole)):
        got = greedy(target, ids, max_new_tokens=32, assistant_model=drafter.to("cuda"), **cache)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("drafter_device", ["cuda", "cpu"])
def test_drafter_and_target_on_their_own_devices(drafter_device):
    target, ids = tiny_target().to("cuda"), random_ids(9).to("cuda")
    drafter = tiny_drafter(target).to(drafter_device)
    expected = greedy(target, ids, max_new_tokens=32)
    assert torch.equal(greedy(target, ids, max_new_tokens=32, assistant_model=drafter), expected)
    sampled = target.generate(ids, do_sample=True, top_k=3, max_new_tokens=32, assistant_model=drafter)
    assert sampled.shape == expected.shape
