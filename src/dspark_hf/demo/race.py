"""Lanes of one race: each in a thread, one at a time on the device; then whether their texts agree."""

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from .._machine import dtype_name
from ..errors import DSparkError
from ..evaluation.agreement import explain_difference, first_difference
from ..evaluation.compare import plain_config
from .events import Event, LaneDone, LaneReady, LaneStopped, RaceFailed, TextsCompared
from .lanes import Job, Lane, lane_config, run_lane
from .turns import RaceStopped, Turns

logger = logging.getLogger(__name__)

_MEMORY_WAY_OUT = "choose fewer rows or tokens, or a smaller model"


def run_race(
    job: Job, lanes: Sequence[Lane], put: Callable[[Event], None], *, is_cancelled: Callable[[], bool], first: int = 0
) -> None:
    """Run all lanes to their ends; returns when the device is free.

    Args:
        put: Is told of every event, by one thread at a time.
        is_cancelled: Asked between rounds.
        first: The lane that begins.

    Raises:
        ComparisonError: a drafter cannot honour a setting; nothing has run.
    """
    for lane in lanes:
        lane_config(job, lane)
        num_drafts = job.settings.num_assistant_tokens
        if lane.drafter is not None and num_drafts is None:
            num_drafts = lane.drafter.config.block_size
        put(LaneReady(lane.number, lane.policy, num_drafts or 0))
    turns = Turns(len(lanes), is_cancelled, first=first)
    done: list[LaneDone] = []

    def run(lane: Lane) -> None:
        try:
            turns.begin(lane.number)
            ended = run_lane(job, lane, turns, put)
            put(ended)
            done.append(ended)
        except RaceStopped:
            put(LaneStopped(lane.number))
        except Exception as error:  # whatever it is, the app lives on and the reader is told
            turns.fail()
            put(RaceFailed(readable(error)))
        finally:
            turns.end(lane.number)

    threads = [threading.Thread(target=run, args=(lane,), name=f"lane {lane.number}", daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(done) == len(lanes) and not is_cancelled():
        done.sort(key=lambda ended: ended.lane)
        put(compare_texts(job, done[0], done[1]))


def compare_texts(job: Job, one: LaneDone, other: LaneDone) -> TextsCompared:
    """Whether two lanes say the same; a first difference is explained by one more forward of the target."""
    num_rows, dtype = len(one.new_ids), dtype_name(job.target.dtype)
    differing = [
        row
        for row, texts in enumerate(zip(one.new_ids, other.new_ids, strict=True))
        if first_difference(*texts) is not None
    ]
    compared = TextsCompared(num_rows, num_rows - len(differing), job.settings.is_greedy, dtype)
    if not differing or not job.settings.is_greedy:
        return compared
    config = plain_config(job.target, job.settings)
    found = [
        explain_difference(job.target, config, job.row_ids(row), one.new_ids[row], other.new_ids[row])
        for row in differing
    ]
    first = found[0]
    assert first is not None, "only rows that differ are explained"
    return TextsCompared(
        num_rows,
        num_rows - len(differing),
        is_greedy=True,
        dtype=dtype,
        first_row=differing[0],
        position=first.position,
        token_gap=first.token_gap,
        is_error=any(difference is not None and difference.is_error for difference in found),
    )


def readable(error: Exception) -> str:
    """One line for the reader; what is not the reader's to mend goes to the log."""
    if isinstance(error, DSparkError):
        return " ".join(str(error).split())
    if is_out_of_memory(error):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return f"The device is out of memory: {_MEMORY_WAY_OUT}."
    logger.error("a race failed", exc_info=error)
    return f"Something went wrong ({type(error).__name__}); the server's log says what. Another prompt may work."


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; torch's CPU allocator has no error type of its own."""
    is_allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or is_allocator
