"""Collects scores, logits, attentions and hidden states with the counts and shapes that plain generate() returns."""

from typing import Any

from torch import Tensor
from transformers import Cache, GenerationConfig

from .report import GenerateDSparkOutput, SpeculationReport
from .types import Verification


class OutputRecorder:
    """One tuple element per committed token, as if each had been generated alone."""

    def __init__(self, generation_config: GenerationConfig, cache: Cache) -> None:
        wanted = bool(generation_config.return_dict_in_generate)
        self.return_dict = wanted
        self._cache = cache
        self._scores: list[Tensor] | None = [] if wanted and generation_config.output_scores else None
        self._logits: list[Tensor] | None = [] if wanted and generation_config.output_logits else None
        self._attentions: list[Any] | None = [] if wanted and generation_config.output_attentions else None
        self._hidden_states: list[Any] | None = [] if wanted and generation_config.output_hidden_states else None

    def scores_with(self, verification: Verification, num_new: int) -> tuple[Tensor, ...] | None:
        """The scores tuple as it would be after `num_new` tokens of the current round; None if not collected."""
        if self._scores is None:
            return None
        return (*self._scores, *verification.scores[:, :num_new].unbind(1))

    def add_prompt(self, outputs: Any, verification: Verification) -> None:
        """Record the prompt's forward: its token, and attentions and hidden states of the whole prompt."""
        self._add_tokens(verification, 1)
        if self._attentions is not None:
            self._attentions.append(outputs.attentions)
        if self._hidden_states is not None:
            self._hidden_states.append(outputs.hidden_states)

    def add_round(self, outputs: Any, verification: Verification, num_kept: int) -> None:
        """Record the first `num_kept` positions of a verification forward."""
        self._add_tokens(verification, num_kept)
        for position in range(num_kept):
            if self._hidden_states is not None:
                layers = outputs.hidden_states
                self._hidden_states.append(tuple(layer[:, position : position + 1].clone() for layer in layers))
            if self._attentions is not None:
                self._attentions.append(
                    tuple(self._attention_at(i, layer, position) for i, layer in enumerate(outputs.attentions))
                )

    def result(self, sequences: Any, report: SpeculationReport) -> GenerateDSparkOutput | Tensor:
        """What generate() returns."""
        if not self.return_dict:
            return sequences
        return GenerateDSparkOutput(
            sequences=sequences,
            scores=_as_tuple(self._scores),
            logits=_as_tuple(self._logits),
            attentions=_as_tuple(self._attentions),
            hidden_states=_as_tuple(self._hidden_states),
            cache=self._cache,
            speculation=report,
            speculation_by_row=(report,),
        )

    def _add_tokens(self, verification: Verification, num_tokens: int) -> None:
        # Copies: a view would keep the whole block's logits alive for each kept token.
        if self._scores is not None:
            self._scores.extend(row.clone() for row in verification.scores[:, :num_tokens].unbind(1))
        if self._logits is not None:
            self._logits.extend(row.clone() for row in verification.logits[:, :num_tokens].unbind(1))

    def _attention_at(self, layer_idx: int, weights: Tensor | None, position: int) -> Tensor | None:
        """Row `position` of a block's attention, over the keys that a one-token step would have seen."""
        if weights is None:
            return None
        num_queries, num_keys = weights.shape[-2:]
        layer: Any = self._cache.layers[layer_idx]
        if layer.is_compileable:  # a static layer always shows its whole buffer
            return weights[..., position : position + 1, :].clone()
        end = num_keys - num_queries + position + 1
        start = max(0, end - layer.sliding_window) if getattr(layer, "is_sliding", False) else 0
        return weights[..., position : position + 1, start:end].clone()


def _as_tuple(items: list[Any] | None) -> tuple[Any, ...] | None:
    return None if items is None else tuple(items)
