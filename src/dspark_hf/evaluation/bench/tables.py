"""A report as sections of text and tables, for Markdown and for the terminal alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..intervals import LEVEL, Estimate
from .latency import LatencySplit
from .pooling import WayNumbers
from .report import BenchReport, CellReport
from .settings import CellKind
from .ways import BASELINE, STATIC


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph, and a table if it has a header.

    Attributes:
        figure: Name of the picture that shows the same, without suffix; None without one.
        is_wide: Whether its table is for a page, not for a terminal.
    """

    title: str
    text: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    figure: str | None = None
    is_wide: bool = False


_SWEEPS: tuple[tuple[CellKind, str, str], ...] = (
    ("batch", "Batches", "batches"),
    ("context", "Contexts", "contexts"),
)


def sections(report: BenchReport) -> Iterator[Section]:
    """Everything that a report says."""
    yield _about(report)
    main = report.cell("main")
    if main is not None and main.ways:
        yield _main(main)
        yield _memory(main)
    for kind, title, figure in _SWEEPS:
        cells = [cell for cell in report.cells if cell.cell.kind == kind and cell.ways]
        if cells:
            yield _sweep(kind, title, figure, cells)
    splits = [split for cell in report.cells for split in cell.latency]
    if splits:
        yield _predictions(splits)
        yield _parts(splits)
    if report.gamma:
        yield _gamma(report)
    if report.depth:
        yield _depth(report)
    notes = [f"Left out: {one.name}: {one.reason}." for one in report.left_out] + list(report.notes)
    if notes:
        yield Section("Notes", "", ("note",), [(note,) for note in notes])


