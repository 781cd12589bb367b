"""Stages 1 to 3 behind a true transformers `CandidateGenerator`: our loop calls it, transformers' own loop can too."""

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.logits_process import LogitsProcessorList
from transformers.utils import ModelOutput

from .._compat import TargetModel, let_record_outputs
from ..errors import IncompatibleTargetError
from ..model.context_cache import DraftContextCache
from ..modeling_dspark import DSparkDraftModel
from .calibrate import accepted_shares_for, calibrate, calibration_for
from .draft import draft_block
from .policies.facts import RoundFacts
from .prefixes import Prefixes
from .sampling import ScoreProcessor
from .scheduler import Found, Scheduler, usable_profile
from .settings import resolve_settings, weighs_costs
from .types import DraftBlock, Proposal

logger = logging.getLogger(__name__)

# Prompt tokens whose features are projected at once; bounds the memory of a long prompt.
CONTEXT_CHUNK_TOKENS = 2048

_PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts for one running generation of one row.

    It holds that generation's draft cache; the drafter itself stays free of state. Each committed token's features
    are projected once: [`observe`] takes them after every target forward, and the next block forward adds them to
    the cache.

    Args:
        drafter: The drafter.
        target: The target, whose embedding and head are called.
        generation_config: The generate() call's.
        logits_processor: The processors of this call; drafts go through them like the target's logits.
        model_kwargs: generate()'s; `attention_mask` tells padding, `output_hidden_states` what the user asked for.
        num_rows: Rows that run together.
        ids_device: Where the text is, and with it drafts and confidences; None: where the target is.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: DSparkDraftModel,
        target: TargetModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
        num_rows: int = 1,
        ids_device: torch.device | None = None,
    ) -> None:
        config = drafter.config
        let_record_outputs(target)
        self.drafter = self._drafter = drafter
        self._embedding = target.get_input_embeddings()
        target_head = target.get_output_embeddings()
        self._vocab_size: int = target.config.get_text_config(decoder=True).vocab_size
        self._head = drafter.borrow_head(target_head, self._vocab_size)
        self._draft_ids = drafter.draftable_ids(self._vocab_size)
        # An offloaded target has no device; the hooks of its modules fetch their input from anywhere.
        self._target_device = target.device if target.device.type != "meta" else drafter.device
        self._head_device, self._head_dtype = _where_it_computes(target_head, self._target_device, target.dtype)
        self._max_length: int = generation_config.max_length
        self.do_sample = bool(generation_config.do_sample)
        self.processor = ScoreProcessor(logits_processor)
        is_asked = weighs_costs(config, generation_config)
        found = usable_profile(target, drafter, num_rows) if is_asked else Found(None)
        self._settings = resolve_settings(
            config, generation_config, why_no_costs=found.why_none, profile_command=found.command
        )
        num_slots = self._settings.num_draft_tokens
        device = self._target_device if ids_device is None else ids_device
        self.scheduler = Scheduler(
            self._settings.new_policy(),
            num_slots,
            found.profile,
            device,
            block_size=config.block_size,
            prior_survival=accepted_shares_for(config, generation_config),
            is_timed=self._target_device.type == "cpu",
        )
        calibration = calibration_for(config, generation_config)
        self._calibration = None if calibration is None else calibration.to(device)
        self._padding_mask: Tensor | None = model_kwargs.get("attention_mask")
        indices = [layer_id + 1 for layer_id in config.target_layer_ids]
        self._feature_indices = indices
        # A list selects; a user who asked for all hidden states must get them all.
        wants_all = bool(model_kwargs.get("output_hidden_states"))
        self.model_kwargs_overrides: dict[str, Any] = {"output_hidden_states": True if wants_all else indices}
        self._masks = torch.full(
            (1, config.num_block_tokens - 1), config.mask_token_id, dtype=torch.long, device=self._target_device
        )
        self._cache = DraftContextCache(config.num_hidden_layers)
        self._pending: list[Tensor] = []  # features observed but not yet in the cache
        self._num_observed = 0  # committed tokens before the anchor, padding not counted
        self._num_inputs = 0  # positions of target forwards observed, padding counted

    # -- stages 1 to 3 ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(self, outputs: ModelOutput, num_tokens: int | None = None) -> None:
        """Take the features of the first `num_tokens` positions of a target forward, by default all, as context.

        Raises:
            IncompatibleTargetError: the target does not return the hidden states that the drafter reads.
        """
        layers = [layer[:, :num_tokens] for layer in self._features_of(outputs)]
        layers = self._without_padding(layers, layers[0].shape[1])
        for start in range(0, layers[0].shape[1], CONTEXT_CHUNK_TOKENS):
            chunk = [layer[:, start : start + CONTEXT_CHUNK_TOKENS].to(self._drafter.device) for layer in layers]
            features = torch.cat(chunk, dim=-1).to(self._drafter.dtype)
            if sum(part.shape[1] for part in self._pending) + features.shape[1] > CONTEXT_CHUNK_TOKENS:
                self._flush()
            self._pending.append(features)
            self._num_observed += features.shape[1]

    @torch.no_grad()
    def propose(self, ids: Tensor) -> Proposal | None:
        """Draft after `ids` `[1, length]`, whose last token is the anchor; None for a plain round.

        A round is plain when no draft could be committed, and when the scheduler says that drafting cannot pay. The
        draft is capped so that verifying it cannot pass max_length, which a static cache could not hold.
        """
        num_slots = min(self._settings.num_draft_tokens, self._max_length - ids.shape[1] - 1)
        if num_slots <= 0 or not self.scheduler.wants_draft(1, self._num_observed):
            return None
        num_slots = self.scheduler.slots({0: self._max_length - ids.shape[1]}, num_slots)
        return self._draft(self._block_hidden(ids[:, -1:]), num_slots, ids, row_ids=(0,))

    def _draft(self, hidden: Tensor, num_slots: int, prefix_ids: Tensor | Prefixes, **facts: Any) -> Proposal:
        """Stages 1 to 3 after the backbone: `hidden` `[rows, block, hidden]` of blocks that follow `prefix_ids`.

        Args:
            num_slots: Drafts to make, at most the block.
            **facts: Of [`RoundFacts.of`].
        """
        # Contiguous: a product of many rows with every few slots left out takes several times as long on a CPU.
        first = self._drafter.config.first_draft_slot
        anchor_hidden = hidden[:, 0] if first else None
        hidden = hidden[:, first : first + num_slots].contiguous()
        block = draft_block(
            self._drafter,
            hidden,
            self._drafter.base_logits(hidden.to(self._head_device, self._head_dtype), self._head),
            prefix_ids,
            self.processor,
            draft_ids=self._draft_ids,
            do_sample=self.do_sample,
            vocab_size=self._vocab_size,
            anchor_hidden=anchor_hidden,
        )
        return self._scheduled(block, **facts)

    def _scheduled(self, block: DraftBlock, **facts: Any) -> Proposal:
        """Stages 2 and 3; `facts` as for [`_draft`]."""
        confidence = calibrate(block.confidence_logits, self._calibration)
        weights = self.scheduler.weights(facts["row_ids"])
        round_facts = RoundFacts.of(block, costs=self.scheduler.costs, weights=weights, **facts)
        return Proposal(block, confidence, self.scheduler.lengths(confidence, round_facts))

    def _block_hidden(self, anchor: Tensor) -> Tensor:
        """Backbone output `[1, block, hidden]` for the block that starts at `anchor` `[1, 1]`.

        Always the whole block, as in training, also when fewer slots are used.
        """
        device = self._drafter.device
        block_ids = torch.cat([anchor.to(self._target_device), self._masks], dim=1)
        positions = torch.arange(block_ids.shape[1], device=device)[None] + self._num_observed
        pending, pending_positions = self._take_pending()
        outputs = self._drafter(
            inputs_embeds=self._drafter.embed(block_ids, self._embedding),
            position_ids=positions,
            context_features=pending,
            context_position_ids=pending_positions,
            cache=self._cache,
        )
        hidden: Tensor = outputs.last_hidden_state
        return hidden

    def _features_of(self, outputs: ModelOutput) -> list[Tensor]:
        """The hidden states `[rows, tokens, hidden]` of the drafter's feature layers."""
        hidden_states = getattr(outputs, "hidden_states", None) or ()
        wanted = self._feature_indices
        found = [hidden_states[i] if i < len(hidden_states) else None for i in wanted]
        hidden_size = self._drafter.config.hidden_size
        layers = [h for h in found if h is not None and h.ndim == 3 and h.shape[-1] == hidden_size]
        if len(layers) < len(wanted):
            shapes = [None if h is None else tuple(h.shape) for h in found]
            raise IncompatibleTargetError(
                f"the drafter reads hidden_states{wanted} of shape [rows, tokens, {hidden_size}], and the target "
                f"returned {shapes}; a drafter needs a target that supports output_hidden_states and has one residual "
                "stream"
            )
        return layers

    def _take_pending(self) -> tuple[Tensor | None, Tensor | None]:
        """Features that are not yet in the cache `[1, tokens, width]`, and their positions `[1, tokens]`."""
        if not self._pending:
            return None, None
        pending, self._pending = torch.cat(self._pending, dim=1), []
        first = self._num_observed - pending.shape[1]
        return pending, torch.arange(first, self._num_observed, device=pending.device)[None]

    def _flush(self) -> None:
        """Project pending features into the cache without a block."""
        features, positions = self._take_pending()
        if features is not None and positions is not None:
            self._drafter.extend_cache(features, positions, self._cache)

    def _without_padding(self, layers: list[Tensor], num_tokens: int) -> list[Tensor]:
        """Drop padding, which only the prompt has: the drafter sees real tokens at their real positions."""
        start, self._num_inputs = self._num_inputs, self._num_inputs + num_tokens
        if self._padding_mask is None or start >= self._padding_mask.shape[1]:
            return layers
        keep = self._padding_mask[0, start : start + num_tokens].bool()
        return [layer[:, keep.to(layer.device)] for layer in layers]

    # -- transformers' interface --------------------------------------------------------------------------------

    def get_candidates(  # type: ignore[override]  # transformers types them LongTensor
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool = True,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Candidates for transformers' own assisted loop.

        Returns:
            The ids with the drafts to verify behind them, and, when sampling, log-probabilities
            float32 `[1, drafts, vocab]` whose softmax is the law each draft was drawn from.
        """
        if is_first_iteration or model_outputs is None:
            return input_ids, None  # the prompt's features come with its forward
        is_prompt = self._num_inputs == 0
        self.observe(model_outputs, None if is_prompt else n_last_matches + 1)
        proposal = self.propose(input_ids)
        num_drafts = 0 if proposal is None else int(proposal.lengths[0])
        if proposal is None or num_drafts == 0:
            return input_ids, None
        candidate_ids = torch.cat([input_ids, proposal.block.tokens[:, :num_drafts]], dim=1)
        draft_probs = proposal.block.draft_probs
        return candidate_ids, None if draft_probs is None else draft_probs[:, :num_drafts].log()

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Tell the policy what the round came to."""
        length = scores.shape[1] - 1  # of the drafts that were verified
        accepted, lengths = (torch.tensor([n], device=input_ids.device) for n in (num_matches, length))
        self.scheduler.observe(accepted, lengths, [int(num_matches)], [length])


def _where_it_computes(
    head: torch.nn.Module, target_device: torch.device, target_dtype: torch.dtype
) -> tuple[torch.device, torch.dtype]:
    """Device and dtype that the head takes its input in; a quantised or offloaded one those of the target."""
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor) and weight.dtype in _PLAIN_DTYPES and weight.device.type != "meta":
        return weight.device, weight.dtype
    return target_device, target_dtype
