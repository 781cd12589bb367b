"""The pair that most integration tests use; files with a pair of their own override it."""

import pytest
from tiny import tiny_drafter, tiny_target


@pytest.fixture
def target():
    return tiny_target()


@pytest.fixture
def drafter(target):
    return tiny_drafter(target)
