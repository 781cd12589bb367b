"""`dspark bench` without models: settings, inputs, kept measurements, pooling, Eq. 1, advice, pages."""

import io
import json
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from throughput_machines import BLOCK_SIZE, StaircaseMachine, profile_of
from torch import nn

from dspark_hf.decoding.observers import EndedRounds
from dspark_hf.evaluation import ComparisonError
from dspark_hf.evaluation.bench import advice, pooling
from dspark_hf.evaluation.bench.advice import GammaCosts, advise_depth, advise_gamma, even_acceptance
from dspark_hf.evaluation.bench.cells import CellStore
from dspark_hf.evaluation.bench.inputs import MOST_SWEEP_PROMPTS, Batch, at_context, batches_of
from dspark_hf.evaluation.bench.latency import RoundCosts, slowdown_of, split_drafter, split_plain
from dspark_hf.evaluation.bench.memory import measure_memory
from dspark_hf.evaluation.bench.pooling import Place, pool
from dspark_hf.evaluation.bench.predictions import splits_of
from dspark_hf.evaluation.bench.profiles import Profiled
from dspark_hf.evaluation.bench.repetitions import ratio_over_repetitions
from dspark_hf.evaluation.bench.report import BenchReport, CellReport
from dspark_hf.evaluation.bench.request import BenchRequest, parse_drafters
from dspark_hf.evaluation.bench.runs import Watch
from dspark_hf.evaluation.bench.settings import BenchSettings, Cell, split_policy
from dspark_hf.evaluation.bench.show import print_report, to_markdown
from dspark_hf.evaluation.bench.way_run import Round, Speculation, Stages, WayRun
from dspark_hf.evaluation.bench.ways import BASELINE, LeftOut, WayFacts
from dspark_hf.evaluation.intervals import bootstrap
from dspark_hf.evaluation.provenance import collect_provenance, command_line
from dspark_hf.prompts import Prompt

MAIN = Cell("main", 1, None, 64, stops_at_end=True, num_repeats=1)
SWEEP = Cell("batch", 4, None, 32, stops_at_end=False, num_repeats=6)
DRAFTER = WayFacts("D, full", "drafter", drafter="D", policy="full", num_draft_tokens=BLOCK_SIZE, num_layers=2)
LOOKUP = WayFacts("prompt lookup", "prompt lookup", num_draft_tokens=10)
PLAIN = WayFacts(BASELINE, "plain")


# --- settings and inputs


def test_settings_name_what_they_refuse():
    for changes, says in [
        ({"policies": ()}, "one or more"),
        ({"policies": ("full", "full")}, "each named once"),
        ({"policies": ("best",)}, "policy must be one of"),
        ({"policies": ("full:x",)}, "a number of drafts"),
        ({"policies": ("full:0",)}, "num_assistant_tokens must be >= 1"),
        ({"batch_sizes": (0,)}, "batch_sizes must be whole numbers >= 1"),
        ({"sweep_new_tokens": 1}, "sweep_new_tokens must be >= 2"),
        ({"prompt_lookup_num_tokens": -1}, "leaves prompt lookup out"),
        ({"temperature": -1.0}, "temperature"),
    ]:
        with pytest.raises(ComparisonError, match=says):
            BenchSettings(**changes)
    assert [split_policy(p) for p in ("own", "own:2", "full", "full:3")] == [
        (None, None), (None, 2), ("full", None), ("full", 3)
    ]  # fmt: skip


def test_cells_are_the_main_table_and_the_points_of_both_sweeps():
    cells = list(BenchSettings(batch_sizes=(8, 2, 8), contexts=(64,), repeats=2).cells())
    assert [cell.name for cell in cells] == ["main", "batch 2", "batch 8", "context 64"]
    assert [cell.stops_at_end for cell in cells] == [True, False, False, False]
    assert len(list(BenchSettings(batch_sizes=(), contexts=()).cells())) == 1


def test_a_context_is_real_text_that_ends_with_the_prompt():
    encoded = {"a": (1, 2, 3), "b": (4, 5), "c": tuple(range(10, 20))}
    texts = at_context(encoded, 4)
    assert texts == {"a": (19, 1, 2, 3), "b": (2, 3, 4, 5), "c": (16, 17, 18, 19)}
    assert at_context({"a": (1, 2)}, 5) == {"a": (2, 1, 2, 1, 2)}


