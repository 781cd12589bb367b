"""The real client of this process, talking HTTP to a Hub in a thread of it.

huggingface_hub reads its endpoint and cache when it is imported, into one module; here that module's values are changed
for a test. Tests that need a process of their own set the variables instead (`hub_process.py`).
"""

import json
import time

import huggingface_hub
import pytest
import transformers
from card_reports import PNG, evaluation_report
from hub_server import RunningHub
from tiny import tiny_drafter, tiny_target

import dspark_hf.hub.faults
import dspark_hf.hub.publish
from dspark_hf.checkpoints.digest import checkpoint_facts


class _NoPause:
    """The time module, without its pauses between one try and the next."""

    sleep = staticmethod(lambda seconds: None)

    def __getattr__(self, name):
        return getattr(time, name)


@pytest.fixture(scope="session")
def _running_hub():
    with RunningHub() as hub:
        yield hub


@pytest.fixture
def hub(_running_hub, monkeypatch, tmp_path_factory):
    """An empty Hub; `hf_alice` is logged in and may write to `alice` and `acme`."""
    home = tmp_path_factory.mktemp("hf_home")
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, _running_hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", _running_hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    for module in (huggingface_hub.utils._http, huggingface_hub.file_download):
        monkeypatch.setattr(module, "time", _NoPause())
    for module in (dspark_hf.hub.publish, dspark_hf.hub.faults):
        monkeypatch.setattr(module, "time", _NoPause())
    huggingface_hub.utils.disable_progress_bars()
    _running_hub.reset()
    yield _running_hub
    huggingface_hub.utils.enable_progress_bars()


@pytest.fixture
def cache(hub):
    """Where huggingface_hub keeps what it fetched."""
    from pathlib import Path

    return Path(huggingface_hub.constants.HF_HUB_CACHE)


@pytest.fixture(scope="session")
def target():
    return tiny_target()


@pytest.fixture
def drafter(target):
    """With a calibration, which has to travel along."""
    drafter = tiny_drafter(target)
    drafter.config.calibration = {
        "greedy": {"temperatures": [1.0, 1.25, 0.5, 2.0], "platt": None, "settings": {}, "num_proposals": 9}
    }
    return drafter


@pytest.fixture
def folder(drafter, tmp_path):
    """The drafter's folder, as training and measuring leave it, with much that is nobody else's business."""
    place = tmp_path / "drafter"
    drafter.save_pretrained(place)
    contents = {
        "reports/evaluation.json": json.dumps(evaluation_report(checkpoint_facts(place).sha256)).encode(),
        "reports/evaluation.png": PNG,
        "checkpoints/checkpoint-1/optimizer.pt": b"state",
        "checkpoints/run.json": b"{}",
        "features/part.safetensors": b"features",
        ".cache/token": b"secret",
        ".env": b"HF_TOKEN=hf_alice",
        "training_args.bin": b"pickle",
        "optimizer.pt": b"state",
        "trainer_state.json": b"{}",
        "answers.jsonl": b"{}",
        "setup.py": b"print()",
    }
    for name, content in contents.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place
