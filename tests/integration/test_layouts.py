"""Padded grids and flat streams say the same, also on the static cache of one row, and compiled in few shapes."""

import operator

import pytest
import torch
from batches import POLICIES, check_layout, prefixes_of_one_text, ragged
from families import FAMILIES, NAMED_FAMILIES, OTHER_FAMILIES
from target_builders import compiled_static_prompt, counting_backend
from tiny import OracleDrafter, greedy, random_ids, tiny_drafter, tiny_target
from transformers.generation.stopping_criteria import StoppingCriteria

from dspark_hf import UnsupportedGenerationError
from dspark_hf.decoding import row_drafter, row_target
from dspark_hf.decoding.batch import BatchRun
from dspark_hf.fitting.fingerprint import Fingerprint
from dspark_hf.model.row_attention import NAME, RowStream, attending_by_rows
from dspark_hf.model.row_slots import COLUMN_STEP, columns_to_see

NUM_NEW = 16


@pytest.fixture
def streams(monkeypatch):
    """Tokens and places of every stream that is run."""
    seen, make = [], RowStream.of

    def noted(is_real, num_tokens):
        assert int(is_real.sum()) == num_tokens
        seen.append((num_tokens, is_real.numel()))
        return make(is_real, num_tokens)

    monkeypatch.setattr(row_target.RowStream, "of", noted)
    return seen


@pytest.mark.parametrize("layout", ["flat", "padded", "auto"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["verification_policy"])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 17])
def test_layouts_say_what_plain_batches_say(num_rows, policy, layout, streams):
    check_layout(tiny_target("llama"), num_rows, NUM_NEW, layout, **policy, cache_implementation="static")
    assert bool(streams) == (layout == "flat") or layout == "auto"


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_forwards_look_at_few_different_numbers_of_columns(layout, monkeypatch):
    """As on an accelerator, for target and drafter."""
    seen = set()

    def noted(num_columns, capacity, device):
        seen.add(columns_to_see(num_columns, capacity, torch.device("cuda")))
        return columns_to_see(num_columns, capacity, torch.device("cuda"))

    monkeypatch.setattr(row_target, "columns_to_see", noted)
    monkeypatch.setattr(row_drafter, "columns_to_see", noted)
    target = tiny_target()
    inputs = ragged([3, 9, 5])
    drafter = tiny_drafter(target)
    options = {"max_new_tokens": 141, "verification_layout": layout, "assistant_model": drafter}
    assert torch.equal(greedy(target, **inputs, **options), greedy(target, **inputs, max_new_tokens=141))
    assert seen == {COLUMN_STEP, 2 * COLUMN_STEP, 150, 150 + drafter.config.block_size}


def test_a_stream_is_chosen_where_it_saves_enough(streams):
    target = tiny_target()
    inputs = ragged([30, 3, 3, 3])
    greedy(target, **inputs, max_new_tokens=6, assistant_model=tiny_drafter(target))
    assert streams[0] == (39, 120)
    streams.clear()
    greedy(target, **ragged([9, 9, 8]), max_new_tokens=3, assistant_model=tiny_drafter(target))
    assert not streams


@pytest.mark.parametrize(
    "family", [*NAMED_FAMILIES, *(pytest.param(name, marks=pytest.mark.full) for name in OTHER_FAMILIES)]
)
def test_families_as_streams(family):
    target = FAMILIES[family].build()
    inputs = ragged([9, 4, 12, 1], vocab_size=128)
    if row_target.why_not_together(target) is not None:
        pytest.skip("its rows run one after the other")
    expected = greedy(target, **inputs, max_new_tokens=NUM_NEW)
    options = {"max_new_tokens": NUM_NEW, "verification_layout": "flat", "assistant_model": tiny_drafter(target)}
    if (reason := row_target.why_not_flat(target)) is not None:
        with pytest.raises(UnsupportedGenerationError, match="verification_layout='flat' needs attention"):
            greedy(target, **inputs, **options)
        assert "its attention is" in reason
        return
    assert torch.equal(greedy(target, **inputs, **options), expected)
    oracle = OracleDrafter.for_target(target, expected[0, 3:], hit_rate=0.8)
    assert torch.equal(greedy(target, **inputs, **options | {"assistant_model": oracle}), expected)


def test_the_target_attends_as_before_when_a_call_has_ended():
    target = tiny_target()
    inputs = ragged([3, 6])

    def fails(ids, scores):
        assert target.config._attn_implementation == NAME
        raise KeyboardInterrupt

    greedy(target, **inputs, max_new_tokens=4, assistant_model=tiny_drafter(target))
    assert target.config._attn_implementation == "sdpa"
    with pytest.raises(KeyboardInterrupt):
        greedy(
            target, **inputs, max_new_tokens=4, assistant_model=tiny_drafter(target),
            prefix_allowed_tokens_fn=fails,
        )  # fmt: skip
    assert target.config._attn_implementation == "sdpa"


def test_an_attention_that_is_set_during_a_call_stays():
    target = tiny_target()
    with attending_by_rows(target):
        target.set_attn_implementation("eager")
    assert target.config._attn_implementation == "eager"


def test_a_profile_is_found_while_a_batch_runs():
    target = tiny_target()
    drafter = tiny_drafter(target)
    before = Fingerprint.of(target, drafter).key
    with attending_by_rows(target):
        assert Fingerprint.of(target, drafter).key == before


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_layout_that_does_not_exist_is_refused(num_rows):
    target = tiny_target()
    with pytest.raises(UnsupportedGenerationError, match="verification_layout must be one of .*got 'square'"):
        greedy(
            target, **ragged([3, 6][:num_rows]), max_new_tokens=4, assistant_model=tiny_drafter(target),
            verification_layout="square",
        )  # fmt: skip


