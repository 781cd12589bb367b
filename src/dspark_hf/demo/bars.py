"""Bars with their values written beside them, as HTML: a phone has no pointer to hover with."""

from dataclasses import dataclass

from .markup import escaped


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        value: Its length; None draws none.
        text: The value for the reader, with its unit.
        kind: Of the colours in `render.CSS`.
    """

    label: str
    value: float | None
    text: str
    kind: str


def bar_chart(title: str, unit: str, bars: list[Bar], *, full: float | None = None) -> str:
    """A titled chart of horizontal bars from 0.

    Args:
        full: The value of a full bar; None: the largest.
    """
    known = [bar.value for bar in bars if bar.value is not None]
    longest = full or max(known, default=0.0)
    rows = "".join(_row(bar, longest) for bar in bars)
    return (
        f'<figure class="ds-chart"><figcaption>{escaped(title)} <small>{escaped(unit)}</small></figcaption>'
        f'<div class="ds-bars">{rows}</div></figure>'
    )


def _row(bar: Bar, longest: float) -> str:
    percent = 100 * bar.value / longest if bar.value and longest else 0.0
    return (
        f'<span class="ds-label">{escaped(bar.label)}</span>'
        f'<span class="ds-track"><span class="ds-bar ds-{bar.kind}" style="width:{percent:.1f}%"></span></span>'
        f'<span class="ds-value">{escaped(bar.text)}</span>'
    )
