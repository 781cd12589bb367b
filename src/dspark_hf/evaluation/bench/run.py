"""A whole bench, in order; every finished measurement is kept as it comes."""

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from ...errors import DSparkError
from ..provenance import collect_provenance
from .assemble import assemble, failure_key
from .cells import CellStore
from .inputs import Batch, batches_of, check_lengths, encode_all
from .layer_cost import layer_share, layers_of
from .pooling import Place
from .profiles import Profiled, profile_for, put_back_profiles
from .report import BenchReport
from .request import BenchModels, BenchRequest, identity_of, load_models
from .runs import Runner
from .settings import Cell
from .ways import BASELINE, LeftOut, Way, drafter_ways, lookup_ways, plain_ways, sibling_ways

MEASUREMENTS = "measurements.jsonl"
LAYER_REPEATS = 15
LAYER_CONTEXT = 256


class BenchInterrupted(KeyboardInterrupt):
    """Ctrl-C during a bench; `report` has what was measured before, None if no run of all ways was done."""

    def __init__(self, report: BenchReport | None) -> None:
        super().__init__()
        self.report = report


def run_bench(
    request: BenchRequest,
    *,
    show_progress: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    keep: Callable[[BenchReport], None] = lambda report: None,
) -> BenchReport:
    """Measure whatever of a request is not measured yet, and report all of it.

    Args:
        request: What is asked for. The same request with the same output goes on where an earlier run stopped.
        show_progress: Whether to show progress bars on stderr, if that is a terminal.
        tell: Takes lines for people.
        keep: Takes the report of what is done when an error ends the bench; the error is then raised.

    Raises:
        ComparisonError: a value cannot be worked with, or the output holds measurements of another request.
        BenchInterrupted: Ctrl-C.
        DSparkError, OSError: models cannot be loaded, or measurements not be written.
    """
    request.output.mkdir(parents=True, exist_ok=True)
    models = load_models(request)
    encoded = encode_all(models.tokenizer, request.prompts)
    check_lengths(request.settings, encoded, models.target)
    target = models.target
    provenance = collect_provenance(target.device, target.dtype, seed=request.settings.seed, n=len(encoded))
    store = CellStore(request.output / MEASUREMENTS, identity_of(request, models, encoded), asdict(provenance))
    bench = _Bench(request, models, encoded, store, show_progress)
    try:
        bench.prepare(tell)
    except KeyboardInterrupt as stop:
        raise BenchInterrupted(None) from stop
    try:
        bench.measure(tell)
    except KeyboardInterrupt as stop:
        raise BenchInterrupted(bench.report(provenance) if bench.has_runs else None) from stop
    except Exception:
        if bench.has_runs:
            keep(bench.report(provenance))
        raise
    return bench.report(provenance)


