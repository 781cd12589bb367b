"""What a card shows of calibration and training, and where all numbers come from."""

from typing import Any

from .. import zoo
from ..configuration_dspark import DSparkConfig
from .fields import Fields
from .markdown import Safe, table
from .numbers import at, count, estimate, number, percent
from .report_store import StoredReport
from .report_views import Metric

_THINKING = {
    "absent": "the template has no thinking mode",
    "on": "thinking, which is what the template does unless told otherwise",
    "off": "not thinking, which is what the template does unless told otherwise",
    "own": "the template's own default, neither of its two modes",
}
NOT_RECORDED = "not recorded"


def calibration_view(report: StoredReport, name: str) -> dict[str, Any]:
    """One mode: quality by slot, before and after."""
    mode = report.fields.one("modes").one(name)
    temperatures, platt = mode.numbers("temperatures"), mode.content.get("platt")
    rows = []
    for k, slot in enumerate(mode.many("slots")):
        before, after = slot.one("before"), slot.one("after")
        fitted = f"T {number(at(temperatures, k), 3)}"
        if isinstance(platt, list) and k < len(platt):
            a, b = [*Fields({"map": platt[k]}, report.name).numbers("map"), None, None][:2]
            fitted = f"a {number(a)}, b {number(b)}"
        rows.append(
            [
                count(slot.count("slot")),
                percent(slot.number("share_accepted")),
                _pair([before, after], "mean_predicted"),
                estimate(before.one("ece"), 1, 100),
                estimate(after.one("ece"), 1, 100),
                percent(slot.number("ece_floor")),
                Safe(f"{number(before.one('auc').number('value'), 3)}, {number(after.one('auc').number('value'), 3)}"),
                Safe(
                    f"{number(before.one('brier').number('value'), 4)}, {number(after.one('brier').number('value'), 4)}"
                ),
                Safe(fitted),
            ]
        )
    header = ["slot", "prefix accepted, %", "mean estimate before, after, %", "ECE before, %", "ECE after, %"]
    header += ["floor, %", "AUC before, after", "Brier before, after", "map"]
    settings = mode.one("settings")
    return {
        "mode": name,
        "settings": ", ".join(f"{key} {settings.number(key):g}" for key in settings.content if settings.number(key)),
        "num_fitted": count(mode.count("num_fitted")),
        "num_fitted_prompts": count(mode.count("num_fitted_prompts")),
        "num_held_out": count(mode.count("num_held_out")),
        "num_held_out_prompts": count(mode.count("num_held_out_prompts")),
        "ece_before": percent(mode.number("mean_ece_before"), 2),
        "ece_after": percent(mode.number("mean_ece_after"), 2),
        "ece_floor": percent(mode.number("mean_ece_floor"), 2),
        "table": table(header, rows),
        "figure": report.figure,
        "written_by_hand": report.fields.text("written_by_hand"),
    }


def calibration_metrics(report: StoredReport, name: str) -> list[Metric]:
    """Mean calibration error over slots, before and after."""
    mode = report.fields.one("modes").one(name)
    found = {word: mode.number(f"mean_ece_{word}") for word in ("before", "after")}
    args = {"num_rounds": mode.count("num_held_out")}
    return [
        Metric(
            "held-out rounds",
            "expected_calibration_error",
            f"of survival estimates {word} calibration, mean over slots, {name}",
            round(value, 6),
            args,
        )
        for word, value in found.items()
        if value is not None
    ]


def config_calibration(config: DSparkConfig, shown: set[str]) -> list[dict[str, Any]]:
    """Modes that config.json has a calibration of and no report tells about: what config.json itself notes."""
    return [
        {
            "mode": name,
            "num_fitted": count(entry.get("num_proposals")),
            "ece_before": percent(entry.get("ece_before"), 2),
            "ece_after": percent(entry.get("ece_after"), 2),
        }
        for name, entry in sorted((config.calibration or {}).items())
        if name not in shown
    ]


def training_view(report: StoredReport) -> dict[str, Any]:
    """The runs that made the drafter, the data, and what it cost."""
    fields = report.fields
    runs = [*fields.many("earlier_runs"), fields]
    header = ["run", "sequences", "steps", "blocks", "sequences a step", "learning rate", "falls to 0 in the last, %"]
    header += ["seed", "hours", "device", "commit"]
    return {
        "is_finished": fields.flag("is_finished"),
        "written_by_hand": fields.text("written_by_hand"),
        "about_data": fields.text("about_data"),
        "about_compute": fields.text("about_compute"),
        "runs": table(header, [_run_row(i, run) for i, run in enumerate(runs, start=1)]),
        "starts_from": runs[0].text("initial_drafter"),
        "data": _data_table(runs),
        "figure": report.figure,
    }


