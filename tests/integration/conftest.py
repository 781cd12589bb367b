"""The pair that most integration tests use; files with a pair of their own override it."""

import inspect

import pytest
from tiny import tiny_drafter, tiny_target

from dspark_hf import DSparkDraftModel


@pytest.fixture
def target():
    return tiny_target()


@pytest.fixture
def drafter(target):
    return tiny_drafter(target)


@pytest.fixture
def pushed(monkeypatch):
    """Folders stand for repositories of the Hub; what was pushed, by repository. (tests/hub has a server.)"""
    real, calls = DSparkDraftModel.push_to_hub, {}

    def push_to_hub(self, repo_id, **options):
        inspect.signature(real).bind(self, repo_id, **options)
        calls[repo_id] = options
        self.save_pretrained(repo_id)

    monkeypatch.setattr(DSparkDraftModel, "push_to_hub", push_to_hub)
    return calls
