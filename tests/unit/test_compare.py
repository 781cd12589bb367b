"""Comparing plain and speculative generation: intervals, agreement, pooling, rendering, reports on disk."""

import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from tiny import VOCAB, OracleDrafter, greedy, tiny_drafter, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from dspark_hf import IncompatibleTargetError, SpeculationReport, UnsupportedGenerationError
from dspark_hf.evaluation import ComparisonError, ComparisonInterrupted, ComparisonSettings, compare, provenance
from dspark_hf.evaluation.agreement import explain_difference, first_difference
from dspark_hf.evaluation.compare import _Bench, drafter_arguments
from dspark_hf.evaluation.intervals import bootstrap
from dspark_hf.evaluation.render import render
from dspark_hf.evaluation.results import GenerationTiming, PromptResult, RunPair, pooled_numbers
from dspark_hf.prompts import Prompt, encode_prompt


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w1")


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target)


def prompts(count=3):
    return [Prompt(f"p{i}", ({"role": "user", "content": f"w{i + 2} w5 w{7 * i + 3}"},)) for i in range(count)]


def settings(**changes):
    return ComparisonSettings(**{"max_new_tokens": 12} | changes)


def rendered(report):
    console = Console(file=io.StringIO(), width=80)
    render(report, console)
    return console.file.getvalue()


# --- intervals


def ratio(sums):
    return sums["a"] / sums["b"]


def test_pooled_value_and_interval_of_two_prompts_by_hand():
    # Resamples: both 1st (1/4), one each (1/2), both 2nd (1/4), so the 2.5 % ends are the prompts' own values.
    found = bootstrap({"a": [10, 30], "b": [5, 5]}, ratio, seed=0)
    assert (found.value, found.low, found.high, found.n) == (4.0, 2.0, 6.0, 2)


def test_interval_agrees_with_scipy():
    rng = np.random.default_rng(3)
    a, b = rng.uniform(40, 64, 20), rng.uniform(1, 3, 20)
    found = bootstrap({"a": a, "b": b}, ratio, seed=0)
    theirs = stats.bootstrap(
        (a, b),
        lambda x, y, axis: x.sum(axis=axis) / y.sum(axis=axis),
        paired=True,
        method="percentile",
        n_resamples=10_000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    spread = theirs.high - theirs.low
    assert found.value == pytest.approx(a.sum() / b.sum())
    assert found.low == pytest.approx(theirs.low, abs=0.05 * spread)
    assert found.high == pytest.approx(theirs.high, abs=0.05 * spread)
    # The same check tells 95 % from 90 %.
    assert found.low != pytest.approx(theirs.low + 0.1 * spread, abs=0.05 * spread)


@pytest.mark.parametrize(
    ("a", "b", "value"), [([3.0], [2.0], 1.5), ([1.0, 2.0], [0.0, 0.0], None), ([0.0], [0.0], None)]
)
def test_no_interval_of_one_prompt_or_of_an_undefined_value(a, b, value):
    found = bootstrap({"a": a, "b": b}, ratio, seed=0)
    assert (found.value, found.low, found.high, found.n) == (value, None, None, len(a))


def test_undefined_resamples_are_left_out():
    found = bootstrap({"a": [1.0, 0.0], "b": [1.0, 0.0]}, ratio, seed=0)
    assert (found.low, found.high) == (1.0, 1.0)


# --- settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a number >= 0; 0 is greedy, got -0.1"),
        ({"temperature": math.nan}, "temperature must be a number"),
        ({"top_p": 0.9}, "top_p must be left out when temperature is 0"),
        ({"top_k": 5}, "top_k must be left out when temperature is 0"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p must be above 0"),
        ({"top_k": 0, "temperature": 1.0}, "top_k must be >= 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        (
            {"policy": "best"},
            "policy must be one of full, threshold, survival, goodput, prefix, smoothed, block, lagged, got 'best'",
        ),
        ({"threshold": 1.5}, "threshold must be a probability"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens must be >= 1"),
        ({"repeats": 0}, "repeats must be >= 1"),
        ({"seed": -1}, "seed must be 0 to"),
    ],
)
def test_settings_name_value_and_rule(changes, message):
    with pytest.raises(ComparisonError, match=message.replace("*", r"\*")):
        ComparisonSettings(**changes)


def test_a_threshold_equal_to_the_one_transformers_merges_is_not_taken_for_unset(target):
    config = tiny_drafter(target, confidence_threshold=0.9).config
    asked = drafter_arguments(config, settings(policy="threshold", threshold=0.4), "threshold")
    threshold = asked["assistant_confidence_threshold"]
    assert threshold != 0.4
    assert torch.tensor(threshold, dtype=torch.float32) == torch.tensor(0.4, dtype=torch.float32)


# --- agreement


@pytest.mark.parametrize(
    ("plain", "dspark", "position"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [4], 0)],
)
def test_first_difference(plain, dspark, position):
    assert first_difference(plain, dspark) == position
    assert first_difference(dspark, plain) == position


