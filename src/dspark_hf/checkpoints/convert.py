"""Write a drafter as another project stores it, for serving engines that read that."""

import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._machine import dtype_name
from ..configuration_dspark import DSparkConfig
from ..decoding.target_refusals import refuse_target
from ..errors import CheckpointFormatError, IncompatibleTargetError
from ..model.draft_vocab import is_plain_linear
from ..modeling_dspark import DSparkDraftModel
from .write_config import WRITERS, TargetNote, config_for, left_out

FORMATS = tuple(WRITERS)


@dataclass(frozen=True)
class Conversion:
    """What was written.

    Attributes:
        folder: Where.
        num_tensors: Stored weights.
        left_out: Fields of the drafter's config that the format has no place for; no draft depends on them.
    """

    folder: Path
    num_tensors: int
    left_out: tuple[str, ...]


# These store something of the target's: weights, or its name.
_NEEDS_TARGET = ("deepspec", "speculators")


def convert_drafter(
    drafter: DSparkDraftModel,
    to: str,
    output: Path,
    *,
    target: PreTrainedModel | None = None,
    target_name: str | None = None,
) -> Conversion:
    """Write `drafter` into the new folder `output` as `to` stores it; the weights keep their dtype.

    Args:
        to: `deepspec` (with copies of the target's embedding and head), `speculators` (which vLLM reads) or
            `specforge` (which SGLang reads).
        target: Its target, for DeepSpec's and speculators' files.
        target_name: Folder or Hub id of the target, for speculators' files.

    Raises:
        CheckpointFormatError: an unknown format, one that cannot express this drafter, a folder that is not empty, or
            no target where one is needed.
        IncompatibleTargetError: drafter and target do not belong together, or its weights cannot be copied.
        OSError: the folder cannot be written; nothing half-written stays behind.
    """
    if to not in WRITERS:
        raise CheckpointFormatError(f"drafters can be converted to {', '.join(FORMATS)}, got {to!r}")
    if drafter.config.model_type != DSparkConfig.model_type:
        raise CheckpointFormatError(
            f"a {to} file describes drafters that draft blocks, and this one's model_type is "
            f"{drafter.config.model_type!r}; convert a DSpark or DFlash drafter"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointFormatError(f"{output} exists and is not an empty folder; choose another one")
    if to in _NEEDS_TARGET and (target is None or target_name is None):
        raise CheckpointFormatError(
            f"a {to} file holds {'copies of weights' if to == 'deepspec' else 'the name'} of the target; name it with "
            "--target"
        )
    note = None
    if target is not None:
        refuse_target(target, drafter)
        note = TargetNote(target_name or "", tuple(target.config.architectures or (type(target).__name__,)))
    config = config_for(drafter.config, to, dtype_name(drafter.dtype), note)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    if target is not None:
        tensors |= _of_target(drafter, to, target)
    _write(output, config, tensors)
    return Conversion(output, len(tensors), tuple(left_out(drafter.config, to)))


def _of_target(drafter: DSparkDraftModel, to: str, target: PreTrainedModel) -> dict[str, Tensor]:
    """What a format stores of the target's, in the drafter's dtype."""
    ids = drafter.draft_token_ids
    if to == "speculators" and ids is not None:
        chosen = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
        chosen[ids.cpu()] = True
        return {"t2d": chosen, "lm_head.weight": _copy(_head(target, drafter)[ids.cpu()], drafter)}
    if to != "deepspec":
        return {}
    embedding = target.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or not embedding.weight.is_floating_point():
        raise _cannot_copy(target, "input embedding", embedding)
    head = _head(target, drafter)
    weight = embedding.weight.detach().cpu()
    _check_rows(target, drafter, weight, "input embedding")
    return {"embed_tokens.weight": _copy(weight, drafter), "lm_head.weight": _copy(head, drafter)}


def _head(target: PreTrainedModel, drafter: DSparkDraftModel) -> Tensor:
    head = target.get_output_embeddings()
    if not is_plain_linear(head) or head.bias is not None:
        raise _cannot_copy(target, "output head", head)
    weight: Tensor = head.weight.detach().cpu()
    _check_rows(target, drafter, weight, "output head")
    return weight


def _check_rows(target: PreTrainedModel, drafter: DSparkDraftModel, weight: Tensor, what: str) -> None:
    if len(weight) != drafter.config.vocab_size:
        raise IncompatibleTargetError(
            f"the {what} of {type(target).__name__} has {len(weight)} rows and the drafter was made for "
            f"{drafter.config.vocab_size} tokens; pass the target as it was when the drafter was trained"
        )


def _cannot_copy(target: PreTrainedModel, what: str, module: nn.Module | None) -> IncompatibleTargetError:
    return IncompatibleTargetError(
        f"the {what} of {type(target).__name__} is a {type(module).__name__} of its own kind, whose weights cannot be "
        "copied; load the target without adapters, quantisation and offloading"
    )


def _copy(weight: Tensor, drafter: DSparkDraftModel) -> Tensor:
    return weight.to(drafter.dtype).clone()


def _write(output: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    """Into a folder beside it, which then takes its place."""
    output.parent.mkdir(parents=True, exist_ok=True)
    made = output.parent / f".{output.name}.{uuid.uuid4().hex}"
    made.mkdir()
    try:
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (made / "config.json").write_text(text, encoding="utf-8")
        # safetensors makes its file readable to its owner only; a serving engine may be somebody else.
        (made / "model.safetensors").chmod((made / "config.json").stat().st_mode)
        made.replace(output)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
