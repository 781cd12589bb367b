"""`dspark eval`: replays against generate() with shorter drafts, decoding against replays, and the command itself."""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer.testing
from near_pair import near_drafter, near_target, save_tokenizer
from tiny import OracleDrafter, greedy, random_ids, tiny_drafter, tiny_target

import dspark_cli
from dspark_hf import record_speculation
from dspark_hf.decoding.calibrate import SlotCalibration
from dspark_hf.decoding.observers import observe_rounds
from dspark_hf.evaluation import ComparisonError, calibration_quality, evaluate, proposals
from dspark_hf.evaluation.cuts import CutPlan
from dspark_hf.evaluation.decoded import decode_drafter, load_eval_prompts
from dspark_hf.evaluation.evaluation_request import DecodingRequest, DrafterSource, EvaluationRequest
from dspark_hf.evaluation.replay import Replay, TargetText
from dspark_hf.model.draft_vocab import offsets_of

NUM_NEW = 32
THRESHOLDS = (0.0, 0.45, 0.5, 0.55)


def drafters(target):
    yield near_drafter(target, confidence_head_with_markov=True)
    yield tiny_drafter(target, initializer_range=0.05, draft_layout="fill_in", markov_head_type="rnn")
    yield tiny_drafter(target, initializer_range=0.05, markov_rank=0, confidence_head_with_markov=False)
    reduced = tiny_drafter(target, initializer_range=0.05, draft_vocab_size=20)
    reduced.d2t.copy_(offsets_of(torch.arange(0, 60, 3)))
    yield reduced


def rounds_of(target, ids, drafter, **call):
    """Anchor's place in the answer, verified and accepted drafts of each round of generate()."""
    rounds, at = [], 0

    def hear(ended):
        nonlocal at
        (verified,), (accepted,) = ended.num_verified, ended.num_accepted
        rounds.append((at, verified, accepted))
        at += accepted + 1

    with observe_rounds(hear, with_plain=True):
        target.generate(ids, assistant_model=drafter, **call)
    return rounds


def sums_of(rounds, size):
    """Rounds, verified and accepted drafts, those behind the text's last token left out."""
    num_blocks = NUM_NEW - 1
    inside = [(num_blocks - at, verified, accepted) for at, verified, accepted in rounds]
    assert all(verified <= size for _, verified, _ in rounds)
    return [len(rounds), sum(min(v, room) for room, v, _ in inside), sum(min(a, room) for room, _, a in inside)]


@pytest.fixture(scope="module")
def target():
    return near_target()


def test_greedy_cuts_are_the_rounds_of_generate(target):
    """Lengths and thresholds, one text: all rounds but those that the length limit of generate() shortens."""
    cuts_with_effect = 0
    for drafter in drafters(target):
        size = drafter.config.block_size
        ids = random_ids(7, seed=3)
        text = greedy(target, ids, max_new_tokens=NUM_NEW)[0]
        plan = CutPlan(size, THRESHOLDS)
        (replayed,) = Replay(target, [TargetText("p/0", text, 7, 0.0)]).run_all([drafter], plans=[plan])[0:1]
        cuts = replayed[0].cuts
        seen = set()
        for i, cut in enumerate(plan.cuts):
            call = {"do_sample": False, "max_new_tokens": NUM_NEW + 2 * size}
            if cut.kind == "length":
                call |= {"verification_policy": "full", "num_assistant_tokens": int(cut.value)}
            else:
                call |= {"verification_policy": "threshold", "assistant_confidence_threshold": cut.value}
            rounds = [one for one in rounds_of(target, ids, drafter, **call) if one[0] < NUM_NEW - 1]
            found = [cuts.num_rounds[i], cuts.num_verified[i], cuts.num_accepted[i]]
            assert [float(value) for value in found] == sums_of(rounds, size), (cut, drafter.config.markov_head_type)
            seen.add(tuple(map(float, found)))
        cuts_with_effect = max(cuts_with_effect, len(seen))
    assert cuts_with_effect >= size + 2, "lengths and some thresholds differ, or the test could not fail"