def plain_tokens(target, ids, num_new=8):
    return greedy(target, ids, max_new_tokens=num_new)[0, ids.shape[1] :].tolist()


def test_a_planted_difference_is_measured_at_its_position(target, tokenizer):
    ids = encode_prompt(tokenizer, prompts()[0])
    plain = plain_tokens(target, ids)
    with torch.no_grad():
        logits = target(torch.cat([ids, torch.tensor([plain[:4]])], dim=1)).logits[0, -1]
    ranked = logits.argsort(descending=True)
    assert plain[4] == ranked[0]
    for rank in (1, 2):
        planted = [*plain[:4], int(ranked[rank]), *plain[5:]]
        found = explain_difference(target, target.generation_config, ids, plain, planted)
        assert (found.position, found.plain_token_id, found.dspark_token_id) == (4, plain[4], int(ranked[rank]))
        assert found.top2_gap == pytest.approx(float(logits[ranked[0]] - logits[ranked[1]]), abs=1e-4)
        assert found.token_gap == pytest.approx(float(logits[ranked[0]] - logits[ranked[rank]]), abs=1e-4)
        assert found.is_error


def test_a_tie_is_no_error_but_a_third_token_is(tokenizer):
    target = tiny_target("llama")
    ids = encode_prompt(tokenizer, prompts()[0])
    best = plain_tokens(target, ids, 1)[0]
    twin, third = [token for token in range(VOCAB) if token != best][:2]
    with torch.no_grad():
        target.lm_head.weight[twin] = target.lm_head.weight[best]
    tie = explain_difference(target, target.generation_config, ids, [best], [twin])
    assert tie.top2_gap == tie.token_gap == 0.0
    assert not tie.is_error
    wrong = explain_difference(target, target.generation_config, ids, [best], [third])
    assert wrong.top2_gap == 0.0
    assert wrong.token_gap > 1e-4
    assert wrong.is_error


def test_in_bfloat16_a_gap_is_told_but_is_no_error(tokenizer):
    target = tiny_target("llama").to(torch.bfloat16)
    ids = encode_prompt(tokenizer, prompts()[0])
    plain = plain_tokens(target, ids)
    found = explain_difference(target, target.generation_config, ids, plain, [(plain[0] + 1) % VOCAB, *plain[1:]])
    assert found.token_gap > 1e-4
    assert not found.is_error


def test_a_text_that_goes_on_where_the_other_ended_is_an_error_in_any_dtype(tokenizer):
    target = tiny_target("llama").to(torch.bfloat16)
    ids = encode_prompt(tokenizer, prompts()[0])
    found = explain_difference(target, target.generation_config, ids, [3, 4], [3, 4, 5])
    assert (found.position, found.plain_token_id, found.dspark_token_id) == (2, None, 5)
    assert found.is_error
    assert found.top2_gap is None


def test_the_gap_is_taken_after_the_logits_processors(target, tokenizer):
    ids = encode_prompt(tokenizer, prompts()[0])
    with torch.no_grad():
        first, second, third = target(ids).logits[0, -1].topk(3).indices.tolist()
    config = target.generation_config
    banned = type(config).from_dict(config.to_dict() | {"suppress_tokens": [first]})
    found = explain_difference(target, banned, ids, [second], [third])
    assert found.top2_gap == found.token_gap


# --- comparing


