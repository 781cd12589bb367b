"""Tallies as HTML. Every text that comes from a visitor, a model or a file is escaped here."""

from collections.abc import Iterable

from .bars import Bar, bar_chart
from .events import Piece, TextsCompared
from .markup import escaped
from .tally import LaneTally, RaceTally

_STAGE_NAMES = {
    "prompt": "prompt",
    "draft": "draft",
    "verify": "verify (target)",
    "accept": "accept",
    "other": "other",
}


def status(tally: RaceTally) -> str:
    """One line: what is going on, or what went wrong."""
    if tally.error is not None:
        return f'<div class="ds-status ds-error" role="alert">{escaped(tally.error)}</div>'
    if tally.was_stopped:
        return '<div class="ds-status">Stopped. The numbers are of what was generated before.</div>'
    if tally.notice:
        return f'<div class="ds-status ds-busy" role="status">{escaped(tally.notice)}</div>'
    return ""


def lane(tally: LaneTally, *, shows_text: bool = True) -> str:
    """A lane: its name, its speed, what it has done, its text and what the text's colours mean."""
    text = f'<div class="ds-text">{_pieces(tally.pieces, tally.is_speculative)}</div>' if shows_text else ""
    key = legend() if shows_text and tally.is_speculative else ""
    return (
        f'<section class="ds-lane" aria-label="{escaped(tally.name)}"><header><b>{escaped(tally.name)}</b>'
        f'<span class="ds-speed">{_number(tally.tokens_per_s, 1)} <small>tokens/s</small></span></header>'
        f'<div class="ds-facts">{_facts(tally)}</div>{text}{key}</section>'
    )


def legend() -> str:
    """What the colours of a DSpark lane mean."""
    return (
        '<div class="ds-legend"><span class="ds-a">accepted draft</span> <s class="ds-r">rejected draft</s> '
        '<span class="ds-o">the target\'s own token</span> '
        "<small>Greener: the drafter was surer. Hover for its confidence.</small></div>"
    )


def results(tally: RaceTally) -> str:
    """Headline, agreement and charts, once both lanes are done."""
    if not tally.is_complete:
        return ""
    lanes = [one for one in tally.lanes if one.is_speculative]
    charts = [_speed_chart(tally.lanes)]
    for one in lanes:
        suffix = f", {one.name}" if len(lanes) > 1 else ""
        charts.append(_acceptance_chart(one, f"Drafts accepted{suffix}"))
    charts.extend(_stage_chart(one, f"Where {one.name}'s time went") for one in lanes)
    return (
        f'<div class="ds-results"><p class="ds-headline">{_headline(tally)}</p>{agreement(tally.texts)}'
        f'<div class="ds-charts">{"".join(charts)}</div></div>'
    )


def agreement(texts: TextsCompared | None) -> str:
    """A line that says whether both texts agree."""
    if texts is None:
        return ""
    kind, line = _agreement(texts)
    return f'<p class="ds-agreement ds-{kind}">{escaped(line)}</p>'


def budgets(tally: LaneTally) -> str:
    """Drafts verified in every round of every row, a line for each row."""
    if not tally.budgets:
        return ""
    most = max(tally.num_draft_tokens, 1)
    rows = "".join(_budget_row(row, tally.budgets[row], most) for row in sorted(tally.budgets))
    return (
        '<figure class="ds-chart ds-wide"><figcaption>Budgets <small>drafts sent to the target, by row and round; at '
        f"most {most}, policy {escaped(tally.policy or '')}</small></figcaption>"
        f'<div class="ds-budgets">{rows}</div></figure>'
    )


# --- parts


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _facts(tally: LaneTally) -> str:
    facts = [
        f"{tally.num_new_tokens} tokens",
        f"{tally.num_target_forwards} target forwards",
        f"{tally.device_s:.1f} s",
    ]
    if tally.is_speculative:
        facts.insert(2, f'<span title="tokens per round, the target\'s own counted">tau {_number(tally.tau, 2)}</span>')
    return " · ".join(facts)


