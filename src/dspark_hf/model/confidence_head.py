"""The confidence head: how likely a slot's draft is accepted, given that all earlier ones were."""

import torch
from torch import Tensor, nn

from ..configuration_dspark import DSparkConfig


class ConfidenceHead(nn.Module):
    """`logit(c_k) = w^T [h_k ; W_1[x_{k-1}]] + b` (paper, Eq. 7; the released code has the bias).

    It reads the token before the slot and never the slot's own, which is what lets a policy decide about slot k
    without leaking `x_k` (non-anticipation, paper section 5.1).
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, previous_embedding: Tensor | None) -> Tensor:
        """Raw logits `[...]` from `h_k` `[..., hidden]` and `W_1[x_{k-1}]` `[..., rank]`."""
        inputs = hidden
        if self.with_markov:
            assert previous_embedding is not None, "config validation ties with_markov to a rank"
            inputs = torch.cat([hidden, previous_embedding], dim=-1)
        logits: Tensor = self.proj(inputs).squeeze(-1)
        return logits
