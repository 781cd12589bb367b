"""What a larger vocabulary costs a draft: milliseconds of its parts over V, beside operations and bytes.

Behind the backbone a block is drafted in two parts. The target's head makes the base logits of all slots in one product
(2 d V operations a slot). The serial loop then adds the sequential head's bias to a slot's logits (2 r V), processes
them and draws, slot by slot. The loop is timed as decoding runs it, greedily and sampled; its products are timed alone.
Weights and hidden states are random, points come in random order, a line is fitted through the medians. What counts is
CPU time of one thread, so that other work on the machine is not in it.

    python scripts/vocabulary_cost.py --json vocabulary-cost.json
    python scripts/vocabulary_cost.py --hidden-size 2560 --rank 256 --block-size 7
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drafter_overhead import table
from torch import nn
from tqdm.auto import tqdm
from transformers import LlamaConfig
from transformers.generation.logits_process import LogitsProcessorList

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.decoding.draft import draft_block
from dspark_hf.decoding.sampling import ScoreProcessor
from dspark_hf.evaluation.provenance import check_can_write, collect_provenance, write_report

VOCABULARIES = (8192, 16384, 32768, 49152, 98304, 151936)
HEAD_DIM = 64
PARTS = ("target head", "loop's products", "loop, greedy", "loop, sampled")
WARM_UPS = 2

Calls = dict[str, Callable[[], Any]]


@torch.no_grad()
def calls_of(vocab_size: int, arguments: argparse.Namespace) -> Calls:
    """What is timed at one vocabulary; everything random, in bfloat16 where a model would be."""
    heads = arguments.hidden_size // HEAD_DIM
    target = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=arguments.hidden_size,
        intermediate_size=HEAD_DIM,
        num_hidden_layers=8,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    config = DSparkConfig.from_target(
        target, num_hidden_layers=1, block_size=arguments.block_size, markov_rank=arguments.rank
    )
    drafter = DSparkDraftModel(config).to(torch.bfloat16).eval()
    head = nn.Linear(arguments.hidden_size, vocab_size, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(arguments.rows, arguments.block_size, arguments.hidden_size, dtype=torch.bfloat16)
    base_logits = head(hidden).float()
    prefix = torch.randint(vocab_size, (arguments.rows, 4))
    processor = ScoreProcessor(LogitsProcessorList())

    @torch.no_grad()
    def loop(*, do_sample: bool) -> None:
        draft_block(drafter, hidden, base_logits, prefix, processor, draft_ids=None, do_sample=do_sample)

    @torch.no_grad()
    def products() -> None:
        embedding = drafter.markov_head.embed(prefix[:, -1])
        for k in range(arguments.block_size):
            drafter.markov_head.step(embedding, hidden[:, k], None)

    def base() -> None:
        with torch.no_grad():
            head(hidden).float()

    return dict(zip(PARTS, (base, products, lambda: loop(do_sample=False), lambda: loop(do_sample=True)), strict=True))


def measure(arguments: argparse.Namespace) -> dict[str, dict[int, list[float]]]:
    """CPU seconds of every repeat, by part and vocabulary."""
    by_size = {size: calls_of(size, arguments) for size in arguments.vocab_size}
    samples: dict[str, dict[int, list[float]]] = {part: {size: [] for size in by_size} for part in PARTS}
    points = [(part, size) for part in PARTS for size in by_size]
    shuffler = random.Random(arguments.seed)
    for repeat in tqdm(range(-WARM_UPS, arguments.repeats), unit="repeat", disable=None):
        for part, size in shuffler.sample(points, len(points)):
            start_s = time.process_time()
            by_size[size][part]()
            if repeat >= 0:
                samples[part][size].append(time.process_time() - start_s)
    return samples


def line_through(sizes: list[int], seconds: list[float]) -> tuple[float, float, float]:
    """Seconds at V = 0, seconds for each token of the vocabulary, and the share of variance that the line explains."""
    slope, start = np.polyfit(sizes, seconds, 1)
    left = np.asarray(seconds) - (start + slope * np.asarray(sizes))
    spread = float(np.var(seconds))
    return float(start), float(slope), 1 - float(np.var(left)) / spread if spread else 1.0


def operations_and_bytes(vocab_size: int, arguments: argparse.Namespace) -> tuple[int, int]:
    """Of the products of a row's serial loop: operations, and bytes of `W_2` in bfloat16 that they read."""
    numbers = arguments.block_size * arguments.rank * vocab_size
    return 2 * numbers * arguments.rows, 2 * numbers