def _pieces(pieces: Iterable[Piece], is_speculative: bool) -> str:
    if not is_speculative:
        return escaped("".join(piece.text for piece in pieces))
    return "".join(_piece(piece) for piece in pieces if piece.text)


def _piece(piece: Piece) -> str:
    text = escaped(piece.text)
    if piece.kind == "own":
        return f'<span class="ds-o" title="the target\'s own token">{text}</span>'
    sure = "" if piece.confidence is None else f", confidence {piece.confidence:.0%}"
    if piece.kind == "accepted":
        strength = 0.5 if piece.confidence is None else piece.confidence
        style = f' style="--c:{12 + 48 * strength:.0f}%"'
        return f'<span class="ds-a"{style} title="draft in slot {piece.slot}{sure}: accepted">{text}</span>'
    fell = f", and {piece.num_fallen} behind it fell too" if piece.num_fallen else ""
    # A struck line break would tear the text apart.
    shown = text.replace("\n", "↵")
    return f'<s class="ds-r" title="draft in slot {piece.slot}{sure}: rejected{fell}">{shown}</s>'


def _headline(tally: RaceTally) -> str:
    first, second = tally.lanes
    ratio = tally.speed_ratio
    if ratio is None:
        return ""
    return f"{escaped(second.name)} is <b>{ratio:.2f}x</b> as fast as {escaped(first.name)}."


def _agreement(texts: TextsCompared) -> tuple[str, str]:
    if not texts.is_greedy:
        return "neutral", "Sampled: both texts are draws from the same law, so they need not agree."
    if texts.num_same == texts.num_rows:
        whose = "Both texts are" if texts.num_rows == 1 else f"All {texts.num_rows} texts are"
        return "same", f"✓ {whose} the same, token for token."
    num_differing = texts.num_rows - texts.num_same
    rows = "in one row" if num_differing == 1 else f"in {num_differing} rows"
    where = f"after {texts.position} tokens" if texts.num_rows == 1 else rows
    if texts.is_error:
        return "differ", f"✗ The texts part {where}, and rounding does not explain it: this is a bug, please report it."
    gap = "" if texts.token_gap is None else f" ({texts.token_gap:.3f} logits apart)"
    same = "" if texts.num_rows == 1 else f"{texts.num_same} of {texts.num_rows} texts are the same. "
    return "near", (
        f"≈ {same}The texts part {where}, where two tokens are nearly tied{gap} and {texts.dtype} rounds either way."
    )


def _speed_chart(lanes: list[LaneTally]) -> str:
    bars = [
        Bar(one.name, one.tokens_per_s, _number(one.tokens_per_s, 1), "fast" if one.is_speculative else "plain")
        for one in lanes
    ]
    return bar_chart("Speed", "tokens per second", bars)


def _acceptance_chart(tally: LaneTally, title: str) -> str:
    bars = [
        Bar(f"slot {slot}", share, "–" if share is None else f"{share:.0%}", "fast")
        for slot, share in enumerate(tally.conditional_acceptance, start=1)
    ]
    return bar_chart(title, "% of those reached", bars, full=1.0)


def _stage_chart(tally: LaneTally, title: str) -> str:
    bars = [
        Bar(_STAGE_NAMES[stage], seconds, f"{seconds:.2f}", "stage") for stage, seconds in (tally.stage_s or {}).items()
    ]
    return bar_chart(title, "seconds", bars)


def _budget_row(row: int, numbers: list[int], most: int) -> str:
    cells = "".join(f'<i style="--b:{100 * number / most:.0f}%">{number}</i>' for number in numbers)
    mean = sum(numbers) / len(numbers)
    return f'<div><span class="ds-label">row {row + 1}</span>{cells}<span class="ds-value">ø {mean:.1f}</span></div>'