def test_sampled_thresholds_have_the_expectation_of_generate():
    """Mean verified and accepted drafts of many real runs against replays of texts that the target sampled alone."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, initializer_range=0.05, block_size=3)
    torch.nn.init.normal_(drafter.confidence_head.proj.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    runs, ids, num_new, threshold = 60, random_ids(5), 8, 0.5
    law = {"do_sample": True, "temperature": 1.3, "top_k": 0}
    cut = {"verification_policy": "threshold", "assistant_confidence_threshold": threshold}
    torch.manual_seed(0)
    real, replayed = [], []
    for run in range(runs):
        rounds = rounds_of(target, ids, drafter, **law, **cut, max_new_tokens=num_new + 3)
        # Rounds that start inside the first tokens, with the drafts that lie inside.
        inside = [(num_new - 1 - at, v, a) for at, v, a in rounds if at < num_new - 1]
        real.append([len(inside), sum(min(v, n) for n, v, _ in inside), sum(min(a, n) for n, _, a in inside)])
        text = TargetText(f"p/{run}", target.generate(ids, **law, max_new_tokens=num_new)[0], 5, 1.3)
        cuts = Replay(target, [text]).run_all([drafter], plans=[CutPlan(3, (threshold,))])[0][0].cuts
        replayed.append([float(cuts.num_rounds[3]), float(cuts.num_verified[3]), float(cuts.num_accepted[3])])
    real, replayed = torch.tensor(real).double(), torch.tensor(replayed).double()
    noise = (real.var(0) / runs + replayed.var(0) / runs).sqrt()
    assert ((real.mean(0) - replayed.mean(0)).abs() < 4 * noise).all(), (real.mean(0), replayed.mean(0), noise)
    verified, accepted = real.mean(0)[1:].tolist()
    assert verified > accepted + 10 * float(noise[1]), "drafts are rejected, or the test could not fail"
    assert verified < 0.9 * 3 * float(real.mean(0)[0]), "and the threshold cuts"


def decoded(target, drafter, tmp_path, num_prompts=4, **changes):
    settings = {"max_new_tokens": NUM_NEW, "batch_size": 2} | changes
    request = DecodingRequest(("unused",), **settings)
    prompts = {f"gsm8k/{i}": random_ids(5 + i, seed=i)[0].tolist() for i in range(num_prompts)}
    temperature = request.temperatures[0]
    result = decode_drafter(
        target, drafter, "d", prompts, request, temperature, thresholds=(0.0, 0.5), folder=tmp_path, seed=0
    )
    return prompts, result


def test_decoding_and_replaying_give_the_same_tau(target, tmp_path):
    drafter = near_drafter(target)
    prompts, found = decoded(target, drafter, tmp_path)
    texts = []
    for name, ids in prompts.items():
        text = greedy(target, torch.tensor([ids]), max_new_tokens=NUM_NEW)[0]
        texts.append(TargetText(name, text, len(ids), 0.0))
    for one, other in zip(found.texts, Replay(target, texts).run(drafter), strict=True):
        assert one.id == other.id and one.num_tokens == other.num_tokens == NUM_NEW - 1
        assert one.num_rounds == other.num_rounds
        assert one.tau == pytest.approx(other.tau)
    total = sum(one.num_rounds for one in found.texts)
    assert total < 0.8 * sum(one.num_tokens for one in found.texts), "something is accepted"


def test_decoded_sums_are_the_report_of_generate(target, tmp_path):
    drafter = near_drafter(target)
    prompts, found = decoded(target, drafter, tmp_path, temperatures=(0.8,), batch_size=1, top_p=0.9, top_k=30)
    with record_speculation() as report:
        decoded(target, drafter, tmp_path / "again", temperatures=(0.8,), batch_size=1, top_p=0.9, top_k=30)
    assert sum(one.num_tokens for one in found.texts) == report.num_new_tokens - report.num_calls
    assert sum(one.num_rounds for one in found.texts) == report.num_rounds
    whole = found.plan.num_slots - 1
    assert sum(float(one.cuts.num_verified[whole]) for one in found.texts) == report.num_verified
    assert sum(float(one.cuts.num_accepted[whole]) for one in found.texts) == report.num_accepted
    reached = sum(one.reached for one in found.texts)
    assert reached.tolist() == report.reached_per_slot
    assert sum(one.accepted for one in found.texts).tolist() == report.accepted_per_slot


@pytest.mark.parametrize("hit_rate", [0.4, 0.8])
def test_a_known_hit_rate_comes_back_from_generate(tmp_path, hit_rate):
    """The oracle drafter draws each slot's correctness by itself: acceptance of every slot is its hit rate."""
    target = tiny_target()
    ids = random_ids(6, seed=1)
    text = greedy(target, ids, max_new_tokens=180)[0]
    drafter = OracleDrafter.for_target(target, text, hit_rate=hit_rate, block_size=3)
    request = DecodingRequest(("unused",), max_new_tokens=160)
    prompts = {"gsm8k/0": ids[0].tolist()}
    found = decode_drafter(target, drafter, "oracle", prompts, request, 0.0, thresholds=(), folder=tmp_path, seed=0)
    (one,) = found.texts
    rates, reached = one.accepted / one.reached, one.reached
    error = 3.5 * (hit_rate * (1 - hit_rate) / reached).sqrt()
    assert ((rates - hit_rate).abs() < error).all() and reached[0] > 45
    expected = 1 + hit_rate + hit_rate**2 + hit_rate**3
    assert one.tau == pytest.approx(expected, abs=0.4)


