"""Tokens per second of batches, with a drafter over without: plain batched generation on its dynamic cache, and ours.

Both run on the same padded batches in turns, greedily and without end tokens, so that both make the same number of
tokens. The interval is a bootstrap over batches.

    python scripts/batch_speed.py --prompts prompts.jsonl --batch-size 1 --batch-size 4
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from dspark_hf import DSparkDraftModel, record_speculation, zoo
from dspark_hf.evaluation.intervals import bootstrap
from dspark_hf.prompts import encode_prompt, load_prompts, quickstart_prompts
from dspark_hf.training.answering import pad_left

TARGET = "smollm2-135m-instruct"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="JSONL; by default those of `make quickstart`")
    parser.add_argument("--batch-size", type=int, action="append", help="may be repeated; by default 1, 2, 4, 8")
    parser.add_argument("--num-batches", type=int, default=8, help="of each size")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    target = zoo.load_target(TARGET, arguments.dtype)
    drafter = zoo.load_drafter(TARGET).to(target.dtype)
    tokenizer = zoo.load_tokenizer(TARGET)
    prompts = quickstart_prompts() if arguments.prompts is None else load_prompts(arguments.prompts)
    encoded = [encode_prompt(tokenizer, prompt)[0].tolist() for prompt in prompts]
    print("| batch | plain, tokens/s | DSpark, tokens/s | ratio | tau |\n|---|---|---|---|---|")
    for size in arguments.batch_size or (1, 2, 4, 8):
        batches = [
            [encoded[(start * size + row) % len(encoded)] for row in range(size)]
            for start in range(arguments.num_batches)
        ]
        print(_row(target, drafter, batches, arguments.max_new_tokens), flush=True)


def _row(target: Any, drafter: DSparkDraftModel, batches: list[list[list[int]]], max_new_tokens: int) -> str:
    """One line of the table: the same batches both ways, and in turns who goes first."""
    seconds: dict[str, list[float]] = {"plain": [], "dspark": []}
    common = {"do_sample": False, "max_new_tokens": max_new_tokens, "eos_token_id": None, "pad_token_id": 0}
    with record_speculation() as report:
        for i, batch in enumerate([batches[0], *batches]):  # the first warms up
            ids, mask = pad_left(batch, target.device)
            for way in ("plain", "dspark") if i % 2 else ("dspark", "plain"):
                extra = {"assistant_model": drafter} if way == "dspark" else {}
                start = time.perf_counter()
                target.generate(ids, attention_mask=mask, **common, **extra)
                if i:
                    seconds[way].append(time.perf_counter() - start)
    ratio = bootstrap(seconds, lambda sums: sums["plain"] / sums["dspark"], seed=0)
    num_tokens = len(batches) * len(batches[0]) * max_new_tokens
    speeds = [num_tokens / sum(seconds[way]) for way in ("plain", "dspark")]
    interval = f" ({ratio.low:.2f} to {ratio.high:.2f}, n = {ratio.n})" if ratio.low is not None else ""
    cells = [str(len(batches[0])), *(f"{speed:.1f}" for speed in speeds), f"{ratio.value:.2f}x{interval}"]
    return f"| {' | '.join(cells)} | {report.tau:.2f} |"


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
