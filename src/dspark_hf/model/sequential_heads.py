"""Sequential heads: the logit bias `B_k` that a slot's previous tokens add to the parallel backbone's logits.

Every head's bias is `code @ W_2` for a code of width r; heads differ in how the code comes about. `start` makes the
state before slot 1, `code` returns a slot's code and the next state, `step` the bias itself. Drafting goes step by
step; training takes the codes of all slots, with the true previous tokens, and multiplies them with `W_2` in chunks.
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
        # The previous token may be any token, the drafted one only a token of the draft vocabulary.
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size or config.vocab_size, bias=False)

    def embed(self, previous_tokens: Tensor) -> Tensor:
        """`W_1[x]` for token ids of any shape: `[..., rank]`."""
        embedding: Tensor = self.markov_w1(previous_tokens)
        return embedding

    def start(self, num_rows: int) -> Tensor | None:
        """State before the first slot."""
        return None

    def started(self, anchor_embedding: Tensor, anchor_hidden: Tensor | None) -> Tensor | None:
        """State before the first slot that drafts, in the fill-in layout behind the anchor's own slot.

        Args:
            anchor_embedding: `W_1[x_0]` `[rows, rank]`.
            anchor_hidden: `[rows, hidden]` of the anchor's slot where it drafts nothing; None: there is none.
        """
        state = self.start(anchor_embedding.shape[0])
        return state if anchor_hidden is None else self.code(anchor_embedding, anchor_hidden, state)[1]

    def code(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Code `[..., rank]` of one slot from `embedding` `[..., rank]` and `hidden` `h_k` `[..., hidden]`."""
        return embedding, state

    def step(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Bias `[..., draft vocabulary]` of one slot; arguments as for [`code`]."""
        code, state = self.code(embedding, hidden, state)
        bias: Tensor = self.markov_w2(code)
        return bias, state

    def codes(self, embeddings: Tensor, hidden: Tensor, anchor_hidden: Tensor | None = None) -> Tensor:
        """Codes `[rows, slots, rank]` of whole blocks from `embeddings` `[rows, slots, rank]` and `hidden`.

        `anchor_hidden` as for [`started`]; slot 1's embedding is the anchor's.
        """
        state = self.started(embeddings[:, 0], anchor_hidden)
        codes = []
        for embedding, slot_hidden in zip(embeddings.unbind(1), hidden.unbind(1), strict=True):
            code, state = self.code(embedding, slot_hidden, state)
            codes.append(code)
        return torch.stack(codes, dim=1)


class GatedMarkovHead(MarkovHead):
    """`B = (g * W_1[x_{k-1}]) W_2` with `g = sigmoid(Linear([h_k; W_1[x_{k-1}]]))` (released code only)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def code(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1)))
        return gate * embedding, state


class RNNHead(MarkovHead):
    """Recurrent head with state `s_k` of width r (paper, Eq. 6); one linear map makes gate, candidate and output."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        rank = config.markov_rank
        self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def start(self, num_rows: int) -> Tensor | None:
        weight = self.joint_proj.weight
        return weight.new_zeros(num_rows, weight.shape[0] // 3)

    def code(self, embedding: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert state is not None, "the recurrent head's state comes from start()"
        joint = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        next_state = gate * state + (1 - gate) * torch.tanh(candidate)
        # Eq. 6 feeds the map's output slice to W_2, not the state.
        return torch.tanh(output), next_state


_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RNNHead,
}


def build_sequential_head(config: DSparkConfig) -> MarkovHead | None:
    """The head a config asks for; None at rank 0 (parallel drafting only)."""
    return _HEADS[config.markov_head_type](config) if config.markov_rank else None
