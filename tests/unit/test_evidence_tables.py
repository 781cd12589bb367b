"""scripts/evidence_tables.py: tables of other documents come from docs/evidence, whole and from the right place."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

PAGE = """# Page

## first, greedy

Speeds:

| a | b |
| --- | --- |
| 1 | 2 |

Costs of it:

| c |
| --- |
| 3 |
end

## second

nothing
"""


@pytest.fixture
def tables(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(SCRIPTS)
    spec = importlib.util.spec_from_file_location("evidence_tables", SCRIPTS / "evidence_tables.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "evidence_tables", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "EVIDENCE", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    return module


def test_a_table_is_cut_from_its_place(tables):
    assert tables.cut("page.md", "first") == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert tables.cut("page.md", "first", "Costs of") == "| c |\n| --- |\n| 3 |"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("third",), "no section 'third'"),
        (("second",), "no table behind ''"),
        (("first", "Gains"), "no table behind 'Gains'"),
    ],
)
def test_a_table_that_is_not_there_is_named(tables, place, message):
    with pytest.raises(LookupError, match=message):
        tables.cut("page.md", *place)


def estimate(value, low=None, high=None):
    return {"value": value, "low": low, "high": high}


def test_drafters_stand_beside_the_last_one(tables, tmp_path):
    slots = [{"conditional_acceptance": estimate(0.5, 0.4, 0.6)}, {"conditional_acceptance": estimate(None)}]
    scores = [
        {"drafter": name, "temperature": 0.0, "mean_tau": estimate(tau, tau - 0.1, tau + 0.1),
         "groups": {"all": {"slots": slots[:num_slots]}}}
        for name, tau, num_slots in (("DFlash", 1.5, 1), ("DSpark", 2.0, 2))
    ]  # fmt: skip
    shapes = {name: {"num_layers": 1, "num_draft_tokens": k} for name, k in (("DFlash", 1), ("DSpark", 2))}
    percent = estimate(-20.0, -50.0, 0.0)
    differences = [
        {"drafter": "DFlash", "temperature": 0.0, "group": group, "gain_percent": percent, "p_value": 0.0004}
        for group in ("math", "all")
    ]
    report = {"drafters": shapes, "scores": scores, "differences": differences}
    (tmp_path / "drafters.json").write_text(json.dumps(report))
    (tmp_path / "bench").mkdir()
    way = {"way": "DSpark, full", "speed_over": {tables.PLAIN: estimate(1.25, 1.2, 1.3)}}
    bench = {"cells": [{"cell": {"kind": "main"}, "ways": [way]}]}
    (tmp_path / "bench" / "bench.json").write_text(json.dumps(bench))
    lines = tables.drafters_table().splitlines()
    # a fifth less than DSpark: DSpark has a quarter more; half as much: twice
    assert lines[2].startswith(
        "| DFlash | 1 | 1 | 1.50 (1.40 to 1.60) | +25.0 % (+0.0 to +100.0), p < 0.001 | 16 to 18 %"
    )
    assert lines[3] == "| DSpark | 1 | 2 | 2.00 (1.90 to 2.10) |  |  | 1.25 (1.20 to 1.30) |"
    assert tables.slots_table().splitlines()[2:] == [
        "| DFlash | greedy | 0.50 (0.40 to 0.60) |  |",
        "| DSpark | greedy | 0.50 (0.40 to 0.60) | - |",
    ]