def test_batches_of_sweeps_are_full_and_take_prompts_again():
    encoded = {f"p{i}": (i,) for i in range(3)}
    sizes = [len(batch.tokens) for batch in batches_of(replace(SWEEP, num_rows=8), encoded)]
    assert sizes == [8]
    singles = batches_of(replace(SWEEP, num_rows=1), {f"p{i}": (i,) for i in range(9)})
    assert len(singles) == MOST_SWEEP_PROMPTS
    assert [batch.ids for batch in batches_of(MAIN, encoded)] == [("p0",), ("p1",), ("p2",)]


def test_drafters_have_names():
    assert parse_drafters(["A=x/y", "runs/B"]) == (("A", "x/y"), ("B", "runs/B"))
    assert parse_drafters([]) == (("drafter", None),)
    with pytest.raises(ComparisonError, match="NAME=FOLDER"):
        parse_drafters(["=x"])
    basics = {"target": "t", "prompts": (), "output": None, "settings": BenchSettings()}
    for drafters, swept, says in [
        ((("A", "x"), ("A", "y")), None, "two drafters are called 'A'"),
        ((("A,B", "x"),), None, "without commas"),
        ((("A", "x"),), ("B",), "swept must be among"),
    ]:
        with pytest.raises(ComparisonError, match=says):
            BenchRequest(**basics, drafters=drafters, swept=swept)


# --- measurements on disk


IDENTITY = {"settings": {"seed": 0, "contexts": [64]}, "target": "t"}


def test_a_store_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "m.jsonl"
    store = CellStore(path, IDENTITY, {"commit": "a"})
    store.add("one", {"x": (1, 2)})
    store.add("two", 2)
    with path.open("a") as file:
        file.write('{"key": "three", "va')  # an interruption in the middle of a line
    again = CellStore(path, IDENTITY, {"commit": "b"})
    assert dict(again.items()) == {"one": {"x": [1, 2]}, "two": 2} == dict(store.items())
    assert again.sessions == [{"commit": "a"}]  # nothing was added by the second
    again.add("three", 3)
    assert CellStore(path, IDENTITY, {}).sessions == [{"commit": "a"}, {"commit": "b"}]
    assert "three" in CellStore(path, IDENTITY, {})


def test_a_store_of_something_else_is_refused(tmp_path):
    path = tmp_path / "m.jsonl"
    CellStore(path, IDENTITY, {}).add("one", 1)
    before = path.read_bytes()
    changed = {"settings": {"seed": 1, "contexts": [64]}, "target": "t"}
    with pytest.raises(ComparisonError, match=r"settings\.seed was 0, now 1; name another --output"):
        CellStore(path, changed, {})
    assert path.read_bytes() == before
    path.write_text("no json\n")
    with pytest.raises(ComparisonError, match="cannot be read as measurements"):
        CellStore(path, IDENTITY, {})


# --- intervals


def test_few_repetitions_are_covered_as_stated_and_a_bootstrap_would_not():
    rng = np.random.default_rng(0)
    num_trials, num_covered, num_by_bootstrap = 400, 0, 0
    for _ in range(num_trials):
        over, under = 1.3 * rng.lognormal(0, 0.05, 4), rng.lognormal(0, 0.05, 4)
        found = ratio_over_repetitions(over, under)
        num_covered += found.low <= 1.3 <= found.high
        other = bootstrap({"a": over, "b": under}, lambda s: s["a"] / s["b"], seed=0, num_resamples=500)
        num_by_bootstrap += other.low <= 1.3 <= other.high
    least, most = stats.binom.ppf([0.001, 0.999], num_trials, 0.95)
    assert least <= num_covered <= most
    assert num_by_bootstrap < least  # why repetitions are not resampled


def test_one_repetition_has_no_interval():
    assert asdict(ratio_over_repetitions([3.0], [2.0])) == {"value": 1.5, "low": None, "high": None, "n": 1}


# --- a timing generator of known speed


