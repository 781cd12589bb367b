"""Numbers of reports as text; what is absent is a dash."""

from collections.abc import Sequence

from .fields import Fields
from .markdown import Safe

DASH = Safe("-")


def number(value: float | None, digits: int = 2) -> Safe:
    """With so many digits behind the point."""
    return DASH if value is None else Safe(f"{value:,.{digits}f}")


def percent(value: float | None, digits: int = 1) -> Safe:
    """A share as percent, without the sign."""
    return number(None if value is None else 100 * value, digits)


def count(value: float | None) -> Safe:
    """A whole number."""
    return number(value, 0)


def millions(value: float | None) -> Safe:
    """A count in millions, with its unit."""
    return DASH if value is None else Safe(f"{value / 1e6:,.1f} M")


def estimate(fields: Fields, digits: int = 2, scale: float = 1.0, unit: str = "") -> Safe:
    """A value with its 95 % interval, if it has one."""
    value, low, high = (fields.number(name) for name in ("value", "low", "high"))
    if value is None:
        return DASH
    text = f"{scale * value:.{digits}f}{unit}"
    if low is not None and high is not None:
        text += f" ({scale * low:.{digits}f} to {scale * high:.{digits}f})"
    return Safe(text)


def at(values: Sequence[float | None], index: int) -> float | None:
    """An entry; None behind the end."""
    return values[index] if index < len(values) else None


def mode_name(temperature: float | None) -> str:
    """How a card calls a temperature."""
    if temperature is None:
        return "not said how"
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"
