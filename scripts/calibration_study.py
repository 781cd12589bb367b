"""How far calibration carries: to other domains, sampling settings and traffic, and with other kinds of maps.

Computed from the rounds of acceptance traces, those that decoding with whole drafts visits: calibration error by domain
and slot, error of maps under settings that they were not fitted for, a temperature against Platt and isotonic maps at
slot 1, and what a drift watch and a refit from other rounds make of changed traffic. Prompts should be none that the
drafter was trained on.

    python scripts/calibration_study.py --traces traces-greedy.jsonl --traces traces-t1.jsonl \\
        --json calibration-study.json
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from calibration_analysis import Rounds, by_domain, by_setting, by_shape, by_traffic

from dspark_hf import CalibrationError, DSparkConfig, zoo
from dspark_hf.decoding.calibrate import SlotCalibration
from dspark_hf.evaluation.provenance import check_can_write, collect_provenance, write_report
from dspark_hf.evaluation.settings import ComparisonError
from dspark_hf.evaluation.traces import AcceptanceTraces, PromptTrace, load_traces
from dspark_hf.fitting.proposals import Proposals

DRAFTER = zoo.BUNDLED_ROOT / "smollm2-135m-instruct"
# As the paper groups its benchmarks; other data sets are a domain of their own.
DOMAINS = {
    "math": ("gsm8k", "math500", "aime24"),
    "code": ("humaneval", "mbpp", "lbpp"),
    "chat": ("mt-bench", "arena-hard-v2", "chatterbot"),
}


def domain_of(trace: PromptTrace) -> str:
    """Math, code, chat, or the data set."""
    return next((name for name, sets in DOMAINS.items() if trace.domain in sets), trace.domain)


def setting_of(traces: AcceptanceTraces) -> str:
    """What was decoded under."""
    return "greedy" if traces.mode == "greedy" else f"T {traces.source['law']['temperature']:g}"


def visited(trace: PromptTrace) -> list[int]:
    """Places of the rounds that decoding with whole drafts runs."""
    places, place = [], 0
    while place < len(trace):
        places.append(place)
        place = trace.step(place, trace.survival.shape[1]).place
    return places


def proposals_of(traces: Sequence[PromptTrace]) -> Proposals:
    """The rounds of some prompts."""
    found = [(number, trace, place) for number, trace in enumerate(traces) for place in visited(trace)]
    return Proposals.of(
        [trace.confidence_logits[place].tolist() for _, trace, place in found],
        [trace.survival.shape[1] for _, trace, _ in found],
        [int(trace.num_accepted[place]) for _, trace, place in found],
        [number for number, _, _ in found],
    )


def rounds_of(recordings: Sequence[AcceptanceTraces]) -> Rounds:
    """Rounds by setting and domain.

    Raises:
        ComparisonError: two recordings are of one setting.
    """
    rounds: Rounds = {}
    for traces in recordings:
        setting = setting_of(traces)
        if setting in rounds:
            raise ComparisonError(f"two files of traces are of setting {setting!r}; give one for each")
        by_name: dict[str, list[PromptTrace]] = {}
        for trace in traces.prompts:
            by_name.setdefault(domain_of(trace), []).append(trace)
        rounds[setting] = {name: proposals_of(found) for name, found in sorted(by_name.items())}
    return rounds


def study(
    rounds: Rounds, maps: Mapping[str, SlotCalibration], sources: Sequence[Mapping[str, Any]], seed: int
) -> dict[str, Any]:
    """The report."""
    num_rounds = sum(len(part) for domains in rounds.values() for part in domains.values())
    provenance = collect_provenance(torch.device("cpu"), torch.float32, seed=seed, n=num_rounds)
    return {
        "kind": "calibration_study",
        "sources": list(sources),
        "domains": by_domain(rounds, maps, seed),
        "settings": by_setting(rounds, maps, seed),
        "shapes": by_shape(rounds, seed),
        "traffic": [asdict(found) for found in by_traffic(rounds, seed)],
        "provenance": asdict(provenance),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, action="append", required=True, help="written by `dspark traces`")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        check_can_write(arguments.json)
        recordings = [load_traces(path) for path in arguments.traces]
        entries = DSparkConfig.from_pretrained(DRAFTER).calibration
        maps = {mode: SlotCalibration.of(entry) for mode, entry in entries.items()}
        content = study(rounds_of(recordings), maps, [traces.source for traces in recordings], arguments.seed)
        write_report(arguments.json, content)
    except (OSError, ComparisonError, CalibrationError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
