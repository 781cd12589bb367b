"""Traces recorded with models give the rounds that generate() has, under whole drafts and under cut ones."""

import json

import pytest
import torch
import typer.testing
from near_pair import near_drafter, near_target, write_pair
from tiny import greedy, random_ids, tiny_drafter, tiny_target

import dspark_cli
from dspark_hf import record_proposals, record_speculation, zoo
from dspark_hf.decoding.calibrate import SlotCalibration, calibrate
from dspark_hf.evaluation import proposals, trace_recording
from dspark_hf.evaluation.proposals import RecordingSettings
from dspark_hf.evaluation.replay import Replay, TargetText
from dspark_hf.evaluation.settings import ComparisonError
from dspark_hf.evaluation.trace_recording import record_positions, record_rounds
from dspark_hf.evaluation.trace_sources import rounds_file
from dspark_hf.evaluation.traces import load_traces
from dspark_hf.model.draft_vocab import offsets_of
from dspark_hf.prompts import encode_prompt, quickstart_prompts

NEW_TOKENS, PROMPT_TOKENS = 24, 7
CALIBRATION = SlotCalibration(torch.tensor([1.5, 0.5, 1.0, 1.0]), torch.tensor([0.3, 0.0, -0.2, 0.0]))


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def drafter_near(target, **overrides):
    """Right now and then: random drafters of wide weights on a small vocabulary agree by chance."""
    return tiny_drafter(target, **({"initializer_range": 0.05} | overrides))


def drafters(target):
    yield drafter_near(target)
    yield drafter_near(target, markov_head_type="rnn")
    yield drafter_near(target, markov_rank=0, confidence_head_with_markov=False)
    yield drafter_near(target, draft_layout="fill_in")
    reduced = drafter_near(target, draft_vocab_size=20)
    reduced.d2t.copy_(offsets_of(torch.arange(0, 60, 3)))
    yield reduced


def walk(trace, length):
    """Rounds of a schedule that verifies `length` drafts: where they begin, and what they keep."""
    place, rounds = 0, []
    while place < len(trace):
        step = trace.step(place, length)
        rounds.append((place, step.num_accepted))
        place = step.place
    return rounds


def text_of(ids, seed, temperature=0.0):
    return TargetText(f"p/{seed}", ids[0], PROMPT_TOKENS, temperature)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_greedy_traces_walk_as_generate_does_under_any_cut(target, length):
    num_accepted = 0
    for drafter in drafters(target):
        for seed in range(3):
            ids = random_ids(PROMPT_TOKENS, seed=seed)
            with record_proposals() as record, record_speculation() as report:
                text = target.generate(
                    ids,
                    assistant_model=drafter,
                    do_sample=False,
                    max_new_tokens=NEW_TOKENS,
                    num_assistant_tokens=length,
                )
            assert torch.equal(text, greedy(target, ids, max_new_tokens=NEW_TOKENS))
            (trace,) = record_positions(target, drafter, [text_of(text, seed)], None, seed=0)
            rounds = walk(trace, length)
            assert len(rounds) == report.num_rounds
            assert trace.num_tokens == NEW_TOKENS - 1
            for (place, kept), ended in zip(rounds, record.rounds, strict=False):  # no draft fits into the last token
                width = ended.num_verified[0]  # less than asked for where little room was left
                assert min(kept, width) == ended.num_accepted[0]
                logits = torch.from_numpy(trace.confidence_logits[place, :width])
                torch.testing.assert_close(logits, ended.confidence_logits[0, :width], atol=2e-4, rtol=1e-3)
            num_accepted += sum(kept for _, kept in rounds)
    assert num_accepted > 0  # or nothing was compared


def test_sampled_traces_have_the_expectation_of_the_replay():
    """Mean accepted drafts by slot over many draws, against the expectation that the replay computes."""
    target = near_target()
    drafter = near_drafter(target)
    text = text_of(greedy(target, random_ids(PROMPT_TOKENS), max_new_tokens=NEW_TOKENS), 0, 1.2)
    (expected,) = Replay(target, [text]).run(drafter)
    survival = expected.acceptance.cumprod(dim=1)
    draws = 150
    counts = torch.zeros_like(survival)
    for seed in range(draws):
        (trace,) = record_positions(target, drafter, [text], None, seed=seed)
        counts += torch.arange(survival.shape[1]) < torch.from_numpy(trace.num_accepted)[:, None]
    noise = (survival * (1 - survival) / draws).sqrt() + 1e-6
    distance = (counts / draws - survival).abs() / noise.clamp(min=1 / draws)
    assert float(distance.max()) < 5
    assert 0.05 < float(survival.mean()) < 0.95  # or nothing could differ


