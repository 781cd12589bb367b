"""What a drafter costs beside its target: parameters, bytes, cache per token, and milliseconds of a draft.

Sizes follow from configs; no weight is loaded. The bundled drafter stands beside SmolLM2-135M-Instruct; for the shapes
of Qwen3 targets there is the recipe of arXiv 2607.05147 (5 layers, gamma 7, rank 256, five target layers, the whole
vocabulary) and the same with the draft vocabulary that `dspark train` gives a target of that size. Milliseconds come
from a profile that `dspark profile` wrote, of the pair that it measured.

    python scripts/drafter_overhead.py
    python scripts/drafter_overhead.py --profile profile.json --context 256
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from dspark_hf import DSparkConfig, DSparkDraftModel, ThroughputProfileError, zoo
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


def size_rows() -> list[list[str]]:
    """The table of sizes."""
    rows = []
    for name, (config, target) in pairs().items():
        found = overhead_of(config, target)
        share = found.parameters / found.target_parameters
        megabytes = found.parameters * BYTES_PER_NUMBER / 1e6
        rows.append(
            [
                name,
                f"{found.parameters / 1e6:,.1f}",
                " / ".join(f"{size / 1e6:,.1f}" for size in found.parts.values()),
                f"{megabytes:,.0f}",
                f"{share:.1%}",
                f"{found.cache_bytes / 1024:g} / {found.target_cache_bytes / 1024:g}",
                f"{found.cache_bytes / found.target_cache_bytes:.1%}",
            ]
        )
    return rows


def time_rows(profile: ThroughputProfile, context: int) -> list[list[str]]:
    """Milliseconds of the parts of a round that verifies whole blocks, by rows."""
    width, rows = profile.grid.tokens_per_row[-1], []
    for num_rows in profile.grid.num_rows:
        draft_s = profile.draft_s(num_rows, context)
        step_s = profile.step_s(num_rows, num_rows * width, context)
        rest_s = profile.overhead_s(num_rows)
        times = [draft_s, step_s, rest_s, profile.plain_step_s(num_rows, context)]
        share = draft_s / (draft_s + step_s + rest_s)
        rows.append([str(num_rows), *(f"{1e3 * seconds:.1f}" for seconds in times), f"{share:.0%}"])
    return rows


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="written by `dspark profile`")
    parser.add_argument("--context", type=int, default=256, help="tokens before the anchor, for milliseconds")
    arguments = parser.parse_args()
    head = ["target, drafter", "M parameters", "layers / projection / sequential / confidence, M", "MB in bfloat16"]
    print(markdown([*head, "of the target", "KiB a token, drafter / target", "share"], size_rows()))
    if arguments.profile is None:
        return
    try:
        profile = load_profile(arguments.profile)
    except (ThroughputProfileError, OSError) as error:
        parser.error(str(error))
    print(
        f"\n{profile.target}, {profile.fingerprint.device}, {profile.fingerprint.dtype}, context {arguments.context}:"
    )
    head = ["rows", "draft ms", "step over whole blocks, ms", "the rest, ms", "plain step, ms", "draft of the round"]
    print(markdown(head, time_rows(profile, arguments.context)))


if __name__ == "__main__":
    main()
