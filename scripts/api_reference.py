"""Write docs/api.md from the docstrings: `python scripts/api_reference.py`.

The sources are read, not imported. `--check` writes nothing and fails where the file differs from what they say.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"

_INTRODUCTION = """\
# API reference

Written by `python scripts/api_reference.py` from the docstrings; do not edit it by hand. `from dspark_hf import NAME`
gives what stands here without a dot. Names with dots are the path below `dspark_hf`; they may move in a later release.
What transformers' own base classes bring along is not repeated.
"""

# Public names are `dspark_hf.__all__`, each in one group; names with dots are given besides.
GROUPS = {
    "Drafters": ["DSparkDraftModel", "DSparkConfig", "AutoregressiveDraftModel", "AutoregressiveConfig"],
    "Generating": [
        "SpeculationReport",
        "decoding.report.GenerateDSparkOutput",
        "record_speculation",
        "DSparkCandidateGenerator",
        "install",
        "uninstall",
    ],
    "A target to try": ["zoo.load_target", "zoo.load_tokenizer", "zoo.load_drafter", "zoo.resolve"],
    "Training": [
        "TrainingRequest",
        "train_drafter",
        "training.outcome.TrainingOutcome",
        "training.responses_command.run_train_data",
        "DSparkTrainer",
        "DSparkTrainingArguments",
    ],
    "Calibration": [
        "CalibrationRequest",
        "calibrate_drafter",
        "evaluation.calibration.CalibrationReport",
        "SequentialTemperatureScaling",
        "Proposals",
        "record_proposals",
        "watch_drift",
        "decoding.drift.DriftWatch",
        "fitting.refit.refit",
    ],
    "Step times": [
        "ThroughputProfile",
        "evaluation.profiling.profile_pair",
        "fitting.measuring.ProfilePlan",
        "fitting.profile_store.save_profile",
        "fitting.profile_store.load_profile",
    ],
}
# Those whose name ends in Error.
_ERRORS = "Errors"

_TITLES = {"parameters": "Arguments", "attributes": "Attributes", "raises": "Raises"}
_STARS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}


def _clean(text: str) -> str:
    """Docstring text as Markdown: references to other names are code, not links without an address."""
    return re.sub(r"\[(`[^`]+`)\](?!\()", r"\1", inspect.cleandoc(text))


def _signature(item: griffe.Function) -> str:
    """Arguments as they are written, without annotations, which stand beside each argument's description."""
    shown: list[str] = []
    is_keyword_only = False
    for parameter in item.parameters:
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is griffe.ParameterKind.keyword_only and not is_keyword_only:
            shown.append("*")
        is_keyword_only |= parameter.kind in (
            griffe.ParameterKind.keyword_only,
            griffe.ParameterKind.var_positional,
        )
        stars = _STARS.get(parameter.kind, "")
        default = "" if parameter.default is None or stars else f"={parameter.default}"
        shown.append(f"{stars}{parameter.name}{default}")
    return f"{item.name}({', '.join(shown)})"


def _facts(item: griffe.Object, name: str) -> str:
    """Type and default of an argument or attribute, as the source states them."""
    member = item.members.get(name) if isinstance(item, griffe.Class) else None
    found: griffe.Attribute | griffe.Parameter | None = member if isinstance(member, griffe.Attribute) else None
    if found is None and isinstance(item, griffe.Class | griffe.Function) and name in item.parameters:
        found = item.parameters[name]
    if found is None:
        return ""
    is_any_number = isinstance(found, griffe.Parameter) and found.kind in _STARS
    default = found.default if isinstance(found, griffe.Parameter) else found.value
    parts = [f"`{found.annotation}`"] if found.annotation is not None else []
    is_required = default is None or is_any_number or "field(" in str(default)
    return f" ({', '.join(parts if is_required else [*parts, f'default `{default}`'])})" if parts else ""


def _names(entry: griffe.DocstringElement, kind: str) -> list[str]:
    """Names that share a description; the parser takes all but the first for a type."""
    kept = str(entry.annotation).strip("()")
    whole = kept if kind == "raises" else f"{entry.name} {kept}" if entry.name.endswith(",") else entry.name
    return whole.split(", ")


def _section(item: griffe.Object, section: griffe.DocstringSection) -> Iterator[str]:
    kind = section.kind.value
    if kind == "text":
        yield from (_clean(section.value), "")
    elif kind in _TITLES:
        yield from (f"**{_TITLES[kind]}**", "")
        for entry in section.value:
            names = _names(entry, kind)
            facts = _facts(item, names[0]) if kind != "raises" and len(names) == 1 else ""
            shown = "`, `".join(names)
            yield f"- `{shown}`{facts}: {' '.join(_clean(entry.description).split())}"
        yield ""
    elif kind == "returns":
        text = " ".join(_clean(entry.description) for entry in section.value)
        yield from (f"**Returns** {' '.join(text.split())}", "")
    elif kind == "admonition":
        yield from (f"**{section.title}**", "", inspect.cleandoc(section.value.description), "")
    else:
        raise ValueError(f"{item.path}: a docstring section {kind!r} has no form on the page; add one here")


def _documented(item: griffe.Object) -> Iterator[str]:
    assert item.docstring is not None, f"{item.path} has no docstring"
    for section in item.docstring.parse(
        "google", returns_named_value=False, returns_multiple_items=False, warn_unknown_params=False, warnings=False
    ):
        yield from _section(item, section)


def _entry(item: griffe.Object, title: str) -> Iterator[str]:
    """An item's heading and docstring; of a class its public methods and properties, too."""
    prefix = title.removesuffix(item.name)
    if isinstance(item, griffe.Function):
        yield from (f"### `{prefix}{_signature(item)}`", "")
        yield from _documented(item)
        return
    assert isinstance(item, griffe.Class), f"{item.path} is neither class nor function"
    yield from (f"### `{title}`", "")
    bases = ", ".join(f"`{base}`" for base in item.bases)
    if bases:
        yield from (f"A kind of {bases}.", "")
    yield from _documented(item)
    for name, member in item.members.items():
        if name.startswith("_") or member.is_alias or member.docstring is None:
            continue
        if isinstance(member, griffe.Function):
            yield from (f"#### `{item.name}.{_signature(member)}`", "")
            yield from _documented(member)
        elif "property" in member.labels:
            yield from (f"#### `{item.name}.{name}`", "")
            yield from _documented(member)


def _groups(public: list[str]) -> dict[str, list[str]]:
    """All groups, checked: each public name stands in one of them.

    Raises:
        ValueError: a name has no place, or no longer exists.
    """
    errors = [name for name in public if name.endswith("Error")]
    placed = [name for names in GROUPS.values() for name in names if "." not in name] + errors
    strange = sorted(set(placed) ^ (set(public) - {"__version__"}))
    if strange:
        raise ValueError(f"GROUPS must hold each public name once; not so for: {', '.join(strange)}")
    return {**GROUPS, _ERRORS: errors}


def page() -> str:
    """The page's text."""
    package = griffe.load("dspark_hf", search_paths=[ROOT / "src"], resolve_aliases=True)
    assert isinstance(package, griffe.Module)
    public = ast.literal_eval(str(package["__all__"].value))
    lines = [_INTRODUCTION]
    for title, names in _groups(public).items():
        lines += [f"## {title}", ""]
        for name in names:
            item = package[name]
            lines += _entry(item.final_target if item.is_alias else item, name)
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Exit code: 0, or 1 where `--check` finds a difference."""
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE.relative_to(ROOT)} is not what the docstrings say; run: python scripts/api_reference.py")
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
