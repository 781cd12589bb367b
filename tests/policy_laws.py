"""Exact joint law of several rows over several rounds under a verification policy, by enumeration.

Every draft of every row is enumerated, the policy (the real one, with what it remembers) says how much is verified,
and acceptance follows the rule that `test_accept.py` proves. What the rows commit must be independent draws from the
target: the product of the rows' target laws.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from laws import Laws, Prefix, random_laws

from dspark_hf.decoding.policies.facts import RoundFacts, StepCosts, VerificationPolicy
from dspark_hf.decoding.policies.gate import DraftGate
from dspark_hf.decoding.policies.history import RowHistory
from dspark_hf.decoding.policies.urgency import token_weights
from dspark_hf.decoding.schedule import schedule
from dspark_hf.decoding.types import Confidence

ConfidenceOf = Callable[[int, int, Prefix], float]  # row, round, drafts before the slot -> c


def facts_of(num_rows, num_slots, *, room=None, usable=None, is_live=None, costs=None, row_ids=None, weights=None):
    """Facts of a round in which, by default, everything can be verified."""
    full = [num_slots] * num_rows
    return RoundFacts(
        num_slots,
        tuple(range(num_rows)) if row_ids is None else row_ids,
        torch.tensor([True] * num_rows if is_live is None else is_live),
        torch.tensor(full if room is None else room),
        torch.tensor(full if usable is None else usable),
        costs,
        weights,
    )


def confidence_of(conditional):
    """Confidences from `[rows, slots]` numbers, in the dtype of the package."""
    values = torch.tensor(conditional, dtype=torch.float32)
    return Confidence(values, values.cumprod(dim=-1))


def lengths_of(policy, conditional, sps=None, **facts):
    """`ell` of a policy for `[rows, slots]` conditional confidences; `sps` by B from `rows` on."""
    num_rows, num_slots = len(conditional), len(conditional[0])
    costs = None if sps is None else StepCosts.of([1.0] * num_rows + [1.0 / value for value in sps])
    return schedule(policy, confidence_of(conditional), facts_of(num_rows, num_slots, costs=costs, **facts)).tolist()


def arbitrary_confidence(seed: int, choices: Sequence[float] = (0.0, 0.2, 0.5, 0.5, 0.8, 0.95, 1.0)) -> ConfidenceOf:
    """Numbers that depend on row, round and the drafts before the slot; ties and extremes among them."""
    return functools.cache(lambda *where: random.Random(repr((seed, where))).choice(choices))


@dataclass
class World:
    """Rows with laws of their own, and what the rounds cost.

    Attributes:
        rows: Draft and target laws of each row by prefix; behind the longest prefix the last token alone counts.
        confidence: `c` by row, round and drafts before the slot.
        usable: Slots that are not broken, by row and drafts; None: all.
        room: Most drafts of each row; None: all.
        shares_draws: Negative control: all rows draft with the same uniforms, and so the same tokens.
        reads_own_token: Negative control: the confidence of a slot sees the slot's own draft.
        num_to_go: Tokens that each row will get: then rows are weighed by what they have got so far; None: all alike.
        horizon: Tokens of each row whose law is told, by default the least that all rounds commit.
    """

    rows: list[tuple[Laws, Laws]]
    vocab: int
    num_slots: int
    num_rounds: int
    confidence: ConfidenceOf
    costs: StepCosts | None = None
    usable: Callable[[int, Prefix], int] | None = None
    room: list[int] | None = None
    shares_draws: bool = False
    reads_own_token: bool = False
    num_to_go: list[int] | None = None
    horizon: int = field(default=0)

    def __post_init__(self) -> None:
        self.horizon = self.horizon or self.num_rounds


def random_world(num_rows, num_slots, num_rounds, seed, *, vocab=2, costs=None, **more):
    """Random laws, confidences and, unless given, a jagged step time for each B."""
    depth = num_rounds
    rows = [
        (random_laws(vocab, depth, 100 * seed + r, sharpness=1.5), random_laws(vocab, depth, 100 * seed + r + 50))
        for r in range(num_rows)
    ]
    if costs is None:
        rng = random.Random(seed)
        steps = itertools.accumulate(rng.choice([0.0, 0.05, 0.4, 0.9]) for _ in range(num_rows * (1 + num_slots) + 1))
        costs = StepCosts.of([1.0 + s for s in steps], draft_s=rng.choice([0.0, 0.3]))
    confidence = more.pop("confidence", arbitrary_confidence(seed))
    return World(rows, vocab, num_slots, num_rounds, confidence, costs, **more)


def total_variation_of(world: World, new_policy: Callable[[], VerificationPolicy], gate: DraftGate | None = None):
    """Distance between the joint law of what the rows commit first and independent target laws."""
    got, want = joint_law(world, new_policy, gate), target_law(world)
    assert math.isclose(math.fsum(got.values()), 1.0, abs_tol=1e-12)
    return 0.5 * math.fsum(abs(got.get(key, 0.0) - want.get(key, 0.0)) for key in got.keys() | want.keys())


def joint_law(world: World, new_policy, gate=None) -> dict[tuple[Prefix, ...], float]:
    """Joint law of the rows' first `horizon` tokens."""
    enumeration = _Enumeration(world)
    start = _Player(new_policy(), gate, world)
    players, states = {start.key(): start}, {start.key(): enumeration.start()}
    for number in range(world.num_rounds):
        new_players, new_states = {}, defaultdict(float)
        for key, probs in states.items():
            for player, moved in enumeration.played(players[key], probs, number):
                new_key = player.key()
                new_players.setdefault(new_key, player)
                new_states[new_key] = new_states[new_key] + moved
        players, states = new_players, new_states
    return enumeration.law(sum(states.values()))


