"""Where training starts: draft layers copied from the target's last ones, context projection from its last feature.

A copied layer already turns hidden states of that depth into the target's predictions; random ones have to learn it
first. Where the target's layers compute something else, the drafter keeps its random weights and a log line says why.
"""

import copy
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..model.draft_vocab import is_plain_linear
from ..model.sequential_heads import MarkovHead, RNNHead
from ..modeling_autoregressive import AutoregressiveDraftModel
from ..modeling_dspark import DSparkDraftModel
from .features import TargetReader

logger = logging.getLogger(__name__)

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")


@torch.no_grad()
def initialise_from_target(drafter: DSparkDraftModel, target: PreTrainedModel, sample_ids: Tensor) -> bool:
    """Copy the target's last layers and final norm into `drafter`, and make its context the last feature.

    Args:
        drafter: Freshly made; its sequential head is set to add nothing yet, a head of its own to be the target's.
        target: The target.
        sample_ids: int64 `[rows, length]` of ordinary text, from which the scale of features and queries is read.

    Returns:
        Whether the layers were copied; False where their structure differs.
    """
    _start_head(drafter.markov_head)
    if drafter.own_head is not None:
        _copy_head(drafter, drafter.own_head, target)
    base = _causal_model(target).base_model
    layers: Any = getattr(base, "layers", None)
    count = drafter.config.num_hidden_layers
    if layers is None or len(layers) < count:
        return _refuse(target, "it has no list of layers that is long enough")
    states = base(input_ids=sample_ids, use_cache=False, output_hidden_states=True).hidden_states
    sources = [_Source(layers[i], states[i]) for i in range(len(layers) - count, len(layers))]
    try:
        for ours, source in zip(drafter.layers, sources, strict=True):
            _check_layer(ours, source, drafter.config)
        _check_norm(drafter.norm, base.norm, states[-1])
    except (AttributeError, TypeError, ValueError) as error:
        return _refuse(target, str(error))
    for ours, source in zip(drafter.layers, sources, strict=True):
        _copy_layer(ours, source)
    drafter.norm.weight.copy_(base.norm.weight)
    if isinstance(drafter, AutoregressiveDraftModel):
        _start_pairs(drafter, sources[0])
    else:
        drafter.hidden_norm.weight.copy_(sources[0].layer.input_layernorm.weight)
        _start_from_last_feature(drafter, states[drafter.config.target_layer_ids[-1] + 1])
    return True


def _refuse(target: PreTrainedModel, why: str) -> bool:
    logger.warning("the draft layers start random: layers of %s cannot be copied (%s)", type(target).__name__, why)
    return False


def _causal_model(target: PreTrainedModel) -> Any:
    """The model inside an adapted one."""
    return target.get_base_model() if hasattr(target, "get_base_model") else target  # type: ignore[operator]


class _Source(NamedTuple):
    """A layer of the target, and what goes into it."""

    layer: Any
    hidden: Tensor


def step_scale_of_features(target: PreTrainedModel, drafter: DSparkDraftModel, sample_ids: Tensor) -> Tensor | None:
    """What [`DSparkTrainer`] takes as `feature_rms`; None where features are not projected without a norm."""
    if not hasattr(drafter, "fc"):
        return None
    rms = feature_rms(target, drafter.config, sample_ids)
    # Eagle3's projection is a residual stream of the last feature's size, DSpark's is normalised.
    return rms / rms[-1] if isinstance(drafter, AutoregressiveDraftModel) else rms


@torch.no_grad()
def feature_rms(target: PreTrainedModel, config: DSparkConfig, sample_ids: Tensor) -> Tensor:
    """Usual root mean square of each feature layer on ordinary text, float32 `[m]`; it grows tenfold over the layers.

    The median over tokens: the first one of a text has entries of thousands in many models.
    """
    features = TargetReader(target, config).read(sample_ids, torch.zeros_like(sample_ids, dtype=torch.bool)).features
    by_layer = features.float().view(-1, len(config.target_layer_ids), config.hidden_size)
    return by_layer.pow(2).mean(dim=2).median(dim=0).values.sqrt()