class _Bench:
    """One bench in progress."""

    def __init__(
        self,
        request: BenchRequest,
        models: BenchModels,
        encoded: dict[str, tuple[int, ...]],
        store: CellStore,
        show_progress: bool,
    ) -> None:
        self._request = request
        self._models = models
        self._store = store
        self._show_progress = show_progress
        self._batches = {cell: batches_of(cell, encoded) for cell in request.settings.cells()}
        self._profiles: dict[str, Profiled | str] = {}
        self._ways: list[Way] = []
        self._left_out: list[LeftOut] = []
        self._warm: set[tuple[str, str]] = set()

    @property
    def has_runs(self) -> bool:
        """Whether there is anything to report."""
        return any(key in self._store for key in map(run_key, self._plan()))

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Profiles, ways, and what a draft layer costs."""
        request, target = self._request, self._models.target
        put_back_profiles(self._models.drafters, target, self._store, tell)
        for name, drafter in self._models.drafters.items():
            self._profiles[name] = profile_for(
                name, drafter, target, request, self._store, show_progress=self._show_progress
            )
        found = [
            (plain_ways(), []),
            lookup_ways(request.settings),
            sibling_ways(request.sibling, self._models.sibling, target),
            drafter_ways(self._models.drafters, target, request.settings, request.swept_names),
        ]
        self._ways = [way for ways, _ in found for way in ways]
        self._left_out = [one for _, left_out in found for one in left_out]
        for one in self._left_out:
            tell(f"left out: {one.name}: {one.reason}")
        for name, drafter in self._models.drafters.items():
            if isinstance(self._profiles[name], Profiled) and layers_of(drafter.model) is not None:
                self._time_layers(name)

    def measure(self, tell: Callable[[str], None]) -> None:
        """All runs that are not there yet; repeats outside, so that a drift hits all cells alike."""
        runner = Runner(self._models.target, self._ways, self._request.settings)
        planned = list(self._plan())
        missing = [one for one in planned if run_key(one) not in self._store]
        bar = tqdm(
            total=len(planned),
            initial=len(planned) - len(missing),
            desc="bench",
            unit="run",
            disable=None if self._show_progress else True,
        )
        with bar:
            for cell, place in missing:
                bar.set_postfix_str(cell.name)
                self._run(runner, cell, place, tell)
                bar.update()

    def report(self, provenance: Any) -> BenchReport:
        """Of everything that is measured."""
        return assemble(
            request=self._request,
            models=self._models,
            batches=self._batches,
            ways=self._ways,
            left_out=self._left_out,
            profiles=self._profiles,
            store=self._store,
            provenance=provenance,
        )

    # -- parts --------------------------------------------------------------------------------------------------

    def _time_layers(self, name: str) -> None:
        key = f"layer/{name}"
        if key not in self._store:
            target, drafter = self._models.target, self._models.drafters[name].model
            share = layer_share(target, drafter, num_rows=1, context=LAYER_CONTEXT, num_repeats=LAYER_REPEATS)
            self._store.add(key, {"share_of_draft": share, "context": LAYER_CONTEXT})

    def _plan(self) -> Iterator[tuple[Cell, Place]]:
        for repeat in range(max(cell.num_repeats for cell in self._batches)):
            for cell, batches in self._batches.items():
                if repeat < cell.num_repeats:
                    yield from ((cell, Place(batch, repeat)) for batch in range(len(batches)))

    def _run(self, runner: Runner, cell: Cell, place: Place, tell: Callable[[str], None]) -> None:
        batch = self._batches[cell][place.batch]
        ways = [
            way
            for way in self._ways
            if way.runs_in(cell) and self._is_ready(runner, way, cell, self._batches[cell][0], tell)
        ]
        if BASELINE not in [way.name for way in ways]:
            return  # nothing to compare with
        seed = self._request.settings.seed + 1000 * place.repeat + place.batch
        random.Random(f"{seed} {cell.name}").shuffle(ways)
        runs = runner.run(ways, cell, batch, seed=seed % 2**32)
        self._store.add(run_key((cell, place)), {name: run.to_dict() for name, run in runs.items()})

    def _is_ready(self, runner: Runner, way: Way, cell: Cell, batch: Batch, tell: Callable[[str], None]) -> bool:
        """Whether a way works at a cell: alone and once, so that what fails takes no other way's measurements along.

        That it failed is kept: runs of one cell that have other ways in them could not be put together.
        """
        failed = failure_key(cell, way.name)
        if failed not in self._store and (cell.name, way.name) not in self._warm:
            try:
                self._warm_up(runner, way, cell, batch)
            except (DSparkError, ValueError, torch.OutOfMemoryError) as error:
                if way.name == BASELINE and cell.kind == "main":
                    raise
                self._store.add(failed, " ".join(f"{type(error).__name__}: {error}".split()))
                tell(f"left out: {way.name} at {cell.name}: {self._store[failed]}")
            self._warm.add((cell.name, way.name))
            if failed in self._store and self._models.target.device.type == "cuda":
                torch.cuda.empty_cache()
        return failed not in self._store

    def _warm_up(self, runner: Runner, way: Way, cell: Cell, batch: Batch) -> None:
        key = f"memory/{cell.name}/{way.name}"
        if key in self._store:
            runner.warm_up(way, cell, batch)
        else:
            self._store.add(key, asdict(runner.memory(way, cell, batch)))


def run_key(one: tuple[Cell, Place]) -> str:
    """Of a run of all ways on one batch."""
    cell, place = one
    return f"run/{cell.name}/{place.batch}/{place.repeat}"