def synthetic_runs(rng, *, ratio, num_prompts, num_repeats=1, num_rows=1, tau=2.0):
    """Runs of a plain way and a drafter `ratio` times as fast, on a machine whose speed drifts alike for both."""
    runs = {}
    for repeat in range(num_repeats):
        for batch in range(num_prompts):
            tokens = int(rng.integers(30, 65)) * num_rows
            drift = rng.lognormal(0, 0.3)
            plain_s = 0.04 * tokens * drift * rng.lognormal(0, 0.03)
            spec_s = 0.04 * tokens * drift * rng.lognormal(0, 0.03) / (ratio * rng.lognormal(0, 0.1))
            num_rounds = round((tokens - num_rows) / tau)
            runs[Place(batch, repeat)] = {
                BASELINE: WayRun(num_rows, tokens, plain_s, 0.1, tokens // num_rows, None, num_rows),
                "D, full": WayRun(
                    num_rows, tokens, spec_s, 0.1, num_rounds // num_rows + 1,
                    speculation(num_rounds=num_rounds), num_rows,
                ),
            }  # fmt: skip
    return runs


def pooled(ratio):
    """What tokens per second come to: the mean of a prompt's seconds is above the seconds at the mean speed."""
    return ratio * np.exp(-(0.1**2) / 2)


def speculation(*, num_rounds, rounds=(), num_accepted=None, stages=(0.0,) * 6):
    accepted = num_rounds if num_accepted is None else num_accepted
    return Speculation(
        num_rounds, BLOCK_SIZE * num_rounds, BLOCK_SIZE * num_rounds, accepted, (num_rounds,) * BLOCK_SIZE,
        (accepted,) + (0,) * (BLOCK_SIZE - 1), Stages(*stages), tuple(rounds),
    )  # fmt: skip


def test_known_speed_tau_and_forwards_are_recovered():
    rng = np.random.default_rng(1)
    runs = synthetic_runs(rng, ratio=1.6, num_prompts=40)
    found = pool(MAIN, DRAFTER, runs, [BASELINE], num_batches=40, seed=0)
    ratio = found.speed_over[BASELINE]
    assert ratio.low <= pooled(1.6) <= ratio.high and ratio.n == 40
    assert found.interval_over == "prompts"
    assert found.tau.value == pytest.approx(2.0, rel=0.02)
    assert found.target_forwards_per_token.value == pytest.approx(0.52, rel=0.03)
    assert found.num_identical == found.num_texts == 40
    assert found.conditional_acceptance == [1.0, 0.0, 0.0]
    plain = pool(MAIN, PLAIN, runs, [BASELINE], num_batches=40, seed=0)
    assert (plain.tau.value, plain.speed_over, plain.target_forwards_per_token.value) == (1.0, {}, 1.0)


def test_intervals_over_prompts_cover_as_often_as_stated(monkeypatch):
    monkeypatch.setattr(pooling, "bootstrap", partial(bootstrap, num_resamples=400))
    num_trials, num_covered = 100, 0
    for trial in range(num_trials):
        runs = synthetic_runs(np.random.default_rng(trial), ratio=1.4, num_prompts=40)
        ratio = pool(MAIN, DRAFTER, runs, [BASELINE], num_batches=40, seed=0).speed_over[BASELINE]
        num_covered += ratio.low <= pooled(1.4) <= ratio.high
    assert num_covered >= stats.binom.ppf(0.001, num_trials, 0.92)  # percentile intervals of 40 are a little narrow


def test_drift_would_hide_what_turns_show():
    """The same speeds without pairing: a ratio of sums over other machines' moments is far wider."""
    rng = np.random.default_rng(5)
    runs = synthetic_runs(rng, ratio=1.05, num_prompts=4, num_repeats=8)
    cell = replace(SWEEP, num_rows=1, num_repeats=8)
    paired = pool(cell, DRAFTER, runs, [BASELINE], num_batches=4, seed=0).speed_over[BASELINE]
    others = [runs[place]["D, full"] for place in sorted(runs)]
    moved = {
        place: {BASELINE: runs[place][BASELINE], "D, full": other}
        for place, other in zip(sorted(runs), [*others[4:], *others[:4]], strict=True)
    }
    unpaired = pool(cell, DRAFTER, moved, [BASELINE], num_batches=4, seed=0).speed_over[BASELINE]
    assert paired.n == unpaired.n == 8
    assert (unpaired.high - unpaired.low) > 2 * (paired.high - paired.low)


def test_a_repetition_counts_when_all_its_batches_ran():
    runs = synthetic_runs(np.random.default_rng(2), ratio=1.5, num_prompts=2, num_repeats=3)
    del runs[Place(1, 2)]
    assert pool(SWEEP, DRAFTER, runs, [BASELINE], num_batches=2, seed=0).speed_over[BASELINE].n == 2


def test_rounds_of_transformers_own_assistants_begin_with_the_prompt():
    runs = {Place(0, 0): {BASELINE: WayRun(1, 30, 1.0, 0.1, 30), "prompt lookup": WayRun(1, 30, 1.0, 0.1, 10)}}
    assert pool(MAIN, LOOKUP, runs, [BASELINE], num_batches=1, seed=0).tau.value == 3.0
    assert pool(MAIN, DRAFTER, runs, [], num_batches=1, seed=0) is None


def test_runs_survive_json():
    run = next(iter(synthetic_runs(np.random.default_rng(0), ratio=1.0, num_prompts=1).values()))["D, full"]
    run = replace(run, speculation=speculation(num_rounds=3, rounds=[Round(1, 2, 3, 40)]))
    assert WayRun.from_dict(json.loads(json.dumps(run.to_dict()))) == run


# --- Eq. 1


def constant_costs(draft_s=0.01, step_s=0.05, plain_s=0.04):
    return RoundCosts(
        lambda rows, tokens, context: step_s + 0.001 * tokens + 1e-5 * context,
        lambda rows, slots, context: draft_s * (slots > 0) + 0.002 * slots,
        lambda rows, context: plain_s + 1e-5 * context,
    )


def drafter_runs(rng, num_rows):
    runs = []
    for _ in range(5):
        rounds, num_rounds, accepted, live = [], 0, 0, num_rows
        for step in range(int(rng.integers(5, 12))):
            rounds.append(Round(live, 3, int(rng.integers(0, 4)), 100 + 2 * step))
            num_rounds += live
            accepted += int(rng.integers(0, 3 * live + 1))
            live = max(1, live - int(rng.integers(0, 2)))
        cut = min(2, accepted)
        tokens = num_rows + accepted + num_rounds - cut
        stages = tuple(rng.uniform(0.01, 0.4, 6))
        told = speculation(num_rounds=num_rounds, rounds=rounds, num_accepted=accepted, stages=stages)
        runs.append(WayRun(num_rows, tokens, sum(stages), 0.2, len(rounds) + 1, told, num_rows))
    return runs


@pytest.mark.parametrize("num_rows", [1, 4])
def test_parts_add_up_to_the_difference(num_rows):
    runs = drafter_runs(np.random.default_rng(num_rows), num_rows)
    split = split_drafter("D, full", "main", runs, constant_costs(), slowdown=1.3)
    assert sum(split.parts.values()) == pytest.approx(split.residual_s, rel=1e-9)
    assert split.predicted_s == pytest.approx((split.draft_s + split.step_s) / split.tau)
    tokens = sum(run.num_new_tokens for run in runs)
    assert split.measured_s == pytest.approx(num_rows * sum(run.latency_s for run in runs) / tokens)
    assert (split.parts["ended rows"] == 0) == (num_rows == 1)
    plain = [WayRun(num_rows, 30 * num_rows - 3 * (num_rows > 1), 1.7, 0.2, 30) for _ in range(3)]
    found = split_plain(BASELINE, "main", plain, [100, 120, 90], constant_costs())
    assert sum(found.parts.values()) == pytest.approx(found.residual_s, rel=1e-9)
    assert (found.parts["ended rows"] > 0) == (num_rows > 1)
    slowdown = slowdown_of(plain, [100, 120, 90], constant_costs())
    assert slowdown == pytest.approx(3 * 1.5 / (29 * (3 * 0.04 + 1e-5 * (310 + 3 * 14))))


def test_a_machine_that_keeps_its_profile_leaves_nothing_to_explain():
    """Rounds that take what the profile says, no overhead, nothing cut: what is left is the prompt and its token."""
    costs = constant_costs()
    rounds = [Round(1, 3, 3, 100 + 3 * step) for step in range(8)]
    draft_s = sum(costs.draft_s(1, 3, one.context) for one in rounds)
    step_s = sum(costs.step_s(1, 4, one.context) for one in rounds)
    told = speculation(num_rounds=8, rounds=rounds, num_accepted=16, stages=(0.3, draft_s, step_s, 0, 0, 0))
    run = WayRun(1, 25, 0.3 + draft_s + step_s, 0.3, 9, told, 1)
    split = split_drafter("D, full", "main", [run], costs)
    assert split.tau == 3.0
    assert split.predicted_s == pytest.approx((draft_s + step_s) / 24)
    assert split.parts["the prompt"] == pytest.approx(0.3 / 25)
    for name in ("draft", "target step", "accept and commit", "outside", "ended rows", "cut off"):
        assert split.parts[name] == pytest.approx(0, abs=1e-12), name
    halved = RoundCosts(
        lambda *where: costs.step_s(*where) / 2, lambda *where: costs.draft_s(*where) / 2, costs.plain_s
    )
    since = split_drafter("D, full", "main", [run], halved, slowdown=2.0)  # a profile of a machine twice as fast
    assert since.predicted_s == pytest.approx(split.predicted_s / 2)
    assert since.parts["the machine since"] == pytest.approx((draft_s + step_s) / 2 / 25)
    assert since.parts["draft"] == pytest.approx(0, abs=1e-12) == since.parts["target step"]
    slow = replace(told, stages=replace(told.stages, accept_s=0.08))  # control: 10 ms of overhead a round
    slowed = split_drafter("D, full", "main", [replace(run, speculation=slow, latency_s=run.latency_s + 0.08)], costs)
    assert slowed.parts["accept and commit"] == pytest.approx(0.08 / 25)


def test_rows_that_run_as_one_stream_cost_their_own_tokens():
    costs = constant_costs()
    found = {}
    for num_flat in (None, 8, 5):
        rounds = [Round(2, 3, 3, 100, num_flat)] * 4
        told = speculation(num_rounds=8, rounds=rounds, num_accepted=8, stages=(0.1,) * 6)
        run = WayRun(2, 18, 0.6, 0.2, 5, told, 2)
        found[num_flat] = split_drafter("D, full", "main", [run], costs)
        assert sum(found[num_flat].parts.values()) == pytest.approx(found[num_flat].residual_s, rel=1e-9)
    assert found[None].step_s == found[8].step_s  # two rows of four places
    assert found[8].step_s - found[5].step_s == pytest.approx(0.003)


def test_a_drafter_without_a_profile_borrows_the_steps_of_another():
    profiled = Profiled(profile_of(StaircaseMachine(), num_rows=(1, 2)), is_found=True)
    stages = (0.3, 0.02 * 8, 0.9, 0.1, 0.0, 0.0)
    told = speculation(num_rounds=8, rounds=[Round(1, 2, 2, 20)] * 8, num_accepted=8, stages=stages)
    batch = Batch(("p",), (tuple(range(20)),))
    runs = {Place(0, 0): {BASELINE: WayRun(1, 17, 1.0, 0.1, 17), "D, full": WayRun(1, 17, 1.46, 0.3, 9, told, 1)}}
    notes = []
    plain, split = splits_of(MAIN, [batch], [PLAIN, DRAFTER], runs, {"other": profiled}, notes, device_type="cpu")
    slowdown = 0.9 / (16 * (7e-4 + 1e-6 * 28))
    assert split.draft_s == pytest.approx(0.02 / slowdown) and split.parts["draft"] == pytest.approx(0, abs=1e-12)
    assert split.step_s == pytest.approx(profiled.profile.step_s(1, 3, 20))
    assert plain.parts["the machine since"] > 0 and not notes
    wide = replace(told, rounds=(Round(1, 7, 7, 20),) * 8)
    runs[Place(0, 0)]["D, full"] = WayRun(1, 17, 1.46, 0.3, 9, wide, 1)
    assert len(splits_of(MAIN, [batch], [PLAIN, DRAFTER], runs, {"other": profiled}, notes, device_type="cpu")) == 1
    assert "main, D, full: no prediction: a step of 8 tokens" in notes[0]
    assert splits_of(MAIN, [batch], [PLAIN, DRAFTER], runs, {}, notes, device_type="cpu") == []


def test_an_accelerators_stages_are_not_told_apart():
    profiled = Profiled(profile_of(StaircaseMachine(), num_rows=(1, 2)), is_found=True)
    told = speculation(num_rounds=8, rounds=[Round(1, 2, 2, 20)] * 8, num_accepted=8, stages=(0.3, 0.2, 0.9, 0.1, 0, 0))
    batch = Batch(("p",), (tuple(range(20)),))
    runs = {Place(0, 0): {BASELINE: WayRun(1, 17, 1.0, 0.1, 17), "D, full": WayRun(1, 17, 1.5, 0.3, 9, told, 1)}}
    for device_type, num_splits in [("cpu", 2), ("cuda", 0), ("mps", 0)]:
        notes = []
        found = splits_of(MAIN, [batch], [PLAIN, DRAFTER], runs, {"D": profiled}, notes, device_type=device_type)
        assert len(found) == num_splits
        assert [f"not set against the measurement on {device_type}" in note for note in notes] == [True] * (not found)


def test_costs_are_the_profiles():
    profile = profile_of(StaircaseMachine())
    costs = RoundCosts.of(profile)
    assert costs.step_s(2, 6, 20) == profile.step_s(2, 6, 20)
    assert costs.draft_s(2, BLOCK_SIZE, 20) == pytest.approx(profile.draft_s(2, 20))
    assert costs.draft_s(2, 1, 10) == pytest.approx(0.5 * profile.draft_s(2, 10))  # as the machine has it
    assert costs.draft_s(2, 0, 10) == 0.0
    assert costs.plain_s(2, 20) == profile.plain_step_s(2, 20)


# --- advice


def test_equal_acceptance_gives_tau_back():
    assert even_acceptance(3.689280, 5) == pytest.approx(0.8, abs=1e-6)  # 1 + .8 + .64 + ...
    assert even_acceptance(1.0, 5) == pytest.approx(0.0, abs=1e-9)
    assert even_acceptance(6.1, 5) is None


@pytest.mark.parametrize("slot_s", [0.001, 0.02, 0.2])
def test_the_best_gamma_is_the_fastest(slot_s):
    rates = (0.8, 0.7, 0.5, 0.4, 0.3)
    rng = np.random.default_rng(0)
    reached = [[100.0] * 5 for _ in range(20)]
    accepted = [[float(rng.binomial(100, rate)) for rate in rates] for _ in range(20)]
    round_s = tuple(0.03 + slot_s * g for g in range(1, 6))
    costs = GammaCosts(1, 100, 0.03, round_s)
    advised = advise_gamma("D", reached, accepted, costs, seed=0)
    expected = [1.0]
    for g in range(1, 6):
        tau = 1 + sum(np.prod(rates[:k]) for k in range(1, g + 1))
        expected.append(0.03 * tau / round_s[g - 1])
        point = advised.points[g - 1]
        assert point.tau == pytest.approx(tau, rel=0.02)
        assert point.speed_ratio.low <= expected[g] <= point.speed_ratio.high
    assert advised.best == int(np.argmax(expected))
    gain = advised.gain_over_block
    assert gain.low <= expected[advised.best] / expected[5] - 1 <= gain.high
    assert advised.best == {0.001: 4, 0.02: 1, 0.2: 0}[slot_s]
    others = [value for g, value in enumerate(expected) if g != advised.best]
    assert advised.gain_over_next == pytest.approx(expected[advised.best] / max(others) - 1, rel=0.05)


def drafts_of(rng, num_prompts, rates, *, num_rounds=25):
    """Drafts that were reached and accepted, by prompt and slot."""
    reached, accepted = [], []
    for easier in rng.normal(0, 0.05, num_prompts):
        live, reached_here, accepted_here = num_rounds, [], []
        for rate in rates:
            reached_here.append(float(live))
            live = int(rng.binomial(live, min(1.0, rate + easier)))
            accepted_here.append(float(live))
        reached.append(reached_here)
        accepted.append(accepted_here)
    return reached, accepted


def test_the_better_of_equal_gammas_gains_nothing(monkeypatch):
    monkeypatch.setattr(advice, "bootstrap", partial(bootstrap, num_resamples=200))
    rates = (0.8, 0.7, 0.5, 0.4, 0.3)
    taus = tuple(1 + float(np.cumprod(rates)[:g].sum()) for g in range(1, 6))
    equal, better = GammaCosts(1, 100, 1.0, taus), GammaCosts(1, 100, 1.0, (*taus[:4], 1.3 * taus[4]))
    num_trials, num_held, num_not_above_0, num_found = 40, 0, 0, 0
    for trial in range(num_trials):
        drafts = drafts_of(np.random.default_rng(trial), 16, rates)
        found = advise_gamma("D", *drafts, equal, seed=0)
        num_held += found.gain_over_block.low <= 0 <= found.gain_over_block.high
        num_not_above_0 += found.gain_over_block.value <= 0
        gain = advise_gamma("D", *drafts, better, seed=0).gain_over_block
        num_found += 0 < gain.low <= 0.3 <= gain.high
    assert num_held >= stats.binom.ppf(0.001, num_trials, 0.95)
    assert num_not_above_0 >= num_trials / 4  # a gain on the prompts that chose it is never below 0
    assert num_found >= stats.binom.ppf(0.001, num_trials, 0.9)  # control: a gamma that is better gains
    alone = advise_gamma("D", *drafts_of(np.random.default_rng(0), 1, rates), equal, seed=0)
    assert alone.gain_over_block.value is None and len(alone.points) == 5


def test_one_layer_more_at_tau_to_pay_is_as_fast_as_now():
    costs = GammaCosts(1, 100, 0.03, (0.04, 0.05, 0.06))
    found = advise_depth("D", num_layers=2, layer_s=0.006, tau=2.4, gamma=3, costs=costs)
    assert (0.06 + 0.006) / found.tau_to_pay == pytest.approx(0.06 / 2.4)
    assert (0.06 - 0.006) / found.tau_to_lose == pytest.approx(0.06 / 2.4)
    assert sum(found.acceptance**k for k in range(4)) == pytest.approx(2.4)
    assert sum(found.acceptance_to_pay**k for k in range(4)) == pytest.approx(found.tau_to_pay)
    assert found.layer_share == pytest.approx(0.1)
    whole = advise_depth("D", num_layers=1, layer_s=0.03, tau=3.9, gamma=3, costs=costs)
    assert whole.acceptance_to_pay is None and whole.tau_to_lose is None


# --- one call from inside


class Twin(nn.Module):
    """A target whose forward takes a second of a clock."""

    device = torch.device("cpu")

    def __init__(self, now):
        super().__init__()
        self.now = now

    def forward(self):
        self.now[0] += 1.0


def ended(rows, verified, accepted, num_slots=3):
    tokens = torch.zeros(len(rows), num_slots, dtype=torch.long) if num_slots else None
    return EndedRounds(None, 0, tuple(rows), None, None, tuple(verified), tuple(accepted), False, tokens)


def test_waiting_for_turns_is_nobodys_time():
    now = [0.0]
    twin = Twin(now)
    watch = Watch(twin, [10, 7], clock=lambda: now[0])
    waits = iter([5.0, 7.0, 11.0])

    def give_away(*_):
        now[0] += next(waits)

    with watch.before_others():
        turns = twin.register_forward_pre_hook(give_away)  # where interleave() stands
        with watch:
            now[0] += 0.25  # before the first forward
            twin()
            now[0] += 0.5
            twin()
            watch.hear(ended([0, 1], [3, 2], [1, 0]))
            twin()
            watch.hear(ended([1], [2], [2], num_slots=2))
        turns.remove()
    assert watch.first_token_s == 1.25
    assert watch.waited_s() == (5.0, 18.0)
    assert watch.rounds == [Round(2, 3, 3, 10), Round(1, 2, 2, 8)]
    assert not twin._forward_pre_hooks and not twin._forward_hooks


def test_a_second_prompt_is_told_from_a_round():
    """Rows one after the other: a forward that no end of a round follows is a prompt's."""
    now = [0.0]
    twin = Twin(now)
    watch = Watch(twin, [4, 4], clock=lambda: now[0])
    waits = iter([1.0, 2.0, 4.0, 8.0])
    with watch.before_others():
        turns = twin.register_forward_pre_hook(lambda *_: now.__setitem__(0, now[0] + next(waits)))
        with watch:
            for row in (0, 1):
                twin()
                twin()
                watch.hear(ended([row], [0], [0], num_slots=0))
        turns.remove()
    assert watch.waited_s() == (5.0, 10.0)
    assert watch.rounds == [Round(1, 0, 0, 4)] * 2


# --- memory


class Cached(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, past_key_values=None):
        return None


class Box:
    """A cache of a kind that nobody told us of."""

    def __init__(self, tensors):
        self.layers = [{"keys": tensor, "view": tensor[:1]} for tensor in tensors]


def test_weights_and_caches_are_counted_once():
    weight = nn.Parameter(torch.zeros(100))
    target, twin = Cached(weight), Cached(weight)
    held = []

    def call():
        target(past_key_values=Box([torch.zeros(8), torch.zeros(8)]))
        target(past_key_values=Box([torch.zeros(16), torch.zeros(16)]))
        twin(past_key_values=Box([torch.zeros(4)]))
        held.append(torch.ones(30_000_000))

    found = measure_memory([target, twin], call)
    assert found.weight_bytes == 400
    assert found.cache_bytes == 2 * 64 + 16
    assert not target._forward_hooks
    if found.peak_rise_bytes is not None:  # the system tells
        assert found.peak_rise_bytes >= 100_000_000
        assert measure_memory([target], lambda: None).peak_rise_bytes < 20_000_000  # control: the peak is reset


# --- pages


def bench_report():
    runs = synthetic_runs(np.random.default_rng(0), ratio=1.5, num_prompts=8)
    drafter = replace(DRAFTER, name="D|x, full", drafter="D|x")
    runs = {place: {BASELINE: by_way[BASELINE], drafter.name: by_way["D, full"]} for place, by_way in runs.items()}
    facts = (PLAIN, drafter)
    numbers = tuple(pool(MAIN, way, runs, [BASELINE], num_batches=8, seed=0) for way in facts)
    split = split_drafter(drafter.name, "main", drafter_runs(np.random.default_rng(0), 1), constant_costs())
    memory = {BASELINE: measure_memory([Cached(nn.Parameter(torch.zeros(4)))], lambda: None)}
    costs = GammaCosts(1, 100, 0.03, (0.04, 0.05, 0.06))
    gamma = advise_gamma("D|x", [[9.0] * 3] * 4, [[5.0] * 3] * 4, costs, seed=0)
    depth = advise_depth("D|x", num_layers=2, layer_s=0.006, tau=2.4, gamma=3, costs=costs)
    sweep = CellReport(SWEEP, ("p",), 2, 1, numbers, {}, ())
    return BenchReport(
        target="t",
        settings=BenchSettings(),
        pairs={},
        ways=facts,
        left_out=(LeftOut("assisted generation", "no sibling model was given"),),
        cells=(CellReport(MAIN, tuple("abcdefgh"), 8, 8, numbers, memory, (split,)), sweep),
        profiles={},
        gamma=(gamma,),
        depth=(depth,),
        notes=("a note",),
        provenance=collect_provenance(torch.device("cpu"), torch.float32, seed=0, n=8),
        sessions=(),
    )


def test_pages_say_everything_and_names_cannot_break_them():
    report = bench_report()
    page = to_markdown(report, {"ways": "bench-ways.png"})
    for title in ("# Bench", "## Ways of generating", "## Memory", "## Batches", "## Eq. 1 against the measurement",
                  "## Where the difference comes from", "## Which gamma", "## Which depth", "## Notes"):  # fmt: skip
        assert f"{title}\n" in page
    assert "![Ways of generating](bench-ways.png)" in page and "bench-batches" not in page
    widths = {line.replace("\\|", "").count("|") for line in page.splitlines() if line.startswith("| D")}
    assert "D\\|x, full" in page and len(widths) == 3  # each table's own number of columns
    assert "Left out: assisted generation: no sibling model was given." in page
    assert "9 of 10 done" in page and not report.is_complete and report.num_errors == 0
    console = Console(file=io.StringIO(), width=120)
    print_report(report, console)
    assert "D|x, full" in console.file.getvalue()


def test_the_json_holds_what_properties_compute():
    content = json.loads(json.dumps(bench_report().to_dict()))
    assert content["kind"] == "bench" and content["is_complete"] is False
    main = content["cells"][0]
    assert main["latency"][0]["residual_s"] == pytest.approx(sum(main["latency"][0]["parts"].values()))
    assert main["ways"][1]["conditional_acceptance"] == [1.0, 0.0, 0.0]


def test_a_prompt_without_text_is_refused():
    from dspark_hf.evaluation.bench.inputs import encode_all

    class Tokenizer:
        chat_template = None

        def __call__(self, text, return_tensors):
            return {"input_ids": torch.zeros(1, len(text), dtype=torch.long)}

    prompts = [Prompt("a", ({"role": "user", "content": "x"},)), Prompt("b", ({"role": "user", "content": ""},))]
    with pytest.raises(ComparisonError, match="prompt 'b' has no tokens"):
        encode_all(Tokenizer(), prompts)
    with pytest.raises(ComparisonError, match="list of prompts is empty"):
        encode_all(Tokenizer(), [])


def test_a_module_is_told_as_such():
    assert (
        command_line(["/opt/lib/dspark_cli/__main__.py", "eval", "--seed", "1"]) == "python -m dspark_cli eval --seed 1"
    )
    assert command_line(["/usr/bin/dspark", "eval"]) == "dspark eval"
