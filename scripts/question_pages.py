"""Fill the tables of docs/questions and of other documents from reports: `python scripts/question_pages.py`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. `--check` writes nothing and fails where a
page differs from its report. The reports come from other scripts; each page says from which. Those of `make bench` are
in docs/evidence.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from drafter_overhead import size_table, table, time_table
from evidence_tables import cut, drafters_table, evidence, slots_table
from vocabulary_cost import cost_table

from dspark_hf.fitting.profile_store import load_profile
from dspark_hf.fitting.throughput import ThroughputProfile

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "questions"
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
CONTEXT = 256


@cache
def report(name: str) -> dict[str, Any]:
    """A report by its file's name."""
    content: dict[str, Any] = json.loads((PAGES / "reports" / f"{name}.json").read_text(encoding="utf-8"))
    return content


@cache
def profile() -> ThroughputProfile:
    """The profile that the pages speak of."""
    return load_profile(PAGES / "reports" / "profile.json")


def percent(estimate: dict[str, Any], digits: int = 1) -> str:
    """An estimate with its interval, in per cent."""
    value, low, high = (estimate[name] for name in ("value", "low", "high"))
    text = f"{100 * value:.{digits}f}"
    return text if low is None else f"{text} ({100 * low:.{digits}f} to {100 * high:.{digits}f})"


def shares(values: list[float]) -> str:
    """Numbers by slot, in per cent."""
    return " ".join(f"{100 * value:.1f}" for value in values)


def provenance(content: dict[str, Any]) -> str:
    """Where a report comes from, in one line."""
    made = content["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    command = made["command"].replace("python -m dspark_cli ", "dspark ", 1)
    dirty = ", with changes" if made["git_is_dirty"] else ""
    return (
        f"`{command}`, commit {(made['git_commit'] or 'unknown')[:12]}{dirty}, {versions}, {made['device']}, "
        f"{made['num_threads']} threads, {made['dtype']}, seed {made['seed']}."
    )


# -- tables -----------------------------------------------------------------------------------------------------------


def intervals() -> str:
    """Half widths of tau's interval, of the bundled drafter's stored evaluation."""
    folder = ROOT / "src/dspark_hf/bundled/smollm2-135m-instruct/reports"
    content = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    rows = [["texts", "n", "tau, greedy", "half width, %", "tau, temperature 1", "half width, %"]]
    scores = {score["temperature"]: score["tau"] for score in content["scores"]}
    for name, greedy in scores[0.0].items():
        cells = []
        for found in (greedy, scores[1.0][name]):
            half = (found["high"] - found["low"]) / 2 / found["value"]
            cells += [f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})", f"{100 * half:.1f}"]
        rows.append([name, str(greedy["n"]), *cells])
    return table(rows)


def domains() -> str:
    """Error by slot, setting and domain."""
    rows = [
        ["setting", "domain", "prompts", "rounds", "accepted, %", "before, %", "after, %", "floor, %", "AUC, after"]
    ]
    for found in report("calibration-study")["domains"]:
        errors = [[one["value"] for one in found[name]] for name in ("ece_before", "ece_after")]
        auc = " ".join(f"{one['value']:.2f}" for one in found["auc"])
        counts = [f"{found[name]:,}" for name in ("num_prompts", "num_rounds")]
        columns = [found["share_accepted"], *errors, found["ece_floor"]]
        rows.append([found["setting"], found["domain"], *counts, *map(shares, columns), auc])
    return table(rows)


def settings() -> str:
    """Error of every set of maps under every setting."""
    content = report("calibration-study")["settings"]
    names = list(content[0]["errors"])
    rows = [["decoded", "rounds", *(f"maps: {name}, %" for name in names), "floor, %"]]
    for found in content:
        errors = [percent(found["errors"][name]) for name in names]
        rows.append([found["setting"], f"{found['num_rounds']:,}", *errors, f"{100 * found['floor']:.1f}"])
    return table(rows)


def shapes() -> str:
    """Error at slot 1 by kind of map."""
    content = report("calibration-study")["shapes"]
    names = list(content[0]["errors"])
    rows = [["decoded", "rounds judged on", *(f"{name}, %" for name in names), "floor, %"]]
    for found in content:
        cells = []
        for values in found["errors"].values():
            mean = sum(values) / len(values)
            cells.append(f"{100 * mean:.2f} ({100 * min(values):.2f} to {100 * max(values):.2f})")
        rows.append([found["setting"], f"{found['num_rounds']:,}", *cells, f"{100 * found['floor']:.2f}"])
    return table(rows)