def _run_row(index: int, run: Fields) -> list[object]:
    provenance, settings = run.one("provenance"), run.one("settings")
    seconds, rate = run.number("spent_s"), settings.number("learning_rate")
    return [
        index,
        count(run.count("num_sequences")),
        count(run.count("num_steps")),
        count(run.count("num_anchors")),
        count(settings.count("batch_size")),
        Safe("-" if rate is None else f"{rate:g}"),
        percent(settings.number("decay_fraction"), 0),
        count(settings.count("seed")),
        number(None if seconds is None else seconds / 3600),
        device_of(provenance),
        commit_of(provenance),
    ]


def _data_table(runs: list[Fields]) -> Safe | None:
    rows = []
    for source in [source for run in runs for source in run.many("data")]:
        temperatures = source.numbers("temperatures")
        prompts = [prompt.text("name") or NOT_RECORDED for prompt in source.many("prompt_sources")]
        templates = source.many("chat_templates")
        row = [
            source.text("file") or NOT_RECORDED,
            source.text("target") or NOT_RECORDED,
            ", ".join(f"{value:g}" for value in temperatures if value is not None) or NOT_RECORDED,
            source.count("max_new_tokens") or NOT_RECORDED,
            ", ".join(prompts) or NOT_RECORDED,
            "; ".join(template_of(one) for one in templates) or NOT_RECORDED,
        ]
        if row not in rows:
            rows.append(row)
    header = ["answers", "of", "temperatures", "at most, tokens", "to prompts of", "chat template, mode"]
    return table(header, rows) if rows else None


def hub_datasets(reports: list[StoredReport]) -> list[str]:
    """Hub ids of the data sets that training prompts came from."""
    runs = [run for r in reports if r.kind == "training" for run in [*r.fields.many("earlier_runs"), r.fields]]
    sources = [source for run in runs for data in run.many("data") for source in data.many("prompt_sources")]
    names = [(source.text("name") or "").partition(":")[0] for source in sources if source.flag("is_on_hub")]
    return list(dict.fromkeys(filter(zoo.is_hub_id, names)))


def template_of(fields: Fields) -> str:
    """A chat template by its hash, and whether the model thinks under it."""
    sha256 = fields.text("sha256")
    if sha256 is None:
        return "no chat template"
    return f"sha256 {sha256[:16]}, {_THINKING.get(fields.text('thinking') or '', 'thinking mode not recorded')}"


def sources_table(reports: list[StoredReport]) -> Safe:
    """On what, with what and when every report was made."""
    rows: list[list[object]] = []
    for report in reports:
        provenance = report.fields.one("provenance")
        versions = provenance.one("versions")
        rows.append(
            [
                report.name,
                device_of(provenance),
                provenance.text("dtype") or NOT_RECORDED,
                ", ".join(f"{name} {versions.text(name)}" for name in versions.content) or NOT_RECORDED,
                commit_of(provenance),
                (provenance.text("date_utc") or "")[:10] or NOT_RECORDED,
            ]
        )
    return table(["report", "device", "dtype", "versions", "commit", "date"], rows)


def commands_of(reports: list[StoredReport]) -> list[str]:
    """Every command that a report came from, once, training first; those that made its texts stand before it."""
    every = [one for report in reports for one in [*report.fields.many("earlier_runs"), report.fields]]
    found: list[str | None] = []
    for one in every:
        for answers in [*one.many("data"), *one.many("sources")]:
            found += answers.texts("commands")
        found.append(one.one("provenance").text("command"))
    return list(dict.fromkeys(filter(None, found)))


def device_of(provenance: Fields) -> str:
    """Device, and threads where it is a CPU."""
    device, threads = provenance.text("device"), provenance.count("num_threads")
    if device is None:
        return NOT_RECORDED
    if not device.startswith("cpu") or threads is None:
        return device
    return f"{device}, {threads} thread{'' if threads == 1 else 's'}"


def commit_of(provenance: Fields) -> str:
    """Short commit, marked where the source differed from it."""
    commit = provenance.text("git_commit")
    if commit is None:
        return NOT_RECORDED
    return f"{commit[:7]}, changed" if provenance.flag("git_is_dirty") else commit[:7]


def _pair(sides: list[Fields], name: str) -> Safe:
    return Safe(", ".join(percent(side.number(name)) for side in sides))
