"""Texts from outside stay texts: in Markdown, in tables, in code, in YAML, in Python."""

import ast

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dspark_hf.evaluation.scrub import scrub_any
from dspark_hf.hub.card_facts import _literal
from dspark_hf.hub.markdown import MAX_NAME_LENGTH, Safe, block, escape, one_line, prose, table
from dspark_hf.hub.metadata import metadata_block
from dspark_hf.hub.report_views import Metric

QUICK = settings(deadline=None, max_examples=60)  # a busy machine is no failure
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
ATTACKS = [
    "a `code` b",
    "*bold* _it_ ~~gone~~ **x**",
    "a | b | c",
    "line\n# heading\n\n---\nnew: yaml",
    "<script>alert(1)</script><!-- x -->",
    "[click](https://example.org) ![x](y.png) <https://example.org>",
    "{{ config }} {% raw %}",
    "- item",
    "1. item",
    "= heading",
    "+ item",
    "> quote",
    "\\`x\\`",
    "&lt;b&gt; &amp;",
    "    indented",
    "```\nfence\n```",
    "\u202edesrever\u0000\x1b[0m",
    "$x$",
]
texts = st.one_of(
    st.sampled_from(ATTACKS), st.text(max_size=60), st.text(alphabet="`|*_[]()<>!#\\~-&\n a1.", max_size=40)
)


def plain_text(markdown):
    """The text of the one paragraph that a piece of Markdown is; fails on any other element."""
    paragraph, inline, end = MARKDOWN.parse(markdown)
    assert (paragraph.type, inline.type, end.type) == ("paragraph_open", "inline", "paragraph_close")
    assert {child.type for child in inline.children} <= {"text", "text_special"}
    return "".join(child.content for child in inline.children)


@QUICK
@given(texts.filter(lambda text: one_line(text)))
def test_escaped_text_is_the_text_and_nothing_else(text):
    assert plain_text(escape(text)) == one_line(scrub_any(text))[:MAX_NAME_LENGTH]


@pytest.mark.parametrize("attack", ["*bold*", "<b>x</b>", "- item", "[a](b)", "`x`", "> a", "    a", "~~a~~"])
def test_the_check_of_escaped_text_can_fail(attack):
    with pytest.raises((AssertionError, ValueError)):
        plain_text(attack)


@QUICK
@given(st.lists(st.lists(texts, min_size=2, max_size=2), min_size=1, max_size=3))
def test_a_table_has_the_cells_it_was_given(rows):
    tokens = MARKDOWN.parse(table(["a", "b"], rows))
    cells = [tokens[i + 1] for i, token in enumerate(tokens) if token.type == "td_open"]
    assert [token.type for token in tokens].count("table_open") == 1
    assert tokens[-1].type == "table_close"
    shown = ["".join(child.content for child in cell.children) for cell in cells]
    assert shown == [one_line(scrub_any(cell))[:MAX_NAME_LENGTH] for row in rows for cell in row]


@QUICK
@given(texts)
def test_a_block_of_code_holds_its_text(text):
    lines = [part for part in text.splitlines() if part.isprintable()]
    tokens = MARKDOWN.parse(f"before\n\n{block(lines, 'bash')}\n\nafter")
    assert [token.type for token in tokens].count("fence") == 1
    (fence,) = [token for token in tokens if token.type == "fence"]
    assert fence.content == "\n".join(lines) + "\n" and fence.info == "bash"


def test_long_names_are_cut_and_sentences_are_not():
    assert escape("x" * 300) == "x" * (MAX_NAME_LENGTH - 3) + "..."
    assert prose("x" * 300) == "x" * 300


def test_what_is_safe_is_left_alone():
    assert escape(Safe("**x**")) == "**x**"


def test_addresses_do_not_become_links():
    for address in ("https://example.org", "www.example.org", "ann@example.org"):
        assert address not in escape(address)


@QUICK
@given(texts)
def test_names_in_python_are_literals(text):
    assert ast.literal_eval(_literal(text)) == one_line(scrub_any(text))


@QUICK
@given(texts)
def test_metadata_is_one_block_with_the_fields_we_set(text):
    metric = Metric(text, "accepted_length", text, 2.5, {"device": text})
    written = metadata_block(text, base_model="org/target", license_id="mit", datasets=["a/b"], metrics=[metric])
    first, body, last = written[:4], written[4:-4], written[-4:]
    assert (first, last) == ("---\n", "\n---") and "\n---" not in body
    read = yaml.safe_load(body)
    assert set(read) == {
        "library_name", "base_model", "license", "pipeline_tag", "tags", "datasets", "model-index",
    }  # fmt: skip
    (entry,) = read["model-index"]
    (result,) = entry["results"]
    assert result["dataset"]["name"] == one_line(scrub_any(text))
    assert result["metrics"][0]["value"] == 2.5