def _check_layer(ours: Any, source: _Source, config: DSparkConfig) -> None:
    """Raise unless a draft layer with the source's weights computes what the source does, but for q/k norms."""
    layer, hidden = source
    for ours_part, theirs_part, names in _linear_layers(ours, layer):
        for name in names:
            ours_linear, theirs_linear = getattr(ours_part, name), getattr(theirs_part, name)
            is_linear = isinstance(theirs_linear, nn.Linear)
            if not is_linear or theirs_linear.weight.shape != _for_states(ours_linear, theirs_linear).shape:
                raise ValueError(f"{name} is not a linear layer of the drafter's shape")
            if theirs_linear.bias is not None and ours_linear.bias is None:
                raise ValueError(f"{name} has a bias, the drafter's has none; attention_bias=True would add it")
    for name in _NORMS:
        _check_norm(getattr(ours, name), getattr(layer, name), hidden)
    if set(vars(layer)["_modules"]) - {"self_attn", "mlp", *_NORMS}:
        raise ValueError(f"its layers have more parts: {sorted(vars(layer)['_modules'])}")
    if not torch.equal(ours.mlp.act_fn(hidden), layer.mlp.act_fn(hidden)):
        raise ValueError(f"its activation is not {config.hidden_act}")
    if getattr(layer.self_attn, "scaling", ours.self_attn.scaling) != ours.self_attn.scaling:
        raise ValueError("its attention has another scale")
    if getattr(layer, "residual_multiplier", 1.0) != 1.0:
        raise ValueError("its residual stream is scaled")


def _check_norm(ours: nn.Module, theirs: nn.Module, hidden: Tensor) -> None:
    """Raise unless a norm of ours with their weight gives what theirs gives."""
    candidate = copy.deepcopy(ours).to(hidden.dtype)
    assert isinstance(candidate.weight, Tensor)
    candidate.weight.copy_(theirs.weight)  # type: ignore[arg-type]
    if not torch.allclose(candidate(hidden).float(), theirs(hidden).float(), rtol=2e-2, atol=1e-3):
        raise ValueError(f"its {type(theirs).__name__} is another norm than the drafter's")


def _for_states(ours: nn.Linear, theirs: nn.Linear) -> Tensor:
    """Of a weight of ours the columns that read hidden states: in Eagle3's attention the second half."""
    return ours.weight[:, -theirs.in_features :]


def _linear_layers(ours: Any, theirs: Any) -> list[tuple[Any, Any, tuple[str, ...]]]:
    return [(ours.self_attn, theirs.self_attn, _ATTENTION), (ours.mlp, theirs.mlp, _MLP)]


def _copy_layer(ours: Any, source: _Source) -> None:
    layer, hidden = source
    for ours_part, theirs_part, names in _linear_layers(ours, layer):
        for name in names:
            ours_linear, theirs_linear = getattr(ours_part, name), getattr(theirs_part, name)
            _for_states(ours_linear, theirs_linear).copy_(theirs_linear.weight)
            if ours_linear.bias is not None:
                ours_linear.bias.zero_() if theirs_linear.bias is None else ours_linear.bias.copy_(theirs_linear.bias)
    for name in _NORMS:
        getattr(ours, name).weight.copy_(getattr(layer, name).weight)
    for norm_name, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        ours_norm, theirs_norm = getattr(ours.self_attn, norm_name), getattr(layer.self_attn, norm_name, None)
        if not hasattr(ours_norm, "weight"):
            continue
        if theirs_norm is not None:
            ours_norm.weight.copy_(theirs_norm.weight)
        else:
            # The target does not normalise them: the norm's weight takes over their usual size.
            states = getattr(layer.self_attn, projection)(layer.input_layernorm(hidden))
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


def _start_from_last_feature(drafter: DSparkDraftModel, feature: Tensor) -> None:
    """Identity on the last feature `[rows, length, hidden]` divided by its rms, nothing from the others yet."""
    width = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    rms = float(feature.float().pow(2).mean(dim=-1).median().sqrt())
    drafter.fc.weight[:, -width:] = torch.eye(width, device=drafter.device) / rms


def _start_pairs(drafter: AutoregressiveDraftModel, source: _Source) -> None:
    """Let the copied layer read the state of a pair as it read the target's stream.

    Eagle3's stream starts as its last feature, and its attention reads the embeddings with random weights yet. MTP's
    starts as the normalised hidden state, in the size that the copied layer is used to; embeddings add nothing yet.
    """
    layer: Any = drafter.layers[0]
    width = drafter.config.hidden_size
    identity = torch.eye(width, device=drafter.device)
    if drafter.config.drafter_type == "eagle3":
        layer.hidden_norm.weight.copy_(source.layer.input_layernorm.weight)
        nn.init.ones_(layer.input_layernorm.weight)
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -width:] = identity
    else:
        rms = float(source.hidden.float().pow(2).mean(dim=-1).median().sqrt())
        layer.eh_proj.weight.copy_(torch.cat([torch.zeros_like(identity), rms * identity], dim=1))


def _copy_head(drafter: DSparkDraftModel, head: nn.Linear, target: PreTrainedModel) -> None:
    theirs = target.get_output_embeddings()
    ids = drafter.draft_token_ids
    if is_plain_linear(theirs):  # training refuses others
        rows = theirs.weight if ids is None else theirs.weight[ids]
        head.weight.copy_(rows * drafter.config.logit_multiplier)  # which its own head's logits are not multiplied with
