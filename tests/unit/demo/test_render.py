"""Tallies as HTML: what is shown, and that nothing of a visitor's or a model's becomes markup."""

from html.parser import HTMLParser

import pytest

from dspark_hf.demo import render
from dspark_hf.demo.bars import Bar, bar_chart
from dspark_hf.demo.events import (
    LaneDone,
    LaneReady,
    LaneStopped,
    Piece,
    RaceFailed,
    RowRound,
    StepDone,
    TextsCompared,
)
from dspark_hf.demo.tally import LaneTally, RaceTally

NASTY = "<script>alert(1)</script>\"'&{{value}}${value}"


class Page(HTMLParser):
    """Elements with their attributes, and all text; fails on tags that do not pair."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self._open = [], "", []
        self.feed(html)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def having(self, css_class):
        return [attrs for _, attrs in self.elements if css_class in attrs.get("class", "").split()]


def speculative(name="DSpark"):
    tally = LaneTally(name, is_speculative=True)
    first = (Piece("The", "own"),)
    tally.add_step(StepDone(1, (RowRound(0, 1),), first, 0.1, is_prompt=True))
    pieces = (
        Piece(" cat", "accepted", 1, 0.9),
        Piece(" sits", "accepted", 2, 0.5),
        Piece(" un", "rejected", 3, 0.25, num_fallen=1),
        Piece(" on", "own"),
    )
    tally.add_step(StepDone(1, (RowRound(0, 3, 4, 2),), pieces, 0.25, is_prompt=False))
    return tally


def finished():
    plain, dspark = LaneTally("plain", is_speculative=False), speculative()
    race = RaceTally([plain, dspark])
    race.add(LaneReady(1, "full", 4))
    for step in range(4):
        race.add(StepDone(0, (RowRound(0, 1),), (Piece("x", "own"),), 0.125 * (step + 1), is_prompt=step == 0))
    race.add(LaneDone(0, ((1, 2, 3, 4),), 0.5, 4))
    stages = {"prompt": 0.05, "draft": 0.05, "verify": 0.1, "accept": 0.02, "other": 0.03}
    race.add(LaneDone(1, ((1, 2, 3, 4),), 0.25, 2, stages, (1, 1, 1, 0), (1, 1, 0, 0)))
    race.add(TextsCompared(1, 1, is_greedy=True, dtype="bfloat16"))
    return race


def test_a_lane_shows_speed_counts_and_where_each_token_comes_from():
    page = Page(render.lane(speculative()))
    assert "16.0 tokens/s" in page.text and "4 tokens · 2 target forwards · tau 3.00 · 0.2 s" in page.text
    assert "The cat sits un on" in page.text
    accepted = [attrs["title"] for attrs in page.having("ds-a") if "title" in attrs]
    assert accepted == ["draft in slot 1, confidence 90%: accepted", "draft in slot 2, confidence 50%: accepted"]
    assert [attrs["title"] for attrs in page.having("ds-r") if "title" in attrs] == [
        "draft in slot 3, confidence 25%: rejected, and 1 behind it fell too"
    ]
    assert {tag for tag, attrs in page.elements if attrs.get("class") == "ds-r"} == {"s"}
    assert len([attrs for attrs in page.having("ds-o") if "title" in attrs]) == 2


def test_a_plain_lane_has_no_tau_and_no_colours():
    page = Page(render.lane(finished().lanes[0]))
    assert "xxxx" in page.text and "tau" not in page.text and not page.having("ds-o")


def test_nothing_from_outside_becomes_markup():
    lane = LaneTally(NASTY, is_speculative=True, policy=NASTY, num_draft_tokens=4)
    kinds = [Piece(NASTY, "accepted", 1, 0.5), Piece(NASTY, "rejected", 2, 0.5), Piece(NASTY, "own")]
    lane.add_step(StepDone(0, (RowRound(0, 2, 2, 1),), tuple(kinds), 0.1, is_prompt=False))
    plain = LaneTally(NASTY, is_speculative=False, pieces=kinds)
    race = finished()
    race.lanes[0].name = race.lanes[1].name = NASTY
    shown = [
        render.lane(lane),
        render.lane(plain),
        render.status(RaceTally([], error=NASTY)),
        render.status(RaceTally([], notice=NASTY)),
        render.results(race),
        render.budgets(lane),
        bar_chart(NASTY, NASTY, [Bar(NASTY, 1.0, NASTY, "fast")]),
    ]
    for html in shown:
        page = Page(html)
        assert NASTY in page.text
        assert {tag for tag, _ in page.elements} <= {
            "section", "header", "b", "span", "small", "div", "s", "p", "figure", "figcaption", "i",
        }  # fmt: skip


def test_results_name_ratio_agreement_and_bars_with_units():
    page = Page(render.results(finished()))
    assert "DSpark is 2.00x as fast as plain." in page.text
    assert "✓ Both texts are the same, token for token." in page.text
    for words in ("Speed tokens per second", "slot 1100%", "slot 30%", "slot 4–", "seconds", "verify (target)0.10"):
        assert words in page.text
    widths = [attrs["style"] for attrs in page.having("ds-bar")]
    assert widths[:2] == ["width:50.0%", "width:100.0%"]
    assert render.results(RaceTally([speculative(), speculative()])) == ""  # not over yet


@pytest.mark.parametrize(
    ("texts", "kind", "words"),
    [
        (TextsCompared(8, 8, True, "float32"), "same", "All 8 texts are the same"),
        (TextsCompared(1, 0, False, "float32"), "neutral", "draws from the same law"),
        (TextsCompared(1, 0, True, "bfloat16", 0, 37, 0.0312), "near", "after 37 tokens, where two tokens are nearly"),
        (
            TextsCompared(4, 3, True, "bfloat16", 2, 5, 0.1),
            "near",
            "3 of 4 texts are the same. The texts part in one row",
        ),
        (TextsCompared(1, 0, True, "float32", 0, 3, 2.0, is_error=True), "differ", "please report it"),
    ],
)
def test_agreement_line(texts, kind, words):
    html = render.agreement(texts)
    assert f"ds-{kind}" in html and words in html


def test_budgets_have_a_cell_for_every_round_of_every_row():
    lane = LaneTally("DSpark", is_speculative=True, policy="threshold", num_draft_tokens=4)
    for verified in ((4, 0), (2, 1)):
        rows = tuple(RowRound(row, 1, number) for row, number in enumerate(verified))
        lane.add_step(StepDone(1, rows, (), 0.1, is_prompt=False))
    page = Page(render.budgets(lane))
    cells = [attrs["style"] for tag, attrs in page.elements if tag == "i"]
    assert cells == ["--b:100%", "--b:50%", "--b:0%", "--b:25%"]
    assert "at most 4, policy threshold" in page.text and "ø 3.0" in page.text
    assert render.budgets(LaneTally("x", is_speculative=True)) == ""


def test_a_status_is_the_error_else_the_stop_else_the_notice():
    race = RaceTally([LaneTally("a", is_speculative=False)], notice="loading")
    assert "loading" in render.status(race)
    race.add(LaneStopped(0))
    assert "Stopped" in render.status(race)
    race.add(RaceFailed("no such model"))
    assert "no such model" in render.status(race) and 'role="alert"' in render.status(race)
    assert render.status(RaceTally([])) == ""


def test_bars_start_at_0_and_the_longest_is_full():
    page = Page(
        bar_chart("t", "u", [Bar("a", 1.0, "1", "fast"), Bar("b", 4.0, "4", "fast"), Bar("c", None, "–", "fast")])
    )
    assert [attrs["style"] for attrs in page.having("ds-bar")] == ["width:25.0%", "width:100.0%", "width:0.0%"]
    assert 'style="width:20.0%"' in bar_chart("t", "u", [Bar("a", 0.2, "", "fast")], full=1.0)
    assert 'style="width:0.0%"' in bar_chart("t", "u", [Bar("a", 0.0, "", "fast")])