def test_sampled_confidences_are_those_of_drafts_in_decoding(target):
    """Means of the second slot's confidence logit, which reads the first draft, over texts that the target sampled."""
    drafter = drafter_near(target, block_size=3, initializer_range=0.1, confidence_head_with_markov=True)
    torch.nn.init.normal_(drafter.confidence_head.proj.weight, std=1.0)
    runs, ids = 150, random_ids(PROMPT_TOKENS)
    law = {"do_sample": True, "temperature": 1.3, "top_k": 0, "max_new_tokens": 2}
    torch.manual_seed(0)
    real, traced = [], []
    for seed in range(runs):
        with record_proposals() as record:
            target.generate(ids, assistant_model=drafter, **law | {"max_new_tokens": 8})
        real.append(float(record.rounds[0].confidence_logits[0, 1]))
        text = text_of(target.generate(ids, **law | {"max_new_tokens": 8}), seed, 1.3)
        traced.append(float(record_positions(target, drafter, [text], None, seed=seed)[0].confidence_logits[0, 1]))
    real, traced = torch.tensor(real).double(), torch.tensor(traced).double()
    noise = float((real.var() / runs + traced.var() / runs).sqrt())
    assert abs(float(real.mean() - traced.mean())) < 4 * noise
    assert float(real.std()) == pytest.approx(float(traced.std()), rel=0.35) and float(real.std()) > 0


def test_draws_of_a_text_depend_on_seed_and_id_alone(target):
    drafter = drafter_near(target)
    texts = [
        text_of(greedy(target, random_ids(PROMPT_TOKENS, seed=s), max_new_tokens=NEW_TOKENS), s, 1.0) for s in (0, 1)
    ]
    both = record_positions(target, drafter, texts, None, seed=3)
    alone = record_positions(target, drafter, texts[1:], None, seed=3)
    other = record_positions(target, drafter, texts[1:], None, seed=4)
    assert both[1].num_accepted.tolist() == alone[0].num_accepted.tolist()
    assert both[1].confidence_logits.tolist() != other[0].confidence_logits.tolist()


def test_cut_into_chunks_traces_are_the_same(target, monkeypatch):
    drafter = drafter_near(target)
    text = text_of(greedy(target, random_ids(PROMPT_TOKENS), max_new_tokens=NEW_TOKENS), 0)
    (whole,) = record_positions(target, drafter, [text], CALIBRATION, seed=0)
    monkeypatch.setattr(trace_recording, "TABLE_NUMBERS", 3 * drafter.config.block_size * drafter.config.vocab_size)
    (cut,) = record_positions(target, drafter, [text], CALIBRATION, seed=0)
    assert cut.num_accepted.tolist() == whole.num_accepted.tolist()
    torch.testing.assert_close(torch.from_numpy(cut.survival), torch.from_numpy(whole.survival), atol=1e-5, rtol=0)


def test_decoded_rounds_are_kept_whole_with_their_prompt(target, tmp_path):
    drafter = drafter_near(target)
    prompts = {
        f"{domain}/{i}": random_ids(5 + i, seed=i)[0].tolist() for i, domain in enumerate(("math", "code", "math"))
    }
    settings = RecordingSettings(0.0, None, None, max_new_tokens=NEW_TOKENS, batch_size=2, seed=0)
    path = tmp_path / "rounds"
    traces = record_rounds(target, drafter, prompts, path, settings, CALIBRATION, num_rounds=10_000)
    assert [(t.id, t.domain, t.prompt_length) for t in traces] == [
        ("math/0", "math", 5),
        ("code/1", "code", 6),
        ("math/2", "math", 7),
    ]
    for trace in traces:
        with record_proposals() as record:
            ids = torch.tensor([prompts[trace.id]])
            target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=NEW_TOKENS)
        whole = [ended for ended in record.rounds if ended.num_verified[0] == drafter.config.block_size]
        assert trace.num_accepted.tolist() == [ended.num_accepted[0] for ended in whole]
        logits = torch.stack([ended.confidence_logits[0] for ended in whole])
        want = calibrate(logits, CALIBRATION).survival
        torch.testing.assert_close(torch.from_numpy(trace.survival), want, atol=2e-4, rtol=1e-3)


def test_a_drafter_without_confidences_is_refused(target, tmp_path):
    drafter = drafter_near(target, enable_confidence_head=False)
    with pytest.raises(ComparisonError, match="no confidence head"):
        record_positions(target, drafter, [text_of(random_ids(9), 0)], None, seed=0)
    with pytest.raises(ComparisonError, match="no confidence head"):
        record_rounds(
            target, drafter, {}, tmp_path / "x", RecordingSettings(0.0, None, None, 4, 1, 0), None, num_rounds=1
        )


# -- the commands -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    write_pair(root)
    rows = [json.loads(line) for line in (root / "answers.jsonl").read_text().splitlines()]
    with (root / "texts.jsonl").open("w") as file:
        for number, row in enumerate(rows[:12]):
            temperature = 0.0 if number < 8 else 1.0
            domain = ("math", "chat")[number % 2]
            file.write(json.dumps(row | {"id": f"{domain}/{number}", "temperature": temperature}) + "\n")
    return root


def run(*arguments):
    return typer.testing.CliRunner().invoke(dspark_cli.app, [str(argument) for argument in arguments])


def traces_command(pair, output, *more):
    models = ("--target", pair / "target", "--drafter", pair / "my-drafter", "--dtype", "float32", "--threads", 1)
    return run("traces", *models, "--output", output, *more)


