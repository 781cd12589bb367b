"""A server with the real small pair, and pages of a Debian chromium that note errors and outside requests."""

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
START_S = 180
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.real_model)


@pytest.fixture(scope="session")
def playwright():
    for module in ("gradio", "playwright"):
        pytest.importorskip(module, reason='needs the extras demo and browser: pip install -e ".[demo,browser]"')
    if CHROMIUM is None:
        pytest.skip("needs chromium on the PATH (Debian: apt install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def outside(tmp_path_factory):
    """The file in which the server's requests to other machines are noted."""
    return tmp_path_factory.mktemp("outside") / "notes.txt"


@pytest.fixture(scope="session")
def new_port():
    """Finds free ports: gradio, told none, tries one after the other and leaves the sockets of used ones open."""

    def find():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find


@pytest.fixture(scope="session")
def server(playwright, outside, tmp_path_factory, new_port):
    """Address of `dspark demo --offline` with SmolLM2, on one thread: the browser needs the other processor."""
    from dspark_hf import zoo

    zoo.resolve("smollm2-135m-instruct")  # fetched here: the server may not
    port = new_port()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE / "outside"), os.environ.get("PYTHONPATH", "")]),
        "DSPARK_TEST_OUTSIDE_NOTES": str(outside),
    }
    environment.pop("OMP_NUM_THREADS", None)
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-m", "dspark_cli", "demo", "--offline", "--threads", "1", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        _await(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def _await(address, process, log):
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.5)
    raise AssertionError(f"no page after {START_S} s: {log.read_text()}")


class Visitor:
    """A page with what went wrong on it."""

    def __init__(self, playwright, folder, address, width):
        self.errors, self.requests = [], []
        self._context = playwright.chromium.launch_persistent_context(
            str(folder), executable_path=CHROMIUM, args=FLAGS, viewport={"width": width, "height": 900}
        )
        self.page = self._context.pages[0]
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.page.locator("#race-run").wait_for(timeout=30_000)
        self._address = address

    def outside(self):
        local = (self._address, "data:", "blob:")
        return [url for url in self.requests if not url.startswith(local)]

    def close(self):
        self._context.close()


@pytest.fixture
def open_visitor(playwright, tmp_path):
    """Opens pages; at the end none may have asked another machine, nor have logged an error that is not expected."""
    visitors, calm = [], []

    def open_page(address, width=1280, *, expects_errors=False):
        visitors.append(Visitor(playwright, tmp_path / f"profile-{len(visitors)}", address, width))
        if not expects_errors:
            calm.append(visitors[-1])
        return visitors[-1]

    yield open_page
    for visitor in visitors:
        visitor.close()
    assert [visitor.errors for visitor in calm if visitor.errors] == []
    assert [visitor.outside() for visitor in visitors if visitor.outside()] == []


@pytest.fixture
def visit(open_visitor, server):
    """Opens pages of the server."""
    return functools.partial(open_visitor, server)
