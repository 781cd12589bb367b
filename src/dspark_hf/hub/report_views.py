"""What a card shows of reports of accepted length, speed and batches: tables, and the facts of the sentences."""

from dataclasses import dataclass
from typing import Any

from .fields import Fields
from .markdown import Safe, bold, table
from .numbers import DASH, at, count, estimate, mode_name, number, percent
from .report_store import StoredReport


@dataclass(frozen=True)
class Metric:
    """One entry of a card's model-index."""

    data_set: str
    type: str
    name: str
    value: float
    args: dict[str, Any]


def evaluation_view(report: StoredReport, sha256: str) -> dict[str, Any]:
    """Accepted length by data set and mode, acceptance and confidence by slot."""
    scores = _own_scores(report.fields, sha256)
    modes = [mode_name(score.number("temperature")) for score in scores]
    domains = list(dict.fromkeys(name for score in scores for name in score.named("tau") if name != "all"))
    rows: list[list[object]] = []
    for name in domains:
        each = [score.named("tau").get(name, Fields({}, report.name)) for score in scores]
        rows.append([name, _same([one.count("n") for one in each]), *map(estimate, each)])
    pooled = [score.named("tau").get("all", Fields({}, report.name)) for score in scores]
    rows.append([bold("all, pooled"), _same([one.count("n") for one in pooled]), *(map(bold, map(estimate, pooled)))])
    means = [estimate(score.one("mean_tau")) for score in scores]
    if len(domains) > 1 and set(means) != {DASH}:
        rows.append(["mean of data sets", DASH, *means])
    sources = report.fields.many("sources")
    limits = {limit for source in sources if (limit := source.count("max_new_tokens")) is not None}
    return {
        "name": report.name,
        "num_texts": count(sum(one.count("n") or 0 for one in pooled)),
        "max_new_tokens": count(limits.pop()) if len(limits) == 1 else None,
        "tau": table(["data set", "prompts", *(f"tau, {mode}" for mode in modes)], rows),
        "slots": _slot_table(scores, modes),
        **_circumstances(report.fields),
    }


def evaluation_metrics(report: StoredReport, sha256: str) -> list[Metric]:
    """tau of every data set and mode."""
    metrics = []
    for score in _own_scores(report.fields, sha256):
        temperature = score.number("temperature")
        for name, found in score.named("tau").items():
            value = found.number("value")
            if value is not None:
                args = {"temperature": temperature, **_interval(found)}
                title = f"tokens per round, bonus token counted, {mode_name(temperature)}"
                metrics.append(Metric(name, "accepted_length", title, round(value, 4), args))
    return metrics


def _own_scores(fields: Fields, sha256: str) -> list[Fields]:
    names = [name for name, pair in fields.named("pairs").items() if pair.text("drafter_sha256") == sha256]
    return [score for score in fields.many("scores") if names and score.text("drafter") == names[0]]


def _slot_table(scores: list[Fields], modes: list[str]) -> Safe:
    kinds = {
        "conditional_acceptance": "conditional acceptance",
        "confidence_auc": "confidence AUC",
        "confidence_ece": "confidence ECE",
    }
    lines = [
        (f"{title}, {mode}", score.numbers(name))
        for score, mode in zip(scores, modes, strict=True)
        for name, title in kinds.items()
        if score.numbers(name)
    ]
    num_slots = max((len(values) for _, values in lines), default=0)
    rows = [[title, *(number(at(values, k), 3) for k in range(num_slots))] for title, values in lines]
    return table(["slot", *range(1, num_slots + 1)], rows)