def test_identical_texts_and_sums(target, drafter, tokenizer):
    report = compare(target, drafter, tokenizer, prompts(), settings(repeats=2), target_name="t", drafter_name="d")
    assert report.is_complete
    assert report.num_identical == 3
    assert not report.losslessness_errors
    assert [p.prompt_id for p in report.prompts] == ["p0", "p1", "p2"]
    runs = [run for prompt in report.prompts for run in prompt.runs]
    assert [run.ran_first for run in runs] == ["plain", "dspark"] * 3
    assert report.plain_num_new_tokens == report.dspark_num_new_tokens == 3 * 2 * 12
    assert report.plain_latency_s == pytest.approx(sum(run.plain.latency_s for run in runs))
    assert report.dspark_num_target_forwards == sum(run.speculation.num_target_forwards for run in runs)
    assert report.speed_ratio.value == pytest.approx(report.dspark_tokens_per_s / report.plain_tokens_per_s)
    assert report.speed_ratio.low <= report.speed_ratio.value <= report.speed_ratio.high
    assert sum(stage.seconds for stage in report.stages) == pytest.approx(report.dspark_latency_s)
    assert sum(stage.share for stage in report.stages) == pytest.approx(1.0)
    assert report.stages[-1].seconds > 0
    assert report.num_draft_tokens == len(report.slots) == 4
    assert (report.provenance.n, report.provenance.dtype, report.provenance.seed) == (3, "float32", 0)


def test_a_good_drafter_saves_target_forwards(target, tokenizer):
    prompt = prompts()[0]
    ids = encode_prompt(tokenizer, prompt)
    text = greedy(target, ids, max_new_tokens=40)[0]
    drafter = OracleDrafter.for_target(target, text, hit_rate=1.0)
    report = compare(target, drafter, tokenizer, [prompt], settings(max_new_tokens=33))
    # The prompt's forward gives one token, then four rounds of 7 + 1.
    assert report.dspark_num_target_forwards == 5
    assert report.target_forwards_saved_percent.value == pytest.approx(100 * (1 - 5 / 33))
    assert report.tau.value == 8.0
    assert [slot.conditional_acceptance for slot in report.slots] == [1.0] * 7
    assert report.num_identical == 1


def test_new_tokens_are_counted_up_to_the_end_of_text(tokenizer, drafter):
    target = tiny_target("llama")
    ids = encode_prompt(tokenizer, prompts()[0])
    plain = plain_tokens(target, ids)
    target.generation_config.eos_token_id = [plain[2]]
    length = plain.index(plain[2]) + 1
    report = compare(target, drafter, tokenizer, prompts(1), settings())
    assert report.plain_num_new_tokens == report.dspark_num_new_tokens == length


def test_the_targets_own_sampling_defaults_do_not_leak_in(tokenizer, drafter, caplog):
    target = tiny_target("llama")
    target.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9, top_k=20)
    assert compare(target, drafter, tokenizer, prompts(2), settings()).num_identical == 2
    bench = _Bench(target, drafter, settings(temperature=0.7))
    config = bench._plain_config
    assert (config.temperature, config.top_p, config.top_k) == (0.7, 1.0, 0)
    assert not caplog.records