def target_law(world: World) -> dict[tuple[Prefix, ...], float]:
    """The law that `joint_law` must give."""
    rows = [_extended({(): 1.0}, target, world) for _, target in world.rows]
    return {tuple(texts): math.prod(row[t] for row, t in zip(rows, texts, strict=True)) for texts in _product(rows)}


def _product(rows):
    return itertools.product(*rows)


def _law(laws: Laws, prefix: Prefix):
    return laws[prefix] if prefix in laws else laws[prefix[-1:]]


def _extended(texts: dict[Prefix, float], target: Laws, world: World) -> dict[Prefix, float]:
    """The law of the first `horizon` tokens when the target continues texts that are shorter."""
    done: dict[Prefix, float] = defaultdict(float)
    stack = list(texts.items())
    while stack:
        text, prob = stack.pop()
        if len(text) >= world.horizon:
            done[text[: world.horizon]] += prob
        else:
            stack.extend(((*text, token), prob * float(p)) for token, p in enumerate(_law(target, text)))
    return done


class _Player:
    """Policy and gate with what they remember, and what the rows have got so far."""

    def __init__(self, policy, gate, world):
        self.policy, self.gate = copy.deepcopy(policy), copy.deepcopy(gate)
        self.history = RowHistory(world.num_slots)
        self.num_to_go = world.num_to_go

    def key(self):
        memory = (self.num_to_go, _digest(self.history)) if self.num_to_go else None
        return _digest(self.policy), _digest(self.gate), repr(memory)

    def weights(self, costs):
        if self.num_to_go is None:
            return None
        shares = self.history.accepted_share(range(len(self.num_to_go)))
        weights = token_weights(np.array(self.num_to_go, dtype=float), 1.0 + shares.sum(axis=1), costs)
        return torch.from_numpy(weights)

    def note(self, num_accepted, num_slots):
        if self.num_to_go is not None:
            self.history.observe(range(len(num_accepted)), num_accepted, num_slots)
            self.num_to_go = [togo - n - 1 for togo, n in zip(self.num_to_go, num_accepted, strict=True)]

    def wants_draft(self, num_rows, costs):
        return self.gate is None or self.gate.wants_draft(num_rows, costs)


def _digest(value):
    if isinstance(value, torch.Tensor | np.ndarray):
        return tuple(value.flatten().tolist())
    if isinstance(value, list | tuple) or type(value).__name__ == "deque":
        return tuple(_digest(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _digest(item)) for name, item in sorted(value.items()))
    if hasattr(value, "__dict__"):
        return tuple((name, _digest(item)) for name, item in sorted(vars(value).items()))
    return value


