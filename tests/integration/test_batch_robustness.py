"""A batch that fails leaves everything usable, and a long one needs no more memory than it should."""

import gc

import pytest
import torch
from batches import ragged
from tiny import greedy, tiny_drafter, tiny_target
from transformers.generation.stopping_criteria import StoppingCriteria

from dspark_hf import UnsupportedGenerationError
from dspark_hf.decoding.batch import BatchRun
from dspark_hf.decoding.row_drafter import RowDrafter
from dspark_hf.decoding.row_target import RowTarget

NUM_NEW = 16


class FailsAfter(StoppingCriteria):
    def __init__(self, num_calls, error):
        self.left, self.error = num_calls, error

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        if self.left <= 0:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool)


def failing(right, error, after):
    """A method that works `after` times."""
    left = [after]

    def method(self, *args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return right(self, *args, **kwargs)

    return method


FAULTS = {
    "out_of_memory_in_the_target": (RowTarget, "forward", torch.OutOfMemoryError("no memory left")),
    "out_of_memory_in_the_prompt": (RowTarget, "prefill", torch.OutOfMemoryError("no memory left")),
    "out_of_memory_in_the_drafter": (RowDrafter, "propose_rows", torch.OutOfMemoryError("no memory left")),
    "interrupted_in_a_round": (BatchRun, "_append", KeyboardInterrupt()),
    "interrupted_while_rows_leave": (BatchRun, "_compact", KeyboardInterrupt()),
}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("after", [0, 2])
def test_model_and_drafter_are_usable_after_a_fault(fault, after, cache, monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target)
    inputs = ragged([3, 9, 5])
    common = {"max_new_tokens": NUM_NEW, "cache_implementation": cache, "prefill_chunk_size": 3}
    expected = greedy(target, **inputs, **common)
    owner, name, error = FAULTS[fault]
    before = set(vars(target)), set(vars(drafter))
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(owner, name, failing(getattr(owner, name), error, after))
        greedy(target, **inputs, **common, assistant_model=drafter)
    assert (set(vars(target)), set(vars(drafter))) == before
    assert torch.equal(greedy(target, **inputs, **common), expected)
    assert torch.equal(greedy(target, **inputs, **common, assistant_model=drafter), expected)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), torch.OutOfMemoryError("none left")])
def test_an_exception_in_a_criterion_comes_through(error):
    target = tiny_target()
    drafter = tiny_drafter(target)
    inputs = ragged([3, 9, 5])
    with pytest.raises(type(error), match=str(error) or None):
        greedy(
            target, **inputs, max_new_tokens=NUM_NEW, assistant_model=drafter,
            stopping_criteria=[FailsAfter(5, error)],
        )  # fmt: skip
    expected = greedy(target, **inputs, max_new_tokens=NUM_NEW)
    assert torch.equal(greedy(target, **inputs, max_new_tokens=NUM_NEW, assistant_model=drafter), expected)


def test_a_prompt_chunk_of_nothing_is_refused():
    target = tiny_target()
    with pytest.raises(UnsupportedGenerationError, match="prefill_chunk_size must be >= 1, got -1"):
        greedy(target, **ragged([3, 9]), max_new_tokens=4, prefill_chunk_size=-1, assistant_model=tiny_drafter(target))


def tensor_bytes():
    """Bytes of all tensors that are alive."""
    gc.collect()
    # By type(): asking an object for its class may run code of its own.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_memory_does_not_grow_from_round_to_round(monkeypatch):
    """Over 1,000 rounds; of the tensors, which is exact, where resident memory is noise."""
    target = tiny_target()
    target.config.max_position_embeddings = 2048  # rotary embeddings have no end of their own
    drafter = tiny_drafter(target, block_size=2)
    inputs = ragged([3, 9, 5, 4])
    sizes, rounds = [], []
    run_round = BatchRun._round

    def measured(self):
        run_round(self)
        rounds.append(1)
        if len(rounds) in (20, 1020):
            sizes.append(tensor_bytes())

    monkeypatch.setattr(BatchRun, "_round", measured)
    greedy(
        target, **inputs, max_new_tokens=1100, num_assistant_tokens=1, assistant_model=drafter,
        verification_policy="threshold", assistant_confidence_threshold=1.0,
    )  # fmt: skip
    assert len(sizes) == 2, "1,020 rounds"
    assert sizes[1] - sizes[0] < 2**20