def test_sampling_is_repeatable_and_leaves_the_callers_random_state(target, drafter, tokenizer):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = (
        compare(target, drafter, tokenizer, prompts(), settings(temperature=1.0, top_p=0.9, top_k=9)) for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert first.num_identical is None
    assert [p.is_identical for p in first.prompts] == [None] * 3
    assert first.tau == second.tau
    assert "by design" in rendered(first)


def test_a_planted_wrong_token_is_an_error_of_the_report(target, drafter, tokenizer, monkeypatch):
    plant_wrong_token(monkeypatch, position=5)
    report = compare(target, drafter, tokenizer, prompts(), settings())
    assert report.num_identical == 0
    assert len(report.losslessness_errors) == 3
    assert {prompt.difference.position for prompt in report.prompts} == {5}
    text = rendered(report)
    assert "0 of 3 prompts identical" in text
    assert "ERROR: 3 of 3 prompts" in text


def plant_wrong_token(monkeypatch, position):
    right = _Bench._generate

    def wrong(self, ids, is_speculative, *args, **kwargs):
        new, timing, report = right(self, ids, is_speculative, *args, **kwargs)
        if is_speculative and len(new) > position:
            new[position] = (new[position] + 1) % VOCAB
        return new, timing, report

    monkeypatch.setattr(_Bench, "_generate", wrong)


@pytest.mark.parametrize("num_finished", [0, 2])
def test_an_interrupt_keeps_what_was_measured(target, drafter, tokenizer, monkeypatch, num_finished):
    measure = _Bench.measure

    def interrupted(self, index, *args):
        if index == num_finished:
            raise KeyboardInterrupt
        return measure(self, index, *args)

    monkeypatch.setattr(_Bench, "measure", interrupted)
    with pytest.raises(ComparisonInterrupted) as stop:
        compare(target, drafter, tokenizer, prompts(), settings())
    if num_finished == 0:
        assert stop.value.report is None
        return
    report = stop.value.report
    assert (len(report.prompts), report.num_planned, report.is_complete) == (2, 3, False)
    assert "2 of 3 prompts (interrupted)" in rendered(report)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_assistant_tokens": 9}, ComparisonError, "at most 4, this drafter's block, got 9"),
        ({"threshold": 0.5}, ComparisonError, "needs the policy 'threshold', and the policy is 'full'"),
    ],
)
def test_settings_that_the_drafter_cannot_honour(target, drafter, tokenizer, changes, error, message):
    with pytest.raises(error, match=message):
        compare(target, drafter, tokenizer, prompts(), settings(**changes))


def test_inputs_that_cannot_be_compared(target, drafter, tokenizer):
    with pytest.raises(ComparisonError, match="list of prompts is empty"):
        compare(target, drafter, tokenizer, [], settings())
    with pytest.raises(IncompatibleTargetError, match="number of decoder layers 5"):
        compare(target, tiny_drafter(tiny_target(num_layers=5)), tokenizer, prompts(), settings())
    headless = tiny_drafter(target, enable_confidence_head=False)
    with pytest.raises(UnsupportedGenerationError, match="confidence head"):
        compare(target, headless, tokenizer, prompts(), settings(policy="threshold"))
    blank = [Prompt("blank", ({"role": "user", "content": " "},))]
    with pytest.raises(ComparisonError, match="'blank' has no tokens"):
        compare(target, drafter, tokenizer, blank, settings())


# --- pooling and rendering


def made_up_prompt(number, plain_s, dspark_s):
    speculation = SpeculationReport(
        num_calls=1, num_new_tokens=3, num_target_forwards=1, prefill_s=0.1, draft_s=0.2, verify_s=0.3
    )
    speculation.count_round(num_drafted=2, num_verified=2, num_accepted=1)
    run = RunPair("plain", GenerationTiming(10, plain_s), GenerationTiming(8, dspark_s), speculation)
    return PromptResult(f"prompt-{number}", 5, (run,), is_identical=True, difference=None)


def test_pooled_numbers_by_hand():
    found = pooled_numbers((made_up_prompt(0, 2.0, 1.0), made_up_prompt(1, 3.0, 3.0)), is_greedy=True, seed=0)
    assert found["plain_tokens_per_s"] == 20 / 5
    assert found["dspark_tokens_per_s"] == 16 / 4
    assert found["speed_ratio"].value == 1.0
    assert (found["speed_ratio"].low, found["speed_ratio"].high) == pytest.approx((8 / (10 / 1), 8 / (10 / 2)))
    assert found["tau"].value == 2.0
    assert found["target_forwards_saved_percent"].value == pytest.approx(100 * (1 - 4 / 16))
    assert [(s.num_reached, s.num_accepted) for s in found["slots"]] == [(2, 2), (2, 0)]
    stages = {stage.stage: stage.seconds for stage in found["stages"]}
    assert stages == pytest.approx({"prefill": 0.2, "draft": 0.4, "verify": 0.6, "accept": 0.0, "other": 2.8})
    assert found["num_identical"] == 2


@pytest.fixture(scope="module")
def report(target, drafter, tokenizer):
    return compare(target, drafter, tokenizer, prompts(2), settings(), target_name="t", drafter_name="d")


