"""A person at the page: each tab on SmolLM2 with the bundled drafter."""

import re
import time

import pytest

MAX_FIRST_TEXT_S = 2.0
DONE_MS = 120_000
# A step takes a fraction of a second, what is stopped would take several; the rest is for a busy machine.
STOP_MS = 4_000
FIRST_MS = 30_000


def tab(visitor, name):
    visitor.page.get_by_role("tab", name=name, exact=True).click()


def await_results(visitor, elem):
    visitor.page.locator(f"#{elem}-results .ds-headline").wait_for(timeout=DONE_MS)
    visitor.page.locator(f"#{elem}-run:not([disabled])").wait_for(timeout=10_000)


def set_number(visitor, label, value):
    """Type into a slider's number field, in the settings."""
    field = visitor.page.get_by_label(f"number input for {label}")
    field.fill(str(value))
    field.press("Enter")


def open_settings(visitor):
    visitor.page.get_by_role("button", name=re.compile("^Settings")).click()


def visible_bars(visitor, elem):
    """Bars at least 2 pixels long and 8 high, by their colour class."""
    boxes = visitor.page.locator(f"#{elem}-results .ds-bar").evaluate_all(
        "bars => bars.map(b => [b.className, b.getBoundingClientRect().width, b.getBoundingClientRect().height])"
    )
    return [name for name, width, height in boxes if width >= 2 and height >= 8]


def colour(place, selector):
    return place.locator(selector).first.evaluate("e => getComputedStyle(e).backgroundColor")


def test_race(visit):
    visitor = visit()
    page = visitor.page
    page.locator("#race-run").click()
    page.locator("#race-lane-1 .ds-text span").first.wait_for(timeout=FIRST_MS)
    assert page.locator("#race-run").is_disabled()
    lengths = set()
    for _ in range(8):
        lengths.add(tuple(len(page.locator(f"#race-lane-{i} .ds-text").inner_text()) for i in (0, 1)))
        page.wait_for_timeout(150)
    assert len(lengths) > 3  # both grow on the way
    assert len({plain for plain, _ in lengths}) > 1 and len({dspark for _, dspark in lengths}) > 1
    await_results(visitor, "race")
    assert re.search(r"DSpark is \d+\.\d\dx as fast as plain", page.locator("#race-results").inner_text())
    line = page.locator("#race-results .ds-agreement").inner_text()
    assert line.startswith("✓") or "nearly tied" in line  # bfloat16
    text = page.locator("#race-lane-1 .ds-text")
    struck = text.locator("s.ds-r").first.evaluate("e => getComputedStyle(e).textDecorationLine")
    assert "line-through" in struck
    hover = text.locator(".ds-a").first.get_attribute("title")
    assert re.fullmatch(r"draft in slot \d, confidence \d+%: accepted", hover)
    colours = {colour(text, kind) for kind in (".ds-a", ".ds-o", ".ds-r")}
    assert len(colours) == 3
    bars = visible_bars(visitor, "race")
    assert {"ds-bar ds-plain", "ds-bar ds-fast", "ds-bar ds-stage"} <= set(bars)
    assert re.search(r"tau \d\.\d\d", page.locator("#race-lane-1 .ds-facts").inner_text())


def test_first_text_comes_at_once(visit):
    visitor = visit()
    page = visitor.page
    waits_s = []
    while len(waits_s) < 3 and min(waits_s, default=9.0) >= MAX_FIRST_TEXT_S:  # a busy machine gets three tries
        started_s = time.monotonic()
        page.locator("#race-run:not([disabled])").click()
        page.locator("#race-lane-0 .ds-text", has_text=re.compile(r"\w")).wait_for(timeout=20_000)
        waits_s.append(time.monotonic() - started_s)
        page.locator("#race-stop").click()
        page.locator("#race-status", has_text="Stopped").wait_for(timeout=STOP_MS)
    assert min(waits_s) < MAX_FIRST_TEXT_S


def test_batch(visit):
    visitor = visit()
    tab(visitor, "Batch")
    open_settings(visitor)
    set_number(visitor, "New tokens, at most", 32)
    visitor.page.locator("#batch-run").click()
    await_results(visitor, "batch")
    text = visitor.page.locator("#batch-results").inner_text()
    assert "DSpark is" in text and "row 4" in text and "policy " in text
    assert "texts are the same" in text
    cells = visitor.page.locator("#batch-results .ds-budgets i")
    assert len({cells.nth(i).inner_text() for i in range(cells.count())}) > 1  # budgets differ
    assert {"ds-bar ds-plain", "ds-bar ds-fast"} <= set(visible_bars(visitor, "batch"))


