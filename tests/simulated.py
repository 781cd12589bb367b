"""Small simulated servers whose answers are known by formula."""

import numpy as np
import torch

from dspark_hf.evaluation.simulation.bank import RoundBank
from dspark_hf.evaluation.simulation.machine import FormulaTimes, Machine
from dspark_hf.evaluation.simulation.setting import Setting
from dspark_hf.evaluation.simulation.systems import System
from dspark_hf.evaluation.simulation.workload import LengthLaw
from dspark_hf.fitting.throughput import MeasuredCosts, ProfileGrid

GAMMA = 3
STEP_S, TOKENS_PER_BASE, FIRST_SLOT_S, SLOT_S = 0.01, 40.0, 0.002, 0.001


def machine(*, block_size=GAMMA, prefill_token_s=0.0, max_rows=64, **changes):
    """A step takes `STEP_S (1 + B / TOKENS_PER_BASE)`."""
    fields = {"first_slot_s": FIRST_SLOT_S, "slot_s": SLOT_S, "max_rows": max_rows} | changes
    times = FormulaTimes(STEP_S, TOKENS_PER_BASE, block_size, **fields)
    return Machine("formula", "of a test", times, prefill_token_s)


def step_s(num_tokens):
    """The same formula, written out again."""
    return STEP_S * (1 + num_tokens / TOKENS_PER_BASE)


def draft_s(num_slots):
    """Seconds of drafting so many slots."""
    return FIRST_SLOT_S + (num_slots - 1) * SLOT_S


class TableTimes:
    """Step seconds from a table by B, whatever the rows; drafting is free."""

    def __init__(self, sps, block_size, max_rows):
        self._step_s = [1.0] + [1 / value for value in sps]
        self.grid = ProfileGrid((1, max_rows), tuple(range(1, block_size + 2)), (1,))
        self._block_size = block_size

    def step_costs(self, num_rows, context):
        most = num_rows * (1 + self._block_size)
        known = self._step_s + [self._step_s[-1]] * (most + 1 - len(self._step_s))
        return MeasuredCosts(torch.tensor(known[: most + 1], dtype=torch.float64), 0.0)

    def overhead_s(self, num_rows):
        return 0.0


def bank(accepted, *, conditional=0.8, layout="rounds", domains=None, prompt_tokens=16):
    """Texts whose rounds accept the given numbers of drafts, with one estimate for every slot."""
    texts = [np.array(one, dtype=np.int64) for one in accepted]
    total = sum(map(len, texts))
    tokens = [len(one) if layout == "positions" else len(one) + int(one.sum()) for one in texts]
    return RoundBank(
        conditional=np.full((total, GAMMA), conditional, dtype=np.float32),
        num_accepted=np.concatenate(texts),
        starts=np.cumsum([0, *map(len, texts)], dtype=np.int64),
        domains=tuple(domains or ["all"] * len(texts)),
        prompt_tokens=np.full(len(texts), prompt_tokens, dtype=np.int64),
        answer_tokens=np.array(tokens, dtype=np.int64),
        layout=layout,
    )


def random_bank(*, num_texts=6, num_rounds=12, seed=0, layout="rounds"):
    """Texts of random acceptance and random, calibrated estimates."""
    rng = np.random.default_rng(seed)
    conditional = rng.beta(4, 2, size=(num_texts * num_rounds, GAMMA)).astype(np.float32)
    accepted = (rng.random(conditional.shape) < conditional).cumprod(axis=1).sum(axis=1)
    whole = bank(
        accepted.reshape(num_texts, num_rounds).tolist(), layout=layout, domains=["easy", "hard"] * (num_texts // 2)
    )
    return RoundBank(
        **{name: getattr(whole, name) for name in RoundBank.__dataclass_fields__} | {"conditional": conditional}
    )


def setting(drafts, *, lengths="traces", max_rows=8, on=None):
    """Traffic on a machine."""
    return Setting(on or machine(), drafts, max_rows, lengths=LengthLaw.parse(lengths))


def system(name, **changes):
    """A system by name."""
    return System.named(name, **changes)
