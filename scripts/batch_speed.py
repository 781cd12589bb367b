"""Tokens per second of batches, with a drafter over without, on the same batches in one interleaved run.

Plain batched generation runs on its dynamic and on its static cache, and the drafter under each policy, all greedily
and without end tokens, so that all make the same number of tokens. The ways advance side by side, one target forward a
turn, so that a drift of the machine's speed hits all alike. Ratios are of total seconds over all batches of a
repetition; the interval (95 %, Student) is over repetitions, so it says how well the machine was measured on these
prompts, not how other prompts would do; with one repetition there is none (null in the JSON). A batch larger than the
list of prompts repeats them, and so do further batches. The JSON holds the ratio of each way to each other, and the
seconds behind them.

    python scripts/batch_speed.py --prompts prompts.jsonl --batch-size 1 --batch-size 4 --policy full --json speed.json
"""

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student
from tqdm.auto import tqdm

from dspark_hf import record_speculation, zoo
from dspark_hf.evaluation.identity import pair_facts
from dspark_hf.evaluation.interleave import interleave, twin_of
from dspark_hf.evaluation.provenance import check_can_write, collect_provenance, write_report
from dspark_hf.prompts import encode_prompt, load_prompts, quickstart_prompts
from dspark_hf.training.answering import pad_left

TARGET = "smollm2-135m-instruct"
PLAIN = {"plain, dynamic": {}, "plain, static": {"cache_implementation": "static"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="JSONL; by default those of `make quickstart`")
    parser.add_argument("--batch-size", type=int, action="append", help="may be repeated; by default 1 to 32")
    parser.add_argument("--num-batches", type=int, default=2, help="of each size; of small sizes more, for 4 prompts")
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--policy", action="append", help="may be repeated; default: the drafter's own")
    parser.add_argument(
        "--fixed", type=int, action="append", default=[], help="verify so many drafts always; repeatable"
    )
    parser.add_argument("--layout", default="auto")
    parser.add_argument("--no-plain", action="store_true", help="compare policies and lengths only")
    parser.add_argument("--static", action="store_true", help="also the drafter with cache_implementation='static'")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.json is not None:
        check_can_write(arguments.json)
    target = zoo.load_target(TARGET, arguments.dtype)
    drafter = zoo.load_drafter(TARGET).to(target.dtype)
    tokenizer = zoo.load_tokenizer(TARGET)
    prompts = quickstart_prompts() if arguments.prompts is None else load_prompts(arguments.prompts)
    encoded = [encode_prompt(tokenizer, prompt)[0].tolist() for prompt in prompts]
    ways: dict[str, dict[str, Any]] = {} if arguments.no_plain else dict(PLAIN)
    for policy in arguments.policy or ("default",):
        named = None if policy == "default" else policy
        options = {"assistant_model": drafter, "verification_policy": named, "verification_layout": arguments.layout}
        ways[policy] = options
        if arguments.static:
            ways[f"{policy}, static"] = options | {"cache_implementation": "static"}
    for length in arguments.fixed:
        ways[f"fixed {length}"] = {
            "assistant_model": drafter,
            "verification_policy": "full",
            "num_assistant_tokens": length,
            "verification_layout": arguments.layout,
        }
    columns = ["batch", "way", "tokens/s", *(f"over {way}" for way in ways), "tau"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    rows = []
    for size in arguments.batch_size or (1, 2, 4, 8, 16, 32):
        num_batches = max(arguments.num_batches, 4 // size)
        chosen = [encoded[i % len(encoded)] for i in range(num_batches * size)]
        batches = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        rows += _measured(target, ways, batches, arguments)
        for row in rows[-len(ways) :]:
            print(_line(row), flush=True)
    if arguments.json is not None:
        content = {
            "kind": "batches",
            "target": TARGET,
            "settings": {key: str(value) for key, value in vars(arguments).items()},
            "pair": asdict(pair_facts(TARGET, target, tokenizer, zoo.bundled_drafter(TARGET))),
            "provenance": asdict(collect_provenance(target.device, target.dtype, seed=0, n=arguments.repetitions)),
            "rows": rows,
        }
        write_report(arguments.json, content)


def _measured(
    target: Any, ways: dict[str, dict[str, Any]], batches: list[list[list[int]]], arguments: Any
) -> list[dict]:
    """Seconds of every way for all batches, by repetition; one row of the table for each way."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    taus: dict[str, float] = {}
    size = len(batches[0])
    padded = [pad_left(batch, target.device) for batch in batches]
    twins = {way: twin_of(target) for way in ways}

    def runner(way: str) -> Callable[[Any], float]:
        def run(twin: Any) -> float:
            with record_speculation() as report:
                for ids, mask in padded:
                    twin.generate(
                        ids,
                        attention_mask=mask,
                        do_sample=False,
                        max_new_tokens=arguments.max_new_tokens,
                        eos_token_id=None,
                        pad_token_id=0,
                        **ways[way],
                    )
            return report.tau

        return run

    num_forwards = None
    names = list(ways)
    for repetition in tqdm(range(-1, arguments.repetitions), desc=f"batch {size}", leave=False):  # the first warms up
        random.Random(repetition).shuffle(names)
        turns = interleave(target, {way: runner(way) for way in names}, num_forwards, twins)
        num_forwards = {way: turns[way].num_forwards for way in names}
        for way in names if repetition >= 0 else ():
            seconds[way].append(turns[way].seconds)
            taus[way] = turns[way].result
    num_tokens = len(batches) * size * arguments.max_new_tokens
    return [
        {
            "batch_size": size,
            "way": way,
            "tokens_per_s": num_tokens * len(seconds[way]) / sum(seconds[way]),
            "ratios": {other: _interval(seconds[other], seconds[way]) for other in ways},
            "tau": taus[way],
            "num_forwards": num_forwards[way] if num_forwards else None,
            "seconds": seconds[way],
        }
        for way in ways
    ]


def _interval(over: list[float], under: list[float]) -> dict[str, float]:
    """Mean ratio of seconds over repetitions, and half the width of its 95 % interval."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    if len(ratios) < 2:
        return {"mean": ratios[0], "half_width": float("nan")}
    half = student.ppf(0.975, len(ratios) - 1) * statistics.stdev(ratios) / len(ratios) ** 0.5
    return {"mean": statistics.mean(ratios), "half_width": float(half)}


def _line(row: dict[str, Any]) -> str:
    ratios = [f"{r['mean']:.3f} ± {r['half_width']:.3f}" for r in row["ratios"].values()]
    cells = [row["batch_size"], row["way"], f"{row['tokens_per_s']:.1f}", *ratios, f"{row['tau']:.2f}"]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