def test_two_drafters(visit):
    visitor = visit()
    tab(visitor, "Two drafters")
    open_settings(visitor)
    set_number(visitor, "New tokens, at most", 24)
    visitor.page.locator("#drafters-run").click()
    await_results(visitor, "drafters")
    text = visitor.page.locator("#drafters-results").inner_text()
    assert "B: untrained is" in text and "Drafts accepted, A: bundled" in text
    accepted = [visitor.page.locator(f"#drafters-lane-{i} .ds-text .ds-a").count() for i in (0, 1)]
    assert accepted[0] > accepted[1]


def test_stop_frees_the_device_at_once(visit):
    visitor = visit()
    page = visitor.page
    open_settings(visitor)
    set_number(visitor, "New tokens, at most", 256)
    page.locator("#race-run").click()
    page.locator("#race-lane-1 .ds-text span").first.wait_for(timeout=FIRST_MS)
    page.locator("#race-stop").click()
    page.locator("#race-status", has_text="Stopped").wait_for(timeout=STOP_MS)
    page.locator("#race-run:not([disabled])").click()
    page.locator("#race-lane-1 .ds-text span").first.wait_for(timeout=FIRST_MS)
    page.locator("#race-stop").click()
    page.locator("#race-status", has_text="Stopped").wait_for(timeout=STOP_MS)


def test_a_wrong_id_shows_a_message_and_the_app_lives_on(visit):
    visitor = visit()
    page = visitor.page
    open_settings(visitor)
    set_number(visitor, "New tokens, at most", 16)
    drafter = page.get_by_label("Drafter", exact=True)
    drafter.fill("nobody/no-such-drafter")
    drafter.press("Enter")
    page.locator("#race-run").click()
    alert = page.locator("#race-status [role=alert]")
    alert.wait_for(timeout=20_000)
    assert "nobody/no-such-drafter" in alert.inner_text()
    drafter.fill("bundled")
    drafter.press("Enter")
    page.locator("#race-run:not([disabled])").click()
    await_results(visitor, "race")


def test_a_visitors_text_stays_text(visit):
    visitor = visit()
    page = visitor.page
    open_settings(visitor)
    set_number(visitor, "New tokens, at most", 24)
    nasty = '<img src=x onerror="window.hacked=1"> ${window.hacked=1} {{value}} <b>bold</b>'
    drafter = page.get_by_label("Drafter", exact=True)
    drafter.fill(nasty)
    drafter.press("Enter")
    page.get_by_label("Prompt").first.fill(f"Repeat exactly: {nasty}")
    page.locator("#race-run").click()
    alert = page.locator("#race-status [role=alert]")
    alert.wait_for(timeout=20_000)
    assert "onerror=" in alert.inner_text() and alert.locator("img, b").count() == 0
    drafter.fill("bundled")
    drafter.press("Enter")
    page.locator("#race-run:not([disabled])").click()
    await_results(visitor, "race")
    assert page.locator(".ds-text img, .ds-text b").count() == 0
    assert page.evaluate("window.hacked") is None


def test_two_visitors_wait_for_each_other(visit):
    one, other = visit(), visit()
    for visitor in (one, other):
        open_settings(visitor)
        set_number(visitor, "New tokens, at most", 48)
    one.page.locator("#race-run").click()
    one.page.locator("#race-lane-1 .ds-text span").first.wait_for(timeout=FIRST_MS)
    other.page.locator("#race-run").click()
    other.page.locator("#race-status", has_text="Waiting for the device").wait_for(timeout=5_000)
    assert other.page.locator("#race-lane-1 .ds-text span").count() == 0
    await_results(one, "race")
    await_results(other, "race")


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_sticks_out_of_the_page(visit, width):
    visitor = visit(width)
    for name, elem in (("Race", "race"), ("Batch", "batch"), ("Two drafters", "drafters")):
        tab(visitor, name)
        visitor.page.locator(f"#{elem}-run").wait_for()
        assert visitor.page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_server_asked_no_other_machine(visit, outside):
    visit()
    assert not outside.exists(), outside.read_text()


def test_the_watch_for_outside_requests_can_see_one(tmp_path):
    import os
    import subprocess
    import sys
    from pathlib import Path

    notes = tmp_path / "notes.txt"
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent / "outside"),
        "DSPARK_TEST_OUTSIDE_NOTES": str(notes),
    }
    program = "import socket; socket.create_connection(('dspark.invalid', 80))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "dspark.invalid" in notes.read_text()
