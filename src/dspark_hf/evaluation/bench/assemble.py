"""From kept measurements to a report."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..identity import pair_facts
from ..provenance import Provenance
from .advice import DepthAdvice, GammaAdvice, advise_depth, advise_gamma
from .cells import CellStore
from .inputs import Batch
from .memory import Memory
from .pooling import Place, Runs, pool
from .predictions import splits_of
from .profiles import Profiled, rows_of
from .report import BenchReport, CellReport
from .request import BenchModels, BenchRequest
from .settings import Cell
from .way_run import WayRun
from .ways import BASELINE, STATIC, LeftOut, Way, WayFacts

Batches = Mapping[Cell, Sequence[Batch]]


def assemble(
    *,
    request: BenchRequest,
    models: BenchModels,
    batches: Batches,
    ways: Sequence[Way],
    left_out: Sequence[LeftOut],
    profiles: Mapping[str, Profiled | str],
    store: CellStore,
    provenance: Provenance,
) -> BenchReport:
    """Everything that `store` holds of a request, pooled."""
    facts = [way.facts for way in ways]
    runs = {cell: _runs_of(cell, parts, store) for cell, parts in batches.items()}
    known = {name: one for name, one in profiles.items() if isinstance(one, Profiled)}
    notes = [f"no throughput profile of {name}: {one}" for name, one in profiles.items() if isinstance(one, str)]
    device_type = models.target.device.type
    cells = [
        _cell(cell, batches[cell], ways, runs[cell], known, store, request, notes, device_type=device_type)
        for cell in batches
    ]
    main = next(cell for cell in batches if cell.kind == "main")
    gamma = [
        advice
        for name, profiled in known.items()
        for advice in _gamma(name, profiled, facts, main, runs[main], batches[main], request)
    ]
    return BenchReport(
        target=request.target,
        settings=request.settings,
        pairs={
            name: pair_facts(request.target, models.target, models.tokenizer, one.folder)
            for name, one in models.drafters.items()
        },
        ways=tuple(facts),
        left_out=(*left_out, *_failures(batches, ways, store)),
        cells=tuple(cells),
        profiles={name: one.facts for name, one in known.items()},
        gamma=tuple(gamma),
        depth=tuple(_depth(facts, gamma, known, store)),
        notes=tuple(dict.fromkeys(notes)),
        provenance=provenance,
        sessions=tuple(store.sessions),
    )


def failure_key(cell: Cell, way_name: str) -> str:
    """Of why a way was left out at a cell."""
    return f"failed/{cell.name}/{way_name}"


def _failures(batches: Batches, ways: Sequence[Way], store: CellStore) -> Iterator[LeftOut]:
    """Ways that failed at a cell. Where plain generation did, nothing was measured."""
    for cell in batches:
        for way in ways:
            if (key := failure_key(cell, way.name)) in store:
                name = f"all ways at {cell.name}" if way.name == BASELINE else f"{way.name} at {cell.name}"
                yield LeftOut(name, store[key])


def _runs_of(cell: Cell, batches: Sequence[Batch], store: CellStore) -> Runs:
    places = [Place(batch, repeat) for repeat in range(cell.num_repeats) for batch in range(len(batches))]
    found: dict[Place, dict[str, WayRun]] = {}
    for place in places:
        key = f"run/{cell.name}/{place.batch}/{place.repeat}"
        if key in store:
            found[place] = {name: WayRun.from_dict(run) for name, run in store[key].items()}
    return found


def _cell(
    cell: Cell,
    batches: Sequence[Batch],
    ways: Sequence[Way],
    runs: Runs,
    known: Mapping[str, Profiled],
    store: CellStore,
    request: BenchRequest,
    notes: list[str],
    *,
    device_type: str,
) -> CellReport:
    present = [way.facts for way in ways if way.runs_in(cell)]
    first = [way.name for way in present if way.kind == "drafter"][:1]
    numbers = [
        pool(cell, way, runs, [BASELINE, STATIC, *first], num_batches=len(batches), seed=request.settings.seed)
        for way in present
    ]
    memory = {way.name: f"memory/{cell.name}/{way.name}" for way in present}
    return CellReport(
        cell=cell,
        prompt_ids=tuple(name for batch in batches for name in batch.ids),
        num_planned=0 if failure_key(cell, BASELINE) in store else len(batches) * cell.num_repeats,
        num_done=len(runs),
        ways=tuple(one for one in numbers if one is not None),
        memory={name: Memory(**store[key]) for name, key in memory.items() if key in store},
        latency=tuple(splits_of(cell, batches, present, runs, known, notes, device_type=device_type)),
    )


# -- advice ------------------------------------------------------------------------------------------------------


def _gamma(
    name: str,
    profiled: Profiled,
    ways: Sequence[WayFacts],
    cell: Cell,
    runs: Runs,
    batches: Sequence[Batch],
    request: BenchRequest,
) -> list[GammaAdvice]:
    """By number of rows; acceptance from the main table, where every draft of a whole block was verified."""
    num_slots = profiled.profile.grid.tokens_per_row[-1] - 1
    whole = [
        way.name for way in ways if way.drafter == name and way.policy == "full" and way.num_draft_tokens == num_slots
    ]
    by_batch: dict[int, list[Any]] = {}
    for place, by_way in runs.items():
        for way in whole[:1]:
            if way in by_way and by_way[way].speculation is not None:
                by_batch.setdefault(place.batch, []).append(by_way[way].speculation)
    if not by_batch:
        return []
    reached = [_slots(several, "reached_per_slot", num_slots) for several in by_batch.values()]
    accepted = [_slots(several, "accepted_per_slot", num_slots) for several in by_batch.values()]
    context = int(statistics.median(batch.longest for batch in batches)) + cell.max_new_tokens // 2
    return [
        advise_gamma(name, reached, accepted, profiled.gamma_costs(rows, context), seed=request.settings.seed)
        for rows in rows_of(name, request)
    ]


def _slots(several: Sequence[Any], field: str, num_slots: int) -> list[float]:
    """One prompt's counts, repeats added up."""
    sums = [0.0] * num_slots
    for speculation in several:
        for slot, count in enumerate(getattr(speculation, field)):
            sums[slot] += count
    return sums


def _depth(
    ways: Sequence[WayFacts], gamma: Sequence[GammaAdvice], known: Mapping[str, Profiled], store: CellStore
) -> list[DepthAdvice]:
    """Of drafters whose layers were timed; at one row, where their tau at the whole block was measured."""
    advice = []
    num_layers = {way.drafter: way.num_layers for way in ways}
    for one in gamma:
        key = f"layer/{one.drafter}"
        layers = num_layers.get(one.drafter)
        if key not in store or one.num_rows != 1 or not layers:
            continue
        whole = one.points[-1]
        context = store[key]["context"]
        costs = known[one.drafter].gamma_costs(1, context)
        advice.append(
            advise_depth(
                one.drafter,
                num_layers=layers,
                layer_s=store[key]["share_of_draft"] * known[one.drafter].profile.draft_s(1, context),
                tau=whole.tau,
                gamma=whole.gamma,
                costs=costs,
            )
        )
    return advice
