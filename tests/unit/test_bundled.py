"""What is shipped: a drafter that loads and is small enough."""

import pytest
import torch

from dspark_hf import DSparkConfig, zoo

ALIAS = "smollm2-135m-instruct"
MAX_BYTES = 48_000_000


def test_the_shipped_drafter_is_small_and_whole():
    folder = zoo.bundled_drafter(ALIAS)
    assert folder is not None
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "notes.md", "reports"}
    assert sum(path.stat().st_size for path in folder.rglob("*")) <= MAX_BYTES
    drafter = zoo.load_drafter(f"HuggingFaceTB/{ALIAS}", dtype=torch.float32)
    assert not drafter.training and drafter.dtype == torch.float32
    assert all(bool(weight.isfinite().all()) for weight in drafter.parameters())
    assert len(drafter.draft_token_ids) == drafter.config.draft_vocab_size
    assert 2 in drafter.draft_token_ids.tolist()  # the target's stop token


def test_its_config_says_nothing_unknown(caplog):
    DSparkConfig.from_pretrained(zoo.bundled_drafter(ALIAS))
    assert caplog.text == ""


def test_a_target_without_one_is_said():
    assert zoo.bundled_drafter("gpt2") is None
    with pytest.raises(zoo.ZooError, match=f"no drafter is shipped for 'gpt2' .shipped: {ALIAS}"):
        zoo.load_drafter("gpt2")
