"""Train the drafters that are compared with each other: equal data, seed, steps and sequences, one after the other.

Two baselines (MTP, Eagle3), DFlash (no sequential head), and DSpark with each of its heads. They share the features of
the target on disk; each goes into a folder of its own below the output, where an interrupted run goes on and a finished
one is left as it is. `baselines.json` and `baselines.md` there say what each cost and came to.

    python scripts/train_baselines.py --data answers/                    # all six, 2,000 steps each
    python scripts/train_baselines.py --data answers/ --only mtp eagle3  # some of them
    python scripts/train_baselines.py --data answers/ --smoke            # a few tiny steps, under a minute
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from dspark_hf import TrainingRequest, train_drafter, zoo
from dspark_hf.errors import DSparkError
from dspark_hf.evaluation.provenance import command_line, write_report
from dspark_hf.evaluation.report_files import REPORTS_FOLDER
from dspark_hf.training.records import data_digest, data_files, load_sequences, read_rows

ROOT = Path(__file__).resolve().parents[1]
# Two passes over 4,000 answers. Six drafters of SmolLM2-135M take about 5 core-hours then.
DEFAULT_STEPS = 2000
# gamma 5, two layers, rank 128 and 8,192 draft tokens are what `dspark train` takes for so small a target on a CPU;
# they are written out so that a GPU trains the same drafters.
_BLOCKS = {"block_size": 5, "num_hidden_layers": 2, "markov_rank": 128, "draft_vocab_size": 8192}
DRAFTERS: dict[str, dict[str, Any]] = {
    "dspark-vanilla": _BLOCKS,
    "dspark-gated": _BLOCKS | {"markov_head_type": "gated"},
    "dspark-rnn": _BLOCKS | {"markov_head_type": "rnn"},
    "dflash": _BLOCKS | {"markov_rank": 0},
    "eagle3": {"drafter_type": "eagle3", "block_size": 5, "draft_vocab_size": 8192},
    "mtp": {"drafter_type": "mtp", "draft_vocab_size": 8192},
}
_SMOKE: dict[str, Any] = {"max_steps": 3, "batch_size": 2, "max_anchors": 8, "max_length": 96}
_SMOKE |= {"held_out_fraction": 0.1, "num_decode_prompts": 0}
_SMOKE_ANSWERS, _SMOKE_PROMPT_TOKENS = 16, 64
# Parts of the run over which the tables give the mean tau, and the share of it that smooths the figure.
_PARTS, _SMOOTHED_SHARE = 4, 0.05


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    try:
        reports = _train_all(arguments)
    except (DSparkError, OSError) as error:
        print(f"train_baselines: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    if reports is None:
        return 130
    _summarise(arguments, reports)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--data", nargs="+", required=True, help="answers of the target: files or folders")
    parser.add_argument("--output", type=Path, default=ROOT / "baselines", help="folder of the drafters' folders")
    parser.add_argument("--target", default="smollm2-135m-instruct", help="folder, Hub id or zoo name")
    parser.add_argument("--only", nargs="+", choices=DRAFTERS, default=list(DRAFTERS), help="default: all")
    parser.add_argument("--max-steps", type=int, default=DEFAULT_STEPS, help="of each drafter (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per step (default: %(default)s)")
    parser.add_argument("--max-anchors", type=int, default=64, help="blocks per sequence (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32 (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and anchors")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps on a few answers")
    return parser.parse_args(argv)


def _train_all(arguments: argparse.Namespace) -> dict[str, dict[str, Any]] | None:
    """Reports of the runs by name; None: somebody interrupted."""
    requests = _requests(arguments)
    data_sha256 = _data_sha256(next(iter(requests.values())))
    for name in arguments.only:
        request = requests[name]
        if _is_done(request, data_sha256):
            print(f"== {name}: done before, in {request.output}")
            continue
        print(f"== {name}", flush=True)
        if not train_drafter(request, lambda line: print(line, flush=True)).is_finished:
            return None
    found = {name: _report(request) for name, request in requests.items()}
    return {name: report for name, report in found.items() if report is not None}


def _requests(arguments: argparse.Namespace) -> dict[str, TrainingRequest]:
    output: Path = arguments.output
    common = TrainingRequest(
        target=arguments.target,
        data=tuple(arguments.data),
        output=output,
        max_steps=arguments.max_steps,
        batch_size=arguments.batch_size,
        max_anchors=arguments.max_anchors,
        num_evaluations=1,
        feature_cache=output / "features",
        dtype=arguments.dtype,
        device=arguments.device,
        seed=arguments.seed,
    )
    if arguments.smoke:
        common = replace(common, data=(str(_few_answers(common.data, output)),), **_SMOKE)
    return {name: replace(common, output=output / name, **shape) for name, shape in DRAFTERS.items()}


def _few_answers(data: tuple[str, ...], output: Path) -> Path:
    """A file of the first answers to short prompts."""
    rows = (row for file in data_files(list(data)) for row in read_rows(file))
    short = (row for row in rows if len(row.get("prompt_ids", ())) <= _SMOKE_PROMPT_TOKENS)
    output.mkdir(parents=True, exist_ok=True)
    path = output / "few-answers.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in islice(short, _SMOKE_ANSWERS)), encoding="utf-8")
    return path


def _data_sha256(request: TrainingRequest) -> str:
    """Of the answers as a run reads them; its report tells the same."""
    config = AutoConfig.from_pretrained(zoo.resolve(request.target)).get_text_config(decoder=True)
    sequences = load_sequences(list(request.data), vocab_size=config.vocab_size, max_length=request.max_length)
    return data_digest(sequences, with_prompt_ids=True)


def _report(request: TrainingRequest) -> dict[str, Any] | None:
    path = request.output / REPORTS_FOLDER / "training.json"
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return report


def _is_done(request: TrainingRequest, data_sha256: str) -> bool:
    """Whether this very run has ended before."""
    report = _report(request)
    if report is None or not report.get("is_finished") or not report.get("metrics"):
        return False
    settings = json.loads(json.dumps(request.must_not_change()))
    settings.pop("learning_rate")  # resolved in the report
    same = all(report["settings"].get(name) == value for name, value in settings.items())
    return same and report["num_steps"] == request.max_steps and report.get("data_sha256") == data_sha256


def _summarise(arguments: argparse.Namespace, reports: dict[str, dict[str, Any]]) -> None:
    rows = {name: _row(arguments.output / name, report) for name, report in reports.items()}
    first = next(iter(reports.values()))
    provenance = first["provenance"] | {"command": command_line()}
    content = {"kind": "baselines", "provenance": provenance, "drafters": rows}
    write_report(arguments.output / "baselines.json", content)
    lines = [
        f"{first['num_sequences']} sequences to train on, all with DSpark's losses. Tau and acceptance of slot "
        "1 are expected ones of held-out blocks, teacher-forced, at temperature 1; `dspark eval` decodes.",
        "",
        "| drafter | steps | blocks | M parameters | gamma | device hours | expected tau | slot 1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        taus = " | ".join(_number(row[key], 3) for key in ("expected_tau", "acceptance_1"))
        lines.append(
            f"| {name} | {row['num_steps']} | {row['num_anchors']} | {row['num_parameters'] / 1e6:.1f} | "
            f"{row['block_size']} | {_number(row['device_hours'], 2)} | {taus} |"
        )
    text = "\n".join([*lines, *_growth_table(rows)]) + "\n"
    _draw_growth(rows, arguments.output / "baselines.png")
    (arguments.output / "baselines.md").write_text(text, encoding="utf-8")
    print(text)


def _growth_table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Lines: mean expected tau and acceptance of slot 1 of training batches by quarter of the run."""
    parts = [f"{100 * i // _PARTS} to {100 * (i + 1) // _PARTS} %" for i in range(_PARTS)]
    told = "Expected tau of the training batches, and acceptance of slot 1, means over parts of the run"
    lines = ["", f"{told}; all drafters see the same blocks at the same step:", ""]
    lines += [f"| drafter | {' | '.join(parts)} |", "|---|" + "---|" * _PARTS]
    for name, row in rows.items():
        taus, firsts = (_means_of_parts(row[key]) for key in ("tau_by_step", "acceptance_1_by_step"))
        cells = [f"{tau:.3f}; {first:.3f}" if tau else "" for tau, first in zip(taus, firsts, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _means_of_parts(values: list[float]) -> list[float]:
    """0 for a part without values."""
    cuts = [len(values) * i // _PARTS for i in range(_PARTS + 1)]
    return [sum(values[a:b]) / max(1, b - a) for a, b in pairwise(cuts)]


def _draw_growth(rows: dict[str, dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for name, row in rows.items():
        taus, steps = row["tau_by_step"], row["steps"]
        width = max(1, round(_SMOOTHED_SHARE * len(taus)))
        smooth = [sum(taus[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(taus))]
        axes.plot(steps, smooth, label=name)
    axes.set(xlabel="training step", ylabel="expected tau of training batches, temperature 1")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def _row(folder: Path, report: dict[str, Any]) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = ("num_steps", "num_anchors", "num_sequences", "spent_s", "device_hours", "data_sha256")
    metrics = report.get("metrics", {})
    history = [entry for entry in report.get("history", []) if "expected_tau" in entry]
    held_out = {key: metrics.get(f"eval_{key}") for key in ("expected_tau", "acceptance_1")}
    return {
        **{name: report.get(name) for name in names},
        "num_parameters": _num_parameters(folder),
        "block_size": config["block_size"],
        **held_out,
        "steps": [entry["step"] for entry in history],
        "tau_by_step": [round(entry["expected_tau"], 4) for entry in history],
        "acceptance_1_by_step": [round(entry["acceptance_1"], 4) for entry in history],
        "settings": report["settings"],
    }


def _num_parameters(folder: Path) -> int:
    from dspark_hf.checkpoints.digest import checkpoint_facts

    return checkpoint_facts(folder).num_parameters


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
