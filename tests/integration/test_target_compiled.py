"""Compiled targets really run compiled under a drafter, and later calls need no new graphs."""

import pytest
import torch
from batches import ragged
from target_builders import compiled_static_prompt, counting_backend
from tiny import greedy, random_ids, tiny_drafter, tiny_target


@pytest.fixture(autouse=True)
def _no_compiled_code_is_left():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_compiled_static_cache_needs_no_new_graphs_for_later_calls():
    backend, graphs = counting_backend()
    target = tiny_target(num_layers=2)
    drafter = tiny_drafter(target)
    options = {"do_sample": False, "max_length": 40} | compiled_static_prompt(backend)
    options.pop("input_ids")
    for length, num_drafts in ((5, 4), (9, 2)):  # the second number of drafts makes the sizes symbols
        target.generate(random_ids(length), **options, assistant_model=drafter, num_assistant_tokens=num_drafts)
    num_graphs = len(graphs)
    assert num_graphs > 0
    for length in (3, 14):
        for num_drafts in (2, 3, 4):
            output = target.generate(
                random_ids(length), **options, assistant_model=drafter, num_assistant_tokens=num_drafts
            )
            assert torch.equal(output, greedy(target, random_ids(length), max_length=40))
    assert len(graphs) == num_graphs


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize(("backend", "how"), [("aot_eager", "forward"), ("inductor", "call")])
def test_other_backends(backend, how):
    counted, graphs = counting_backend(backend)
    target = tiny_target(num_layers=2)
    if how == "forward":
        target.forward = torch.compile(target.forward, backend=counted, dynamic=True)
    else:
        target.compile(backend=counted, dynamic=True)
    ids = random_ids(9)
    plain = greedy(target, ids, max_new_tokens=8)
    num_graphs = len(graphs)
    assert num_graphs > 0
    assert torch.equal(greedy(target, ids, max_new_tokens=8, assistant_model=tiny_drafter(target)), plain)
    assert len(graphs) > num_graphs


@pytest.mark.parametrize("how", ["forward", "in_place", "layers"])
def test_ragged_batches_of_targets_that_their_user_compiled(how):
    target = tiny_target(num_layers=2)
    if how == "forward":
        target.forward = torch.compile(target.forward, backend="eager", dynamic=True)
    elif how == "in_place":
        target.compile(backend="eager", dynamic=True)
    else:
        for layer in target.model.layers:
            layer.compile(backend="eager", dynamic=True)
    inputs = ragged([3, 8, 14])
    expected = greedy(tiny_target(num_layers=2), **inputs, max_new_tokens=12)
    assert torch.equal(greedy(target, **inputs, max_new_tokens=12, assistant_model=tiny_drafter(target)), expected)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_processors_see_no_tokens_that_only_fill_a_compiled_width(num_rows):
    target = tiny_target(num_layers=2)
    inputs = ragged([5] * num_rows)
    expected = greedy(target, **inputs, max_new_tokens=9)
    assert not (expected[:, 5:] == 0).any()

    def allowed(prompt, ids):
        assert 0 not in ids[5:].tolist(), "token 0 is never allowed"
        return list(range(1, 61))

    common = compiled_static_prompt() | inputs | {"max_new_tokens": 9, "do_sample": False}
    got = target.generate(**common, prefix_allowed_tokens_fn=allowed, assistant_model=tiny_drafter(target))
    assert torch.equal(got, expected)
