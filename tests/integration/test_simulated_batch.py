"""A simulated batch of recorded rounds against the real batch that they were recorded of, on SmolLM2-135M-Instruct."""

import pytest
import torch
from machines import Machine

from dspark_hf import zoo
from dspark_hf.decoding.calibrate import SlotCalibration
from dspark_hf.decoding.observers import observe_rounds
from dspark_hf.evaluation.simulation.bank import RoundBank
from dspark_hf.evaluation.simulation.estimates import RecordedEstimates
from dspark_hf.evaluation.simulation.machine import Machine as SimulatedMachine
from dspark_hf.evaluation.simulation.server import Server
from dspark_hf.evaluation.simulation.systems import System
from dspark_hf.evaluation.simulation.workload import ClosedLoop, Request
from dspark_hf.evaluation.traces import AcceptanceTraces, prompt_trace
from dspark_hf.prompts import encode_prompt, quickstart_prompts

pytestmark = pytest.mark.real_model

NUM_ROWS, NUM_NEW = 3, 33


class EachTextOnce:
    """Requests for text 0, 1, 2, ..."""

    def __init__(self, bank):
        self._bank = bank
        self._next = 0

    def next(self, issued_s):
        text, self._next = self._next, self._next + 1
        return Request(text, issued_s, text, int(self._bank.prompt_tokens[text]), NUM_NEW - 1)


class AllAtOnce(ClosedLoop):
    """Users who ask one time."""

    def finished(self, now_s):
        pass


@pytest.fixture(scope="module")
def pair():
    return zoo.load_target("smollm2-135m-instruct", dtype=torch.float32), zoo.load_drafter("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def batch():
    tokenizer = zoo.load_tokenizer("smollm2-135m-instruct")
    ids = [encode_prompt(tokenizer, prompt)[0] for prompt in quickstart_prompts()[:NUM_ROWS]]
    longest = max(map(len, ids))
    padded = torch.zeros(NUM_ROWS, longest, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for row, own in enumerate(ids):
        padded[row, longest - len(own) :], mask[row, longest - len(own) :] = own, 1
    return {"input_ids": padded, "attention_mask": mask}


@pytest.mark.parametrize("policy", ["full", "prefix", "block", "lagged"])
def test_a_simulated_batch_goes_as_the_real_one_went(pair, batch, policy, monkeypatch):
    target, drafter = pair
    times = Machine(lambda b: 1.0 + 0.05 * b, draft_s=0.1)
    monkeypatch.setattr("dspark_hf.decoding.scheduler.find_profile", lambda target, drafter: times)
    monkeypatch.setattr("dspark_hf.decoding.scheduler.residuals_of", lambda profile: None)
    # A call of generate() waits for its last row; a server does not.
    monkeypatch.setattr("dspark_hf.decoding.policies.block.BlockPolicy.weighs_rows", False)
    real = []
    with observe_rounds(real.append):
        target.generate(
            **batch,
            assistant_model=drafter,
            verification_policy=policy,
            do_sample=False,
            min_new_tokens=NUM_NEW,
            max_new_tokens=NUM_NEW,
        )
    bank = bank_of(real, drafter, batch)
    views = []
    machine = SimulatedMachine("of a test", "", times)
    planner = System.named(policy).planner(machine, bank.num_slots)
    server = Server(
        machine,
        planner,
        bank,
        RecordedEstimates(),
        EachTextOnce(bank),
        AllAtOnce(NUM_ROWS),
        max_rows=NUM_ROWS,
        on_round=views.append,
    )
    server.run(lambda one: len(one.served) == NUM_ROWS)
    num_compared = 0
    num_tokens = dict.fromkeys(range(NUM_ROWS), 1)
    for ended, view in zip(real, views, strict=False):
        if any(NUM_NEW - num_tokens[row] <= bank.num_slots for row in ended.rows):
            break  # generate() knows the end beforehand, and drafts nothing behind it
        assert view.ids.tolist() == list(ended.rows)
        assert view.lengths.tolist() == list(ended.num_verified)
        assert view.num_accepted.tolist() == list(ended.num_accepted)
        num_compared += 1
        for row, accepted in zip(ended.rows, ended.num_accepted, strict=True):
            num_tokens[row] += 1 + accepted
    assert num_compared >= 5
    verified = [tuple(ended.num_verified) for ended in real[:num_compared]]
    assert (set(verified) == {(bank.num_slots,) * NUM_ROWS}) == (policy == "full"), "the others cut"


def bank_of(rounds, drafter, batch):
    """The rounds of each row, as recorded."""
    calibration = SlotCalibration.of(drafter.config.calibration["greedy"])
    logits, accepted = ({row: [] for row in range(NUM_ROWS)} for _ in range(2))
    for ended in rounds:
        for place, row in enumerate(ended.rows):
            own = ended.confidence_logits[place].tolist()
            logits[row].append(own + [0.0] * (drafter.config.block_size - len(own)))  # near the end fewer are drafted
            accepted[row].append(ended.num_accepted[place])
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    prompts = [
        prompt_trace(
            f"quick/{row}",
            logits[row],
            accepted[row],
            layout="rounds",
            calibration=calibration,
            prompt_length=lengths[row],
        )
        for row in range(NUM_ROWS)
    ]
    return RoundBank.of(AcceptanceTraces(tuple(prompts), "greedy", calibration))
