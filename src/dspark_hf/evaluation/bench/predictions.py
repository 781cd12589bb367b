"""Eq. 1 against the measurement for the ways of a cell: which profile predicts which way."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...errors import ThroughputProfileError
from .inputs import Batch
from .latency import LatencySplit, RoundCosts, slowdown_of, split_drafter, split_plain
from .pooling import Runs
from .profiles import Profiled
from .settings import Cell
from .way_run import WayRun
from .ways import BASELINE, WayFacts

_HOST_TIMES = (
    "Eq. 1 is not set against the measurement on {device_type}: stages are timed on the host, which runs ahead of the "
    "device, so their seconds would land in the wrong stages"
)


def splits_of(
    cell: Cell,
    batches: Sequence[Batch],
    ways: Sequence[WayFacts],
    runs: Runs,
    known: Mapping[str, Profiled],
    notes: list[str],
    *,
    device_type: str,
) -> list[LatencySplit]:
    """Of plain generation on its dynamic cache, which profiles hold, and of drafters; none on an accelerator.

    Args:
        known: Profiles by drafter. A drafter without one is predicted from the target steps of another's, and from
            drafts as they were measured.
        notes: Takes what could not be predicted, and why.
        device_type: Of the target, as torch names it.
    """
    if device_type != "cpu":
        notes.append(_HOST_TIMES.format(device_type=device_type))
        return []
    plain = {place: by_way[BASELINE] for place, by_way in runs.items() if BASELINE in by_way}
    contexts = [batches[place.batch].longest for place in plain]
    splits = []
    for way in ways:
        own = [by_way[way.name] for by_way in runs.values() if way.name in by_way]
        if not own or not known:
            continue
        widest = max(known.values(), key=lambda one: one.profile.grid.tokens_per_row[-1])
        costs = RoundCosts.of(known.get(way.drafter or "", widest).profile)
        try:
            slowdown = slowdown_of(list(plain.values()), contexts, costs)
            if way.kind == "drafter" and all(run.speculation and run.speculation.rounds for run in own):
                if way.drafter not in known:
                    costs = _with_measured_drafts(costs, own, slowdown)
                splits.append(split_drafter(way.name, cell.name, own, costs, slowdown=slowdown))
            elif way.name == BASELINE and all(run.num_new_tokens > run.num_rows for run in own):
                splits.append(split_plain(way.name, cell.name, own, contexts, costs))
        except ThroughputProfileError as error:
            notes.append(f"{cell.name}, {way.name}: no prediction: {error}")
    return splits


def _with_measured_drafts(costs: RoundCosts, runs: Sequence[WayRun], slowdown: float) -> RoundCosts:
    """Drafts of the mean measured seconds, at the speed that the machine had when the profile was made."""
    spoken = [run.speculation for run in runs if run.speculation is not None]
    num_drafts = sum(one.num_slots > 0 for speculation in spoken for one in speculation.rounds)
    draft_s = sum(speculation.stages.draft_s for speculation in spoken) / max(1, num_drafts) / slowdown
    return replace(costs, draft_s=lambda rows, slots, context: draft_s if slots else 0.0)