def _about(report: BenchReport) -> Section:
    origin, settings = report.provenance, report.settings
    done = sum(cell.num_done for cell in report.cells)
    planned = sum(cell.num_planned for cell in report.cells)
    mode = "greedy" if settings.is_greedy else f"temperature {settings.temperature:g}"
    rows = [
        ("target", f"{report.target}, {origin.dtype}"),
        ("device", f"{origin.device}, {origin.num_threads} threads"),
        ("prompts", f"{origin.n}, {mode}, up to {settings.max_new_tokens} new tokens, seed {settings.seed}"),
        ("runs", f"{done} of {planned} done, in {len(report.sessions)} sessions"),
        ("date", origin.date_utc),
        ("commit", f"{origin.git_commit or 'unknown'}{', changed since' if origin.git_is_dirty else ''}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in origin.versions.items())),
        ("command", origin.command),
    ]
    text = (
        "All ways run on the same prompts in turns, one target forward each, so that a drift of the machine's speed "
        f"hits all alike. Intervals are {LEVEL:.0%}: over prompts (bootstrap) in the main table, over repetitions of "
        "the same prompts (Student) in the sweeps."
    )
    return Section("Bench", text, ("", ""), rows)


def _main(cell: CellReport) -> Section:
    n = len(cell.prompt_ids)
    header = ("way", "tokens/s", "over plain", "over static", "tau", "forwards a token", "first token ms", "identical")
    rows = []
    for way in cell.ways:
        identical = "-" if way.num_identical is None else f"{way.num_identical} of {way.num_texts}"
        if way.num_errors:
            identical += f", {way.num_errors} ERRORS"
        rows.append(
            (
                way.way,
                f"{way.tokens_per_s:.1f}",
                _over(way, BASELINE),
                _over(way, STATIC),
                _estimate(way.tau),
                _estimate(way.target_forwards_per_token),
                _ms(way.first_token_s),
                identical,
            )
        )
    text = (
        f"{n} prompts, one at a time. tau: tokens a round commits, bonus token counted. Seconds are of whole "
        "generate() calls. In bfloat16 near-ties of the target's two best tokens may fall either way, so some texts "
        "differ; an error is a difference that rounding cannot explain."
    )
    return Section("Ways of generating", text, header, rows, "ways")


def _memory(cell: CellReport) -> Section:
    header = ("way", "weights MB", "caches MB", "peak rise MB")
    rows = [
        (name, _mb(one.weight_bytes), _mb(one.cache_bytes), _mb(one.peak_rise_bytes))
        for name, one in cell.memory.items()
    ]
    text = (
        "Of target and assistant together, each weight once; caches at their largest; how far the process (on an "
        "accelerator: its allocator) rose above its start. Each way alone, on the first prompt."
    )
    return Section("Memory", text, header, rows)


def _sweep(kind: CellKind, title: str, figure: str, cells: Sequence[CellReport]) -> Section:
    points = [str(cell.cell.num_rows if kind == "batch" else cell.cell.context) for cell in cells]
    names = list(dict.fromkeys(way.way for cell in cells for way in cell.ways))
    found = {(cell.cell.name, way.way): way for cell in cells for way in cell.ways}
    rows = [("tokens/s, " + BASELINE, *(_speed(found.get((cell.cell.name, BASELINE))) for cell in cells))]
    rows += [
        (name, *(_over(found.get((cell.cell.name, name)), BASELINE) for cell in cells))
        for name in names
        if name != BASELINE
    ]
    first = cells[0].cell
    what = "Prompts that share forwards" if kind == "batch" else "Tokens of each prompt, real text"
    text = (
        f"Speed over {BASELINE}, by {what[0].lower()}{what[1:]}; {first.max_new_tokens} new tokens, end tokens off, "
        f"{first.num_repeats} repetitions. A way without a number takes single prompts only."
    )
    return Section(title, text, (kind, *points), rows, figure)


def _predictions(splits: Sequence[LatencySplit]) -> Section:
    header = ("cell", "way", "tau", "draft ms", "step ms", "predicted ms", "measured ms", "difference")
    rows = [
        (
            split.cell,
            split.way,
            f"{split.tau:.2f}",
            _ms(split.draft_s),
            _ms(split.step_s),
            _ms(split.predicted_s),
            _ms(split.measured_s),
            f"{100 * split.residual_s / split.predicted_s:+.0f} %",
        )
        for split in splits
    ]
    text = (
        "L = (T_draft + T_verify) / tau (Eq. 1 of arXiv 2607.05147) a token, seconds of a draft and of a target step "
        "from the throughput profile for the rounds that there were, against the time that a row waited for a token."
    )
    return Section("Eq. 1 against the measurement", text, header, rows, "prediction")


def _parts(splits: Sequence[LatencySplit]) -> Section:
    names = list(dict.fromkeys(name for split in splits for name in split.parts))
    rows = [
        (
            split.cell,
            split.way,
            _ms(split.residual_s),
            *(_ms(split.parts[name]) if name in split.parts else "-" for name in names),
        )
        for split in splits
    ]
    text = (
        "The difference in milliseconds a token, by reason; the parts add up to it. The first token comes with the "
        "prompt's forward, so fewer rounds are needed than Eq. 1 counts; draft and target step: measured minus "
        "profile of the same rounds, after the machine's change of speed since, as plain steps show it."
    )
    return Section("Where the difference comes from", text, ("cell", "way", "ms", *names), rows, is_wide=True)


def _gamma(report: BenchReport) -> Section:
    most = max(len(one.points) for one in report.gamma)
    header = ("drafter", "rows", *(f"gamma {g}" for g in range(1, most + 1)), "best", "gain over the block")
    rows = []
    for one in report.gamma:
        ratios = [_estimate(point.speed_ratio) for point in one.points] + ["-"] * (most - len(one.points))
        best = "plain generation" if one.best == 0 else f"gamma {one.best}"
        gain = one.gain_over_block
        interval = (
            "" if gain.low is None or gain.high is None else f" ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
        )
        value = "-" if gain.value is None else f"{100 * gain.value:+.1f} %{interval}"
        rows.append((one.drafter, str(one.num_rows), *ratios, best, value))
    text = (
        "Expected speed over plain generation if every round drafts and verifies that many tokens: seconds from the "
        "profile, acceptance from the main table's drafts, all verified. Gain: chosen on one half of the prompts, "
        "judged on the other, and the other way round. Policies that weigh drafts against time choose by round and can "
        "do better."
    )
    return Section("Which gamma", text, header, rows, "gamma")


def _depth(report: BenchReport) -> Section:
    header = ("drafter", "layers", "layer ms", "of a round", "tau", "tau to pay for one more", "acceptance", "to pay")
    rows = []
    for one in report.depth:
        to_pay = "not to be had" if one.acceptance_to_pay is None else f"{one.acceptance_to_pay:.3f}"
        rows.append(
            (
                one.drafter,
                str(one.num_layers),
                f"{1000 * one.layer_s:.2f}",
                f"{100 * one.layer_share:.1f} %",
                f"{one.tau:.2f}",
                f"{one.tau_to_pay:.2f}",
                f"{one.acceptance:.3f}",
                to_pay,
            )
        )
    text = (
        "What one draft layer costs, and what the drafter must accept with one more to be as fast as now; "
        "acceptance is the conditional one, equal in all slots, that gives that tau. One row."
    )
    return Section("Which depth", text, header, rows)


# -- cells of tables ----------------------------------------------------------------------------------------------


def _over(way: WayNumbers | None, other: str) -> str:
    if way is None:
        return "-"
    if way.way == other:
        return "1"
    return _estimate(way.speed_over[other]) if other in way.speed_over else "-"


def _speed(way: WayNumbers | None) -> str:
    return "-" if way is None else f"{way.tokens_per_s:.1f}"


def _estimate(value: Estimate) -> str:
    if value.value is None:
        return "-"
    if value.low is None or value.high is None or value.low == value.high:
        return f"{value.value:.2f}"
    return f"{value.value:.2f} ({value.low:.2f} to {value.high:.2f})"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def _mb(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:.1f}"
