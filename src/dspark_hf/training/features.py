"""What the drafter learns from: the target's hidden states on a batch of sequences.

Per position a row holds the feature layers' outputs, the final hidden state (what the output head reads) and the
logarithm of the softmax's denominator over the whole vocabulary. With the last one the target's law on any subset of
the vocabulary follows from the head's rows of that subset alone, so no logits are ever stored.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..errors import IncompatibleTargetError
from ..modeling_dspark import treat_logits

# Positions whose logits over the whole vocabulary exist at once, on a CPU and elsewhere; 256 x 152k in float32 are
# 156 MB.
NORMALIZER_CHUNK_POSITIONS = 256
ACCELERATOR_CHUNK_POSITIONS = 2048

# Of the largest logit; what two roundings of bfloat16 can make.
MAX_LOGIT_DIFFERENCE = 0.02


@dataclass(frozen=True)
class TargetFeatures:
    """The target's view of right-padded sequences; padding positions hold numbers without meaning.

    Attributes:
        features: `[rows, length, m * hidden]`, outputs of the config's `target_layer_ids` side by side.
        final_hidden: `[rows, length, hidden]`, after the target's last norm.
        log_normalizer: float32 `[rows, length]`, logsumexp of the logits over the whole vocabulary; 0 where it was
            not asked for.
    """

    features: Tensor
    final_hidden: Tensor
    log_normalizer: Tensor


class TargetReader:
    """Reads [`TargetFeatures`] off a frozen target; kept out of any module so that nobody trains or saves it.

    Args:
        target: Any decoder-only model with an output head.
        config: The drafter's; says which layers, and how the target's forward treats its logits.
        layer_ids: Layers to read instead of the config's.

    Raises:
        IncompatibleTargetError: their vocabularies differ. generate() works with a resized one; here laws over both
            are compared.
    """

    def __init__(self, target: PreTrainedModel, config: DSparkConfig, layer_ids: list[int] | None = None) -> None:
        if (size := target.config.get_text_config(decoder=True).vocab_size) != config.vocab_size:
            raise IncompatibleTargetError(
                f"the drafter was made for {config.vocab_size} tokens and the target has {size}; train and evaluate "
                "with a target whose embedding was not resized since, or make a new drafter for this one"
            )
        # Of an adapted model the layers are inside, and the adapters with them.
        self._target: Any = target.get_base_model() if hasattr(target, "get_base_model") else target  # type: ignore[operator]
        self._config = config
        self._layer_ids = config.target_layer_ids if layer_ids is None else layer_ids
        self.head: nn.Module = target.get_output_embeddings()
        self.embedding: nn.Module = target.get_input_embeddings()
        self.device: torch.device = target.device
        self.logit_treatment = config.logit_multiplier, config.final_logit_softcapping

    @torch.no_grad()
    def read(self, input_ids: Tensor, needs_normalizer: Tensor | None = None) -> TargetFeatures:
        """Run the target on `input_ids` `[rows, length]`, padded on the right with any id.

        Args:
            needs_normalizer: bool `[rows, length]`, positions whose law will be used; None: all.

        Raises:
            IncompatibleTargetError: the target does not return the layers that the drafter reads.
        """
        wanted = [layer_id + 1 for layer_id in self._layer_ids]
        # Padding on the right of causal attention is never seen, so no mask is needed.
        outputs = self._target.base_model(
            input_ids=input_ids, use_cache=False, output_hidden_states=wanted, return_dict=True
        )
        hidden_states = outputs.hidden_states or ()
        layers: list[Tensor] = [hidden_states[i] for i in wanted if i < len(hidden_states)]
        layers = [h for h in layers if h is not None and h.shape[-1] == self._config.hidden_size]
        if len(layers) < len(wanted):
            raise IncompatibleTargetError(
                f"the drafter reads hidden_states{wanted} of width {self._config.hidden_size}, and "
                f"{type(self._target).__name__} did not return them; build the config with DSparkConfig.from_target"
            )
        final_hidden = outputs.last_hidden_state
        needed = torch.ones_like(input_ids, dtype=torch.bool) if needs_normalizer is None else needs_normalizer
        log_normalizer = torch.zeros(input_ids.shape, dtype=torch.float32, device=final_hidden.device)
        log_normalizer[needed] = self._log_normalizer(final_hidden[needed])
        return TargetFeatures(torch.cat(layers, dim=-1), final_hidden, log_normalizer)

    @torch.no_grad()
    def check_law(self, sample_ids: Tensor) -> None:
        """Compare the law read off hidden states with the logits of the target's own forward, on `[1, length]` ids.

        Raises:
            IncompatibleTargetError: they differ: the target does something between final hidden state and logits that
                the drafter's config does not know of.
        """
        theirs = self._target(input_ids=sample_ids, use_cache=False).logits.float()
        final_hidden = self._target.base_model(input_ids=sample_ids, use_cache=False).last_hidden_state
        ours = treat_logits(self.head(final_hidden), self._config)
        difference = float((ours - theirs).abs().max())
        if not difference <= MAX_LOGIT_DIFFERENCE * float(theirs.abs().max()):
            raise IncompatibleTargetError(
                f"the logits of {type(self._target).__name__} are not its output head on its last hidden state "
                f"(difference up to {difference:.3g}); set logit_multiplier and final_logit_softcapping in the "
                "drafter's config to what its forward does, or choose another target"
            )

    def _log_normalizer(self, hidden: Tensor) -> Tensor:
        size = NORMALIZER_CHUNK_POSITIONS if hidden.device.type == "cpu" else ACCELERATOR_CHUNK_POSITIONS
        parts = [torch.logsumexp(treat_logits(self.head(chunk), self._config), dim=-1) for chunk in hidden.split(size)]
        return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)
