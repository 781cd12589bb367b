"""Requests in, tallies out: limits, errors, cancelling, one race at a time."""

import threading

import pytest
from demo_races import TinyShelf
from tiny import tiny_drafter, tiny_target

from dspark_hf.demo import service as module
from dspark_hf.demo.service import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, MAX_ROWS, DemoService, RaceRequest, rows_from
from dspark_hf.demo.shelf import BUNDLED
from dspark_hf.demo.zero_gpu import races_on_lent_gpu
from dspark_hf.evaluation import ComparisonError, ComparisonSettings


@pytest.fixture(autouse=True)
def _views_at_once(monkeypatch):
    monkeypatch.setattr(module, "VIEW_EVERY_S", 0.0)


def request_of(*prompts, drafter=BUNDLED, target="tiny", **settings):
    lanes = (("plain", None), ("DSpark", drafter))
    return RaceRequest(lanes, prompts or ("w5 w9 w3",), ComparisonSettings(**{"max_new_tokens": 16} | settings), target)


def last(views):
    *_, tally = views
    return tally


def run(service, request):
    return last(service.tallies(request, threading.Event()))


def test_a_race_grows_and_ends_with_agreement():
    service = DemoService(TinyShelf())
    numbers = [
        [lane.num_new_tokens for lane in tally.lanes] for tally in service.tallies(request_of(), threading.Event())
    ]
    assert numbers[0] == [0, 0] and numbers[-1] == [16, 16] and len(numbers) > 3
    tally = run(service, request_of())
    assert tally.is_complete and tally.error is None and tally.texts.num_same == 1
    assert tally.speed_ratio == pytest.approx(tally.lanes[1].tokens_per_s / tally.lanes[0].tokens_per_s)
    assert tally.lanes[0].tau is None and 1 <= tally.lanes[1].tau <= 5
    assert tally.lanes[0].text_after_s <= tally.lanes[0].device_s


def test_first_movers_alternate(monkeypatch):
    firsts = []
    monkeypatch.setattr(module, "run_race", lambda *args, first, **kwargs: firsts.append(first))
    service = DemoService(TinyShelf())
    for _ in range(4):
        run(service, request_of())
    assert firsts == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": (" \n",)}, "the prompt is empty"),
        ({"prompts": ()}, "the prompt is empty"),
        ({"prompts": ("w1",) * (MAX_ROWS + 1)}, "at most 16 rows, got 17"),
        ({"settings": ComparisonSettings(max_new_tokens=MAX_NEW_TOKENS + 1)}, "at most 256, got 257"),
    ],
)
def test_more_than_a_visitor_may_ask_for_is_refused(change, message):
    fields = {"lanes": (("a", None), ("b", BUNDLED)), "prompts": ("w1",), "settings": ComparisonSettings()}
    with pytest.raises(ComparisonError, match=message):
        RaceRequest(**fields | change)


def test_a_prompt_that_is_too_long_is_told():
    tally = run(DemoService(TinyShelf()), request_of(" ".join(["w5"] * (MAX_PROMPT_TOKENS + 1))))
    assert "1 to 1024 tokens, this one has 1025" in tally.error


def test_errors_are_told_and_the_next_race_runs():
    service = DemoService(TinyShelf(broken={"huge": MemoryError(), "odd": KeyError("x")}))
    assert "is not a folder" in run(service, request_of(drafter="no/such")).error
    assert "out of memory" in run(service, request_of(drafter="huge")).error
    assert "KeyError" in run(service, request_of(target="odd")).error
    assert "at most 4, this drafter's block" in run(service, request_of(num_assistant_tokens=7)).error
    assert "step times of this machine" in run(service, request_of(policy="block")).error
    assert run(service, request_of()).texts.num_same == 1


def test_a_closed_view_frees_the_device():
    service = DemoService(TinyShelf())
    views = service.tallies(request_of(max_new_tokens=256), threading.Event())
    next(views), next(views), next(views)
    views.close()
    assert not any(thread.name.startswith("lane") for thread in threading.enumerate())
    assert run(service, request_of()).is_complete


def test_a_switch_stops_a_running_race_and_one_that_has_not_begun():
    service = DemoService(TinyShelf())
    switch = threading.Event()
    views = service.tallies(request_of(max_new_tokens=256), switch)
    next(views), next(views), next(views)
    switch.set()
    tally = last(views)
    assert tally.was_stopped and not tally.is_complete and tally.texts is None
    assert sum(lane.num_new_tokens for lane in last(service.tallies(request_of(), switch)).lanes) == 0


def test_two_visitors_never_race_at_once():
    service = DemoService(TinyShelf())
    one = service.tallies(request_of(max_new_tokens=64), threading.Event())
    next(one), next(one)
    results = []
    other = threading.Thread(target=lambda: results.append(run(service, request_of())))
    other.start()
    assert last(one).is_complete
    other.join(timeout=20)
    assert results[0].is_complete


def test_a_batch_without_a_profile_is_shown_under_a_threshold():
    target = tiny_target()
    drafter = tiny_drafter(target, verification_policy="block")
    service = DemoService(TinyShelf(target, {BUNDLED: drafter}))
    tally = run(service, request_of("w5 w9", "w3", "w8 w2 w4"))
    assert tally.lanes[1].policy == "threshold"
    assert set(tally.lanes[1].budgets) == {0, 1, 2}
    assert run(service, request_of()).lanes[1].policy == "full"
    assert run(service, request_of("w5", "w3", policy="full")).lanes[1].policy == "full"


def test_warm_up_loads_and_runs_the_pair():
    shelf = TinyShelf()
    DemoService(shelf).warm_up("tiny")
    assert shelf.num_loads == 1


def test_rows_are_filled_from_the_examples_in_turn():
    assert rows_from(["a", "b", "c"], 2) == ("a", "b")
    assert rows_from(["a", "b", "c"], 5) == ("a", "b", "c", "a", "b")


# --- a GPU that is lent for one call


def lent_gpu(calls):
    def gpu(duration):
        def wrap(function):
            def called(request):
                calls.append(duration)
                yield from function(request)

            return called

        return wrap

    return gpu


def test_on_a_lent_gpu_a_race_runs_inside_the_wrapped_function():
    calls = []
    shelf = TinyShelf(broken={"odd": KeyError("x")})
    races = races_on_lent_gpu(DemoService(shelf), lent_gpu(calls))
    assert calls == []
    tally = last(races(request_of(), threading.Event()))
    assert tally.is_complete and calls == [60]
    assert "KeyError" in last(races(request_of(target="odd"), threading.Event())).error and calls == [60]


def test_on_a_lent_gpu_wrong_names_cost_no_gpu_and_a_switch_stops():
    calls = []
    races = races_on_lent_gpu(DemoService(TinyShelf()), lent_gpu(calls))
    assert "is not a folder" in last(races(request_of(drafter="no/such"), threading.Event())).error
    assert calls == []
    switch = threading.Event()
    views = races(request_of(max_new_tokens=256), switch)
    next(views), next(views), next(views)
    switch.set()
    assert last(views).was_stopped
    assert last(races(request_of(), threading.Event())).is_complete


def test_a_race_that_waits_for_the_device_can_be_stopped():
    service = DemoService(TinyShelf())
    running = service.tallies(request_of(max_new_tokens=256), threading.Event())
    next(running), next(running)
    switch = threading.Event()
    waiting = service.tallies(request_of(), switch)
    assert next(waiting).notice == "Waiting for the device …"
    switch.set()
    assert last(waiting).was_stopped
    running.close()
