"""The demo without a page: requests in, tallies out, one race at a time on the device."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from ..decoding.policies.simple import ThresholdPolicy
from ..decoding.scheduler import policy_without_a_word
from ..evaluation.settings import ComparisonError, ComparisonSettings
from ..modeling_dspark import DSparkDraftModel
from ..prompts import Prompt, encode_prompt
from ..training.answering import pad_left
from .events import Event, LaneStopped, RaceFailed
from .lanes import Job, Lane
from .race import readable, run_race
from .shelf import BUNDLED, DEFAULT_TARGET, Shelf
from .tally import LaneTally, RaceTally
from .turns import RaceStopped

# What one visitor may ask for.
MAX_PROMPT_TOKENS = 1024
MAX_PROMPT_CHARACTERS = 6000
MAX_NEW_TOKENS = 256
MAX_ROWS = 16

# Seconds between two views of a running race: reads as live, and leaves the processor to the race.
VIEW_EVERY_S = 0.12

# Seconds between two looks at whether a waiting race was cancelled.
ASK_EVERY_S = 0.1

WARM_UP = "Say hello."
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class RaceRequest:
    """What a visitor asks for.

    Attributes:
        lanes: Two pairs of a name for the reader and a drafter; None is plain generation.
        prompts: Several make a batch.

    Raises:
        ComparisonError: more than a visitor may ask for, or no text.
    """

    lanes: tuple[tuple[str, str | None], tuple[str, str | None]]
    prompts: tuple[str, ...]
    settings: ComparisonSettings
    target: str = DEFAULT_TARGET

    def __post_init__(self) -> None:
        if not self.prompts or not all(prompt.strip() for prompt in self.prompts):
            raise ComparisonError("the prompt is empty; write one, or choose an example")
        if (length := max(map(len, self.prompts))) > MAX_PROMPT_CHARACTERS:
            raise ComparisonError(f"a prompt may have at most {MAX_PROMPT_CHARACTERS} characters, got {length}")
        if len(self.prompts) > MAX_ROWS:
            raise ComparisonError(f"a batch may have at most {MAX_ROWS} rows, got {len(self.prompts)}")
        num_new = self.settings.max_new_tokens
        if num_new > MAX_NEW_TOKENS:
            raise ComparisonError(f"new tokens must be at most {MAX_NEW_TOKENS}, got {num_new}")


class DemoService:
    """Runs races, one at a time; every method may be called from any thread."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self._device = threading.Lock()
        self._numbers = itertools.count()

    def warm_up(self, target: str = DEFAULT_TARGET, drafter: str = BUNDLED) -> None:
        """Load the default pair and let both lanes say a few words: first calls pick kernels and fill caches.

        Raises:
            ComparisonError, ZooError: as for `Shelf.target` and `Shelf.drafter`.
        """
        settings = ComparisonSettings(max_new_tokens=WARM_UP_TOKENS)
        request = RaceRequest((("plain", None), ("DSpark", drafter)), (WARM_UP,), settings, target)
        with self._device:
            job, lanes = self._prepare(request)
            run_race(job, lanes, lambda _: None, is_cancelled=lambda: False)

    def load(self, request: RaceRequest) -> None:
        """Load what a race needs, if it is not there.

        Raises:
            ComparisonError, ZooError: as for `Shelf.target` and `Shelf.drafter`.
        """
        with self._device:
            self._prepare(request)

    def tallies(self, request: RaceRequest, cancelled: threading.Event) -> Iterator[RaceTally]:
        """Run a race; yields the one tally of it, each time more of it is known.

        Errors are in the tally, and nothing is raised. When the iterator is closed or `cancelled` is set, the race
        ends after the running target forward and the device is free.
        """
        tally = new_tally(request)
        tally.notice = "Waiting for the device …"
        yield tally
        is_closed = threading.Event()
        events: queue.SimpleQueue[Event | str | None] = queue.SimpleQueue()

        def is_cancelled() -> bool:
            return cancelled.is_set() or is_closed.is_set()

        worker = threading.Thread(target=self._work, args=(request, events.put, is_cancelled), daemon=True)
        worker.start()
        try:
            is_over = False
            while not is_over:
                is_over = _take(events, tally)
                yield tally
        finally:
            is_closed.set()
            worker.join()

    def _work(
        self, request: RaceRequest, put: Callable[[Event | str | None], None], is_cancelled: Callable[[], bool]
    ) -> None:
        """The race, in a thread of its own; a text is a notice, None the end."""
        try:
            with self._holding_device(is_cancelled):
                put("" if self._is_loaded(request) else "Loading the models …")
                job, lanes = self._prepare(request)
                put("")
                run_race(job, lanes, put, is_cancelled=is_cancelled, first=next(self._numbers) % 2)
        except RaceStopped:
            put(LaneStopped(0))
        except Exception as error:  # of loading, and of settings that the drafter cannot honour
            put(RaceFailed(readable(error)))
        finally:
            put(None)

    @contextmanager
    def _holding_device(self, is_cancelled: Callable[[], bool]) -> Iterator[None]:
        """Wait for the device, and give it back at the end.

        Raises:
            RaceStopped: the race was cancelled before.
        """
        while not self._device.acquire(timeout=ASK_EVERY_S):
            if is_cancelled():
                raise RaceStopped
        try:
            yield
        finally:
            self._device.release()

    def _is_loaded(self, request: RaceRequest) -> bool:
        return all(self.shelf.holds(drafter, request.target) for _, drafter in request.lanes)

    def _prepare(self, request: RaceRequest) -> tuple[Job, list[Lane]]:
        """What the race runs, loaded; called by who has the device."""
        target, tokenizer = self.shelf.target(request.target)
        drafters = [None if name is None else self.shelf.drafter(name, request.target) for _, name in request.lanes]
        prompts = [
            Prompt(f"row {row}", ({"role": "user", "content": text},)) for row, text in enumerate(request.prompts)
        ]
        rows = [encode_prompt(tokenizer, prompt)[0].tolist() for prompt in prompts]
        if (bad := next((len(row) for row in rows if not 0 < len(row) <= MAX_PROMPT_TOKENS), None)) is not None:
            raise ComparisonError(f"a prompt must have 1 to {MAX_PROMPT_TOKENS} tokens, this one has {bad}; shorten it")
        ids, mask = pad_left(rows, target.device)
        policies = [None if drafter is None else _policy(request, target, drafter) for drafter in drafters]
        settings = request.settings
        if settings.policy is None and ThresholdPolicy.name in policies and len(rows) > 1:
            settings = replace(settings, policy=ThresholdPolicy.name)
        lanes = [Lane(number, *pair) for number, pair in enumerate(zip(drafters, policies, strict=True))]
        return Job(target, tokenizer, ids, mask, settings), lanes


