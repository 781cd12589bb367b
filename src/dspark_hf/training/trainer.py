"""`DSparkTrainer`: transformers' Trainer for a drafter, its frozen target kept outside of everything it saves."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Sampler
from transformers import PreTrainedModel, Trainer

from .._compat import check_overridable
from ..decoding.report import record_speculation
from ..decoding.target_refusals import refuse_target
from ..errors import TrainingDataError
from ..modeling_dspark import DSparkDraftModel
from .anchors import AnchorBlocks, build_blocks, position_weights
from .dataset import AnchorDataset, LengthGroupedEpochs, collate
from .features import TargetFeatures, TargetReader
from .head_rows import HeadRows
from .hub_pushes import PushesDrafters
from .losses import PositionTerms, draft_loss
from .metrics import BlockMetrics
from .packed_forward import packed_hidden
from .scaled_steps import scale_steps
from .settings import DSparkTrainingArguments

# Methods of Trainer that are overridden though they are not public; a new release must not rename them unnoticed.
check_overridable(Trainer, ("_get_train_sampler", "_run_epoch", "_get_num_items_in_batch"))


class DSparkTrainer(PushesDrafters):
    """Trains a drafter on a frozen target's answers (paper, section 3.3).

    Everything of transformers' Trainer works: accumulation, mixed precision, several processes, checkpoints, resume,
    `report_to`. The loss of a step is a weighted mean over all supervised positions of all its micro-batches and
    processes, so splitting a batch differently changes nothing but rounding.

    Args:
        model: The drafter.
        target: Its target, in eval mode.
        args: Settings.
        train_dataset, eval_dataset: Sequences with anchors; with cached features the target only decodes.
        decode_prompts: int64 `[1, length]` each; evaluation really decodes them.
        feature_rms: float `[m]`, scale of each feature layer ([`feature_rms`]); the context projection's weights of
            a layer then move by steps that many times smaller. An optimiser like Adam moves every weight equally
            far, which on inputs of size 30 would throw the context about. None: all alike.
        **kwargs: As for `Trainer`.

    Raises:
        TrainingDataError: the target's output head is not a plain linear layer, the target is elsewhere, or a setting
            cannot be used.
        IncompatibleTargetError: drafter and target do not belong together.
    """

    def __init__(
        self,
        model: DSparkDraftModel,
        target: PreTrainedModel,
        args: DSparkTrainingArguments,
        train_dataset: AnchorDataset | None = None,
        eval_dataset: AnchorDataset | None = None,
        decode_prompts: list[Tensor] | None = None,
        feature_rms: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        # One process per device: torch's DataParallel would split blocks from the contexts they read.
        _ = args.n_gpu
        args._n_gpu = min(args._n_gpu, 1)
        if target.device.type != args.device.type:
            raise TrainingDataError(
                f"the target is on {target.device} and training runs on {args.device}; move the target there first"
            )
        if args.fp16:
            raise TrainingDataError(
                "fp16 is True, and the loss's gradients, made beside the loss and before any scaling, would underflow "
                "in float16; use bf16=True or float32"
            )
        if model.config.attention_dropout > 0:
            raise TrainingDataError(
                f"attention_dropout must be 0, got {model.config.attention_dropout}: packed blocks are trained without"
            )
        super().__init__(
            model=model,
            args=args,
            data_collator=collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            **kwargs,
        )
        refuse_target(target, model)
        # Our loss divides by what _get_num_items_in_batch counts, over all micro-batches and processes.
        self.loss_is_scaled_for_ga = True
        self._drafter = model
        self._settings = args
        self._decode_prompts = decode_prompts or []
        # Not a part of the drafter: no checkpoint or state dict ever finds the target.
        self._target: Any = target.requires_grad_(False)
        self._reader = TargetReader(target, model.config)
        self._product_dtype = torch.bfloat16 if args.bf16 else model.dtype
        self._head = HeadRows.of(target, model, self._product_dtype)
        self._weights = position_weights(model.config.block_size, args.loss_decay or model.config.block_size)
        self._metrics = BlockMetrics(model.config.block_size, args.device)
        self._is_evaluating = False
        # Asked between the batches and texts of an evaluation; one that was cut short reports nothing.
        self.stop_evaluating: Callable[[], bool] = lambda: False
        self._step_scale = None
        if feature_rms is not None:
            self._step_scale = (1.0 / feature_rms.to(args.device)).repeat_interleave(model.config.hidden_size)

    # -- data and optimiser -------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[Any] | None:
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        per_step = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        lengths = [len(sequence) for sequence in dataset.sequences]
        self._train_sampler = LengthGroupedEpochs(lengths, per_step, self.args.seed)
        return self._train_sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # A checkpoint that was loaded since may have another draft vocabulary.
        self._head = HeadRows.of(self._target, self._drafter, self._product_dtype)
        # Where a resumed epoch skips batches on several processes, the loader's own set_epoch gets lost on the way.
        self._train_sampler.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW or what `args.optim` names, with a rate of their own for the heads."""
        if self.optimizer is None:
            cls, options = self.get_optimizer_cls_and_kwargs(self.args, self._drafter)
            decayed = set(self.get_decay_parameter_names(self._drafter))
            groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
            for name, parameter in self._drafter.named_parameters():
                is_head = name.startswith(("markov_head.", "confidence_head."))
                groups.setdefault((is_head, name in decayed), []).append(parameter)
            head_rate = self.args.learning_rate * self._settings.head_learning_rate_multiplier
            self.optimizer = cls(
                [
                    {
                        "params": parameters,
                        "lr": head_rate if is_head else self.args.learning_rate,
                        "weight_decay": self.args.weight_decay if decays else 0.0,
                    }
                    for (is_head, decays), parameters in groups.items()
                ],
                **options,
            )
            if self._step_scale is not None:
                scale_steps(self.optimizer, self._drafter.fc.weight, self._step_scale)
        return self.optimizer

    # -- loss ---------------------------------------------------------------------------------------------------

    def _current_block_size(self) -> int:
        """Slots of a block at this step of the curriculum."""
        gamma = self._drafter.config.block_size
        growing = self._settings.curriculum_fraction * self.state.max_steps
        if self._is_evaluating or self.state.global_step >= growing:
            return gamma
        return min(gamma, 1 + int(gamma * self.state.global_step / growing))

    def _blocks_of(self, batch: dict[str, Any]) -> AnchorBlocks:
        return build_blocks(
            batch["input_ids"],
            batch["loss_mask"],
            batch["anchors"],
            self._current_block_size(),
            self._drafter.first_anchor,
        )

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        """Sum of position weights over the step's micro-batches and all processes: the loss's denominator."""
        total = torch.zeros((), device=device)
        for batch in batch_samples:
            blocks = self._blocks_of(batch)
            total += (blocks.is_supervised * self._weights[: blocks.is_supervised.shape[-1]].to(total.device)).sum()
        return self.accelerator.reduce(total, "sum")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """`0.1 L_ce + 0.9 L_tv + 1.0 L_conf` (Eq. 12, with the settings' coefficients) of a batch of blocks."""
        blocks = self._blocks_of(inputs)
        hidden, embeddings, codes = self._draft(model, inputs, blocks)
        mask = blocks.is_supervised
        weight = self._weights[: mask.shape[-1]].to(mask.device).expand(mask.shape)[mask]
        rows = torch.arange(mask.shape[0], device=mask.device)[:, None, None].expand(mask.shape)[mask]
        law_positions = blocks.law_positions[mask]
        drafter = self._drafter
        w2 = None if drafter.markov_head is None else drafter.markov_head.markov_w2.weight
        has_own = drafter.own_head is not None
        loss, terms = draft_loss(
            None if has_own else hidden,
            hidden if has_own else codes,
            w2 if drafter.own_head is None else drafter.own_head.weight,
            head=self._head,
            target_hidden=inputs["final_hidden"][rows, law_positions],
            log_normalizer=inputs["log_normalizer"][rows, law_positions],
            next_tokens=blocks.next_tokens[mask],
            position_weight=weight,
            weights=self._settings.loss_weights,
        )
        confidence_loss, confidence = self._confidence_loss(hidden, embeddings, terms)
        if confidence_loss is not None:
            loss = loss + self._settings.confidence_weight * (weight * confidence_loss).sum()
        self._metrics.add(blocks, terms, weight, confidence_loss, confidence)
        denominator = weight.sum() if num_items_in_batch is None else num_items_in_batch
        # Gradients are averaged over processes, the denominator is summed over them.
        loss = loss * self.args.world_size / (denominator + 1e-6)
        return (loss, {}) if return_outputs else loss

    def _draft(
        self, model: nn.Module, inputs: dict[str, Any], blocks: AnchorBlocks
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`h_k`, `W_1[x_{k-1}]` and codes of the supervised positions, `[n, ...]`; fills in missing features."""
        drafter = self._drafter
        if "features" not in inputs:
            inputs.update(self._read_features(inputs, blocks))
        hidden, anchor_hidden = packed_hidden(model, drafter, self._reader.embedding, inputs["features"], blocks)
        mask = blocks.is_supervised.flatten(0, 1)
        if drafter.markov_head is None:
            return hidden[mask], None, None
        embeddings = drafter.markov_head.embed(blocks.previous_tokens.flatten(0, 1))
        codes = drafter.markov_head.codes(embeddings, hidden, anchor_hidden)
        return hidden[mask], embeddings[mask], codes[mask]

    def _read_features(self, inputs: dict[str, Any], blocks: AnchorBlocks) -> dict[str, Tensor]:
        needed = torch.zeros_like(inputs["loss_mask"])
        rows = torch.arange(needed.shape[0], device=needed.device)[:, None, None].expand(blocks.is_supervised.shape)
        needed[rows[blocks.is_supervised], blocks.law_positions[blocks.is_supervised]] = True
        with torch.autocast(needed.device.type, enabled=False):
            read: TargetFeatures = self._reader.read(inputs["input_ids"], needed)
        return vars(read)

    def _confidence_loss(
        self, hidden: Tensor, embeddings: Tensor | None, terms: PositionTerms
    ) -> tuple[Tensor | None, Tensor | None]:
        """BCE against the detached label (Eq. 11), and `c_k`, both float32 `[n]`."""
        if self._drafter.confidence_head is None:
            return None, None
        logits = self._drafter.confidence_head(hidden, embeddings).float()
        loss = F.binary_cross_entropy_with_logits(logits, terms.acceptance, reduction="none")
        return loss, logits.detach().sigmoid()

    # -- reports ------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add loss parts, conditional acceptance per slot and expected tau to what is reported."""
        if "loss" in logs:
            sums = self.accelerator.reduce(self._metrics.take(), "sum")
            logs = logs | self._metrics.summarise(sums)
        super().log(logs, start_time)

    @torch.no_grad()
    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Loss parts and acceptance on held-out blocks, and tau of real speculative decoding on held-out prompts."""
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise TrainingDataError("evaluate() needs an eval_dataset; pass one here or to DSparkTrainer")
        was_training = self._drafter.training
        training_sums, self._metrics = self._metrics, BlockMetrics(self._drafter.config.block_size, self.args.device)
        self._drafter.eval()
        self._is_evaluating = True
        try:
            self._add_up(dataset)
            sums = self.accelerator.reduce(self._metrics.take(), "sum")
            # Every process has to know what the first one decoded: it may decide about the best checkpoint.
            values = self._metrics.summarise(sums) | broadcast_object_list([self._decode()])[0]
        finally:
            self._is_evaluating = False
            self._metrics = training_sums
            self._drafter.train(was_training)
        if self.stop_evaluating():
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, {})
            return {}
        weights = self._settings.loss_weights
        values["loss"] = (
            weights.cross_entropy * values["cross_entropy"]
            + weights.total_variation * values["total_variation"]
            + weights.confidence * values["confidence"]
        )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _add_up(self, dataset: AnchorDataset) -> None:
        """Metrics of this process's share of a data set; a loader shared by processes would repeat some sequences."""
        mine = range(self.args.process_index, len(dataset), self.args.world_size)
        size = self.args.eval_batch_size
        for start in range(0, len(mine), size):
            if self.stop_evaluating():
                return
            batch = self._prepare_inputs(collate([dataset[i] for i in mine[start : start + size]]))
            with self.compute_loss_context_manager():
                self.compute_loss(self._drafter, batch)

    def _decode(self) -> dict[str, float]:
        """tau of generate() with this drafter, greedy and at temperature 1; leaves every random state as it was."""
        prompts = self._decode_prompts[: self._settings.num_decode_prompts]
        if not prompts or not self.is_world_process_zero():
            return {}
        result = {}
        law: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        for name, options in (("tau_greedy", {"do_sample": False}), ("tau_sampled", law)):
            device = self._target.device
            with torch.random.fork_rng([device] if device.type == "cuda" else []), record_speculation() as report:
                torch.manual_seed(self.args.seed)
                for ids in prompts:
                    if self.stop_evaluating():
                        return {}
                    self._target.generate(
                        ids.to(self._target.device),
                        attention_mask=torch.ones_like(ids, device=self._target.device),
                        assistant_model=self._drafter,
                        max_new_tokens=self._settings.decode_new_tokens,
                        **options,
                    )
            result[name] = report.tau
        return result
