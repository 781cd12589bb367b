"""The cards in `model_cards/` are what the shipped drafters' configs and reports give."""

from pathlib import Path

import pytest

import dspark_hf
from dspark_hf import zoo
from dspark_hf.hub.card import render_card, reports_address

ROOT = Path(dspark_hf.__file__).parents[2]
CARDS = ROOT / "model_cards"
TEMPLATE = "template.md"
MAX_REPORT_BYTES = 300_000


def cards():
    return sorted(path for path in CARDS.glob("*.md") if path.name != TEMPLATE)


def test_every_shipped_drafter_has_a_card_and_every_card_a_drafter():
    shipped = {path.name for path in zoo.BUNDLED_ROOT.glob("*/") if (path / "config.json").is_file()}
    assert {path.stem for path in cards()} == shipped != set()


@pytest.mark.parametrize("path", cards(), ids=lambda path: path.stem)
def test_a_card_is_what_its_drafters_reports_give(path):
    folder = zoo.BUNDLED_ROOT / path.stem
    written = render_card(folder, reports_at=reports_address(folder, path))
    assert path.read_text(encoding="utf-8") == written, f"run: dspark card {folder} --output {path}"


@pytest.mark.parametrize("path", cards(), ids=lambda path: path.stem)
def test_pictures_of_a_card_are_there(path):
    names = [part.split(")")[0] for part in path.read_text(encoding="utf-8").split("](") if ".png)" in part]
    assert names and all((path.parent / name).is_file() for name in names)


def test_shipped_reports_are_small():
    for folder in zoo.BUNDLED_ROOT.glob("*/"):
        assert sum(path.stat().st_size for path in (folder / "reports").iterdir()) <= MAX_REPORT_BYTES


def test_there_is_one_template():
    assert (CARDS / TEMPLATE).read_text() == (ROOT / "src/dspark_hf/hub" / TEMPLATE).read_text()
