"""A tiny drafter's folder with reports of every kind, as the commands' own classes write them."""

from dataclasses import asdict
from pathlib import Path

from tiny import tiny_drafter, tiny_target

from dspark_hf.checkpoints.digest import checkpoint_facts
from dspark_hf.evaluation.calibration import CalibrationReport, ModeReport
from dspark_hf.evaluation.calibration_quality import SlotQuality, SurvivalQuality
from dspark_hf.evaluation.drafters import DrafterScore, DraftersReport, TextResult
from dspark_hf.evaluation.identity import PairFacts
from dspark_hf.evaluation.intervals import Estimate
from dspark_hf.evaluation.provenance import Provenance
from dspark_hf.evaluation.report_files import keep_report
from dspark_hf.evaluation.results import ComparisonReport, DomainNumbers, SlotAcceptance, StageSeconds
from dspark_hf.evaluation.settings import ComparisonSettings
from dspark_hf.prompts import ChatTemplate
from dspark_hf.training.answer_facts import AnswerFacts, PromptSource

TEMPLATE = ChatTemplate("c" * 64, "off")
ENTRY = {"temperatures": [1.5, 1.25], "platt": None, "settings": {"repetition_penalty": 1.0}, "num_proposals": 900}


def make_drafter(folder: Path, *, seed: int = 1, **overrides) -> Path:
    """A drafter of two slots, saved."""
    drafter = tiny_drafter(tiny_target(), seed=seed, block_size=2, **overrides)
    drafter.save_pretrained(folder)
    return folder


def provenance(command: str = "dspark eval --texts eval.jsonl", **changes) -> Provenance:
    known = {
        "command": command,
        "date_utc": "2026-11-30T12:00:00+00:00",
        "versions": {"dspark_hf": "0.1.0", "torch": "2.13.0"},
        "git_commit": "a" * 40,
        "git_is_dirty": False,
        "device": "cpu: AMD EPYC 9B14",
        "num_threads": 2,
        "dtype": "bfloat16",
        "seed": 0,
        "n": 20,
    }
    return Provenance(**known | changes)


def pair(sha256: str, **changes) -> PairFacts:
    known = {
        "drafter_sha256": sha256,
        "target_hub_id": "org/tiny-target",
        "target_folder": None,
        "target_num_parameters": 1_000_000,
        "target_num_bytes": 2_000_000,
        "chat_template": TEMPLATE,
    }
    return PairFacts(**known | changes)


def estimate(value: float, n: int = 20) -> Estimate:
    return Estimate(value, value - 0.125, value + 0.125, n)


def evaluation_report(sha256: str, **changes) -> dict:
    scores = [
        DrafterScore(
            "mine",
            temperature,
            {"all": estimate(2.25, 40), "gsm8k": estimate(2.5), "mt-bench": estimate(2.0)},
            estimate(2.25, 40),
            [0.75, 0.5],
            [0.8125, 0.6875],
            [0.0625, 0.03125],
        )
        for temperature in (0.0, 1.0)
    ]
    known = {
        "target": "org/tiny-target",
        "provenance": provenance(),
        "num_texts": {"0": 40, "1": 40},
        "sources": [
            AnswerFacts(
                "eval.jsonl",
                "org/tiny-target",
                [0.0],
                128,
                [TEMPLATE],
                [PromptSource("x", False)],
                ["dspark train data x"],
            )
        ],
        "pairs": {"other": pair("f" * 64), "mine": pair(sha256)},
        "scores": [DrafterScore("other", 0.0, {"all": estimate(9.75)}, estimate(9.75), [], [], []), *scores],
        "differences": [],
        "texts": [TextResult("mine", 0.0, "gsm8k/1", 100, 40.0)],
    }
    return DraftersReport(**known | changes).to_dict()


