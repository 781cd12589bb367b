"""Tables of docs/evidence for other documents: cut from its pages as they are, or put together from its reports."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from drafter_overhead import table

EVIDENCE = Path(__file__).resolve().parents[1] / "docs" / "evidence"
PLAIN = "plain, dynamic cache"
# DSpark over the others in the paper (arXiv 2607.05147, sections 1 and 4.2), per cent more accepted length.
PAPER_GAINS = {"DFlash": "16 to 18", "Eagle3": "27 to 31"}


@cache
def evidence(name: str) -> dict[str, Any]:
    """A report by its file's name."""
    content: dict[str, Any] = json.loads((EVIDENCE / f"{name}.json").read_text(encoding="utf-8"))
    return content


def cut(page: str, section: str, lead: str = "") -> str:
    """The first table of a page behind the line that starts with `lead`, in the section whose title starts so.

    Raises:
        LookupError: There is none.
    """
    text = (EVIDENCE / page).read_text(encoding="utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    inside = next((part for part in (parts[1:] if section else parts) if part.startswith(section)), None)
    if inside is None:
        raise LookupError(f"{page} has no section {section!r}")
    _, start, behind = ("", "", inside) if not lead else inside.partition(f"\n{lead}")
    lines = behind.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("|")), None)
    if first is None or (lead and not start):
        raise LookupError(f"{page} has no table behind {lead!r} in {section!r}")
    rest = lines[first:]
    end = next((i for i, line in enumerate(rest) if not line.startswith("|")), len(rest))
    return "\n".join(rest[:end])


def drafters_table() -> str:
    """Accepted length of every drafter, what DSpark is above it, and its speed."""
    content = evidence("drafters")
    names = list(content["drafters"])
    reference, temperatures = names[-1], sorted({score["temperature"] for score in content["scores"]})
    told = ["greedy" if temperature == 0 else f"T {temperature:g}" for temperature in temperatures]
    head = ["drafter", "layers", "gamma", *(f"tau, {one}" for one in told)]
    head += [*(f"{reference} over it, {one}" for one in told), "in the paper", "tokens/s over plain"]
    rows = [head]
    for name in names:
        facts = content["drafters"][name]
        taus = [_interval(_score(content, name, t)["mean_tau"], 2) for t in temperatures]
        gains = ["" if name == reference else _gain(content, name, t) for t in temperatures]
        paper = f"{PAPER_GAINS[name]} %" if name in PAPER_GAINS else ""
        shape = [str(facts["num_layers"]), str(facts["num_draft_tokens"])]
        rows.append([name, *shape, *taus, *gains, paper, _speed(f"{name}, full")])
    return table(rows)


def slots_table() -> str:
    """Acceptance by slot, given that all slots before were accepted."""
    content = evidence("drafters")
    most = max(facts["num_draft_tokens"] for facts in content["drafters"].values())
    rows = [["drafter", "decoded", *(f"slot {k + 1}" for k in range(most))]]
    for score in content["scores"]:
        slots = score["groups"]["all"]["slots"]
        cells = [_interval(slot["conditional_acceptance"], 2) for slot in slots]
        decoded = "greedy" if score["temperature"] == 0 else f"T {score['temperature']:g}"
        rows.append([score["drafter"], decoded, *cells, *[""] * (most - len(cells))])
    return table(rows)


def _score(content: dict[str, Any], name: str, temperature: float) -> dict[str, Any]:
    pairs = ((score["drafter"], score["temperature"]) for score in content["scores"])
    found: dict[str, Any] = content["scores"][list(pairs).index((name, temperature))]
    return found


def _gain(content: dict[str, Any], name: str, temperature: float) -> str:
    """Of the reference over a drafter, from the drafter's over the reference."""
    wanted = name, temperature, "all"
    found = next(d for d in content["differences"] if (d["drafter"], d["temperature"], d["group"]) == wanted)
    percent = found["gain_percent"]
    ends = [100 * (100 / (100 + percent[key]) - 1) for key in ("value", "high", "low")]
    p_value = f"{found['p_value']:.3f}" if found["p_value"] >= 0.001 else "< 0.001"
    return f"{ends[0]:+.1f} % ({ends[1]:+.1f} to {ends[2]:+.1f}), p {p_value}"


def _speed(way: str) -> str:
    main = next(cell for cell in evidence("bench/bench")["cells"] if cell["cell"]["kind"] == "main")
    found = next((one for one in main["ways"] if one["way"] == way), None)
    return "" if found is None else _interval(found["speed_over"][PLAIN], 2)


def _interval(estimate: dict[str, Any], digits: int) -> str:
    value, low, high = (estimate[name] for name in ("value", "low", "high"))
    if value is None:
        return "-"
    text = f"{value:.{digits}f}"
    return text if low is None else f"{text} ({low:.{digits}f} to {high:.{digits}f})"
