"""One batch through every way in turns: tokens, seconds, rounds, and whether the texts are plain generation's."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...decoding.observers import EndedRounds, observe_rounds
from ...decoding.report import SpeculationReport, record_speculation
from ...training.answering import pad_left
from ..agreement import explain_difference
from ..compare import plain_config
from ..interleave import Turns, interleave, twin_of
from .inputs import Batch
from .memory import Memory, measure_memory
from .settings import BenchSettings, Cell
from .way_run import Difference, Round, Speculation, Stages, WayRun
from .ways import BASELINE, Way

WARM_UP_TOKENS = 8


class Runner:
    """Runs ways of generating on one target; each keeps a twin of it.

    Args:
        target: Loaded, in eval mode.
        ways: All that will be asked for.
        settings: How to generate.
    """

    def __init__(self, target: PreTrainedModel, ways: Sequence[Way], settings: BenchSettings) -> None:
        self._target = target
        self._twins: dict[str, Any] = {way.name: twin_of(target) for way in ways}
        self._config = plain_config(target, settings.generation())
        self._settings = settings
        self._num_forwards: dict[tuple[str, str], int] = {}  # of the last run, by cell and way
        self._explained: dict[tuple[object, ...], Difference] = {}

    def memory(self, way: Way, cell: Cell, batch: Batch) -> Memory:
        """What a whole call needs, alone; it warms the way up as well."""
        models = [self._twins[way.name]] + ([] if way.assistant is None else [way.assistant])
        return measure_memory(models, lambda: self._alone(way, cell, batch, cell.max_new_tokens))

    def warm_up(self, way: Way, cell: Cell, batch: Batch) -> None:
        """A few tokens: first calls pick kernels, allocate and look profiles up."""
        self._alone(way, cell, batch, min(WARM_UP_TOKENS, cell.max_new_tokens))

    def run(self, ways: Sequence[Way], cell: Cell, batch: Batch, *, seed: int) -> dict[str, WayRun]:
        """All ways on one batch, in turns.

        Args:
            ways: With plain generation among them; whoever comes first begins.
            seed: Of sampling.

        Raises:
            UnsupportedGenerationError: a way cannot do what the settings ask for.
        """
        ids, mask = pad_left(batch.tokens, self._target.device)
        watches = {way.name: Watch(self._twins[way.name], [len(tokens) for tokens in batch.tokens]) for way in ways}

        def runner(way: Way) -> Callable[[Any], tuple[Tensor, SpeculationReport]]:
            def run(twin: Any) -> tuple[Tensor, SpeculationReport]:
                watch = watches[way.name]
                with watch, record_speculation() as report, observe_rounds(watch.hear, with_plain=True):
                    output = self._generate(twin, way, ids, mask, cell, cell.max_new_tokens)
                return output, report

            return run

        known = {way.name: self._num_forwards.get((cell.name, way.name), 0) for way in ways}
        devices = [self._target.device] if self._target.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), ExitStack() as hooks:
            torch.manual_seed(seed)
            for watch in watches.values():
                hooks.enter_context(watch.before_others())
            turns = interleave(
                self._target,
                {way.name: runner(way) for way in ways},
                known if all(known.values()) else None,
                {way.name: self._twins[way.name] for way in ways},
            )
        self._num_forwards |= {(cell.name, name): turn.num_forwards for name, turn in turns.items()}
        texts = {name: self._texts(turn.result[0], ids.shape[1], cell) for name, turn in turns.items()}
        return {name: self._way_run(name, turn, watches[name], texts, cell, batch) for name, turn in turns.items()}

    # -- parts --------------------------------------------------------------------------------------------------

    def _alone(self, way: Way, cell: Cell, batch: Batch, max_new_tokens: int) -> None:
        ids, mask = pad_left(batch.tokens, self._target.device)
        devices = [self._target.device] if self._target.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            self._generate(self._twins[way.name], way, ids, mask, cell, max_new_tokens)

    def _generate(self, twin: Any, way: Way, ids: Tensor, mask: Tensor, cell: Cell, max_new_tokens: int) -> Tensor:
        config = self._config
        arguments: dict[str, Any] = {
            name: getattr(config, name) for name in ("do_sample", "temperature", "top_p", "top_k", "pad_token_id")
        }
        if not cell.stops_at_end:
            arguments |= {"eos_token_id": None, "pad_token_id": config.pad_token_id or 0}
        output: Tensor = twin.generate(
            ids, attention_mask=mask, max_new_tokens=max_new_tokens, **arguments, **way.arguments
        )
        return output

    def _texts(self, sequences: Tensor, num_prompt: int, cell: Cell) -> list[list[int]]:
        """New tokens of each row, up to its first end token, which counts."""
        ends = self._config.eos_token_id if cell.stops_at_end else None
        end_ids = {ends} if isinstance(ends, int) else set(ends or ())
        texts = []
        for row in sequences[:, num_prompt:].tolist():
            length = next((place + 1 for place, token in enumerate(row) if token in end_ids), len(row))
            texts.append(row[:length])
        return texts

    def _way_run(
        self,
        name: str,
        turn: "Turns[tuple[Tensor, SpeculationReport]]",
        watch: "Watch",
        texts: Mapping[str, list[list[int]]],
        cell: Cell,
        batch: Batch,
    ) -> WayRun:
        report = turn.result[1]
        differences: tuple[Difference, ...] = ()
        if self._settings.is_greedy and name != BASELINE:
            differences = tuple(self._differences(name, texts[BASELINE], texts[name], cell, batch))
        return WayRun(
            num_rows=len(batch.tokens),
            num_new_tokens=sum(map(len, texts[name])),
            latency_s=turn.seconds,
            first_token_s=watch.first_token_s,
            num_forwards=turn.num_forwards,
            speculation=_speculation(report, watch, turn.seconds) if report.num_calls else None,
            num_identical=len(batch.tokens) - len(differences) if self._settings.is_greedy else None,
            differences=differences,
        )

    def _differences(
        self, name: str, plain: list[list[int]], others: list[list[int]], cell: Cell, batch: Batch
    ) -> list[Difference]:
        """Of rows whose text is another; the same one in another repeat is explained once."""
        found = []
        for row, (ours, theirs) in enumerate(zip(plain, others, strict=True)):
            if ours == theirs:
                continue
            key = (cell.name, batch.ids, row, tuple(ours), tuple(theirs))
            if key not in self._explained:
                prompt = torch.tensor([batch.tokens[row]], device=self._target.device)
                difference = explain_difference(self._target, self._config, prompt, ours, theirs)
                assert difference is not None, "the texts differ"
                self._explained[key] = Difference(row, difference.position, difference.token_gap, difference.is_error)
            found.append(self._explained[key])
        return found


class Watch:
    """Sees one call from inside: when its forwards begin and end, how long it waited for its turns, and its rounds.

    Two hooks on the twin stand around the one that gives the turn away: one registered before the call begins, the
    other by the call itself.

    Args:
        twin: That the call runs on.
        num_prompt_tokens: Of each row, padding not counted.
        clock: Seconds.
    """

    def __init__(
        self,
        twin: PreTrainedModel,
        num_prompt_tokens: Sequence[int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.rounds: list[Round] = []
        self._twin = twin
        self._clock = clock
        self._start_s = 0.0
        self._since_s = 0.0
        self._num_in_stream: int | None = None  # tokens of the last forward, if all are in one row
        self._first_token_s: float | None = None
        self._waits: list[tuple[int, float]] = []  # rounds ended before a forward, and seconds waited for its turn
        self._num_real = [length + 1 for length in num_prompt_tokens]
        self._hooks = ExitStack()

    def before_others(self) -> ExitStack:
        """Registers the first hook; leaving it removes it."""
        stack = ExitStack()
        stack.callback(self._twin.register_forward_pre_hook(self._ask).remove)
        return stack

    def __enter__(self) -> "Watch":
        self._hooks.callback(self._twin.register_forward_pre_hook(self._go_on, with_kwargs=True).remove)
        self._hooks.callback(self._twin.register_forward_hook(self._ended).remove)
        self._start_s = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    @property
    def first_token_s(self) -> float:
        """Seconds until the first forward was over, waiting not counted."""
        assert self._first_token_s is not None, "a call has at least one forward"
        return self._first_token_s

    def hear(self, ended: EndedRounds) -> None:
        """A round is over."""
        num_slots = 0 if ended.draft_tokens is None else ended.draft_tokens.shape[1]
        context = max(self._num_real[row] for row in ended.rows) - 1
        num_flat = self._num_in_stream if len(ended.rows) > 1 else None
        self.rounds.append(Round(len(ended.rows), max(ended.num_verified), num_slots, context, num_flat))
        for row, num_accepted in zip(ended.rows, ended.num_accepted, strict=True):
            self._num_real[row] += num_accepted + 1

    def waited_s(self) -> tuple[float, float]:
        """Seconds waited before forwards over prompts, and before those of rounds, which a round's end follows."""
        counts = [count for count, _ in self._waits[1:]] + [len(self.rounds)]
        prompts = rounds = 0.0
        for (before, seconds), after in zip(self._waits, counts, strict=True):
            if after > before:
                rounds += seconds
            else:
                prompts += seconds
        return prompts, rounds

    def _ask(self, *_: object) -> None:
        self._since_s = self._clock()

    def _go_on(self, _twin: object, _args: object, kwargs: Mapping[str, Any]) -> None:
        tokens = kwargs.get("input_ids")
        self._num_in_stream = tokens.shape[1] if tokens is not None and tokens.shape[0] == 1 else None
        self._waits.append((len(self.rounds), self._clock() - self._since_s))

    def _ended(self, *_: object) -> None:
        if self._first_token_s is None:
            if self._twin.device.type == "cuda":
                torch.cuda.synchronize(self._twin.device)
            self._first_token_s = self._clock() - self._start_s - sum(seconds for _, seconds in self._waits)


def _speculation(report: SpeculationReport, watch: Watch, latency_s: float) -> Speculation:
    """The report without the seconds that others had the device."""
    of_prompts, of_rounds = watch.waited_s()
    stages = {
        "prefill_s": report.prefill_s - of_prompts,
        "draft_s": report.draft_s,
        "verify_s": report.verify_s - of_rounds,
        "accept_s": report.accept_s,
        "other_s": report.other_s,
    }
    return Speculation(
        num_rounds=report.num_rounds,
        num_drafted=report.num_drafted,
        num_verified=report.num_verified,
        num_accepted=report.num_accepted,
        reached_per_slot=tuple(report.reached_per_slot),
        accepted_per_slot=tuple(report.accepted_per_slot),
        stages=Stages(**stages, outside_s=latency_s - sum(stages.values())),
        rounds=tuple(watch.rounds),
    )