def speed_report(sha256: str, **changes) -> dict:
    known = {
        "target": "org/tiny-target",
        "drafter": "mine",
        "drafter_kind": "given",
        "settings": ComparisonSettings(),
        "policy": "full",
        "num_draft_tokens": 2,
        "num_planned": 20,
        "plain_num_new_tokens": 640,
        "plain_latency_s": 20.0,
        "plain_tokens_per_s": 32.0,
        "dspark_num_new_tokens": 640,
        "dspark_latency_s": 10.0,
        "dspark_tokens_per_s": 64.0,
        "dspark_num_target_forwards": 300,
        "speed_ratio": estimate(1.75),
        "tau": estimate(2.125),
        "target_forwards_saved_percent": estimate(50.0),
        "slots": (SlotAcceptance(1, 100, 75, 0.75),),
        "stages": (StageSeconds("draft", 1.5, 0.15), StageSeconds("verify", 6.0, 0.6)),
        "num_identical": 19,
        "domains": {"gsm8k": DomainNumbers(estimate(1.875, 10), estimate(2.25, 10))},
        "prompts": (),
        "provenance": provenance("dspark compare --prompts-file speed.jsonl"),
        "pair": pair(sha256),
    }
    return ComparisonReport(**known | changes).to_dict() | {"is_complete": True}


def calibration_report(sha256: str, mode: str = "greedy", **changes) -> dict:
    quality = SurvivalQuality(0.625, estimate(0.25), estimate(0.75), estimate(0.1875), ())
    slots = [SlotQuality(k, 1800, 0.5, quality, quality, estimate(0.0), 0.0078125, 0.01) for k in (1, 2)]
    known = {
        "num_fitted": 900,
        "num_held_out": 1800,
        "num_fitted_prompts": 90,
        "num_held_out_prompts": 180,
        "settings": ENTRY["settings"],
        "temperatures": ENTRY["temperatures"],
        "platt": None,
        "slots_left_as_they_are": [],
        "slots": slots,
        "mean_ece_before": 0.0625,
        "mean_ece_after": 0.03125,
        "mean_ece_floor": 0.015625,
        "slots_worse": [],
        "is_written": True,
    }
    mode_report = ModeReport(**known | changes)
    command = "dspark calibrate --prompts train.jsonl"
    report = CalibrationReport("org/tiny-target", "mine", "out", {mode: mode_report}, provenance(command), pair(sha256))
    return report.to_dict()


def training_report(sha256: str, **changes) -> dict:
    """As `training/outcome.py` writes it; the training command's own test renders a real one."""
    sources = [PromptSource("org/prompts:main", True), PromptSource("mine.jsonl", False)]
    data = AnswerFacts("answers.jsonl", "org/tiny-target", [0.0, 1.0], 256, [TEMPLATE], sources, None)
    known = {
        "kind": "training",
        "is_finished": True,
        "pair": asdict(pair(sha256)),
        "target": "org/tiny-target",
        "initial_drafter": None,
        "earlier_runs": [],
        "data": [asdict(data)],
        "num_sequences": 640,
        "num_steps": 1234,
        "num_anchors": 78_976,
        "spent_s": 5400.0,
        "settings": {"batch_size": 4, "learning_rate": 0.003, "decay_fraction": 0.25, "seed": 7},
        "provenance": asdict(provenance("dspark train --data answers.jsonl --output mine")),
        "history": [{"step": 1}],
    }
    return known | changes


def batches_report(sha256: str) -> dict:
    def row(size: int, way: str, mean: float) -> dict:
        ratios = {name: {"mean": mean, "half_width": 0.0625} for name in ("plain, dynamic", "plain, static")}
        return {"batch_size": size, "way": way, "tokens_per_s": 50.0, "ratios": ratios, "tau": 2.0, "seconds": [1.0]}

    ways = ("plain, dynamic", "plain, static", "full", "full, static")
    return {
        "kind": "batches",
        "target": "tiny",
        "settings": {"max_new_tokens": "48", "repetitions": "6"},
        "pair": asdict(pair(sha256)),
        "provenance": asdict(provenance("batch_speed.py --prompts speed32.jsonl")),
        "rows": [row(size, way, 1.25 + size / 8) for size in (1, 2) for way in ways],
    }


def whole_folder(folder: Path) -> Path:
    """A calibrated drafter with a report of every kind and two figures."""
    make_drafter(folder, calibration={"greedy": ENTRY | {"ece_before": 0.0625, "ece_after": 0.03125}})
    sha256 = checkpoint_facts(folder).sha256
    keep_report(folder, "evaluation", evaluation_report(sha256))
    keep_report(folder, "speed", speed_report(sha256))
    keep_report(folder, "batches", batches_report(sha256))
    keep_report(folder, "calibration-greedy", calibration_report(sha256)).write_bytes(PNG)
    keep_report(folder, "training", training_report(sha256)).write_bytes(PNG)
    return folder


PNG = b"\x89PNG\r\n\x1a\n and so on"
