"""Resident memory of a batch over many rounds, and its peak beside the sum of what a batch has to hold.

One batch of SmolLM2-135M-Instruct in bfloat16 runs rounds of one token (policy `threshold` at 1), so that there are as
many rounds as new tokens. Linux only: resident memory comes from /proc.

    python scripts/batch_memory.py --batch-size 8 --rounds 1000
"""

import argparse
import ctypes
import gc
import resource
from pathlib import Path
from typing import Any

from dspark_hf import zoo
from dspark_hf.decoding.batch import BatchRun
from dspark_hf.prompts import encode_prompt, quickstart_prompts
from dspark_hf.training.answering import pad_left

TARGET = "smollm2-135m-instruct"
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--warm-up-rounds", type=int, default=50, help="before the first look (default: %(default)s)")
    arguments = parser.parse_args()
    target = zoo.load_target(TARGET, "bfloat16")
    drafter = zoo.load_drafter(TARGET).to(target.dtype)
    tokenizer = zoo.load_tokenizer(TARGET)
    prompts = [encode_prompt(tokenizer, prompt)[0].tolist() for prompt in quickstart_prompts()]
    size = arguments.batch_size
    ids, mask = pad_left([prompts[i % len(prompts)] for i in range(size)], target.device)
    weights = sum(p.nbytes for model in (target, drafter) for p in {*model.parameters(), *model.buffers()})
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of loading is not a batch's
    first, last = arguments.warm_up_rounds, arguments.warm_up_rounds + arguments.rounds
    samples: dict[int, int] = {}
    middle = (first + last) // 2
    rounds = _sampled_rounds(samples, first, middle, last)
    target.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=last + 10,
        eos_token_id=None,
        pad_token_id=0,
        assistant_model=drafter,
        verification_policy="threshold",
        assistant_confidence_threshold=1.0,
    )
    print(f"rounds {len(rounds)}, rows {size}, prompt {ids.shape[1]} tokens, capacity {ids.shape[1] + last + 10}")
    halves = [(samples[end] - samples[start]) / MIB for start, end in ((first, middle), (middle, last))]
    print(f"grown by {halves[0]:.2f} MiB in the first half of {arguments.rounds} rounds, {halves[1]:.2f} in the second")
    parts = {"weights": weights, **_parts(target, drafter, size, ids.shape[1], ids.shape[1] + last + 10)}
    for name, num_bytes in parts.items():
        print(f"{name:>28} {num_bytes / MIB:8.1f} MiB")
    status = Path("/proc/self/status").read_text()
    peak = 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    print(f"{'sum':>28} {sum(parts.values()) / MIB:8.1f} MiB")
    print(f"{'peak of the process':>28} {peak / MIB:8.1f} MiB; {before / MIB:.1f} before the batch, libraries among it")


def _sampled_rounds(samples: dict[int, int], *when: int) -> list[int]:
    """Note resident memory after some of the rounds to come; the list counts them."""
    rounds: list[int] = []
    run_round = BatchRun._round

    def sampled(self: BatchRun) -> None:
        run_round(self)
        rounds.append(1)
        if len(rounds) in when:
            samples[len(rounds)] = _resident()

    BatchRun._round = sampled  # type: ignore[method-assign]
    return rounds


def _resident() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the allocator keeps back is not in use
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _parts(target: Any, drafter: Any, rows: int, prompt: int, capacity: int) -> dict[str, int]:
    """Bytes of what a batch holds at its largest, by the shapes; bfloat16, and float32 for logits."""
    config, ours = target.config, drafter.config
    kv = 2 * 2 * rows * (capacity + 1)
    width = 1 + ours.block_size
    return {
        "target's keys and values": kv * config.num_hidden_layers * config.num_key_value_heads * config.head_dim,
        "drafter's keys and values": kv * ours.num_hidden_layers * ours.num_key_value_heads * ours.head_dim,
        "a round's logits": rows * width * config.vocab_size * (2 + 4),
        "the prompts' widest layer": rows * prompt * (3 * config.intermediate_size + 2 * config.hidden_size) * 2,
        "the prompts' features": rows * prompt * len(ours.target_layer_ids) * config.hidden_size * 2,
    }


if __name__ == "__main__":
    main()
