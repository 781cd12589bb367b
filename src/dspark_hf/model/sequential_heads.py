"""Sequential heads: the logit bias `B_k` that a slot's previous tokens add to the parallel backbone's logits.

Each head has the same two methods, so that drafting (one slot at a time) and training (all slots at once, with the
true previous tokens) share them: `start` makes the state before slot 1, `step` returns the bias and the next state.
Tensor names are DeepSpec's.
"""

import torch
from torch import Tensor, nn

from ..configuration_dspark import DSparkConfig


class MarkovHead(nn.Module):
    """`B(x_{k-1}) = W_1[x_{k-1}] W_2`, of rank r (paper, Eq. 5). It has no state."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def embed(self, previous_tokens: Tensor) -> Tensor:
        """`W_1[x]` for token ids of any shape: `[..., rank]`."""
        embedding: Tensor = self.markov_w1(previous_tokens)
        return embedding

    def start(self, num_rows: int) -> Tensor | None:
        """State before the first slot."""
        return None

    def step(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Bias `[..., vocab]` for one slot from `embedding` `[..., rank]` and `hidden` `h_k` `[..., hidden]`."""
        bias: Tensor = self.markov_w2(embedding)
        return bias, state


class GatedMarkovHead(MarkovHead):
    """`B = (g * W_1[x_{k-1}]) W_2` with `g = sigmoid(Linear([h_k; W_1[x_{k-1}]]))` (released code only)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def step(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1)))
        bias: Tensor = self.markov_w2(gate * embedding)
        return bias, state


class RNNHead(MarkovHead):
    """Recurrent head with state `s_k` of width r (paper, Eq. 6); one linear map makes gate, candidate and output."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        rank = config.markov_rank
        self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def start(self, num_rows: int) -> Tensor | None:
        weight = self.joint_proj.weight
        return weight.new_zeros(num_rows, weight.shape[0] // 3)

    def step(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert state is not None, "the recurrent head's state comes from start()"
        joint = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        next_state = gate * state + (1 - gate) * torch.tanh(candidate)
        # Eq. 6 feeds the map's output slice to W_2, not the state.
        bias: Tensor = self.markov_w2(torch.tanh(output))
        return bias, next_state


_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RNNHead,
}


def build_sequential_head(config: DSparkConfig) -> MarkovHead | None:
    """The head a config asks for; None at rank 0 (parallel drafting only)."""
    return _HEADS[config.markov_head_type](config) if config.markov_rank else None
