"""The table of planted faults fits the source: each text occurs once, and replacing it changes the program."""

import ast
import importlib.util
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
mutants = importlib.util.module_from_spec(spec)
sys.modules["mutants"] = mutants  # dataclasses look their module up
spec.loader.exec_module(mutants)

TABLE = mutants.read_mutants(mutants.TABLE.read_text())


def parts(source):
    """Functions, methods and other statements of a file, as `(first line, last line)` from 0."""
    for node in ast.parse(source).body:
        for part in node.body if isinstance(node, ast.ClassDef) else [node]:
            yield part.lineno - 1, part.end_lineno


def dumped(part):
    return ast.dump(ast.parse(textwrap.dedent(part)))


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in TABLE}))
def test_each_fault_occurs_once_and_changes_the_program(file):
    source = (ROOT / mutants.DECODING / file).read_text()
    lines = source.splitlines(keepends=True)
    texts = ["".join(lines[first:last]) for first, last in parts(source)]
    for mutant in TABLE:
        if mutant.file == file:
            mutant.applied_to(source)  # raises where the text is not there once
            (part,) = [text for text in texts if mutant.old.strip() in text]  # parsing the whole file takes longer
            changed = mutant.applied_to(part.rstrip("\n") + "\n\n")
            assert dumped(changed) != dumped(part), mutant.name


def test_names_are_unique_and_every_file_has_tests():
    assert max(Counter(mutant.name for mutant in TABLE).values()) == 1
    assert {mutant.file for mutant in TABLE} == set(mutants.TESTS)
    tests = {test for group in mutants.TESTS.values() for test in group}
    assert all((ROOT / "tests" / test).is_file() for test in tests)
    assert len(TABLE) >= 60


def test_a_text_that_is_gone_or_ambiguous_is_named():
    mutant = mutants.Mutant("accept.py", "planted", "nothing", "a", "b")
    for count in (0, 2):
        with pytest.raises(ValueError, match=f"mutant planted: .* occurs {count} times in accept.py"):
            mutant.applied_to("a" * count)


def test_the_table_is_read_line_by_line():
    got = mutants.read_mutants("== f.py\n: one: breaks: all\n- a\n-     b\n+ c\n\n: two: more\n- d\n+ e")
    assert [(m.file, m.name, m.breaks, m.old, m.new) for m in got] == [
        ("f.py", "one", "breaks: all", "a\n    b", "c"),
        ("f.py", "two", "more", "d", "e"),
    ]
