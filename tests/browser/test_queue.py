"""More visitors than may wait: a page with a tiny, slow pair, served from this process."""

import time

import pytest
from demo_races import TinyShelf
from tiny import tiny_target

STEP_S = 0.1

# gradio's statistics of its queue use what pandas has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting'"),
    pytest.mark.filterwarnings("ignore:The copy keyword is deprecated"),
]


@pytest.fixture
def full_server(playwright, monkeypatch, new_port):
    """A page whose races take seconds and where one visitor may wait."""
    from dspark_hf.demo import ui
    from dspark_hf.demo.service import DemoService

    target = tiny_target()
    forward = target.forward

    def slow(*args, **kwargs):
        time.sleep(STEP_S)
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", slow)
    monkeypatch.setattr(ui, "MAX_WAITING", 1)
    demo = ui.build_demo(DemoService(TinyShelf(target)), target="tiny")
    _, address, _ = demo.launch(prevent_thread_lock=True, quiet=True, server_port=new_port(), **ui.launch_options())
    yield address.rstrip("/")
    demo.close()


def test_who_finds_the_queue_full_is_told_and_may_try_again(full_server, open_visitor):
    visitors = [open_visitor(full_server, expects_errors=True) for _ in range(4)]
    for visitor in visitors:
        visitor.page.get_by_label("Prompt").first.fill("w5 w9 w3")
        visitor.page.locator("#race-run").click()
        visitor.page.wait_for_timeout(300)
    due_s, told = time.monotonic() + 15, []
    while not told and time.monotonic() < due_s:
        visitors[-1].page.wait_for_timeout(200)
        told = [visitor for visitor in visitors if visitor.page.locator("#race-status [role=alert]").count()]
    assert told and visitors[0] not in told
    assert "Too many visitors are waiting" in told[0].page.locator("#race-status").inner_text()
    visitors[0].page.locator("#race-stop").click()
    assert told[0].page.locator("#race-run").is_enabled()
