"""Throughput profiles for the drafters of a bench: found in the user's cache, or measured and left there."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedModel

from ...decoding.scheduler import usable_profile
from ...errors import ThroughputProfileError
from ...fitting.measuring import DEFAULT_CONTEXTS, ProfilePlan
from ...fitting.profile_store import find_profile, save_profile
from ...fitting.throughput import ThroughputProfile
from ...modeling_dspark import DSparkDraftModel
from ..loading import LoadedDrafter
from ..profiling import profile_pair
from .advice import GammaCosts
from .cells import CellStore
from .latency import RoundCosts
from .report import ProfileFacts
from .request import BenchRequest


@dataclass(frozen=True)
class Profiled:
    """A profile, and whether it was there before."""

    profile: ThroughputProfile
    is_found: bool

    @property
    def facts(self) -> ProfileFacts:
        """For reports."""
        grid = self.profile.grid
        return ProfileFacts(grid.num_rows, grid.contexts, self.profile.provenance.get("date_utc"), self.is_found)

    def gamma_costs(self, num_rows: int, context: int) -> GammaCosts:
        """Seconds of rounds of every gamma; raises as `ThroughputProfile.step_s`."""
        costs = RoundCosts.of(self.profile)
        overhead_s = self.profile.overhead_s(num_rows)
        round_s = tuple(
            costs.draft_s(num_rows, gamma, context)
            + costs.step_s(num_rows, num_rows * (1 + gamma), context)
            + overhead_s
            for gamma in range(1, self.profile.grid.tokens_per_row[-1])
        )
        return GammaCosts(num_rows, context, costs.plain_s(num_rows, context), round_s)


def profile_for(
    name: str,
    drafter: LoadedDrafter,
    target: PreTrainedModel,
    request: BenchRequest,
    store: CellStore,
    *,
    show_progress: bool,
) -> Profiled | str:
    """The profile of a drafter, or why there is none.

    One that is measured here goes into the user's cache, as `dspark profile` does it: policies look there.
    """
    key = f"profile/{name}"
    if key not in store:
        if not isinstance(drafter.model, DSparkDraftModel):
            return "its rounds are not of the form that `dspark profile` measures"
        num_rows = rows_of(name, request)
        found = usable_profile(target, drafter.model, max(num_rows)).profile
        if found is not None and not found.covers(min(num_rows), 1):
            found = None
        try:
            profile = found or _measured(drafter, target, request, num_rows, show_progress)
        except ThroughputProfileError as error:
            return str(error)
        store.add(key, {"is_found": found is not None, "profile": profile.to_dict()})
    kept = store[key]
    return Profiled(ThroughputProfile.from_dict(kept["profile"]), kept["is_found"])


def put_back_profiles(
    drafters: Mapping[str, LoadedDrafter], target: PreTrainedModel, store: CellStore, tell: Callable[[str], None]
) -> None:
    """Make the user's cache hold the profiles that this bench began with.

    Policies read the cache and Eq. 1 the kept ones: were they two, a bench that goes on would mix them.

    Args:
        tell: Takes a line for people about each profile that was put back.

    Raises:
        OSError: the cache cannot be written.
    """
    kept: dict[str, tuple[str, ThroughputProfile]] = {}
    for name in drafters:
        if (key := f"profile/{name}") in store:  # drafters of one shape share a place, where the last one stays
            profile = ThroughputProfile.from_dict(store[key]["profile"])
            kept[profile.fingerprint.key] = name, profile
    for name, profile in kept.values():
        cached = find_profile(target, drafters[name].model)
        if cached is None or json.dumps(cached.to_dict()) != json.dumps(profile.to_dict()):
            path = save_profile(profile)
            was = "was missing" if cached is None else "was another one"
            tell(f"put back: the throughput profile of {name} that this bench began with; {path} {was}")


def rows_of(name: str, request: BenchRequest) -> tuple[int, ...]:
    """Numbers of rows that a drafter runs with: those of the sweep, if it is swept."""
    sizes = request.settings.batch_sizes if name in request.swept_names else ()
    return tuple(sorted({1, *sizes}))


def _measured(
    drafter: LoadedDrafter,
    target: PreTrainedModel,
    request: BenchRequest,
    num_rows: tuple[int, ...],
    show_progress: bool,
) -> ThroughputProfile:
    settings = request.settings
    older = find_profile(target, drafter.model)
    rows = {*num_rows, *(older.grid.num_rows if older is not None else ())}
    contexts = (DEFAULT_CONTEXTS[0], max(settings.contexts, default=DEFAULT_CONTEXTS[-1]))
    profile = profile_pair(
        target,
        drafter.model,
        ProfilePlan(tuple(rows), contexts, request.profile_repeats, settings.seed),
        target_name=request.target,
        drafter_name=None if drafter.kind != "given" else drafter.name,
        show_progress=show_progress,
    )
    save_profile(profile)
    return profile
