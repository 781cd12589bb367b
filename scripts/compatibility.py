"""Write docs/compatibility.md from the tables that the tests run: `python scripts/compatibility.py`.

`--check` writes nothing and fails where the file differs from what the tables say.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "integration")]

from families import FAMILIES  # noqa: E402
from generate_options import OPTIONS  # noqa: E402
from practices import PRACTICES  # noqa: E402
from refusals import REFUSALS  # noqa: E402
from target_forms import TARGET_FORMS  # noqa: E402

_INTRODUCTION = """\
# What works, what is refused, and why

Written by `python scripts/compatibility.py` from the tables that the tests run; do not edit it by hand.

"Works" means: in float32 the greedy output with a drafter is the output without one, token for token, and scores,
logits, hidden states, attentions, streamed tokens and the calls of your own criteria agree as well. Each is tried with
an untrained drafter, which is wrong nearly always, and with one that is right with probability 0.8. Sampling follows
the target's law: [lossless.md](lossless.md) says how that is proved.
"""


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""


def page() -> str:
    """The page's text."""
    named = [family for family in FAMILIES.values() if family.is_named]
    others = [family for family in FAMILIES.values() if not family.is_named]
    lines = [_INTRODUCTION, "## Families of targets", ""]
    lines.append(
        f"Tiny random models of these {len(FAMILIES)} families run in the tests, each with every option below in "
        "`make test-full`. In `make test`\n"
        f"each option runs on two of the first {len(named)} families, and two options run on every other one. A family "
        "that is not listed works\nif its cache can be rolled back and its hidden states are one stream; if not, "
        "generate() says so.\n"
    )
    rows = [(family.name, f"`{family.model_type}`", family.note) for family in (*named, *others)]
    lines += _table(("family", "`model_type`", "special about it"), rows)
    lines += ["## Ways to call generate()", ""]
    lines += _table(("option", "note"), [(option.name, option.note) for option in OPTIONS.values()])
    lines += ["## Targets as you have them", ""]
    lines += _table(("target", "note"), [(form.name, form.note) for form in TARGET_FORMS])
    lines += ["## Around the call", ""]
    lines += _table(("what", "note"), [(practice.name, practice.note) for practice in PRACTICES])
    lines += ["## Refused, before any work", ""]
    lines.append(
        "Each raises an error that names the value, the rule and the way out; your cache stays as it is. Contrastive "
        "search, beam groups,\nconstraints and continuous batching are refused by transformers itself, in its own "
        "words, before it looks at the drafter.\n"
    )
    lines += _table(("what", "why"), [(refusal.name, refusal.why) for refusal in REFUSALS])
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Exit code: 0, or 1 where `--check` finds a difference."""
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE.relative_to(ROOT)} is not what the tables say; run: python scripts/compatibility.py")
            return 1
        return 0
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