# -- one row on a static cache ------------------------------------------------------------------------------------


class Listener:
    def __init__(self):
        self.tokens, self.has_ended = [], False

    def put(self, value):
        self.tokens.extend(value.flatten().tolist())

    def end(self):
        self.has_ended = True


@pytest.mark.parametrize("padding", [0, 3])
def test_one_row_on_a_static_cache_runs_on_the_caches_of_a_batch(padding, monkeypatch):
    target, ids = tiny_target(), random_ids(9)
    mask = (torch.arange(9) >= padding).long()[None]
    common = {"attention_mask": mask, "max_new_tokens": NUM_NEW, "pad_token_id": 0}
    expected = greedy(target, ids, **common)
    runs, run = [], BatchRun.run
    monkeypatch.setattr(BatchRun, "run", lambda self, ids: runs.append(1) or run(self, ids))
    for drafter in (tiny_drafter(target), OracleDrafter.for_target(target, expected[0, padding:])):
        listener = Listener()
        got = greedy(target, ids, **common, streamer=listener, cache_implementation="static", assistant_model=drafter)
        assert torch.equal(got, expected)
        assert listener.tokens == expected[0].tolist() and listener.has_ended
    assert len(runs) == 2
    output = greedy(
        target, ids, **common, cache_implementation="static", assistant_model=drafter, return_dict_in_generate=True
    )
    assert output.cache is not None, "a cache that is asked for is handed back"
    assert torch.equal(output.sequences, expected)


class EndsAt(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 13)


def test_nothing_behind_a_stop_is_streamed():
    target, ids = tiny_target(), random_ids(9)
    common = {"max_new_tokens": NUM_NEW, "stopping_criteria": [EndsAt()], "cache_implementation": "static"}
    expected = greedy(target, ids, **common)
    assert expected.shape == (1, 13)
    oracle = OracleDrafter.for_target(target, greedy(target, ids, max_new_tokens=40)[0], hit_rate=1.0)
    listener = Listener()
    assert torch.equal(greedy(target, ids, **common, streamer=listener, assistant_model=oracle), expected)
    assert listener.tokens == expected[0].tolist()


# -- compiled -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _no_compiled_code_is_left():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_no_compiled_code_is_left")
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_compiled_batch_has_one_graph_for_each_width(num_rows):
    backend, graphs = counting_backend()
    target = tiny_target(num_layers=2)
    drafter = tiny_drafter(target, block_size=7)
    whole, inputs = prefixes_of_one_text(target, num_rows)
    options = compiled_static_prompt(backend) | inputs | {"max_length": 60, "do_sample": False}
    plain = greedy(target, **inputs, max_length=60)
    widths = set()
    forward = row_target.RowTarget.forward

    def noted(self, tokens, *args, **kwargs):
        widths.add(tokens.shape[1])
        return forward(self, tokens, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_target.RowTarget, "forward", noted)
        threshold = {"verification_policy": "threshold", "assistant_confidence_threshold": 0.5}
        for policy in ({}, threshold, {"num_assistant_tokens": 2}):
            for assistant in (drafter, OracleDrafter.for_target(target, whole, hit_rate=0.8)):
                torch._dynamo.config.automatic_dynamic_shapes, before = False, True
                try:
                    got = target.generate(**options, **policy, assistant_model=assistant)
                finally:
                    torch._dynamo.config.automatic_dynamic_shapes = before
                assert torch.equal(got, plain)
    assert widths <= {1, 2, 3, 4, 8}
    assert len(graphs) == len(widths) > 1


@pytest.fixture
def compiled(monkeypatch):
    """A tiny target, arguments that compile it, the graphs that were compiled, and the widths that were run."""
    graphs, widths, forward = [], set(), row_target.RowTarget.forward

    def backend(graph, example_inputs, **options):
        graphs.append(graph)
        return graph.forward

    def noted(self, tokens, *args, **kwargs):
        widths.add(tokens.shape[1])
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(row_target.RowTarget, "forward", noted)
    target = tiny_target(num_layers=2)
    options = compiled_static_prompt(backend) | ragged([3, 7, 5]) | {"do_sample": False}
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        yield target, options | {"assistant_model": tiny_drafter(target, block_size=7)}, graphs, widths


@pytest.mark.usefixtures("_no_compiled_code_is_left")
def test_a_compiled_forward_changes_no_input_without_a_fixed_address(compiled):
    target, options, graphs, _ = compiled
    target.generate(**options, max_new_tokens=6)
    nodes = list(graphs[0].graph.nodes)
    written = [node.args[0] for node in nodes if node.target is operator.setitem]
    assert len(written) == 4 and all(node.op == "placeholder" for node in written), "keys and values of two layers"
    # What torch asks before it replays a CUDA graph.
    assert all(node.meta["tensor_dict"]["_dynamo_static_input_type"] == "unguarded" for node in written)


@pytest.mark.usefixtures("_no_compiled_code_is_left")
def test_a_compiled_batch_that_verifies_all_has_one_width_to_the_end(compiled):
    target, options, graphs, widths = compiled
    plain = greedy(target, **ragged([3, 7, 5]), max_new_tokens=NUM_NEW)
    assert torch.equal(target.generate(**options, max_new_tokens=NUM_NEW), plain)
    assert widths == {8}
    assert len(graphs) == 1


@pytest.mark.usefixtures("_no_compiled_code_is_left")
def test_texts_of_other_lengths_need_no_new_graph(compiled):
    target, options, graphs, _ = compiled
    for num_new in (20, 9, 14):
        plain = greedy(target, **ragged([3, 7, 5]), max_new_tokens=num_new)
        assert torch.equal(target.generate(**options, max_new_tokens=num_new), plain)
    assert len(graphs) == 1
