"""The target's output head as training needs it: the rows of the draft vocabulary, multiplied without the module."""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..errors import TrainingDataError
from ..model.draft_vocab import draft_index, is_plain_linear
from ..modeling_dspark import DSparkDraftModel, treat_logits


class HeadRows:
    """Rows of the target's head, and how the target treats its logits.

    Args:
        weight: `[draft_vocab, hidden]`, in the dtype to compute in.
        bias: `[draft_vocab]` or None.
        token_ids: int64 `[draft_vocab]`; None: the whole vocabulary.
        config: The drafter's.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, token_ids: Tensor | None, config: DSparkConfig) -> None:
        self.weight = weight
        self.bias = bias
        self.config = config
        # Draft id of each token, -1 outside.
        self.draft_index = None if token_ids is None else draft_index(token_ids, config.vocab_size)

    @classmethod
    def of(cls, target: PreTrainedModel, drafter: DSparkDraftModel, dtype: torch.dtype) -> "HeadRows":
        """Those that `drafter` needs of `target`'s head.

        Raises:
            TrainingDataError: the head is not a plain linear layer.
        """
        head = target.get_output_embeddings()
        if not is_plain_linear(head):
            raise TrainingDataError(
                f"training needs a target whose output head is a plain linear layer in memory, this one's is a "
                f"{type(head).__name__} (quantised, adapted, hooked or offloaded); load the target unquantised, on one "
                "device, and without an adapter on its head"
            )
        ids = drafter.draft_token_ids
        rows: Tensor | slice = slice(None) if ids is None else ids
        weight = head.weight.detach()[rows].to(dtype)
        bias = None if head.bias is None else head.bias.detach()[rows].to(dtype)
        return cls(weight, bias, ids, drafter.config)

    @property
    def has_cap(self) -> bool:
        """Whether the logits are capped, so that their slope is not constant."""
        return self.config.final_logit_softcapping is not None

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 `[n, draft_vocab]` of `hidden` `[n, hidden]`."""
        return treat_logits(F.linear(hidden, self.weight, self.bias), self.config)

    def grad_through_treatment(self, grad_logits: Tensor, logits: Tensor) -> Tensor:
        """Gradient with respect to the head's output; `logits` as [`logits`] returned them."""
        multiplier, cap = self.config.logit_multiplier, self.config.final_logit_softcapping
        if cap is not None:
            grad_logits = grad_logits * (1.0 - (logits / cap) ** 2)
        return grad_logits * multiplier if multiplier != 1.0 else grad_logits

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """Draft id of each token, -1 for tokens that cannot be drafted."""
        return tokens if self.draft_index is None else self.draft_index[tokens]