def test_an_interrupted_evaluation_goes_on(target, tmp_path, monkeypatch):
    drafter, decode = near_drafter(target), proposals._decode
    _, whole = decoded(target, drafter, tmp_path / "whole")
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decode(*args)

    monkeypatch.setattr(proposals, "_decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoded(target, drafter, tmp_path / "cut")
    _, again = decoded(target, drafter, tmp_path / "cut")
    assert len(calls) == 3, "one batch had been kept"
    assert [dataclasses.asdict(one) for one in again.rounds] == [dataclasses.asdict(one) for one in whole.rounds]


def test_a_drafter_without_confidences_has_no_thresholds(target, tmp_path):
    drafter = near_drafter(target, enable_confidence_head=False, confidence_head_with_markov=False)
    _, found = decoded(target, drafter, tmp_path)
    assert found.plan == CutPlan(4) and found.reliability(seed=0) is None
    assert all(one.confidence is None for one in found.texts)
    _, sure = decoded(target, near_drafter(target), tmp_path / "sure")
    slots = sure.reliability(seed=0)
    assert [slot.slot for slot in slots] == [1, 2, 3, 4] and slots[0].before == slots[0].after


# -- prompts ------------------------------------------------------------------------------------------------------


def test_prompts_of_every_layout_get_a_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    lines = [{"prompt": "w1 w2"}, {"id": "x", "turns": ["w3", "w4"]}, {"id": "other/7", "messages": chat("w5")}]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    saved = datasets.Dataset.from_list([{"question": f"w{i}"} for i in range(3)])
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": saved}).save_to_disk(tmp_path / "splits")
    sources = tuple(str(tmp_path / name) for name in ("own.jsonl", "saved", "splits"))
    found = load_eval_prompts(DecodingRequest(sources, split="test", num_prompts=2))
    assert [one.id for one in found] == ["own/1", "own/x", "saved/1", "saved/2", "splits/1", "splits/2"]
    assert [one.messages[0]["content"] for one in found] == ["w1 w2", "w3", "w1", "w2", "w1", "w2"][:2] + [
        "w0",
        "w1",
        "w0",
        "w1",
    ]
    every = load_eval_prompts(DecodingRequest(sources[:1]))
    assert every[-1].id == "other/7" and every[-1].messages[0]["content"] == "w5"
    with pytest.raises(Exception, match="has no split 'train', only test"):
        load_eval_prompts(DecodingRequest(sources[2:]))
    (tmp_path / "more.jsonl").write_text(json.dumps({"id": "own/x", "prompt": "w9"}) + "\n")
    with pytest.raises(ComparisonError, match="two prompts have the id 'own/x'"):
        load_eval_prompts(DecodingRequest((sources[0], str(tmp_path / "more.jsonl"))))


def chat(text):
    return [{"role": "user", "content": text}]


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("eval")
    target = near_target()
    target.save_pretrained(root / "target")
    save_tokenizer(root / "target")
    for layers in (1, 2):
        near_drafter(target, num_hidden_layers=layers, seed=layers).save_pretrained(root / f"deep{layers}")
    calibrated = near_drafter(target, markov_rank=32)
    entry = {"temperatures": [2.0] * 4, "platt": None, "num_proposals": 9, "ece_before": 0.1, "ece_after": 0.1}
    greedy_law = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    calibrated.config.calibration = {"greedy": entry | {"settings": greedy_law}}
    calibrated.save_pretrained(root / "calibrated")
    sets = ("gsm8k", "mbpp", "mt-bench")
    lines = [{"id": f"{sets[i % 3]}/{i}", "prompt": f"w{i} w{i + 3} w{i + 5}"} for i in range(1, 13)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (root / "texts.jsonl").open("w") as file:
        for i, line in enumerate(lines):
            ids = greedy(target, random_ids(6, seed=i), max_new_tokens=14)[0].tolist()
            row = {"id": line["id"], "prompt_ids": ids[:6], "response_ids": ids[6:], "temperature": float(i % 2)}
            file.write(json.dumps(row) + "\n")
    return root


def run(root, *arguments):
    basics = ["eval", "--target", root / "target", "--dtype", "float32", "--device", "cpu"]
    done = typer.testing.CliRunner().invoke(dspark_cli.app, [*map(str, basics), *map(str, arguments)])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def fewer_resamples():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark_hf.evaluation.intervals.NUM_RESAMPLES", 100)
        patch.setattr("dspark_hf.evaluation.calibration_quality.NUM_RESAMPLES", 50)
        patch.setattr("dspark_hf.evaluation.paired.NUM_SWAPS", 100)
        floor = functools.partial(calibration_quality.calibrated_error_floor, num_draws=10)
        patch.setattr(calibration_quality, "calibrated_error_floor", floor)
        yield


def three(root):
    return [
        part
        for name in ("shallow=deep1", "deep=deep2", "calibrated=calibrated")
        for part in ("--drafter", f"{name.split('=')[0]}={root / name.split('=')[1]}")
    ]


def test_prompts_are_decoded_with_every_drafter(root, tmp_path, fewer_resamples):
    outputs = ["--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md"]
    prompts = ["--prompts", root / "prompts.jsonl", "--max-new-tokens", 12, "--temperature", 0, "--temperature", 1]
    code, output = run(root, *three(root), *prompts, *outputs, "--rounds", tmp_path / "rounds")
    assert code == 0, output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["kind"] == "evaluation" and report["method"] == "decoding"
    assert report["num_texts"] == {"0": 12, "1": 12} and len(report["texts"]) == 3 * 2 * 12
    assert {(one["drafter"], one["temperature"]) for one in report["scores"]} == {
        (name, t) for name in ("shallow", "deep", "calibrated") for t in (0.0, 1.0)
    }
    groups = report["scores"][0]["groups"]
    assert set(groups) == {"all", "math", "code", "chat"} and groups["math"]["data_sets"] == ["gsm8k"]
    lengths = groups["all"]["lengths"]
    assert [one["value"] for one in lengths] == [1, 2, 3, 4]
    assert lengths[-1]["tau"] == report["scores"][0]["tau"]["all"]
    assert all(a["tau"]["value"] <= b["tau"]["value"] for a, b in zip(lengths, lengths[1:], strict=False))
    assert len(groups["all"]["thresholds"]) == 10 and groups["all"]["calibrated_thresholds"] == []
    calibrated = next(one for one in report["scores"] if (one["drafter"], one["temperature"]) == ("calibrated", 0.0))
    assert len(calibrated["groups"]["all"]["calibrated_thresholds"]) == 10
    assert {one["group"] for one in report["differences"]} == {"all", "math", "code", "chat", "mean of data sets"}
    assert all(0 < one["p_value"] <= 1 for one in report["differences"])
    assert [one["drafter"] for one in report["depths"]] == ["shallow", "deep", "calibrated"] * 2
    assert report["depths"][0]["gains"] == []
    assert all(report["depths"][i]["gains"][0]["baseline"] == "shallow" for i in (1, 2))
    text = (tmp_path / "r.md").read_text()
    assert "calibrated, greedy, all: by threshold on the calibrated confidence" in text
    assert len(list((tmp_path / "rounds").iterdir())) == 6
    again = [*three(root), *prompts, "--json", tmp_path / "again.json", "--rounds", tmp_path / "rounds"]
    assert run(root, *again)[0] == 0  # from the rounds that are kept
    assert json.loads((tmp_path / "again.json").read_text())["scores"] == report["scores"]
    code, output = run(root, *again, "--max-new-tokens", 10)
    assert code == 2 and "max_new_tokens 12, now 10" in output


def test_figures_are_drawn_beside_the_papers(root, tmp_path, fewer_resamples):
    pytest.importorskip("matplotlib")
    rows = [json.loads(line) for line in (root / "prompts.jsonl").read_text().splitlines()]
    math = [json.dumps(row) for row in rows if row["id"].startswith("gsm8k")]
    (tmp_path / "math.jsonl").write_text("\n".join(math))
    outputs = ["--json", tmp_path / "r.json", "--markdown", tmp_path / "r.md", "--figures", tmp_path / "figures"]
    prompts = ["--prompts", tmp_path / "math.jsonl", "--max-new-tokens", 12, "--threshold", 0.3, "--threshold", 0.6]
    drafters = [*three(root)[:2], *three(root)[4:]]
    code, output = run(root, *drafters, *prompts, *outputs)
    assert code == 0, output
    report = json.loads((tmp_path / "r.json").read_text())
    assert set(report["reliability"]) == {"shallow", "calibrated"}
    assert set(report["reliability"]["calibrated"]) == {"greedy"}
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {
        "figure2-acceptance-by-slot-greedy.png",
        "figure3-tau-by-depth-greedy.png",
        "figure4-tau-by-length-greedy.png",
        *(f"figure5-thresholds-{name}-greedy.png" for name in ("shallow", "calibrated")),
        *(f"figure6-reliability-{name}.png" for name in ("shallow", "calibrated")),
    }
    text = (tmp_path / "r.md").read_text()
    assert all(f"(<figures/{name}>)" in text for name in names)


def test_a_card_shows_what_decoding_measured(root, tmp_path, fewer_resamples):
    prompts = ["--prompts", root / "prompts.jsonl", "--max-new-tokens", 8]
    code, output = run(root, "--drafter", root / "deep1", *prompts, "--json", tmp_path / "found.json")
    assert code == 0, output
    shown = dspark_card(root / "deep1", tmp_path / "found.json")
    assert (root / "deep1" / "reports" / "evaluation.json").stat().st_size < 20_000  # without the longer tables
    tau = json.loads((tmp_path / "found.json").read_text())["scores"][0]["tau"]["gsm8k"]
    assert f"{tau['value']:.2f} ({tau['low']:.2f} to {tau['high']:.2f})" in shown and "at most 8 new tokens" in shown


def dspark_card(folder, report):
    done = typer.testing.CliRunner().invoke(dspark_cli.app, ["card", str(folder), "--report", str(report)])
    assert done.exit_code == 0, done.output
    return (folder / "README.md").read_text()


def test_texts_are_replayed_under_every_cut(root, tmp_path, fewer_resamples):
    arguments = [*three(root), "--texts", root / "texts.jsonl", "--json", tmp_path / "r.json", "--threshold", 0.5]
    code, output = run(root, *arguments, "--markdown", tmp_path / "r.md")
    assert code == 0, output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["method"] == "replay" and report["settings"] is None and report["reliability"] == {}
    for score in report["scores"]:
        group = score["groups"]["all"]
        assert group["lengths"][-1]["tau"] == pytest.approx(score["tau"]["all"])  # summed in another order
        assert [one["value"] for one in group["thresholds"]] == [0.5]
        assert [slot["conditional_acceptance"]["value"] for slot in group["slots"]] == pytest.approx(
            score["conditional_acceptance"]
        )
        auc = [slot["confidence_auc"]["value"] for slot in group["slots"]]
        assert auc == pytest.approx(score["confidence_auc"], nan_ok=True)
    assert "walked again with shorter drafts" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either texts of the target (--texts)"),
        (["--texts", "t.jsonl", "--prompts", "p.jsonl"], "got both"),
        (["--texts", "t.jsonl", "--temperature", 1], "temperatures is for prompts that are decoded"),
        (["--texts", "no.jsonl"], "does not exist"),
        (["--prompts", "no.jsonl"], "does not exist"),
        (["--prompts", "p.jsonl", "--temperature", -1], "temperatures must be different numbers >= 0"),
        (["--prompts", "p.jsonl", "--top-p", 0.9], "top_p must be left out where every temperature is 0"),
        (["--prompts", "p.jsonl", "--max-new-tokens", 1], "max_new_tokens must be >= 2"),
        (["--prompts", "p.jsonl", "--batch-size", 0], "batch_size must be >= 1"),
        (["--texts", "t.jsonl", "--threshold", 2], "thresholds must be different probabilities"),
        (["--texts", "t.jsonl", "--drafter", "a=x", "--drafter", "a=y"], "names of drafters must be different"),
        (["--texts", "t.jsonl", "--markdown", "no/such/folder.md"], "its folder does not exist"),
    ],
)
def test_what_cannot_be_evaluated_is_said_at_once(root, monkeypatch, arguments, message):
    def too_early(*args, **kwargs):
        raise AssertionError("nothing is loaded before the arguments are checked")

    monkeypatch.setattr(evaluate, "load_target", too_early)
    code, output = run(root, *arguments)
    assert code == 2 and message in " ".join(output.split()), output


