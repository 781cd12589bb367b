"""What a drafter costs beside its target: parameters, bytes, cache per token, and milliseconds of a draft.

Sizes follow from configs; no weight is loaded. The bundled drafter stands beside SmolLM2-135M-Instruct; for the shapes
of Qwen3 targets there is the recipe of arXiv 2607.05147 (5 layers, gamma 7, rank 256, five target layers, the whole
vocabulary) and the same with the draft vocabulary that `dspark train` gives a target of that size. Milliseconds come
from a profile that `dspark profile` wrote, of the pair that it measured.

    python scripts/drafter_overhead.py
    python scripts/drafter_overhead.py --profile profile.json --context 256
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from dspark_hf import DSparkConfig, DSparkDraftModel, ThroughputProfileError, zoo
from dspark_hf.evaluation.provenance import check_can_write, collect_provenance, write_report
from dspark_hf.fitting.profile_store import load_profile
from dspark_hf.fitting.throughput import ThroughputProfile
from dspark_hf.hub.card_facts import cache_bytes_per_token

SMOLLM2 = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192,
)  # fmt: skip
_QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
QWEN3 = {
    "Qwen3-4B": Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        tie_word_embeddings=True, **_QWEN3,
    ),
    "Qwen3-8B": Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        tie_word_embeddings=False, **_QWEN3,
    ),
    "Qwen3-14B": Qwen3Config(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
        tie_word_embeddings=False, **_QWEN3,
    ),
}  # fmt: skip
BYTES_PER_NUMBER = 2  # bfloat16
TRAINED_VOCABULARY = 32768


@dataclass(frozen=True)
class Overhead:
    """Sizes of a drafter and of its target; parameters by part of the drafter."""

    parts: dict[str, int]
    target_parameters: int
    cache_bytes: int
    target_cache_bytes: int

    @property
    def parameters(self) -> int:
        """Of the drafter; what it borrows from the target is not counted."""
        return sum(self.parts.values())


def overhead_of(config: DSparkConfig, target: PreTrainedConfig) -> Overhead:
    """From configs alone; bytes of a token's keys and values in 16-bit floats."""
    with torch.device("meta"):
        drafter, model = DSparkDraftModel(config), AutoModelForCausalLM.from_config(target)
    parts = {"layers": 0, "context projection and norms": 0, "sequential head": 0, "confidence head": 0}
    for name, parameter in drafter.named_parameters():
        parts[_part_of(name)] += parameter.numel()
    cache = 2 * target.num_hidden_layers * target.num_key_value_heads * target.head_dim * BYTES_PER_NUMBER
    return Overhead(parts, _num_parameters(model), cache_bytes_per_token(config), cache)


def _part_of(name: str) -> str:
    starts = {"layers.": "layers", "markov_head.": "sequential head", "confidence_head.": "confidence head"}
    return next((part for start, part in starts.items() if name.startswith(start)), "context projection and norms")


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())  # tied ones once


def pairs() -> dict[str, tuple[DSparkConfig, PreTrainedConfig]]:
    """Name, drafter and target of each row of the table."""
    bundled = DSparkConfig.from_pretrained(zoo.BUNDLED_ROOT / "smollm2-135m-instruct")
    found = {"SmolLM2-135M, the bundled drafter": (bundled, SMOLLM2)}
    for name, target in QWEN3.items():
        found[f"{name}, the paper's recipe"] = (DSparkConfig.from_target(target), target)
        reduced = DSparkConfig.from_target(target, draft_vocab_size=TRAINED_VOCABULARY)
        found[f"{name}, {TRAINED_VOCABULARY:,} draft tokens"] = (reduced, target)
    return found


def size_table(content: dict[str, Any]) -> str:
    """A report's sizes as a table."""
    head = ["target, drafter", "M parameters", "layers / projection / sequential / confidence, M", "MB in bfloat16"]
    rows = [[*head, "of the target", "KiB a token, drafter / target", "share"]]
    for name, fields in content["sizes"].items():
        found = Overhead(**fields)
        rows.append(
            [
                name,
                f"{found.parameters / 1e6:,.1f}",
                " / ".join(f"{size / 1e6:,.1f}" for size in found.parts.values()),
                f"{found.parameters * BYTES_PER_NUMBER / 1e6:,.0f}",
                f"{found.parameters / found.target_parameters:.1%}",
                f"{found.cache_bytes / 1024:g} / {found.target_cache_bytes / 1024:g}",
                f"{found.cache_bytes / found.target_cache_bytes:.1%}",
            ]
        )
    return table(rows)


def time_table(profile: ThroughputProfile, context: int) -> str:
    """Milliseconds of the parts of a round that verifies whole blocks, by rows."""
    width = profile.grid.tokens_per_row[-1]
    rows = [["rows", "draft, ms", "step over whole blocks, ms", "the rest, ms", "draft of the round", "plain step, ms"]]
    for num_rows in profile.grid.num_rows:
        draft_s = profile.draft_s(num_rows, context)
        step_s = profile.step_s(num_rows, num_rows * width, context)
        rest_s = profile.overhead_s(num_rows)
        share = draft_s / (draft_s + step_s + rest_s)
        times = [f"{1e3 * seconds:.1f}" for seconds in (draft_s, step_s, rest_s)]
        rows.append([str(num_rows), *times, f"{share:.0%}", f"{1e3 * profile.plain_step_s(num_rows, context):.1f}"])
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown of a head and rows."""
    head, *others = rows
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *others))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="written by `dspark profile`")
    parser.add_argument("--context", type=int, default=256, help="tokens before the anchor, for milliseconds")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.json is not None:
            check_can_write(arguments.json)
        profile = None if arguments.profile is None else load_profile(arguments.profile)
    except (ThroughputProfileError, OSError) as error:
        parser.error(str(error))
    sizes = {name: asdict(overhead_of(*pair)) for name, pair in pairs().items()}
    provenance = collect_provenance(torch.device("cpu"), torch.bfloat16, seed=0, n=len(sizes))
    content = {"kind": "drafter_overhead", "sizes": sizes, "provenance": asdict(provenance)}
    if arguments.json is not None:
        write_report(arguments.json, content)
    print(size_table(content))
    if profile is not None:
        made_on = profile.fingerprint
        print(f"\n{profile.target}, {made_on.device}, {made_on.dtype}, context {arguments.context}:")
        print(time_table(profile, arguments.context))


if __name__ == "__main__":
    main()