def test_rendering_fits_80_columns_and_says_what_matters(report):
    long_id = "a-prompt-with-an-id-that-is-much-longer-than-a-column-of-the-table"
    text = rendered(report)
    assert max(map(len, text.splitlines())) <= 80
    for expected in (
        "tokens per second",
        "95% interval (n = 2 prompts)",
        "tau, tokens per round",
        "target forwards saved",
        "conditional acceptance",
        "prefill",
        "too narrow",
        "Outputs: 2 of 2 prompts identical (greedy, float32).",
    ):
        assert expected in text
    assert "UNTRAINED" not in text
    untrained = rendered(replace(report, drafter_kind="untrained"))
    assert "no speed-up can be expected" in untrained
    assert "--drafter ID_OR_FOLDER" in untrained
    difference = explain_in_place(report, long_id)
    text = rendered(difference)
    assert max(map(len, text.splitlines())) <= 80
    assert "near-ties" in text
    assert "ERROR" not in text


def explain_in_place(report, prompt_id):
    """The report with one bfloat16 difference in it."""
    from dspark_hf.evaluation.agreement import FirstDifference

    difference = FirstDifference(11, 49151, 49150, 0.125, 0.125, is_error=False)
    changed = replace(report.prompts[0], prompt_id=prompt_id, is_identical=False, difference=difference)
    origin = replace(report.provenance, dtype="bfloat16")
    return replace(report, prompts=(changed, *report.prompts[1:]), num_identical=1, provenance=origin)


# --- provenance and files


def test_a_folder_that_takes_no_file_is_found_out_before(tmp_path, monkeypatch):
    def refusing(dir):
        raise OSError(30, "Read-only file system")

    provenance.check_can_write(tmp_path / "x.json")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(provenance.tempfile, "TemporaryFile", refusing)
    with pytest.raises(OSError, match=r"cannot write .*x\.json: Read-only file system in its folder; name another"):
        provenance.check_can_write(tmp_path / "x.json")


def test_report_round_trips_as_json(report, tmp_path):
    path = tmp_path / "report.json"
    provenance.write_json(path, report.to_dict())
    read = json.loads(path.read_text())
    assert read["is_complete"] is True
    assert read["prompts"][1]["runs"][0]["speculation"]["num_new_tokens"] == 12
    assert read["speed_ratio"]["n"] == 2
    assert set(read["provenance"]["versions"]) == {"dspark_hf", "torch", "transformers", "python"}
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_nan_becomes_null_and_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "report.json"
    provenance.write_json(path, {"value": math.nan, "list": [math.inf, 1.0]})
    assert json.loads(path.read_text()) == {"value": None, "list": [None, 1.0]}
    with pytest.raises(TypeError):
        provenance.write_json(path, {"value": object()})
    assert json.loads(path.read_text())["list"] == [None, 1.0]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("dspark compare --json /srv/ann/x/y.json", "dspark compare --json ~/x/y.json"),
        ("--target=/srv/ann", "--target=~"),
        ("/srv/anna/x", "/srv/anna/x"),
        ("'/home/some body/x'", "'~ body/x'"),
        ("/Users/somebody/x /home/other", "~/x ~"),
        (r"C:\Users\somebody\x", r"~\x"),
    ],
)
def test_home_folders_are_scrubbed(monkeypatch, text, scrubbed):
    monkeypatch.setenv("HOME", "/srv/ann")
    assert provenance.scrub(text) == scrubbed


def test_home_of_root_folder_is_left_alone(monkeypatch):
    monkeypatch.setenv("HOME", "/")
    assert provenance.scrub("/a/b") == "/a/b"


def test_commit_is_told_only_where_the_source_is_tracked(tmp_path):
    commit, is_dirty = provenance._git_state(tmp_path)
    assert (commit, is_dirty) == (None, None)


def test_a_drafters_own_policy_gives_way_without_a_profile_and_the_report_says_so(target, tokenizer, monkeypatch):
    monkeypatch.setattr("dspark_hf.decoding.scheduler.find_profile", lambda target, drafter: None)
    drafter = tiny_drafter(target, verification_policy="block")
    report = compare(target, drafter, tokenizer, prompts(), settings(max_new_tokens=4))
    assert report.policy == "full"
    with pytest.raises(ValueError, match="no throughput profile is at hand"):
        compare(target, drafter, tokenizer, prompts(), settings(max_new_tokens=4, policy="block"))
