"""What README and docs/ show is true: Python blocks run, commands exist, links lead somewhere."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import typer.main
from markdown_it import MarkdownIt
from near_pair import write_pair

import dspark_cli
import dspark_hf
from dspark_hf import zoo
from dspark_hf.evaluation import calibration_quality
from dspark_hf.fitting import sts

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [*sorted(set(ROOT.glob("*.md")) - set(PAGES)), *sorted((ROOT / "model_cards").glob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

# What a block must have otherwise to be run here; all else is run as it stands, on a tiny pair under the real name.
CHANGES = {
    "generate.md": {"path/or/hub-id-of-the-model": "target"},
    "calibrate.md": {'modes=("greedy",),': 'modes=("greedy",), max_new_tokens=24,'},
    "train.md": {
        'output=Path("my-drafter"))': 'output=Path("trained"), max_steps=2)',
        "max_steps=1000": "max_steps=2",
    },
}


def markdown_tokens(page):
    """Blocks and what stands inside of lines, in the page's order."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        yield token
        yield from token.children or ()


def fences(page, *kinds):
    """First line and text of the page's fenced blocks of these kinds."""
    return [(t.map[0], t.content) for t in markdown_tokens(page) if t.type == "fence" and t.info.strip() in kinds]


def name_of(page):
    return page.relative_to(ROOT).as_posix()


# -- Python blocks ------------------------------------------------------------------------------------------------


def run_blocks(page, namespace, changes):
    whole = page.read_text(encoding="utf-8")
    assert all(text in whole for text in changes), "a change that no block needs"
    for line, code in fences(page, "python"):
        for text, other in changes.items():
            code = code.replace(text, other)
        exec(compile("\n" * (line + 1) + code, str(page), "exec"), namespace)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    write_pair(root)
    return root


@pytest.fixture
def tiny_world(pair, tmp_path, monkeypatch):
    """A working folder with all that blocks name, and a tiny pair for the real one."""
    shutil.copytree(pair, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSPARK_HF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(zoo, "resolve", lambda name, **_: "target" if name == "smollm2-135m-instruct" else name)
    monkeypatch.setattr(
        zoo, "load_drafter", lambda name, dtype="bfloat16": dspark_hf.DSparkDraftModel.from_pretrained("my-drafter")
    )
    monkeypatch.setattr(sts, "MIN_PROPOSALS", 10)
    monkeypatch.setattr(sts, "MIN_OUTCOMES", 1)
    monkeypatch.setattr(calibration_quality, "NUM_RESAMPLES", 50)


def example_names():
    """What examples in docstrings take for granted."""
    target = zoo.load_target("smollm2-135m-instruct")
    names = {name: getattr(dspark_hf, name) for name in dspark_hf.__all__}
    inputs = zoo.load_tokenizer("smollm2-135m-instruct")("w3 w4", return_tensors="pt")
    drafter = zoo.load_drafter("smollm2-135m-instruct")
    return names | {"model": target, "target": target, "drafter": drafter, "inputs": inputs}


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if fences(page, "python")], ids=name_of)
def test_python_blocks_run(page, tiny_world, pushed):
    torch.manual_seed(0)
    namespace = example_names() if page.name == "api.md" else {}
    run_blocks(page, namespace, CHANGES.get(page.name, {}))


@pytest.mark.real_model
def test_python_blocks_of_the_readme_run(capsys):
    run_blocks(ROOT / "README.md", {}, {})
    assert "12 apples" in capsys.readouterr().out


def test_other_blocks_are_commands():
    kinds = {token.info for page in PAGES for token in markdown_tokens(page) if token.type == "fence"}
    assert kinds <= {"python", ""}


# -- commands -----------------------------------------------------------------------------------------------------


def commands(page):
    """Command lines of the page, and whether each is whole (a line of a block) or may leave options out."""
    for _, text in fences(page, ""):
        lines = text.replace("\\\n", " ").splitlines()
        yield from ((line, True) for line in lines if line.strip())
    yield from ((token.content, False) for token in markdown_tokens(page) if token.type == "code_inline")