def traffic() -> str:
    """What changed traffic does to a calibration."""
    head = [
        "decoded",
        "fitted on, then meets",
        "before the change, %",
        "after, %",
        "no maps, %",
        "refitted, %",
        "floor, %",
    ]
    rows = [[*head, "largest gap, points", "watch warns after (rounds)"]]
    for found in report("calibration-study")["traffic"]:
        errors = [percent(found[name]) for name in ("before", "after", "raw", "refitted")]
        warned = [found[name] for name in ("warned_after", "warned_before")]
        told = "never" if warned[0] is None else f"{warned[0]:,}"
        told += "" if warned[1] is None else f"; before the change too, after {warned[1]:,}"
        gap = f"{100 * found['largest_gap']:+.1f}"
        names = f"{found['fitted_on']}, then {found['judged_on']}"
        rows.append([found["setting"], names, *errors, f"{100 * found['floor']:.1f}", gap, told])
    return table(rows)


def from_calibration() -> str:
    """Where the study comes from, and the rounds that it reads."""
    content = report("calibration-study")
    rounds = [
        f"`{made['command']}`, n = {made['n']} texts" for made in (one["provenance"] for one in content["sources"])
    ]
    return f"{provenance(content)} Rounds: {'; '.join(rounds)}."


def starving() -> str:
    """Drafts of each kind of row, who starves, and what a floor costs."""
    content = report("rows-study")["starving"]
    kinds = list(content[0]["drafts"])
    head = ["rows", "seconds of a step", "policy", "floor"]
    head += [f"{what}, {kind}" for what in ("drafts a round", "starved, %") for kind in kinds]
    rows = [[*head, "longest wait", "floor costs, %"]]
    for found in content:
        drafts = [f"{found['drafts'][kind]:.2f}" for kind in kinds]
        starved = [f"{100 * found['starved'][kind]:.0f}" for kind in kinds]
        floor = "-" if found["floor"] is None else str(found["floor"])
        lost = "-" if found["floor"] is None else percent(found["lost_to_floor"], 2)
        case = [str(found["rows"]), found["cost"], f"`{found['policy']}`", floor]
        rows.append([*case, *drafts, *starved, str(found["longest_wait"]), lost])
    return table(rows)


def history() -> str:
    """Loss of `lagged` in its first rounds."""
    content = report("rows-study")["history"]
    spans = list(content[0]["losses"])
    rows = [["rows", "seconds of a step", "opinion", *(f"round {span}, %" for span in spans)]]
    for found in content:
        losses = [percent(found["losses"][span], 2) for span in spans]
        rows.append([str(found["rows"]), found["cost"], f"{found['opinion']:g}", *losses])
    return table(rows)


def on_profile() -> str:
    """Loss of every policy on the step times that were measured."""
    content = report("rows-study")["on_profile"]
    names = list(content[0]["losses"])
    rows = [["rows", *(f"`{name}`, %" for name in names), "hindsight / plain"]]
    for found in content:
        losses = [percent(found["losses"][name]) for name in names]
        rows.append([str(found["rows"]), *losses, f"{found['best_over_plain']:.2f}"])
    return table(rows)


def curve() -> str:
    """Rises and jumps of the measured curves, all contexts of a number of rows together."""
    rows = [["rows", "steps of B", "SPS rises after", "beyond quartiles", "largest jump", "behind B =", "at context"]]
    for num_rows in profile().grid.num_rows:
        found = [shape for shape in profile().curve_shapes() if shape.num_rows == num_rows]
        jump = max(found, key=lambda shape: shape.largest_jump)
        counts = [sum(getattr(shape, f"num_{name}") for shape in found) for name in ("steps", "rises", "clear_rises")]
        place = [f"{jump.largest_jump:.2f}x", str(jump.jump_at_num_tokens), str(jump.context)]
        rows.append([str(num_rows), *map(str, counts), *place])
    return table(rows)


