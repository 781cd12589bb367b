"""`dspark demo` and the Space's app.py, without a server."""

import importlib.util
import os
import re
import runpy
import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import typer.testing
import yaml
from demo_races import TinyShelf

import dspark_cli
from dspark_hf.demo import service, shelf
from dspark_hf.demo.shelf import Limits

DEMO = Path(__file__).parents[3] / "demo"
HAS_GRADIO = importlib.util.find_spec("gradio") is not None
needs_gradio = pytest.mark.skipif(not HAS_GRADIO, reason='needs the extra demo: pip install -e ".[demo]"')


def run(*arguments):
    return typer.testing.CliRunner().invoke(dspark_cli.app, ["demo", *arguments])


@pytest.fixture(autouse=True)
def _environment():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def tiny(monkeypatch):
    """The tiny pair in place of whatever is asked for, and the pages that were launched."""
    import gradio as gr

    launched, asked = [], []

    def new_shelf(*args, **kwargs):
        asked.append((args, kwargs))
        return TinyShelf(limits=kwargs.get("limits") or (args[2] if len(args) > 2 else Limits()))

    monkeypatch.setattr(shelf, "Shelf", new_shelf)
    monkeypatch.setattr(gr.Blocks, "launch", lambda self, **options: launched.append((self, options)))
    return SimpleNamespace(launched=launched, asked=asked)


def test_without_gradio_the_message_says_what_to_install(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gradio" else find_spec(name, *a))
    done = run()
    assert done.exit_code == 2 and 'pip install "dspark-hf[demo]"' in done.stderr


@needs_gradio
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--port", "0"), "port must be 1 to 65535, got 0"),
        (("--threads", "0"), "--threads must be from 1 to"),
        (("--target", "/no/such/folder"), "is not a folder"),
        (("--dtype", "int8"), "dtype must be one of"),
    ],
)
def test_bad_options_end_in_one_line(arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2 and words in done.stderr and "Traceback" not in done.stderr


@needs_gradio
def test_an_address_that_cannot_be_had_is_told_before_anything_is_loaded(tiny):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run("--target", "tiny", "--port", str(port))
        assert done.exit_code == 2 and "Address already in use" in done.stderr and f"127.0.0.1:{port}" in done.stderr
    done = run("--target", "tiny", "--host", "203.0.113.7")
    assert done.exit_code == 2 and "got '203.0.113.7'" in done.stderr
    assert not tiny.asked and not tiny.launched


@needs_gradio
def test_who_lets_others_in_is_told_that_they_may_load_anything(tiny):
    assert "any model" not in run("--target", "tiny").stderr
    done = run("--target", "tiny", "--host", "0.0.0.0")
    assert done.exit_code == 0 and "can have any model loaded" in done.stderr and "DSPARK_DEMO_TARGETS" in done.stderr
    os.environ |= {"DSPARK_DEMO_TARGETS": "tiny", "DSPARK_DEMO_DRAFTERS": "a/b"}
    assert "any model" not in run("--target", "tiny", "--host", "0.0.0.0").stderr


@needs_gradio
def test_offline_is_set_before_anything_is_loaded(tiny):
    for name in ("HF_HUB_OFFLINE", "GRADIO_ANALYTICS_ENABLED", "PIP_NO_INDEX"):
        os.environ.pop(name, None)
    assert run().exit_code == 0
    assert "PIP_NO_INDEX" not in os.environ
    assert run("--offline", "--port", "7999", "--target", "tiny").exit_code == 0
    found = [os.environ[name] for name in ("HF_HUB_OFFLINE", "GRADIO_ANALYTICS_ENABLED", "PIP_NO_INDEX")]
    assert found == ["1", "False", "1"]
    _, options = tiny.launched[-1]
    assert (options["server_port"], options["server_name"], options["share"]) == (7999, "127.0.0.1", False)


@needs_gradio
def test_the_app_has_a_module_level_demo_and_starts_when_run(tiny):
    app = runpy.run_path(str(DEMO / "app.py"), run_name="app")
    assert app["demo"].title == "DSpark" and tiny.launched == []
    os.environ["SPACE_ID"] = "me/demo"
    app = runpy.run_path(str(DEMO / "app.py"), run_name="__main__")
    assert tiny.launched[0][0] is app["demo"]
    assert app["service"].shelf.limits == Limits(("smollm2-135m-instruct",), (), 4.0)


@needs_gradio
def test_on_zero_gpu_races_are_wrapped_and_nothing_runs_before(tiny, monkeypatch):
    wrapped = []
    spaces = ModuleType("spaces")
    spaces.GPU = lambda duration: lambda function: wrapped.append((duration, function.__name__)) or function
    monkeypatch.setitem(sys.modules, "spaces", spaces)
    monkeypatch.setattr(service.DemoService, "warm_up", lambda *args: pytest.fail("there is no GPU before a race"))
    os.environ["SPACES_ZERO_GPU"] = "1"
    app = runpy.run_path(str(DEMO / "app.py"), run_name="app")
    assert wrapped == [(60, "tallies_on_gpu")] and app["races"] is not None


def test_the_spaces_metadata_names_files_and_versions_that_exist():
    head = (DEMO / "README.md").read_text().split("---")[1]
    metadata = yaml.safe_load(head)
    pins = dict(line.split("==") for line in (DEMO.parent / "constraints.txt").read_text().splitlines() if "==" in line)
    assert metadata["sdk"] == "gradio" and metadata["sdk_version"] == pins["gradio"]
    assert (DEMO / metadata["app_file"]).is_file()
    assert len(metadata["short_description"]) <= 60
    required = [line for line in (DEMO / "requirements.txt").read_text().splitlines() if line[:1] not in ("", "#")]
    assert required == ["dspark-hf[demo,zoo]"]


def test_the_readme_names_every_variable():
    readme = (DEMO / "README.md").read_text()
    for name in (shelf.TARGETS_VARIABLE, shelf.DRAFTERS_VARIABLE, shelf.MAX_GB_VARIABLE):
        assert f"`{name}`" in readme


def test_only_the_page_imports_gradio():
    source = Path(service.__file__).parents[1]
    importing = [
        path for path in source.rglob("*.py") if re.search(r"^\s*(import|from) gradio", path.read_text(), re.M)
    ]
    assert [path.name for path in importing] == ["ui.py"]