def speed_view(report: StoredReport) -> dict[str, Any]:
    """Speed over plain generation, by data set, and where the time goes."""
    fields = report.fields
    settings = fields.one("settings")
    ratio = fields.one("speed_ratio")
    rows = [_speed_row(name, found) for name, found in fields.named("domains").items()]
    rows.append([bold(cell) for cell in _speed_row("all, pooled", fields)])
    stages = {stage.text("stage") or "": stage for stage in fields.many("stages")}
    return {
        "name": report.name,
        "mode": mode_name(settings.number("temperature")),
        "max_new_tokens": count(settings.count("max_new_tokens")),
        "policy": fields.text("policy") or "not recorded",
        "num_draft_tokens": count(fields.count("num_draft_tokens")),
        "num_prompts": count(ratio.count("n")),
        "num_planned": None if fields.flag("is_complete") in (True, None) else count(fields.count("num_planned")),
        "table": table(["data set", "prompts", "speed, DSpark / plain", "tau"], rows),
        "plain_tokens_per_s": number(fields.number("plain_tokens_per_s"), 1),
        "dspark_tokens_per_s": number(fields.number("dspark_tokens_per_s"), 1),
        "num_identical": None if fields.count("num_identical") is None else count(fields.count("num_identical")),
        "stages": [(name, percent(stage.number("share"), 0)) for name, stage in stages.items()],
        "draft_over_verify": _ratio(stages, "draft", "verify"),
        **_circumstances(fields),
    }


def _speed_row(name: str, found: Fields) -> list[object]:
    ratio = found.one("speed_ratio")
    return [name, count(ratio.count("n")), estimate(ratio, unit="x"), estimate(found.one("tau"))]


def speed_metrics(report: StoredReport) -> list[Metric]:
    """The speed ratio of every data set and of all."""
    fields = report.fields
    found = {name: domain.one("speed_ratio") for name, domain in fields.named("domains").items()}
    found["all"] = fields.one("speed_ratio")
    temperature = fields.one("settings").number("temperature")
    device = fields.one("provenance").text("device") or "device not recorded"
    title = f"tokens per second over plain generation, {mode_name(temperature)}, batch 1, {device}"
    return [
        Metric(
            name,
            "speed_ratio",
            title,
            round(value, 4),
            {"temperature": temperature, "device": device, **_interval(one)},
        )
        for name, one in found.items()
        if (value := one.number("value")) is not None
    ]


def batches_view(report: StoredReport) -> dict[str, Any]:
    """Speed of batches over plain batches, a row for each way against the plain one on the same kind of cache."""
    rows = report.fields.many("rows")
    sizes = list(dict.fromkeys(row.count("batch_size") for row in rows))
    cells: dict[str, dict[int | None, Safe]] = {}
    for row in rows:
        way = row.text("way") or "not said which"
        if way.startswith("plain"):
            continue
        base = "plain, static" if way.endswith(", static") else "plain, dynamic"
        ratio = row.one("ratios").one(base)
        half = ratio.number("half_width")
        text = (
            number(ratio.number("mean")) if half is None else Safe(f"{number(ratio.number('mean'))} ± {number(half)}")
        )
        cells.setdefault(f"{way} / {base}", {})[row.count("batch_size")] = text
    settings = report.fields.one("settings")
    return {
        "name": report.name,
        "max_new_tokens": settings.text("max_new_tokens"),
        "repetitions": settings.text("repetitions"),
        "table": table(
            ["batch", *map(count, sizes)],
            [[title, *(found.get(size, DASH) for size in sizes)] for title, found in cells.items()],
        ),
        **_circumstances(report.fields),
    }


def _circumstances(fields: Fields) -> dict[str, Any]:
    provenance = fields.one("provenance")
    return {
        "written_by_hand": fields.text("written_by_hand"),
        "device": provenance.text("device") or "a device that was not recorded",
        "dtype": provenance.text("dtype") or "dtype not recorded",
        "num_threads": provenance.count("num_threads"),
    }


def _interval(fields: Fields) -> dict[str, float | int]:
    found = {"low": fields.number("low"), "high": fields.number("high"), "num_prompts": fields.count("n")}
    return {name: round(value, 4) for name, value in found.items() if value is not None}


def _ratio(stages: dict[str, Fields], over: str, under: str) -> Safe | None:
    seconds = [stages[name].number("seconds") if name in stages else None for name in (over, under)]
    if seconds[0] is None or not seconds[1]:
        return None
    return percent(seconds[0] / seconds[1])


def _same(values: list[int | None]) -> Safe:
    """The numbers, or the one number that they all are."""
    return Safe(", ".join(count(value) for value in dict.fromkeys(values)))
