"""Where training starts: draft layers copied from the target's last ones, context projection from its last feature.

A copied layer already turns hidden states of that depth into the target's predictions; random ones have to learn it
first. Where the target's layers are built differently, the drafter keeps its random weights and a log line says so.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..model.sequential_heads import MarkovHead, RNNHead
from ..modeling_dspark import DSparkDraftModel
from .features import TargetReader

logger = logging.getLogger(__name__)

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@torch.no_grad()
def initialise_from_target(drafter: DSparkDraftModel, target: PreTrainedModel, sample_ids: Tensor) -> bool:
    """Copy the target's last layers and final norm into `drafter`, and make its context the last feature.

    Args:
        drafter: Freshly made; its sequential head is set to add nothing yet.
        target: The target.
        sample_ids: int64 `[rows, length]` of ordinary text, from which the scale of features and queries is read.

    Returns:
        Whether the layers were copied; False where their structure differs.
    """
    _start_head(drafter.markov_head)
    base = target.base_model
    layers = getattr(base, "layers", None)
    final_norm = getattr(base, "norm", None)
    count = drafter.config.num_hidden_layers
    if layers is None or final_norm is None or len(layers) < count:
        logger.warning("%s has no layers and norm to start from; training starts random", type(target).__name__)
        return False
    sources = list(layers)[-count:]
    states = base(input_ids=sample_ids, use_cache=False, output_hidden_states=True).hidden_states
    inputs = states[len(layers) - count : len(layers)]
    try:
        for ours, theirs, hidden in zip(drafter.layers, sources, inputs, strict=True):
            _copy_layer(ours, theirs, hidden)
        _copy(drafter.norm.weight, final_norm.weight)
        _copy(drafter.hidden_norm.weight, sources[0].input_layernorm.weight)
    except (AttributeError, ValueError) as error:
        logger.warning("%s cannot lend its layers (%s); training starts random", type(target).__name__, error)
        drafter.apply(drafter._init_weights)
        return False
    _start_from_last_feature(drafter, [states[i + 1] for i in drafter.config.target_layer_ids])
    return True


@torch.no_grad()
def feature_rms(target: PreTrainedModel, config: DSparkConfig, sample_ids: Tensor) -> Tensor:
    """Usual root mean square of each feature layer on ordinary text, float32 `[m]`; it grows tenfold over the layers.

    The median over tokens: the first one of a text has entries of thousands in many models.
    """
    features = TargetReader(target, config).read(sample_ids, torch.zeros_like(sample_ids, dtype=torch.bool)).features
    by_layer = features.float().view(-1, len(config.target_layer_ids), config.hidden_size)
    return by_layer.pow(2).mean(dim=2).median(dim=0).values.sqrt()


def _copy_layer(ours: Any, theirs: Any, hidden: Tensor) -> None:
    for name in _ATTENTION:
        _copy_linear(getattr(ours.self_attn, name), getattr(theirs.self_attn, name))
    for name in _MLP:
        _copy_linear(getattr(ours.mlp, name), getattr(theirs.mlp, name))
    for name in ("input_layernorm", "post_attention_layernorm"):
        _copy(getattr(ours, name).weight, getattr(theirs, name).weight)
    for norm_name, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        ours_norm = getattr(ours.self_attn, norm_name)
        if not hasattr(ours_norm, "weight"):
            continue
        if (theirs_norm := getattr(theirs.self_attn, norm_name, None)) is not None:
            _copy(ours_norm.weight, theirs_norm.weight)
        else:
            # The target does not normalise them: the norm's weight takes over their usual size.
            states = getattr(theirs.self_attn, projection)(theirs.input_layernorm(hidden))
            by_token = states.float().pow(2).mean(dim=-1)
            ours_norm.weight.fill_(float(by_token.median().sqrt()))


def _start_head(head: MarkovHead | None) -> None:
    """Make the head add nothing yet, and a recurrent one start as a Markov head with a squashed code."""
    if head is None:
        return
    nn.init.zeros_(head.markov_w2.weight)
    if isinstance(head, RNNHead):
        rank = head.markov_w2.in_features
        # With random weights h_k, twenty times longer, would drown the previous token for hundreds of steps.
        output = head.joint_proj.weight[2 * rank :]
        output.zero_()
        output[:, rank : 2 * rank] = torch.eye(rank, device=output.device)


def _start_from_last_feature(drafter: DSparkDraftModel, features: list[Tensor]) -> None:
    """Identity on the last feature, nothing from the others yet, each column divided by its feature's rms."""
    width = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    rms = float(features[-1].float().pow(2).mean(dim=-1).median().sqrt())
    drafter.fc.weight[:, -width:] = torch.eye(width, device=drafter.device) / rms


def _copy_linear(ours: nn.Linear, theirs: nn.Module) -> None:
    if not isinstance(theirs, nn.Linear):
        raise ValueError(f"its projections are {type(theirs).__name__}, not linear layers")
    _copy(ours.weight, theirs.weight)
    if ours.bias is not None and theirs.bias is not None:
        _copy(ours.bias, theirs.bias)


def _copy(ours: Tensor, theirs: Tensor) -> None:
    if ours.shape != theirs.shape:
        raise ValueError(f"a weight has shape {tuple(theirs.shape)}, the drafter's is {tuple(ours.shape)}")
    ours.copy_(theirs)
