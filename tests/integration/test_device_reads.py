"""A round of a batch makes the host wait for the device once, on a CPU that plays the device."""

import device_reads
import pytest
import torch
from device_reads import READ_ONCE, DeviceTensor, counting, put_on_device
from tiny import random_ids, tiny_drafter, tiny_target
from transformers.generation.logits_process import LogitsProcessor

from dspark_hf.decoding.batch import BatchRun


def notes_of_rounds(monkeypatch, **options):
    """What was noted in each round of a batch of three ragged rows; and the text."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    for model in (target, drafter):
        put_on_device(model)
    ids = random_ids(27).view(3, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    rounds, run_round = [], BatchRun._round

    def counted(self):
        with counting(monkeypatch) as noted:
            run_round(self)
        rounds.append(list(noted))

    monkeypatch.setattr(BatchRun, "_round", counted)
    output = target.generate(
        ids.as_subclass(DeviceTensor),
        attention_mask=mask.as_subclass(DeviceTensor),
        max_new_tokens=20,
        pad_token_id=0,
        assistant_model=drafter,
        **options,
    )
    assert isinstance(output, DeviceTensor), "everything was computed from what stands for the device"
    assert len(rounds) > 3
    return rounds, output, {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 20}


@pytest.mark.parametrize("options", READ_ONCE, ids=str)
def test_a_round_is_read_once_and_sent_nothing(monkeypatch, options):
    monkeypatch.setattr("dspark_hf.decoding.batch.COMPACT_SHARE", 2.0)
    rounds, output, inputs = notes_of_rounds(monkeypatch, **options)
    for noted in rounds:
        assert [what.split(" at ")[0] for what in noted] == ["read by cpu"], noted
    if not options["do_sample"]:
        plain = {"verification_layout": None} | options | {"do_sample": False}
        del plain["verification_layout"]
        assert torch.equal(output.as_subclass(torch.Tensor), tiny_target().generate(**inputs, **plain))


def test_policies_that_shorten_read_the_lengths_too(monkeypatch):
    rounds, *_ = notes_of_rounds(
        monkeypatch, do_sample=False, verification_policy="threshold", assistant_confidence_threshold=0.3
    )
    kinds = [sorted(what.split(" at ")[0] for what in noted) for noted in rounds]
    assert kinds[0] == ["read by cpu", "read by tolist"]
    assert all(kind in (kinds[0], ["read by cpu"]) for kind in kinds), "the last round may have no draft"


class Reads(LogitsProcessor):
    """Control: a processor that looks at a value, and picks by values."""

    def __call__(self, input_ids, scores):
        if bool(scores[0, 0] > 0):
            scores = scores + 0
        scores[scores < -1e9].sum()
        return scores + torch.tensor([0.0], device=scores.device)


def test_control_reads_shapes_and_copies_are_seen(monkeypatch):
    rounds, *_ = notes_of_rounds(monkeypatch, do_sample=False, logits_processor=[Reads()])
    kinds = {what.split(" at ")[0] for what in rounds[0]}
    assert {"read by cpu", "read by __bool__", "shape by values of __getitem__", "sent by torch.tensor"} <= kinds
    assert device_reads.NOTED
