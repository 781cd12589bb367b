"""Tiny random targets, drafters and stand-in drafters, built from configs in code."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark_hf import AutoregressiveConfig, AutoregressiveDraftModel, DSparkConfig, DSparkDraftModel

VOCAB = 61


def tiny_target(kind: str = "qwen3", *, vocab_size: int = VOCAB, num_layers: int = 4, seed: int = 0) -> PreTrainedModel:
    """A random float32 target without special ids; wide initial weights, so that its choices are clear-cut."""
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(seed)
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def tiny_drafter(target: PreTrainedModel, *, seed: int = 1, **overrides) -> DSparkDraftModel:
    """A random drafter for `target`; wide initial weights, so that its laws are far from uniform."""
    settings = {
        "num_hidden_layers": 2,
        "block_size": 4,
        "markov_rank": 8,
        "initializer_range": 0.3,
    } | overrides
    torch.manual_seed(seed)
    return DSparkDraftModel(DSparkConfig.from_target(target.config, **settings)).eval()


def tiny_baseline(target: PreTrainedModel, kind: str, *, seed: int = 1, **overrides) -> AutoregressiveDraftModel:
    """A random MTP or Eagle3 drafter for `target`."""
    settings = {"drafter_type": kind, "initializer_range": 0.3} | ({"block_size": 4} if kind == "eagle3" else {})
    torch.manual_seed(seed)
    return AutoregressiveDraftModel(AutoregressiveConfig.from_target(target.config, **settings | overrides)).eval()


class OracleDrafter(DSparkDraftModel):
    """Right with a given probability per slot: plants a known continuation into its logits.

    Each slot's correctness is drawn once per (position, slot), so that runs can be repeated. Rows of a batch follow the
    same continuation, each from its own position.
    """

    @classmethod
    def for_target(
        cls,
        target: PreTrainedModel,
        continuation: Tensor,
        *,
        hit_rate: float = 0.7,
        seed: int = 0,
        **overrides,
    ):
        """`continuation` int64 `[length]` is the whole sequence, prompt included, that a right draft follows."""
        settings = {"num_hidden_layers": 1, "block_size": 7, "markov_rank": 4} | overrides
        torch.manual_seed(seed)
        drafter = cls(DSparkConfig.from_target(target.config, **settings)).eval().to(target.dtype)
        drafter.continuation = continuation
        drafter.hit_rate = hit_rate
        drafter.positions_of_anchors = None
        nn.init.zeros_(drafter.markov_head.markov_w2.weight)
        return drafter

    def forward(self, inputs_embeds, position_ids, **kwargs):
        self.positions_of_anchors = position_ids[:, 0].tolist()
        return super().forward(inputs_embeds, position_ids, **kwargs)

    def base_logits(self, hidden, target_head):
        rows, slots, _ = hidden.shape
        logits = torch.zeros(rows, slots, self.config.vocab_size, device=hidden.device)
        for row, slot in itertools.product(range(rows), range(slots)):
            position = self.positions_of_anchors[row] + slot + 1
            if position < len(self.continuation):
                right = int(self.continuation[position])
                draw = torch.Generator().manual_seed(position * 31 + slot)
                is_hit = torch.rand((), generator=draw) < self.hit_rate
                if right >= self.config.vocab_size:  # a token that the target was given since
                    continue
                logits[row, slot, right if is_hit else (right + 1) % self.config.vocab_size] = 20.0
        return logits


def greedy(target: PreTrainedModel, ids: Tensor | None = None, **kwargs) -> Tensor:
    """Plain greedy generation."""
    return target.generate(ids, do_sample=False, **kwargs)


def random_ids(length: int, *, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    """int64 `[1, length]`, without id 0, which tests use for padding."""
    return torch.randint(1, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))
