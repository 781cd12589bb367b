"""The page's functions, without a browser (tests/browser has one)."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
from demo_races import TinyShelf

pytest.importorskip("gradio", reason='needs the extra demo: pip install -e ".[demo]"')

from dspark_hf.demo import filled_in, ui  # noqa: E402  # after the check for gradio
from dspark_hf.demo.service import DemoService  # noqa: E402
from dspark_hf.demo.shelf import BUNDLED, Limits  # noqa: E402
from dspark_hf.evaluation import ComparisonError  # noqa: E402
from dspark_hf.prompts import demo_prompts  # noqa: E402

SETTINGS = (16, 0.0, ui.OWN_POLICY, 0, 0.4)
VISITOR = SimpleNamespace(session_hash="me")


@pytest.fixture(scope="module")
def page():
    return ui.build_demo(DemoService(TinyShelf()), target="tiny")


def handler(page, tab, name):
    """A function of the page by its tab's run button and its name."""
    buttons = {block.elem_id: block for block in page.blocks.values() if getattr(block, "elem_id", None)}
    run = buttons[f"{tab}-run"]
    found = [function.fn for function in page.fns.values() if function.name == name and run in function.outputs]
    assert len(found) == 1
    return found[0]


def texts_of(page, tab, *values):
    """All views of a race that a visitor starts."""
    handler(page, tab, "begin")(VISITOR)
    return list(handler(page, tab, "race")(VISITOR, *values))


def test_a_race_streams_and_gives_the_button_back(page):
    views = texts_of(page, "race", "w5 w9 w3", BUNDLED, "tiny", *SETTINGS)
    run, stop, status, plain, dspark, results = views[-1]
    assert run.interactive is True and stop.interactive is False and status == ""
    assert "16 tokens" in plain and "16 tokens" in dspark and "the same, token for token" in results
    assert all(not hasattr(view[0], "interactive") for view in views[:-1])


def test_two_drafters_are_named_by_what_was_chosen(page):
    *_, one, other, results = texts_of(page, "drafters", "w5 w9", BUNDLED, "untrained", "tiny", *SETTINGS)[-1]
    assert "A: bundled" in one and "B: untrained" in other
    assert "B: untrained is" in results and "the same, token for token" in results


def test_a_batch_shows_budgets(page):
    *_, plain, dspark, results = texts_of(page, "batch", 4, BUNDLED, "tiny", 8, 0.0, "threshold", 0, 0.5)[-1]
    assert "32 tokens" in plain and "ds-text" not in dspark
    assert "row 4" in results and "policy threshold" in results and "All 4 texts are the same" in results


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("  ", BUNDLED, "tiny", *SETTINGS), "the prompt is empty"),
        (("w5", "no/such", "tiny", *SETTINGS), "is not a folder"),
        (("w5", BUNDLED, "tiny", 9999, *SETTINGS[1:]), "at most 256"),
        (("w5", BUNDLED, "tiny", 8, 0.0, "block", 0, 0.4), "step times of this machine"),
        (("w5", BUNDLED, "tiny", 8, 0.0, "full", 16, 0.4), "at most 4, this drafter"),
        ((None, BUNDLED, "tiny", *SETTINGS), "the prompt is empty"),
        (("w" * 6001, BUNDLED, "tiny", *SETTINGS), "at most 6000 characters, got 6001"),
        # Boxes that were cleared.
        (("w5", None, "tiny", *SETTINGS), "no drafter is chosen"),
        (("w5", " ", "tiny", *SETTINGS), "no drafter is chosen"),
        (("w5", BUNDLED, None, *SETTINGS), "no target is chosen"),
        (("w5", BUNDLED, "tiny", None, *SETTINGS[1:]), "a setting is empty"),
        (("w5", BUNDLED, "tiny", 8, None, *SETTINGS[2:]), "a setting is empty"),
        (("w5", BUNDLED, "tiny", 8, 0.0, None, 0, 0.4), "a setting is empty"),
        (("w5", BUNDLED, "tiny", 8, 0.0, ui.OWN_POLICY, None, 0.4), "a setting is empty"),
    ],
)
def test_an_error_is_shown_and_the_button_comes_back(page, values, words):
    run, stop, status, *_ = texts_of(page, "race", *values)[-1]
    assert words in status and 'role="alert"' in status
    assert run.interactive is True and stop.interactive is False