def test_traces_of_texts_then_an_ablation_of_them(pair, tmp_path):
    output = tmp_path / "traces.jsonl"
    result = traces_command(pair, output, "--texts", pair / "texts.jsonl")
    assert result.exit_code == 0, result.output
    assert "layout positions" in result.output and "(chat, math)" in result.output
    traces = load_traces(output)
    assert (traces.mode, traces.layout, traces.num_slots, len(traces.prompts)) == ("greedy", "positions", 2, 8)
    assert traces.source["from"] == "texts" and traces.source["provenance"]["n"] == 8
    assert traces.source["law"] == {"no_repeat_ngram_size": 0, "repetition_penalty": 1.0}
    few = traces_command(pair, output, "--texts", pair / "texts.jsonl", "--mode", "sampled", "--max-per-domain", 1)
    assert few.exit_code == 0 and len(load_traces(output).prompts) == 2 and load_traces(output).mode == "sampled"
    traces_command(pair, output, "--texts", pair / "texts.jsonl")
    result = run("ablate", "--traces", output, "--smoke", "--json", tmp_path / "ablation.json")
    assert result.exit_code == 0, result.output
    cells = json.loads((tmp_path / "ablation.json").read_text())["cells"]
    assert {cell["num_rows"] for cell in cells} == {2, 16}


def test_traces_of_decoding_go_on_where_they_were_interrupted(pair, tmp_path, monkeypatch):
    output = tmp_path / "traces.jsonl"
    arguments = (
        "--prompts",
        pair / "my-prompts.jsonl",
        "--max-new-tokens",
        12,
        "--batch-size",
        4,
        "--max-per-domain",
        16,
    )
    real, calls = proposals._decode, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(proposals, "_decode", interrupted)
    assert traces_command(pair, output, *arguments).exit_code == 130
    assert not output.exists() and rounds_file(output).exists()
    assert traces_command(pair, output, *arguments).exit_code == 0
    assert len(calls) == 3 + 2 and not rounds_file(output).exists()
    monkeypatch.setattr(proposals, "_decode", real)
    whole = tmp_path / "whole.jsonl"
    assert traces_command(pair, whole, *arguments).exit_code == 0
    one, other = load_traces(output), load_traces(whole)
    assert (one.layout, one.mode, len(one.prompts)) == ("rounds", "greedy", 16)
    assert [p.num_accepted.tolist() for p in one.prompts] == [p.num_accepted.tolist() for p in other.prompts]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((), "one of the two, and not both"),
        (("--texts", "texts.jsonl", "--prompts", "my-prompts.jsonl"), "one of the two, and not both"),
        (("--texts", "texts.jsonl", "--mode", "warm"), "mode must be one of greedy, sampled"),
        (("--texts", "texts.jsonl", "--mode", "sampled", "--temperature", "0.5"), "no text at temperature 0.5"),
        (("--prompts", "my-prompts.jsonl", "--max-prompt-tokens", "2"), "none of 48 prompts has at most 2 tokens"),
        (("--texts", "texts.jsonl", "--max-per-domain", "0"), "max_per_domain must be >= 1"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(pair, tmp_path, monkeypatch, arguments, what):
    monkeypatch.chdir(pair)
    result = traces_command(pair, tmp_path / "traces.jsonl", *arguments)
    assert result.exit_code == 2 and what in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.real_model
def test_the_bundled_drafters_traces_walk_as_generate_does():
    target = zoo.load_target("smollm2-135m-instruct", dtype=torch.float32)
    tokenizer = zoo.load_tokenizer("smollm2-135m-instruct")
    drafter = zoo.load_drafter("smollm2-135m-instruct").to(torch.float32)
    num_rounds = num_accepted = 0
    for prompt in quickstart_prompts()[:2]:
        ids = encode_prompt(tokenizer, prompt)
        for length in (2, drafter.config.block_size):
            with record_proposals() as record:
                text = target.generate(
                    ids,
                    assistant_model=drafter,
                    do_sample=False,
                    max_new_tokens=48,
                    num_assistant_tokens=length,
                    verification_policy="full",
                )
            (trace,) = record_positions(
                target, drafter, [TargetText(prompt.id, text[0], ids.shape[1], 0.0)], None, seed=0
            )
            rounds = walk(trace, length)
            assert len(record.rounds) in (len(rounds) - 1, len(rounds))
            for (place, kept), ended in zip(rounds, record.rounds, strict=False):  # no draft fits into the last token
                assert ended.num_accepted[0] == min(kept, len(trace) - place - 1)  # the target's own token needs room
                width = ended.num_verified[0]
                logits = torch.from_numpy(trace.confidence_logits[place, :width])
                torch.testing.assert_close(logits, ended.confidence_logits[0, :width], atol=1e-2, rtol=1e-2)
            num_rounds, num_accepted = num_rounds + len(rounds), num_accepted + sum(kept for _, kept in rounds)
    assert num_accepted > 0.3 * num_rounds