def new_tally(request: RaceRequest) -> RaceTally:
    """The tally of a race that has not begun."""
    lanes = [LaneTally(name, is_speculative=drafter is not None) for name, drafter in request.lanes]
    return RaceTally(lanes, num_rows=len(request.prompts))


def _policy(request: RaceRequest, target: PreTrainedModel, drafter: DSparkDraftModel) -> str:
    """In force for a drafter's lane.

    A batch is shown for its budgets: where the drafter's own policy would give way to `full`, since this machine has
    no throughput profile, it is `threshold`.
    """
    num_rows = len(request.prompts)
    policy = request.settings.policy or policy_without_a_word(target, drafter, num_rows)
    gave_way = request.settings.policy is None and policy != drafter.config.verification_policy
    return ThresholdPolicy.name if gave_way and num_rows > 1 and drafter.config.enable_confidence_head else policy


def _take(events: "queue.SimpleQueue[Event | str | None]", tally: RaceTally) -> bool:
    """Add what happens until the next view is due; True when nothing will come."""
    due_s = time.monotonic() + VIEW_EVERY_S
    event = events.get()
    while True:
        if event is None:
            tally.notice = ""
            return True
        if isinstance(event, str):
            tally.notice = event
        else:
            tally.add(event)
        try:
            event = events.get(timeout=max(0.0, due_s - time.monotonic()))
        except queue.Empty:
            return False


def rows_from(prompts: Sequence[str], num_rows: int) -> tuple[str, ...]:
    """`num_rows` prompts, from the first on, and again from the first where there are fewer."""
    return tuple(itertools.islice(itertools.cycle(prompts), num_rows))