def contexts() -> str:
    """Milliseconds of a step over whole blocks by rows and context."""
    found = profile()
    grid = found.grid
    width = grid.tokens_per_row[-1]
    columns = [f"{tokens} a row, context {context}" for tokens in (1, width) for context in grid.contexts]
    rows = [["rows", *columns, "longest / shortest, whole blocks"]]
    for num_rows in grid.num_rows:
        times = [found.step_s(num_rows, num_rows * tokens, c) for tokens in (1, width) for c in grid.contexts]
        ratio = times[-1] / times[len(grid.contexts)]
        rows.append([str(num_rows), *(f"{1e3 * seconds:.0f}" for seconds in times), f"{ratio:.2f}"])
    return table(rows)


_ABLATION, _SIMULATION = "ablate.md", "simulation/simulation.md"
_SCHEDULING, _SPEEDS = "What scheduling adds", "Tokens per unit of time"
_STAIRS = "greedy, step time 1 + 16"

TABLES: dict[str, Callable[[], str]] = {
    "scheduling": lambda: cut(_ABLATION, "greedy, step time measured", _SCHEDULING),
    "scheduling-curve": lambda: cut(_ABLATION, "greedy, step time 1 + B/256", _SCHEDULING),
    "policies": lambda: cut(_ABLATION, "greedy, step time measured", _SPEEDS),
    "policies-sampled": lambda: cut(_ABLATION, "sampled, step time measured", _SPEEDS),
    "policies-stairs": lambda: cut(_ABLATION, _STAIRS, _SPEEDS),
    "hindsight": lambda: cut(_ABLATION, "Distance from hindsight"),
    "server-drift": lambda: cut(_SIMULATION, "accelerator", "After "),
    "server-fairness": lambda: cut(_SIMULATION, "accelerator", "Fairness with"),
    "server-gains": lambda: cut(_SIMULATION, "accelerator", "Throughput over mtp-1 with"),
    "server-gains-stairs": lambda: cut(_SIMULATION, "staircase", "Throughput over mtp-1 with"),
    "server-gains-measured": lambda: cut(_SIMULATION, "measured profile", "Throughput over mtp-1 with"),
    "server-prices": lambda: cut(_SIMULATION, "accelerator", "What a verified draft costs"),
    "server-speeds": lambda: cut(_SIMULATION, "accelerator", "Closed loops"),
    "server-speed-matched": lambda: cut(_SIMULATION, "accelerator", "Speed of a user over"),
    "server-nominal": lambda: cut(_SIMULATION, "accelerator", "Throughput over mtp-1 at the same speed"),
    "drafters": drafters_table,
    "drafter-slots": slots_table,
    "drafter-growth": lambda: cut("baselines.md", "", "Expected tau of the training"),
    "gamma": lambda: cut("bench/bench.md", "Which gamma"),
    "depth": lambda: cut("bench/bench.md", "Which depth"),
    "from-bench": lambda: provenance(evidence("bench/bench")),
    "from-drafters": lambda: provenance(evidence("drafters")),
    "from-simulation": lambda: provenance(evidence("simulation/simulation")),
    "from-ablation": lambda: provenance(evidence("ablate")),
    "intervals": intervals,
    "sizes": lambda: size_table(report("drafter-overhead")),
    "draft-times": lambda: time_table(profile(), CONTEXT),
    "vocabulary": lambda: cost_table(report("vocabulary-cost")),
    "vocabulary-wide": lambda: cost_table(report("vocabulary-cost-wide")),
    "domains": domains,
    "settings": settings,
    "shapes": shapes,
    "traffic": traffic,
    "starving": starving,
    "history": history,
    "on-profile": on_profile,
    "curve": curve,
    "contexts": contexts,
    "from-overhead": lambda: provenance(report("drafter-overhead")),
    "from-vocabulary": lambda: provenance(report("vocabulary-cost")),
    "from-calibration": from_calibration,
    "from-rows": lambda: provenance(report("rows-study")),
    "from-profile": lambda: provenance({"provenance": profile().provenance}),
}


def documents() -> list[Path]:
    """All that may hold tables."""
    return [*sorted(PAGES.glob("*.md")), ROOT / "README.md", ROOT / "docs" / "evaluate.md"]


def filled(text: str) -> str:
    """A page with its tables as the reports have them."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    stale = []
    for page in documents():
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new != text and not arguments.check:
            part = page.with_suffix(".part")
            part.write_text(new, encoding="utf-8")
            os.replace(part, page)
        if new != text:
            stale.append(page.name)
    if stale and arguments.check:
        sys.exit(f"differ from their reports: {', '.join(stale)}; run `python scripts/question_pages.py`")


if __name__ == "__main__":
    main()