def test_a_cleared_box_is_no_second_drafter_either(page):
    *_, status, _, _, _ = texts_of(page, "drafters", "w5", BUNDLED, None, "tiny", *SETTINGS)[-1]
    assert "no drafter is chosen" in status


def test_spaces_around_a_name_do_not_count(page):
    *_, results = texts_of(page, "race", "w5 w9 w3", f" {BUNDLED} ", "tiny", *SETTINGS)[-1]
    assert "the same, token for token" in results


def test_who_left_while_waiting_has_no_race(page):
    handler(page, "race", "begin")(VISITOR)
    {function.name: function.fn for function in page.fns.values()}["leave"](VISITOR)
    *_, (_, _, status, plain, *_) = handler(page, "race", "race")(VISITOR, "w5", BUNDLED, "tiny", *SETTINGS)
    assert "Stopped" in status and "0 tokens" in plain


def test_nothing_is_sent_to_gradio_and_nothing_taken_from_visitors(page):
    assert page.analytics_enabled is False
    assert ui.launch_options()["max_file_size"] == 1


def test_stopping_and_leaving_end_the_visitors_race_only(page):
    for tab, end in (("race", "stop"), ("race", "leave")):
        handler(page, tab, "begin")(VISITOR)
        views = handler(page, tab, "race")(VISITOR, "w5 w9", BUNDLED, "tiny", 256, *SETTINGS[1:])
        next(views), next(views)
        by_name = {function.name: function.fn for function in page.fns.values()}
        if end == "leave":
            by_name["leave"](SimpleNamespace(session_hash="somebody else"))
            next(views)
            by_name["leave"](VISITOR)
        else:
            stops = [function.fn for function in page.fns.values() if function.name == "stop_race"]
            assert len(stops) == 3
            for stop in stops:
                stop(VISITOR)
        *_, last = views
        assert "Stopped" in last[2] and last[0].interactive is True


def test_races_share_one_place_in_the_queue(page):
    races = [function for function in page.fns.values() if function.name == "race"]
    assert len(races) == 3
    assert {function.concurrency_id for function in races} == {"device"}
    assert {function.concurrency_limit for function in races} == {1}
    quick = [function for function in page.fns.values() if function.name in ("begin", "stop_race")]
    assert len(quick) == 6 and not any(function.queue for function in quick)


def test_where_names_are_listed_only_those_can_be_chosen():
    limited = ui.build_demo(DemoService(TinyShelf(limits=Limits(("tiny",), ("a/b",), 1.0))), target="tiny")
    boxes = {block.label: block for block in limited.blocks.values() if type(block).__name__ == "Dropdown"}
    assert [value for _, value in boxes["Target"].choices] == ["tiny"]
    assert [value for _, value in boxes["Drafter"].choices] == ["bundled", "untrained", "a/b"]
    assert not boxes["Target"].allow_custom_value and not boxes["Drafter B"].allow_custom_value


def test_a_threshold_is_passed_under_its_policy_only():
    assert filled_in.comparison(64, 0.0, ui.OWN_POLICY, 0, 0.4).threshold is None
    assert filled_in.comparison(64, 0.0, "block", 0, 0.4).threshold is None
    assert filled_in.comparison(64, 0.0, "survival", 0, 0.4).threshold == 0.4
    asked = filled_in.comparison(64.0, 0.7, "threshold", 3, 0.4)
    assert (asked.threshold, asked.num_assistant_tokens, asked.max_new_tokens) == (0.4, 3, 64)
    with pytest.raises(ComparisonError, match="policy must be one of"):
        filled_in.comparison(64, 0.0, "best", 0, 0.4)


def test_examples_are_distinct_and_short():
    prompts = demo_prompts()
    assert len(prompts) == 7
    assert all(len(prompt.id) <= 10 and len(prompt.messages[0]["content"]) < 200 for prompt in prompts)


def test_races_of_one_page_run_one_at_a_time(page):
    seen = []

    def visit(name):
        visitor = SimpleNamespace(session_hash=name)
        handler(page, "race", "begin")(visitor)
        with contextlib.suppress(StopIteration):
            seen.append(list(handler(page, "race", "race")(visitor, "w5 w9", BUNDLED, "tiny", *SETTINGS))[-1])

    threads = [threading.Thread(target=visit, args=(f"v{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(seen) == 3 and all("the same, token for token" in view[-1] for view in seen)
