"""`AutoregressiveDraftModel`: the baseline drafters MTP and Eagle3, which draft one token after the other."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from .configuration_autoregressive import AutoregressiveConfig
from .configuration_dspark import DSparkConfig
from .model.autoregressive import Eagle3Layer, MTPLayer, causal_mask
from .model.backbone import Qwen3RMSNorm, Qwen3RotaryEmbedding
from .model.context_cache import DraftContextCache
from .model.unrolled import UnrolledSteps
from .modeling_dspark import DSparkDraftModel


class AutoregressiveDraftModel(DSparkDraftModel):
    """A baseline drafter, MTP or Eagle3: what generate() and the tools ask of a DSpark drafter it answers too.

    It reads pairs. Pair i, at position i, is what the target knows of position i (its features) and the token at i + 1.
    From the state that comes out the token at i + 2 is drafted; the next pair is that state and the drafted token.

    Pass it to generate(): `model.generate(**inputs, assistant_model=drafter)`. It estimates no confidence, so it goes
    with verification policy `full`, and its rows of a batch are drafted one by one.
    """

    config: AutoregressiveConfig
    config_class = AutoregressiveConfig
    _auto_class = None
    _no_split_modules = ["Eagle3Layer", "MTPLayer"]
    # DeepSpec stores a frozen copy of the target's embedding.
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\."]

    first_anchor = 1  # drafting needs the pair before it
    drafts_rows_together = False

    def _add_modules(self, config: DSparkConfig) -> None:
        assert isinstance(config, AutoregressiveConfig)
        self.markov_head = self.confidence_head = None
        hidden_size = config.hidden_size
        layer: Eagle3Layer | MTPLayer
        if config.drafter_type == "eagle3":
            self.fc = nn.Linear(len(config.target_layer_ids) * hidden_size, hidden_size, bias=False)
            layer = Eagle3Layer(config, 0)
        else:
            layer = MTPLayer(config, 0)
        self.layers = nn.ModuleList([layer])
        self.norm = Qwen3RMSNorm(hidden_size, config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)  # type: ignore[arg-type]  # reads fields that we have too
        if config.has_own_head:
            self.lm_head = nn.Linear(hidden_size, config.draft_vocab_size or config.vocab_size, bias=False)

    def forward(  # type: ignore[override]  # pairs in place of blocks
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        context_features: Tensor | None = None,
        states: Tensor | None = None,
        cache: DraftContextCache | UnrolledSteps | None = None,
    ) -> BaseModelOutput:
        """States of pairs, causally.

        Args:
            inputs_embeds: `[rows, T, hidden]`, embeddings of the tokens at `position_ids + 1`.
            position_ids: `[rows, T]`, absolute positions of the pairs.
            context_features: `[rows, T, m * hidden]`, the target's features at these positions; or instead of them
            states: `[rows, T, hidden]`, the drafter's own of an earlier step.
            cache: Pairs before these, whose keys and values are added behind; the caller commits them. In training
                [`UnrolledSteps`]. None: there are none before.

        Returns:
            `last_hidden_state` `[rows, T, hidden]` behind the final norm, ready for the head; `hidden_states[0]` the
            state that the next step takes.

        Raises:
            ValueError: both or none of `context_features` and `states` were given.
        """
        if (context_features is None) == (states is None):
            raise ValueError("a pair is made of context_features, or of the drafter's own states: pass one of them")
        if context_features is not None:
            states = self.fc(context_features) if self.config.drafter_type == "eagle3" else context_features
        mask = None
        if not isinstance(cache, UnrolledSteps):
            num_cached = 0 if cache is None else cache.length
            mask = causal_mask(num_cached, inputs_embeds, self.config._attn_implementation)
        layer: Any = self.layers[0]
        rotary = self.rotary_emb(inputs_embeds, position_ids)
        state = layer.read_pairs(inputs_embeds, states, rotary, mask, cache)
        return BaseModelOutput(last_hidden_state=self.norm(state), hidden_states=(state,))

    # -- its head -----------------------------------------------------------------------------------------------

    @property
    def own_head(self) -> nn.Linear | None:
        """Eagle3's head; None for MTP."""
        return self.lm_head if self.config.has_own_head else None

    def borrow_head(self, target_head: nn.Module, vocab_size: int) -> Callable[[Tensor], Tensor]:
        """The target's head, as for every drafter, or its own; `vocab_size` is the target's."""
        if self.own_head is None:
            return super().borrow_head(target_head, vocab_size)
        weight = self.own_head.weight
        ids = self.draftable_ids(vocab_size)
        rows = weight[: vocab_size if ids is None else len(ids)]  # a prefix of the draft vocabulary
        return lambda hidden: nn.functional.linear(hidden.to(rows.device, rows.dtype), rows)

    def base_logits(self, hidden: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """float32 `[rows, T, draftable tokens]`; what the target's forward does to logits belongs to its head only."""
        if self.own_head is None:
            return super().base_logits(hidden, target_head)
        return target_head(hidden).to(device=self.device).float()

    # -- blocks, which it has not -------------------------------------------------------------------------------

    def project_context(self, context_features: Tensor) -> Tensor:
        """Not available: there is no context apart from the pairs."""
        raise NotImplementedError("an autoregressive drafter reads pairs; call forward() with context_features")

    def extend_cache(self, context_features: Tensor, position_ids: Tensor, cache: Any) -> None:
        """Not available: there is no context apart from the pairs."""
        raise NotImplementedError("an autoregressive drafter reads pairs; call forward() with context_features")