class _Enumeration:
    """States of a row are its text, cut behind `horizon` tokens to these and the last one."""

    def __init__(self, world: World):
        self.world = world
        vocab, horizon = world.vocab, world.horizon
        lengths = range(horizon + 2)
        self.states = [text for n in lengths for text in itertools.product(range(vocab), repeat=n)]
        self.index = {text: i for i, text in enumerate(self.states)}
        self.blocks = list(itertools.product(range(vocab), repeat=world.num_slots))
        self._moves = functools.cache(self._moves_of)

    def start(self):
        probs = np.zeros([len(self.states)] * len(self.world.rows))
        probs[(0,) * len(self.world.rows)] = 1.0
        return probs

    def law(self, probs):
        law = defaultdict(float)
        for place in np.argwhere(probs):
            rows = [
                _extended({self.states[i]: 1.0}, target, self.world)
                for i, (_, target) in zip(place, self.world.rows, strict=True)
            ]
            for texts in _product(rows):
                share = math.prod(row[t] for row, t in zip(rows, texts, strict=True))
                law[texts] += float(probs[tuple(place)]) * share
        return law

    def played(self, player, probs, number):
        """Each way that a round can go: who plays on, and the probabilities of the texts then."""
        world, num_rows = self.world, len(self.world.rows)
        player = copy.deepcopy(player)
        if not player.wants_draft(num_rows, world.costs):
            player.gate.observe_plain(num_rows, world.costs)
            yield player, self._moved(probs, [(None, 0, 0)] * num_rows)
            return
        decided = {}
        for drafts in itertools.product(self.blocks, repeat=num_rows):
            if world.shares_draws and len(set(drafts)) > 1:
                continue
            shown = drafts if world.reads_own_token else tuple(draft[:-1] for draft in drafts)
            usable = tuple(world.usable(r, d) for r, d in enumerate(drafts)) if world.usable else None
            if (shown, usable) not in decided:
                decided[shown, usable] = self._decision(player, drafts, number, usable)
            confidence, facts, lengths = decided[shown, usable]
            for num_accepted in itertools.product(*(range(n + 1) for n in lengths.tolist())):
                moved = self._moved(probs, list(zip(drafts, lengths.tolist(), num_accepted, strict=True)))
                if not moved.any():
                    continue
                after = copy.deepcopy(player)
                after.policy.observe(confidence, lengths, torch.tensor(num_accepted), facts)
                after.note(num_accepted, world.num_slots)
                if after.gate is not None:
                    after.gate.observe(list(num_accepted), lengths.tolist(), world.costs)
                yield after, moved

    def _decision(self, player, drafts, number, usable):
        world, num_rows = self.world, len(self.world.rows)
        ends = [k + world.reads_own_token for k in range(world.num_slots)]
        confidence = confidence_of(
            [[world.confidence(r, number, drafts[r][:k]) for k in ends] for r in range(num_rows)]
        )
        weights = player.weights(world.costs)
        facts = facts_of(num_rows, world.num_slots, room=world.room, usable=usable, costs=world.costs, weights=weights)
        return confidence, facts, schedule(player.policy, confidence, facts)

    def _moved(self, probs, rows):
        for r, (draft, length, num_accepted) in enumerate(rows):
            moves = self._moves(r, draft, length, num_accepted)
            probs = np.moveaxis(np.tensordot(probs, moves, axes=(r, 0)), -1, r)
        return probs

    def _moves_of(self, r, draft, length, num_accepted):
        """Probability of drafting `draft` and keeping `num_accepted` of `length`, by text before and text after."""
        draft_laws, target_laws = self.world.rows[r]
        moves = np.zeros((len(self.states), len(self.states)))
        for i, text in enumerate(self.states):
            prob = 1.0
            for k, token in enumerate(draft or ()):
                prefix = (*text, *draft[:k])
                draft_law, target_law = _law(draft_laws, prefix), _law(target_laws, prefix)
                if not self.world.shares_draws or r == 0:
                    prob *= float(draft_law[token])
                stands = min(1.0, float(target_law[token] / draft_law[token]))
                prob *= stands if k < num_accepted else 1.0 - stands if k == num_accepted < length else 1.0
            if prob == 0.0:
                continue
            kept = (*text, *(draft or ())[:num_accepted])
            law = _law(target_laws, kept)
            if num_accepted < length:
                law = (law - _law(draft_laws, kept)).clamp(min=0)
                law = law / law.sum()
            for token, p in enumerate(law.tolist()):
                moves[i, self._place((*kept, token))] += prob * p
        return moves

    def _place(self, text):
        horizon = self.world.horizon
        return self.index[text if len(text) <= horizon else (*text[:horizon], text[-1])]
