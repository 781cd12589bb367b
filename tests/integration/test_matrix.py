"""Every way to call generate() on every kind of target: the same with a drafter as without, in float32.

`make test` runs each option on two of the named families, and two options on every other family; `make test-full`
runs everything.
"""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
from families import FAMILIES, NAMED_FAMILIES, OTHER_FAMILIES
from generate_options import OPTIONS, Setup, assert_same, oracle, results, untrained
from practices import PRACTICES

from dspark_hf import record_speculation

_COVERING_STEPS = (1, 4)  # option i runs on families 1 * i and 4 * i + 1
_SHORT_LIST = {"left padding", "repetition penalty"}


@functools.cache
def setup_of(family_name):
    return Setup(FAMILIES[family_name])


def cell(family, option, is_quick):
    name = f"{family}-{OPTIONS[option].run.__name__}"
    return pytest.param(family, option, id=name, marks=() if is_quick else pytest.mark.full)


def cells():
    for i, option in enumerate(OPTIONS):
        quick = {NAMED_FAMILIES[(i * step + step // 4) % len(NAMED_FAMILIES)] for step in _COVERING_STEPS}
        for family in NAMED_FAMILIES:
            yield cell(family, option, family in quick)
    for family in OTHER_FAMILIES:
        for option in OPTIONS:
            yield cell(family, option, option in _SHORT_LIST)


@pytest.mark.filterwarnings("ignore:.*eos_token_id.*:UserWarning")
@pytest.mark.parametrize(("family", "option"), list(cells()))
def test_option_on_family(family, option):
    chosen = OPTIONS[option]
    setup = setup_of(family)
    expected = results(setup, chosen.run, None)
    assert expected
    for drafter_of in (untrained, oracle):
        with record_speculation() as report:
            collected = results(setup, chosen.run, drafter_of)
        for i, (got, wanted) in enumerate(zip(collected, expected, strict=True)):
            assert_same(got, wanted, f"{drafter_of.__name__} {i}")
        if report.num_new_tokens == report.num_calls:  # every text ended with its first token, as plain ones do
            return
        assert report.num_verified > 0
    assert report.num_accepted > 0.1 * report.num_verified, "the oracle is mostly right"


@pytest.mark.parametrize("practice", PRACTICES, ids=lambda practice: practice.test)
def test_a_practice_on_the_page_has_its_test(practice):
    file, _, name = practice.test.partition("::")
    assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")


def test_the_page_says_what_the_tables_say():
    script = Path(__file__).parents[2] / "scripts" / "compatibility.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