def report(samples: dict[str, dict[int, list[float]]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians, quartiles and lines, with provenance."""
    sizes = list(arguments.vocab_size)
    medians = {part: [float(np.median(samples[part][size])) for size in sizes] for part in PARTS}
    lines = {part: line_through(sizes, medians[part]) for part in PARTS}
    provenance = collect_provenance(torch.device("cpu"), torch.bfloat16, seed=arguments.seed, n=arguments.repeats)
    return {
        "kind": "vocabulary_cost",
        "settings": {name: getattr(arguments, name) for name in ("hidden_size", "rank", "block_size", "rows")},
        "vocab_sizes": sizes,
        "median_s": medians,
        "quartiles_s": {
            part: [[float(q) for q in np.quantile(samples[part][size], [0.25, 0.75])] for size in sizes]
            for part in PARTS
        },
        "lines": {part: dict(zip(("start_s", "s_per_token", "r_squared"), lines[part], strict=True)) for part in PARTS},
        "loop_operations": [operations_and_bytes(size, arguments)[0] for size in sizes],
        "loop_bytes": [operations_and_bytes(size, arguments)[1] for size in sizes],
        "provenance": asdict(provenance),
    }


def cost_table(content: dict[str, Any]) -> str:
    """The report as a table, and its lines."""
    rows = [["V", *(f"{part}, ms" for part in PARTS), "products of the sampled loop", "GFLOP/s", "GB/s"]]
    for i, size in enumerate(content["vocab_sizes"]):
        times = {part: content["median_s"][part][i] for part in PARTS}
        products_s = times["loop's products"]
        rows.append(
            [
                f"{size:,}",
                *(f"{1e3 * times[part]:.2f}" for part in PARTS),
                f"{products_s / times['loop, sampled']:.0%}",
                f"{content['loop_operations'][i] / products_s / 1e9:.1f}",
                f"{content['loop_bytes'][i] / products_s / 1e9:.1f}",
            ]
        )
    lines = [
        f"{part} {1e3 * line['start_s']:.2f} ms + {1e6 * line['s_per_token']:.3f} ms (R² {line['r_squared']:.3f})"
        for part, line in content["lines"].items()
    ]
    return f"{table(rows)}\n\nLines through these, the second number for 1,000 tokens: {'; '.join(lines)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, nargs="+", default=list(VOCABULARIES))
    parser.add_argument("--hidden-size", type=int, default=576, help=f"d, a multiple of {HEAD_DIM}")
    parser.add_argument("--rank", type=int, default=128, help="r of the sequential head")
    parser.add_argument("--block-size", type=int, default=5, help="gamma")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    numbers = [*arguments.vocab_size, arguments.rank, arguments.block_size, arguments.rows, arguments.repeats]
    if min(numbers) < 1 or len(set(arguments.vocab_size)) < 2 or arguments.hidden_size % HEAD_DIM:
        parser.error(
            "give two vocabularies or more, numbers of at least 1, and a hidden size that is a multiple of "
            f"{HEAD_DIM}, got --vocab-size {arguments.vocab_size} and --hidden-size {arguments.hidden_size}"
        )
    if arguments.json is not None:
        try:
            check_can_write(arguments.json)
        except OSError as error:
            parser.error(str(error))
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    content = report(measure(arguments), arguments)
    if arguments.json is not None:
        write_report(arguments.json, content)
    print(cost_table(content))


if __name__ == "__main__":
    main()
