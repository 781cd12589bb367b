"""docs/questions: every page has its parts and a command that exists, its tables are those of its reports."""

import ast
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer.main

import dspark_cli
import dspark_hf

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "questions"
INDEX = FOLDER / "README.md"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path != INDEX)
NUMBERS = range(1, 28)
SECTIONS = ["Evidence", "Reproduce", "Limits"]
# What some pages still need a run of; a command that is there is checked like any other.
AWAITED = {"ablate", "bench", "simulate", "traces"}
NEEDED = re.compile(r"needs\s+a\s+run\s+of\s+(`dspark \w+`)")


def loaded(name, path, monkeypatch):
    """A module that is no part of a package."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def documents(monkeypatch):
    """What the other documents are checked with."""
    return loaded("documents", ROOT / "tests" / "integration" / "test_docs.py", monkeypatch)


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return loaded("question_pages", ROOT / "scripts" / "question_pages.py", monkeypatch)


def number_of(page):
    return int(page.name.partition("-")[0])


def is_awaited(command):
    program, *words = command.split()
    there = typer.main.get_command(dspark_cli.app).commands
    return program == "dspark" and words[0] in AWAITED - there.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_parts(page):
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {number_of(page)}. ") and text.partition("\n")[0].endswith("?")
    assert text.index("**Question.**") < text.index("**Short answer.**") < text.index("## Evidence")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    parts = re.split(r"^## .*$", text, flags=re.MULTILINE)
    assert all(len(part.split()) >= 5 for part in parts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_commands_that_exist(page, documents):
    commands = [(text, is_whole) for text, is_whole in documents.commands(page)]
    whole = [text for text, is_whole in commands if is_whole]
    assert whole, "no command"
    for text, is_whole in commands:
        if is_whole or text.split(" ")[0] in ("dspark", "make", "python", "pip"):
            assert is_awaited(text) or documents.check_command(text, is_whole), text


def names_of_tests():
    """Of all tests."""
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    return " ".join(name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE))


def check_arguments(command, names):
    """Files of tests that a command names are there, and so are tests of its words, and options of its script."""
    words = shlex.split(command)
    if words[:2] == ["make", "test"]:
        arguments = shlex.split(words[2].removeprefix("ARGS="))
        if arguments[0] == "-k":
            assert [word for word in arguments[1].split(" or ") if word not in names] == []
        else:
            assert [path for path in arguments if not (ROOT / path).is_file()] == []
    if words[0] == "python":
        script = (ROOT / words[1]).read_text(encoding="utf-8")
        assert [word for word in words if word.startswith("--") and f'"{word}"' not in script] == []


def test_tests_and_options_that_pages_name_are_there(documents):
    names = names_of_tests()
    for page in PAGES:
        for text, is_whole in documents.commands(page):
            if is_whole:
                check_arguments(text, names)


@pytest.mark.parametrize(
    "command",
    [
        "make test ARGS=tests/unit/test_nothing.py",
        "make test ARGS=\"-k 'v9_tiez'\"",
        "python scripts/rows_study.py --row",
    ],
)
def test_a_wrong_argument_is_found(command):
    with pytest.raises(AssertionError):
        check_arguments(command, names_of_tests())


@pytest.mark.parametrize("page", [INDEX, *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page, documents):
    assert [link for link in documents.links(page) if documents.is_broken(page, link)] == []


def rows_of_the_index():
    """Number, and the rest of its line."""
    return re.findall(r"^\| (\d+) \| (.*) \|$", INDEX.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_index_has_every_question_and_every_page():
    rows = rows_of_the_index()
    assert [int(number) for number, _ in rows] == list(NUMBERS)
    for number, line in rows:
        linked = [FOLDER / name for name in re.findall(r"\]\(([\w-]+\.md)\)", line.partition(" | ")[0])]
        assert linked == [page for page in PAGES if number_of(page) == int(number)], number
        assert line.partition(" | ")[2].strip(), f"question {number} has neither answer nor reason"


def open_points(text):
    """The runs that an answer still needs; whether it says that it is not answered yet."""
    return set(NEEDED.findall(text)), re.search(r"not\s+answered\s+yet", text, re.IGNORECASE) is not None


def test_pages_and_index_agree_on_what_is_not_answered_yet():
    lines = dict(rows_of_the_index())
    found = {number_of(page): open_points(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {number: open_points(lines[str(number)]) for number in found} == found
    assert all(bool(runs) == is_open for runs, is_open in found.values()), "what it takes, and that it is open"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_has_a_gap_for_numbers(page):
    text = page.read_text(encoding="utf-8")
    comments = {found.partition(":")[0] for found in re.findall(r"<!-- (.*?) -->", text)}
    assert comments <= {"table", "end of table"}
    without_tables = re.sub(r"<!-- .*? -->\n?", "", text)
    assert not re.search(r":\n+(#|\Z)", without_tables), "a colon with nothing behind it"


def test_tables_are_those_of_the_reports(tables):
    marked = {}
    for page in tables.documents():
        text = page.read_text(encoding="utf-8")
        assert text.count("<!-- table: ") == text.count("<!-- end of table -->") == len(tables.MARKED.findall(text))
        assert tables.filled(text) == text, f"{page.name}: run `python scripts/question_pages.py`"
        marked |= {found[1]: found[0] for found in tables.MARKED.findall(text)}
    assert marked.keys() <= tables.TABLES.keys()
    assert tables.TABLES.keys() <= marked.keys(), "a table that no page shows"


def test_a_changed_number_is_found(tables):
    (page,) = FOLDER.glob("03-*.md")
    text = page.read_text(encoding="utf-8")
    changed = text.replace("| gsm8k | 20 | 2.66", "| gsm8k | 20 | 2.67")
    assert changed != text and tables.filled(changed) == text


def test_policies_know_no_model():
    """What the page about other engines says of imports."""
    source = Path(dspark_hf.__file__).parent / "decoding"
    found = set()
    for path in [*(source / "policies").glob("*.py"), source / "schedule.py", source / "types.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add("." * node.level + (node.module or ""))
    outside = {name for name in found if not name.startswith(".") and name.split(".")[0] not in sys.stdlib_module_names}
    assert {name.split(".")[0] for name in outside} == {"torch", "numpy"}
    package = {name.lstrip(".").split(".")[0] for name in found if name.startswith(".")}
    allowed = {path.stem for path in (source / "policies").glob("*.py")} | {"policies", "types", "errors"}
    assert package <= allowed
