"""How far calibration carries: to other domains, sampling settings and traffic, and with other kinds of maps.

Decodes prompts of several files, a domain each, under a few sampling settings with every draft verified, and keeps the
rounds in a folder, from which an interrupted run goes on. Everything else is computed from these rounds: calibration
error by domain and slot, error of maps under settings that they were not fitted for, a temperature against Platt and
isotonic maps at slot 1, and what a drift watch and a refit from past rounds make of changed traffic.

    python scripts/calibration_study.py --prompts eval --work rounds --json calibration-study.json
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from calibration_analysis import Rounds, by_domain, by_setting, by_shape, by_traffic

from dspark_hf import CalibrationError, zoo
from dspark_hf.decoding.calibrate import SlotCalibration
from dspark_hf.evaluation.proposals import RecordingSettings, record_to_file
from dspark_hf.evaluation.provenance import check_can_write, collect_provenance, write_report
from dspark_hf.prompts import encode_prompt, load_prompts

TARGET = "smollm2-135m-instruct"
# Temperature, top-p, top-k; the last is what the released code samples answers with for Qwen3-4B.
SETTINGS = {"greedy": (0.0, None, None), "T 1": (1.0, None, None), "T 0.7, top-p 0.8, top-k 20": (0.7, 0.8, 20)}
MAX_PROMPT_TOKENS = 512


def record(arguments: argparse.Namespace) -> tuple[Rounds, dict[str, SlotCalibration]]:
    """Rounds by setting and domain, and the drafter's own maps by mode."""
    torch.set_num_threads(arguments.threads)
    target, tokenizer = zoo.load_target(TARGET, "bfloat16"), zoo.load_tokenizer(TARGET)
    drafter = zoo.load_drafter(TARGET)
    rounds: Rounds = {name: {} for name in SETTINGS}
    for path in files_of(arguments.prompts):
        encoded = {one.id: tuple(encode_prompt(tokenizer, one)[0].tolist()) for one in load_prompts(path)}
        short = [name for name, ids in encoded.items() if len(ids) <= MAX_PROMPT_TOKENS][: arguments.num_prompts]
        for name, (temperature, top_p, top_k) in SETTINGS.items():
            settings = RecordingSettings(
                temperature, top_p, top_k, arguments.max_new_tokens, arguments.batch_size, arguments.seed
            )
            rounds[name][path.stem] = record_to_file(
                target,
                drafter,
                {key: encoded[key] for key in short},
                arguments.work / f"{path.stem}-{list(SETTINGS).index(name)}.jsonl",
                settings,
                num_proposals=len(short) * arguments.max_new_tokens,
                show_progress=True,
            )
    maps = {mode: SlotCalibration.of(entry) for mode, entry in drafter.config.calibration.items()}
    return rounds, maps


def files_of(sources: Sequence[Path]) -> list[Path]:
    """Files, and the JSONL files of folders.

    Raises:
        OSError: there is none, or two have one name.
    """
    files = [path for one in sources for path in (sorted(one.glob("*.jsonl")) if one.is_dir() else [one])]
    if not files or len({path.stem for path in files}) < len(files):
        raise OSError(f"--prompts must name JSONL files, each with a name of its own, got {list(map(str, files))}")
    return files


def study(rounds: Rounds, maps: Mapping[str, SlotCalibration], arguments: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    num_rounds = sum(len(part) for domains in rounds.values() for part in domains.values())
    return {
        "kind": "calibration_study",
        "target": TARGET,
        "max_new_tokens": arguments.max_new_tokens,
        "domains": by_domain(rounds, maps, arguments.seed),
        "settings": by_setting(rounds, maps, arguments.seed),
        "shapes": by_shape(rounds, arguments.seed),
        "traffic": [asdict(found) for found in by_traffic(rounds, arguments.seed)],
        "provenance": asdict(
            collect_provenance(torch.device("cpu"), torch.bfloat16, seed=arguments.seed, n=num_rounds)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts",
        type=Path,
        action="append",
        required=True,
        help="JSONL, or a folder of it; file names are domains",
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the rounds")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=20, help="of each domain")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        check_can_write(arguments.json)
        rounds, maps = record(arguments)
        write_report(arguments.json, study(rounds, maps, arguments))
    except (OSError, ValueError, CalibrationError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