def test_only_drafters_of_blocks_are_replayed(root, monkeypatch):
    other = SimpleNamespace(config=SimpleNamespace(model_type="other"))
    load = evaluate.load_drafter
    monkeypatch.setattr(
        evaluate, "load_drafter", lambda *args, **kwargs: dataclasses.replace(load(*args, **kwargs), model=other)
    )
    code, output = run(root, "--texts", root / "texts.jsonl", "--drafter", root / "deep1")
    assert code == 2 and "is of kind 'other', whose rounds cannot be replayed on texts; decode prompts" in output


def test_names_stand_before_sources(tmp_path):
    assert DrafterSource.parse("a b=org/x") == DrafterSource("org/x", "a b")
    assert DrafterSource.parse("org/x") == DrafterSource("org/x")
    assert DrafterSource.parse("./x=y") == DrafterSource("./x=y")
    folder = tmp_path / "lr=0.1"
    folder.mkdir()
    assert DrafterSource.parse(str(folder)).name is None
    assert EvaluationRequest("t", texts=(Path("x"),)).drafters == (DrafterSource(None),)


def test_help_needs_no_torch():
    code = (
        "import sys, typer.testing, dspark_cli\n"
        "done = typer.testing.CliRunner().invoke(dspark_cli.app, ['eval', '--help'])\n"
        "assert done.exit_code == 0 and '--prompts' in done.stdout, done.output\n"
        "assert not {'torch', 'transformers', 'dspark_hf', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"COLUMNS": "200", "PYTHONPATH": ":".join(sys.path)})


# -- the real model -----------------------------------------------------------------------------------------------


@pytest.mark.real_model
def test_both_ways_agree_about_the_bundled_drafter(tmp_path):
    """Greedy, in float32: decoding and replaying the same texts give the same rounds."""
    from dspark_hf import zoo
    from dspark_hf.prompts import encode_prompt, quickstart_prompts

    name = "smollm2-135m-instruct"
    target, tokenizer = zoo.load_target(name, torch.float32), zoo.load_tokenizer(name)
    drafter = zoo.load_drafter(name, torch.float32)
    prompts = {f"own/{p.id}": encode_prompt(tokenizer, p)[0].tolist() for p in quickstart_prompts()[:3]}
    request = DecodingRequest(("unused",), max_new_tokens=32, batch_size=1)
    found = decode_drafter(target, drafter, "b", prompts, request, 0.0, thresholds=(0.5,), folder=tmp_path, seed=0)
    texts = []
    for one, ids in prompts.items():
        call = {"attention_mask": torch.ones(1, len(ids), dtype=torch.long), "do_sample": False, "max_new_tokens": 32}
        texts.append(TargetText(one, target.generate(torch.tensor([ids]), **call)[0], len(ids), 0.0))
    texts = [text for text in texts if text.input_ids.shape[0] >= text.prompt_length + 2]
    own = SlotCalibration.of(drafter.config.calibration["greedy"])
    replayed = Replay(target, texts).run_all([drafter], plans=[CutPlan(drafter.config.block_size, (0.5,), own)])[0]
    assert found.plan.calibration is not None
    by_id = {one.id: one for one in found.texts}
    for one in replayed:
        assert by_id[one.id].num_tokens == one.num_tokens
        assert by_id[one.id].num_rounds == one.num_rounds
        assert by_id[one.id].tau == pytest.approx(one.tau)
    assert sum(one.num_tokens for one in replayed) / sum(one.num_rounds for one in replayed) > 1.3