def check_dspark(words, is_whole):
    command = typer.main.get_command(dspark_cli.app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    is_unknown = hasattr(command, "commands") and words and not words[0].startswith("-")
    assert not is_unknown, f"dspark has no command {words[0]}"
    known = {"--help"}.union(*(parameter.opts for parameter in command.params))
    assert {word for word in words if word.startswith("--")} <= known
    if is_whole:
        command.make_context("dspark", list(words))


def check_command(text, is_whole):
    program, *words = shlex.split(text, comments=True)
    if program == "dspark":
        check_dspark(words, is_whole)
    elif program == "make":
        assert all(re.search(rf"^{word}:", MAKEFILE, re.MULTILINE) for word in words if "=" not in word)
    elif program == "python" and words and words[0].endswith(".py"):
        assert (ROOT / words[0]).is_file()
    elif program == "pip":
        extras = re.findall(r"\.\[([\w,]+)\]", text)
        assert {name for found in extras for name in found.split(",")} <= set(EXTRAS)
    else:
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page):
    for text, is_whole in commands(page):
        if is_whole or text.split(" ")[0] in ("dspark", "make", "python", "pip"):
            assert check_command(text, is_whole), f"{text!r} is no command that this test knows"


@pytest.mark.parametrize(
    "text", ["dspark trian --help", "dspark eval --drafters A", "make tests", "python x.py", 'pip install ".[all]"']
)
def test_a_wrong_command_is_found(text):
    with pytest.raises(AssertionError):
        check_command(text, is_whole=False)


# -- links --------------------------------------------------------------------------------------------------------


def anchors(page):
    """Fragments of the page's headings, as GitHub makes them."""
    found, is_heading = set(), False
    for token in markdown_tokens(page):
        if token.type == "inline" and is_heading:
            text = "".join(part.content for part in token.children)
            found.add(re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-"))
        is_heading = token.type == "heading_open"
    return found


def links(page):
    for token in markdown_tokens(page):
        if token.type in ("link_open", "image"):
            yield token.attrGet("href") or token.attrGet("src")
        elif token.type in ("html_block", "html_inline"):
            yield from re.findall(r'(?:src|href)="([^"]+)"', token.content)


def is_broken(page, link):
    if link.startswith(("http://", "https://")):
        return False
    path, _, fragment = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return True
    return bool(fragment) and fragment not in anchors(target)


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_links_lead_somewhere(page):
    assert [link for link in links(page) if is_broken(page, link)] == []


def test_a_broken_link_is_found():
    page = ROOT / "README.md"
    assert is_broken(page, "docs/nothing.md") and is_broken(page, "docs/train.md#nothing")
    assert not is_broken(page, "docs/train.md#in-code")


def test_every_guide_and_example_is_reached_from_the_readme():
    linked, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        paths = {(page.parent / link.partition("#")[0]).resolve() for link in links(page) if ":" not in link}
        waiting += [path for path in paths - linked if path.suffix == ".md"]
        linked |= paths
    assert set(PAGES[1:]) <= linked
    assert set((ROOT / "examples").glob("*.py")) <= linked


# -- pictures and the API page ------------------------------------------------------------------------------------


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "img").glob("*.svg")), ids=name_of)
def test_a_drawing_stands_alone_in_both_themes(picture):
    text = picture.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"<script|<image|href=|@import|url\(", text)
    *_, width, _ = map(float, root.attrib["viewBox"].split())
    assert width <= 480, "at 400 pixels its letters would be too small"
    sizes = [int(size) for size in re.findall(r"(?:font|font-size): (\d+)px", text)]
    assert min(sizes) >= 14


def test_the_api_page_says_what_the_docstrings_say():
    script = ROOT / "scripts" / "api_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_api_page_has_every_public_name():
    found = anchors(ROOT / "docs" / "api.md")
    missing = [name for name in dspark_hf.__all__ if not any(anchor.startswith(name.lower()) for anchor in found)]
    assert missing == ["__version__"]
