"""`DSparkDraftModel`: target features and an anchor in, hidden states of a block of draft slots out."""

import os
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput

from .checkpoints.headers import check_finite, lacking
from .checkpoints.source import checked_folder
from .checkpoints.specforge import LEGACY_KEYS, is_legacy
from .checkpoints.weights import check_leftovers
from .configuration_dspark import DSparkConfig, other_drafter
from .errors import CheckpointFormatError, OtherDrafterError
from .hub.pushing import PushesToHub
from .hub.remote_code import AUTO_CONFIG, AUTO_MODEL
from .model.backbone import AttentionMask, DSparkDecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding
from .model.confidence_head import ConfidenceHead
from .model.draft_vocab import DraftVocabHead, check_offsets, token_ids_of
from .model.draft_window import masks_by_layer
from .model.packed_blocks import PackedBlocks
from .model.row_slots import DraftCache
from .model.sequential_heads import build_sequential_head

# Classes of other drafters by the model_type of their configs, for `from_pretrained`.
_KINDS: dict[str, Any] = {}


class DSparkDraftModel(PushesToHub, PreTrainedModel):  # type: ignore[misc]  # PushesToHub names its arguments
    """A semi-autoregressive drafter (arXiv 2607.05147, sections 3 and 4).

    It owns what was trained: the context projection, the draft layers, the sequential head and the confidence head.
    The target's embedding and output head are passed in per call and never stored, so one drafter serves several
    targets, adapters can be switched, and a checkpoint holds no copy of them. Nothing of a running generation lives
    on the model either: threads may share one.

    Pass it to generate(): `model.generate(**inputs, assistant_model=drafter)`.
    """

    config: DSparkConfig
    d2t: Tensor  # only with a reduced draft vocabulary
    config_class: type[DSparkConfig] = DSparkConfig
    base_model_prefix = "model"
    main_input_name = "inputs_embeds"
    supports_gradient_checkpointing = False
    _no_split_modules = ["DSparkDecoderLayer", "Gemma4DraftLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True
    # Frozen copies of the target's embedding, head and final norm that other projects store; they are not read.
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.", r"^lm_head\.", r"^verifier_(norm|lm_head)\.", r"^t2d$"]

    # The route recognises a drafter by this attribute: one loaded with trust_remote_code is another class.
    is_dspark_drafter = True
    # Whose loop runs it: that of the copy of this package which its class belongs to.
    package_copy = __name__.rpartition(".")[0]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "config_class" in vars(cls):
            _KINDS[cls.config_class.model_type] = cls

    # The first position of a text whose token can be an anchor.
    first_anchor = 0
    # Whether the rows of a batch can be drafted in one forward.
    drafts_rows_together = True

    def __init__(self, config: DSparkConfig) -> None:
        if config.model_type != self.config_class.model_type:
            raise other_drafter("the config given", config.model_type, self.config_class)
        super().__init__(config)
        self._add_modules(config)
        if config.draft_vocab_size is not None:  # until trained or loaded, the lowest ids
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.post_init()

    def _add_modules(self, config: DSparkConfig) -> None:
        feature_width = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(feature_width, config.hidden_size, bias=False)
        layer_class = _layer_class(config)
        self.hidden_norm = layer_class.norm_class(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(layer_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = layer_class.norm_class(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)  # type: ignore[arg-type]  # reads fields that we have too
        self.markov_head = build_sequential_head(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, Qwen3RMSNorm):
            init.ones_(module.weight)
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *model_args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a drafter from a folder or the Hub, as any transformers model, but never with weights made up.

        A baseline drafter (MTP, Eagle3) is loaded as what it is, an `AutoregressiveDraftModel`.

        Args:
            pretrained_model_name_or_path: Folder or Hub id, of a drafter saved by this package, DeepSpec,
                speculators, SpecForge or z-lab DFlash, told by its content. From the Hub only its config and its
                safetensors are fetched.
            output_loading_info: Whether to return `(drafter, info)`.
            **kwargs: As for `PreTrainedModel.from_pretrained`.

        Raises:
            CheckpointFormatError: it is no drafter that this release reads, lacks weights, has some that are NaN or
                infinite, or would load something else.
            DSparkConfigError: its config breaks a rule.
            HubError: the Hub does not have it, does not hand it out, or failed.
        """
        options = dict(kwargs, output_loading_info=output_loading_info)
        try:
            return cls._loaded(pretrained_model_name_or_path, *model_args, **options)
        except OtherDrafterError as error:
            kind = _KINDS.get(error.model_type)
            if kind is None or not issubclass(kind, cls):
                raise
            return kind._loaded(pretrained_model_name_or_path, *model_args, **options)

    @classmethod
    def _loaded(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *model_args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        kwargs["ignore_mismatched_sizes"] = True  # reported below, with what is missing
        kwargs.setdefault("key_mapping", LEGACY_KEYS)
        if kwargs.get("use_safetensors") is None:
            kwargs["use_safetensors"] = True  # a pickle could run anything
        source = name = pretrained_model_name_or_path
        if kwargs["use_safetensors"] and name is not None:
            source = checked_folder(cls, os.fspath(name), kwargs)
        loaded: Any = super().from_pretrained(source, *model_args, output_loading_info=True, **kwargs)
        drafter, info = loaded
        if source != name:  # whoever asks where a drafter is from wants the Hub's id, not a folder of the cache
            drafter.name_or_path = drafter.config.name_or_path = str(name)
        # transformers fills what is missing or of another shape with random numbers, and goes on.
        absent = sorted({*info["missing_keys"], *(str(entry[0]) for entry in info["mismatched_keys"])})
        if absent:
            raise CheckpointFormatError(lacking(str(name), absent))
        check_leftovers(str(name), info["unexpected_keys"])
        # Else save_pretrained would write the legacy names again.
        conversions = getattr(drafter, "_weight_conversions", ())
        drafter._weight_conversions = [c for c in conversions if not is_legacy(c.source_patterns)]
        if (offsets := getattr(drafter, "d2t", None)) is not None:
            check_offsets(offsets, drafter.config.vocab_size)
        check_finite(str(name), chain(drafter.named_parameters(), drafter.named_buffers()))
        return (drafter, info) if output_loading_info else drafter

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Save the drafter, as any transformers model.

        After `DSparkDraftModel.register_for_auto_class()` its code goes along, for
        `AutoModel.from_pretrained(folder, trust_remote_code=True)` where this package is not installed. Without, code
        that an earlier save left in the folder is removed.

        Raises:
            CheckpointFormatError: the folder holds code of others under the names of ours.
        """
        if type(self) is DSparkDraftModel:  # what the config names, it writes
            if self._auto_class is None:
                vars(self.config).pop("auto_map", None)
            else:
                self.config.auto_map = {"AutoConfig": AUTO_CONFIG, self._auto_class: AUTO_MODEL}
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    @classmethod
    def is_remote_code(cls) -> bool:
        """As transformers asks it; False for this class, whose code it cannot copy: [`save_pretrained`] does."""
        return super().is_remote_code() and cls is not DSparkDraftModel

    @classmethod
    def can_generate(cls) -> bool:
        """False: a drafter cannot run without its target, so generate() is the target's."""
        return False

    # -- the block forward --------------------------------------------------------------------------------------

    def project_context(self, context_features: Tensor) -> Tensor:
        """`H_ctx = RMSNorm(W_c [H^(l_1); ...; H^(l_m)])` (Eq. 2), shared by all draft layers.

        Args:
            context_features: `[rows, S, m * hidden]`, the target layers' outputs side by side, in the order of
                `config.target_layer_ids`.
        """
        context: Tensor = self.hidden_norm(self.fc(context_features))
        return context

    def extend_cache(self, context_features: Tensor, position_ids: Tensor, cache: DraftCache) -> None:
        """Project `context_features` `[rows, S, m * hidden]` at `position_ids` `[rows, S]` into every layer's cache."""
        context = self.project_context(context_features)
        rotary = self.rotary_emb(context, position_ids)
        for layer_idx, layer in enumerate(self.layers):
            assert isinstance(layer, DSparkDecoderLayer)
            cache.append(layer_idx, *layer.self_attn.project_keys_values(context, rotary))
        cache.commit(context_features.shape[1])

    def forward(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        context_features: Tensor | None = None,
        context_position_ids: Tensor | None = None,
        attention_mask: AttentionMask = None,
        cache: DraftCache | None = None,
    ) -> BaseModelOutput:
        """Hidden states `h_1..h_T` of a block: final-norm outputs, ready for the target's output head.

        Args:
            inputs_embeds: `[rows, T, hidden]`, embeddings of the anchor and of the masks, `config.num_block_tokens` of
                a whole block.
            position_ids: `[rows, T]`, absolute positions of the anchor and of the slots behind it.
            context_features: `[rows, S, m * hidden]`, features of committed tokens that the cache does not hold yet;
                all lie strictly before the anchor. They are added to the cache.
            context_position_ids: `[rows, S]`, their absolute positions.
            attention_mask: Additive or bool mask `[rows, 1, T, cached + S + T]`, or [`PackedBlocks`] for T tokens that
                are many independent blocks; None: every slot sees everything. Layers that slide or do not look ahead
                hide more.
            cache: Context of this generation, from position 0 on; None: `context_features` is the whole context.

        Returns:
            `last_hidden_state` `[rows, T, hidden]`; a slot predicts the token at its position plus one, in the fill-in
            layout the token at its position.

        Raises:
            ValueError: only one of `context_features` and `context_position_ids` was given.
        """
        if (context_features is None) != (context_position_ids is None):
            raise ValueError("context_features and context_position_ids belong together: pass both or neither")
        context = None
        positions = position_ids
        if context_features is not None and context_position_ids is not None:
            context = self.project_context(context_features)
            positions = torch.cat([context_position_ids, position_ids], dim=1)
        rotary = self.rotary_emb(inputs_embeds, positions)
        hidden = inputs_embeds
        masks = self._masks_by_layer(attention_mask, position_ids, positions, cache)
        for layer, mask in zip(self.layers, masks, strict=True):
            hidden = layer(hidden, context, rotary, mask, cache)
        if cache is not None and context is not None:
            cache.commit(context.shape[1])
        return BaseModelOutput(last_hidden_state=self.norm(hidden))

    def _masks_by_layer(
        self, mask: AttentionMask, slots: Tensor, new_positions: Tensor, cache: DraftCache | None
    ) -> Sequence[AttentionMask]:
        layers: Any = self.layers
        windows = [layer.self_attn.window for layer in layers]
        if isinstance(mask, PackedBlocks) or not any(windows):
            return [mask] * len(windows)  # packed blocks are narrowed by each layer itself
        keys = new_positions
        if cache is not None:
            keys = torch.arange(cache.num_columns(new_positions.shape[1]), device=slots.device)[None]
        return masks_by_layer(windows, mask, slots, keys, self.config._attn_implementation, self.dtype)

    # -- borrowed target modules --------------------------------------------------------------------------------

    def embed(self, token_ids: Tensor, target_embedding: nn.Module) -> Tensor:
        """Embed ids `[rows, T]` with the target's module, in the drafter's dtype and on its device."""
        embeddings = target_embedding(token_ids)
        if self.config.embedding_multiplier != 1.0:
            embeddings = embeddings * self.config.embedding_multiplier
        embedded: Tensor = embeddings.to(device=self.device, dtype=self.dtype)
        return embedded

    @property
    def draft_token_ids(self) -> Tensor | None:
        """int64 `[draft_vocab_size]`, the tokens that can be drafted, in increasing order; None: all of them."""
        offsets: Tensor | None = getattr(self, "d2t", None)
        return None if offsets is None else token_ids_of(offsets)

    def draftable_ids(self, vocab_size: int) -> Tensor | None:
        """Tokens that can be drafted for a target of `vocab_size` tokens, as [`draft_token_ids`]; None: all of them.

        The target's vocabulary may have been resized or padded since the drafter was made. What both have in common
        is a prefix of the drafter's draft vocabulary.
        """
        ids = self.draft_token_ids
        if ids is None:
            ours = self.config.vocab_size
            return None if vocab_size <= ours else torch.arange(ours, device=self.device)
        return ids if vocab_size >= self.config.vocab_size else ids[ids < vocab_size]

    def borrow_head(self, target_head: nn.Module, vocab_size: int) -> Callable[[Tensor], Tensor]:
        """What [`base_logits`] takes: the head of a target of `vocab_size` tokens, or its rows for those drafted."""
        ids = self.draftable_ids(vocab_size)
        return target_head if ids is None else DraftVocabHead(target_head, ids)

    def base_logits(self, hidden: Tensor, target_head: Callable[[Tensor], Tensor]) -> Tensor:
        """`U_k`: the target's head on `hidden` `[rows, T, hidden]`, as the target's forward treats its logits.

        `target_head` comes from [`borrow_head`], `hidden` in the dtype and on the device that it computes in.

        Returns:
            float32 `[rows, T, draftable tokens]` on the drafter's device.
        """
        return treat_logits(target_head(hidden).to(device=self.device), self.config)

    @property
    def own_head(self) -> nn.Linear | None:
        """A head of its own, from states to the draft vocabulary; None: it borrows the target's."""
        return None

    def get_input_embeddings(self) -> nn.Module:
        """Not available: the embedding is the target's."""
        raise NotImplementedError("a drafter borrows its target's embedding; use target.get_input_embeddings()")

    def set_input_embeddings(self, value: Any) -> None:
        """Not available: the embedding is the target's."""
        raise NotImplementedError("a drafter borrows its target's embedding; nothing to set")


def _layer_class(config: DSparkConfig) -> type[DSparkDecoderLayer]:
    if config.layer_style == "qwen3":
        return DSparkDecoderLayer
    from .model.gemma4_layer import Gemma4DraftLayer  # brings Gemma4's vision and audio models, seconds to import

    return Gemma4DraftLayer


def treat_logits(head_output: Tensor, config: DSparkConfig) -> Tensor:
    """float32 logits as the target's forward returns them: multiplier, then soft cap."""
    logits = head_output.float()
    if config.logit_multiplier != 1.0:
        logits = logits * config.logit_multiplier
    if (cap := config.final_logit_softcapping) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits
