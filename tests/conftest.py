"""One process, one thread: tiny models run faster so, and neighbours on the machine disturb less."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

import dspark_hf

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _route_is_installed():
    """A test that takes the route out must not leave the next one without it."""
    yield
    dspark_hf.install()
