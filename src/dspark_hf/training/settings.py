"""Settings of `DSparkTrainer`, beside those of transformers' Trainer."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from ..errors import TrainingDataError
from .losses import LossWeights
from .recipe import NUM_DECODE_PROMPTS


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """transformers' `TrainingArguments` and what training a drafter needs besides.

    Args:
        cross_entropy_weight, total_variation_weight, confidence_weight: Coefficients of the three losses (Eq. 12).
        loss_decay: Decay constant of the position weights in slots; None: gamma, as in the paper (released code: 4).
        head_learning_rate_multiplier: Learning rate of sequential and confidence head, as a multiple of
            `learning_rate`.
        curriculum_fraction: Share of the steps during which blocks grow from one slot to gamma; 0: none.
        num_decode_prompts: Held-out prompts that each evaluation really decodes, greedy and at temperature 1; 0: none.
        decode_new_tokens: Tokens generated for each of them.
    """

    cross_entropy_weight: float = field(default=LossWeights.cross_entropy)
    total_variation_weight: float = field(default=LossWeights.total_variation)
    confidence_weight: float = field(default=LossWeights.confidence)
    loss_decay: float | None = field(default=None)
    head_learning_rate_multiplier: float = field(default=1.0)
    curriculum_fraction: float = field(default=0.0)
    # The filter shows an average in place of a loss that is not a number; here training ends then.
    logging_nan_inf_filter: bool = field(default=False)
    num_decode_prompts: int = field(default=NUM_DECODE_PROMPTS)
    decode_new_tokens: int = field(default=48)

    def __post_init__(self) -> None:
        rules = {
            "loss_decay": (self.loss_decay is None or self.loss_decay > 0, "must be > 0, or None for gamma"),
            "head_learning_rate_multiplier": (self.head_learning_rate_multiplier > 0, "must be > 0"),
            "curriculum_fraction": (0 <= self.curriculum_fraction <= 1, "must lie between 0 and 1"),
            "num_decode_prompts": (self.num_decode_prompts >= 0, "must be >= 0"),
            "decode_new_tokens": (self.decode_new_tokens >= 1, "must be >= 1"),
        } | {
            name: (getattr(self, name) >= 0, "must be >= 0")
            for name in ("cross_entropy_weight", "total_variation_weight", "confidence_weight")
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise TrainingDataError(f"{name} {rule}, got {getattr(self, name)!r}")
        # The batch's columns are ours, and the loss is already a mean over all processes and accumulated steps.
        self.remove_unused_columns = False
        self.label_names = ["input_ids"]
        if self.ddp_find_unused_parameters is None:
            # The heads work outside of the wrapped forward; looking for unused parameters would count them twice.
            self.ddp_find_unused_parameters = False
        super().__post_init__()

    @property
    def loss_weights(self) -> LossWeights:
        """The coefficients as [`draft_loss`] takes them."""
        return LossWeights(self.cross_entropy_weight, self.total_variation_weight, self.confidence_weight)
