"""A report about drafters as tables of text, for the terminal and for Markdown."""

from dataclasses import dataclass

from ..hub.numbers import DASH, mode_name
from .acceptance_tables import CutScore, GroupScore
from .data_sets import ALL
from .drafters import DrafterScore, DraftersReport
from .intervals import LEVEL, Estimate
from .tau_tables import MEAN


@dataclass(frozen=True)
class TextTable:
    """A table of plain text.

    Attributes:
        title: What it shows, for one line.
        header: Of its columns.
        rows: Cells.
        is_brief: Whether it belongs on a first screen.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    is_brief: bool = True


def headlines(report: DraftersReport) -> list[str]:
    """What was measured, in sentences."""
    counts = ", ".join(f"{n} at temperature {t}" for t, n in report.num_texts.items())
    what = "texts" if report.method == "replay" else "prompts decoded with each drafter"
    lines = [f"target {report.target}, {report.provenance.dtype}; {what}: {counts}"]
    if report.settings is not None:
        cuts = {"top-p": report.settings.get("top_p"), "top-k": report.settings.get("top_k")}
        told = "".join(f", {name} {value} when sampling" for name, value in cuts.items() if value is not None)
        lines.append(f"policy full, at most {report.settings['max_new_tokens']} new tokens a prompt{told}")
    lines.append(f"tau: tokens per round, bonus counted; {LEVEL:.0%} intervals by bootstrap over prompts")
    return lines


def evaluation_tables(report: DraftersReport) -> list[TextTable]:
    """All tables of a report, in reading order."""
    tables = []
    for score in report.scores:
        tables.append(_tau_table(score))
        for group in score.groups:
            tables += _group_tables(score, group)
        if not score.groups:
            tables.append(_slot_table(score))
    if report.depths:
        tables.append(_depth_table(report))
    if report.differences:
        tables.append(_difference_table(report))
    return tables


def _tau_table(score: DrafterScore) -> TextTable:
    rows = {name: value for name, value in score.tau.items() if name != ALL}
    rows |= {"mean of domains": score.mean_tau, "pooled": score.tau[ALL]}
    return TextTable(
        f"{score.drafter}, {mode_name(score.temperature)}",
        ["domain", "tau", "interval", "prompts"],
        [[name, *_cells(value), str(value.n)] for name, value in rows.items()],
    )


def _group_tables(score: DrafterScore, name: str) -> list[TextTable]:
    group = score.groups[name]
    is_all = name == ALL
    of = f"{score.drafter}, {mode_name(score.temperature)}, {name}"
    tables = [
        TextTable(
            f"{of}: drafts", ["rounds", "verified", "accepted", "rejected", "tokens"], [_counts(group)], is_brief=is_all
        ),
        TextTable(
            f"{of}: acceptance by slot, given that all slots before were accepted",
            ["slot", "conditional acceptance", "interval", "drafts reached", "confidence AUC", "confidence ECE"],
            [
                [
                    str(slot.slot),
                    *_cells(slot.conditional_acceptance),
                    f"{slot.num_reached:.0f}",
                    _both(slot.confidence_auc),
                    _both(slot.confidence_ece),
                ]
                for slot in group.slots
            ],
            is_brief=is_all,
        ),
        TextTable(
            f"{of}: by number of drafts", ["drafts", *_CUT_HEADER], list(map(_cut_row, group.lengths)), is_brief=False
        ),
    ]
    for title, cuts in (("raw", group.thresholds), ("calibrated", group.calibrated_thresholds)):
        if cuts:
            rows = list(map(_cut_row, cuts))
            tables.append(
                TextTable(f"{of}: by threshold on the {title} confidence", ["threshold", *_CUT_HEADER], rows, False)
            )
    return tables


_CUT_HEADER = [
    "tau",
    "accepted drafts a round",
    "rejected drafts a round",
    "acceptance rate, bonus counted",
    "drafts alone",
]


def _cut_row(cut: CutScore) -> list[str]:
    return [f"{cut.value:g}", *map(_both, (cut.tau, cut.accepted, cut.rejected, cut.rate, cut.draft_rate))]


def _counts(group: GroupScore) -> list[str]:
    counts = group.counts
    values = (counts.num_rounds, counts.num_verified, counts.num_accepted, counts.num_rejected, counts.num_tokens)
    return [f"{value:.0f}" for value in values]


def _slot_table(score: DrafterScore) -> TextTable:
    """Of a report without intervals by slot."""
    rows = []
    for k, acceptance in enumerate(score.conditional_acceptance):
        confidence = [values[k] if values else None for values in (score.confidence_auc, score.confidence_ece)]
        rows.append([str(k + 1), *(DASH if value is None else f"{value:.3f}" for value in (acceptance, *confidence))])
    return TextTable("", ["slot", "conditional acceptance", "confidence AUC", "confidence ECE"], rows)


def _depth_table(report: DraftersReport) -> TextTable:
    names = list(dict.fromkeys(name for depth in report.depths for name in depth.tau if name not in (ALL, MEAN)))
    rows = []
    for depth in report.depths:
        gain = next((one for one in depth.gains if one.group == ALL), None)
        found = [depth.tau.get(name) for name in (*names, ALL, MEAN)]
        told = DASH if gain is None or gain.gain_percent is None else _both(gain.gain_percent, 1)
        mode = mode_name(depth.temperature)
        rows.append([f"{depth.family}, {mode}", str(depth.num_layers), depth.drafter, *map(_both, found), told])
    header = ["kind", "layers", "drafter", *names, "pooled", MEAN, "gain over the shallower, percent"]
    return TextTable("tau by depth", header, rows)


def _difference_table(report: DraftersReport) -> TextTable:
    header = ["drafter", "baseline", "temperature", "data sets", "tau difference", "interval", "percent", "p"]
    rows = [
        [
            one.drafter,
            one.baseline,
            f"{one.temperature:g}",
            one.group,
            *_cells(one.tau),
            _both(one.gain_percent, 1),
            DASH if one.p_value is None else f"{one.p_value:.4f}",
        ]
        for one in report.differences
    ]
    return TextTable("paired differences on the same prompts; p: swaps within prompts, two-sided", header, rows)


def _cells(value: Estimate) -> tuple[str, str]:
    middle = DASH if value.value is None else f"{value.value:.3f}"
    if value.low is None or value.high is None:
        return middle, DASH
    return middle, f"{value.low:.3f} to {value.high:.3f}"


def _both(value: Estimate | None, digits: int = 3) -> str:
    """Value and interval in one cell."""
    if value is None or value.value is None:
        return DASH
    if value.low is None or value.high is None:
        return f"{value.value:.{digits}f}"
    return f"{value.value:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})"
