"""Checks of what the drafter's files hold: broken numbers, norms that were never trained, copies of another target."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...training.feature_cache import target_fingerprint
from ..provenance import dtype_name
from ..report_files import REPORTS_FOLDER
from .case import Case
from .findings import Finding, NotExamined

TRAINING_REPORT = f"{REPORTS_FOLDER}/training.json"
# Rows of a stored copy that are compared.
NUM_ROWS = 512
# Two roundings of bfloat16, relative to a row's largest entry.
ROUNDING = 2.0**-7

# What other projects call their frozen copies, by the part before `.weight`.
_COPIES = {"embed_tokens": "embedding", "lm_head": "output head", "verifier_lm_head": "output head"}


def check_numbers_of_weights(case: Case) -> tuple[str, list[Finding]]:
    """NaN and infinity in the weights."""
    broken = {name: int((~p.isfinite()).sum()) for name, p in case.drafter.named_parameters()}
    broken = {name: count for name, count in broken.items() if count}
    if not broken:
        return f"{sum(1 for _ in case.drafter.parameters())} weights are finite", []
    case.causes.append("weights that are not finite")
    name, count = next(iter(broken.items()))
    kept = getattr(case.drafter.config, "dtype", None)
    how = "saved or loaded in float16, which ends at 65504" if case.drafter.dtype == torch.float16 else "damaged"
    return "", [
        Finding(
            f"{len(broken)} of the drafter's weights hold NaN or infinity, first {name} ({count} numbers); "
            "no draft of such a drafter is used",
            "certain: read off the weights",
            f"it was {how} (dtype {dtype_name(case.drafter.dtype)}, saved as {kept}): load it with "
            "dtype=torch.bfloat16 (--dtype bfloat16), and if that is no better download or export it again",
        )
    ]


def check_norms(case: Case) -> tuple[str, list[Finding]]:
    """Norms whose weights are all one: as they are before training, so export lost them or they were never trained."""
    norms = {n: p for n, p in case.drafter.named_parameters() if "norm" in n and p.ndim == 1 and p.numel() > 1}
    flat = [name for name, p in norms.items() if bool((p == 1).all())]
    if not flat:
        return f"{len(norms)} norms are trained", []
    all_of_them = len(flat) == len(norms)
    if all_of_them:
        case.causes.append("norms that are all ones")
    which = "all" if all_of_them else f"{len(flat)} of {len(norms)}"
    return "", [
        Finding(
            f"{which} norms of the drafter are ones only ({', '.join(flat[:3])}{', ...' if len(flat) > 3 else ''}): "
            "the values they have before training",
            "certain that they are ones; training leaves hardly any norm so",
            "export the drafter again from the trained weights, norms included"
            + ("; one that was never trained has to be: `dspark train`" if all_of_them else ""),
        )
    ]


def check_stored_copies(case: Case) -> tuple[str, list[Finding]]:
    """Copies of the target's embedding and head that some formats store, against this target's own."""
    if case.source is None:
        raise NotExamined("the drafter's folder is not at hand")
    findings, seen = [], []
    for name, what, copied in _stored_copies(case.source):
        own = _own_rows(case, what, copied)
        if own is None:
            continue
        seen.append(what)
        is_same, share = _compare(copied, own)
        if is_same:
            continue
        if share < 0.5:  # chance finds one in `NUM_ROWS`; another version of a model, nearly all
            case.causes.append("another target")
            findings.append(
                Finding(
                    f"the drafter's stored copy of its target's {what} ({name}) is not this target's: only "
                    f"{share:.0%} of {min(NUM_ROWS, len(own))} rows resemble the row of the same token most",
                    "certain: the drafter was made for another model, or for another tokenizer",
                    "load the target that it was trained with, or the drafter of this target",
                )
            )
        else:
            findings.append(
                Finding(
                    f"the drafter's stored copy of its target's {what} ({name}) differs from this target's, "
                    "row by row, by more than rounding",
                    "certain that they differ: another version of the same model, fine-tuned or quantised",
                    "if acceptance is low, load the version that the drafter was trained with",
                    is_fault=False,
                )
            )
    return f"stored copies: {', '.join(dict.fromkeys(seen)) or 'none'}", findings


def check_training_report(case: Case) -> tuple[str, list[Finding]]:
    """The target that `dspark train` noted, against this one."""
    path = None if case.source is None else case.source / TRAINING_REPORT
    if path is None or not path.is_file():
        raise NotExamined(f"no {TRAINING_REPORT} lies beside the drafter")
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        if "written_by_hand" in report:
            raise NotExamined(f"{TRAINING_REPORT} was written by hand, and does not tell the target's weights")
        trained_with, dtype = report["target_fingerprint"], report["provenance"]["dtype"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotExamined(f"{TRAINING_REPORT} cannot be read ({error!r})") from error
    if dtype != dtype_name(case.target.dtype):
        raise NotExamined(f"it was trained with the target in {dtype}, here it is in {dtype_name(case.target.dtype)}")
    if trained_with == target_fingerprint(case.target):
        return "trained with exactly this target", []
    return "", [
        Finding(
            f"weights or config of this target are not those of {report.get('target')!r} when the drafter was trained",
            "certain: their fingerprints differ; how much it matters acceptance says",
            "load the target of the training run, or train on with this one: `dspark train --initial-drafter`",
            is_fault=False,
        )
    ]


def _stored_copies(folder: Path) -> Iterator[tuple[str, str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # no mapping
                    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
                    if part in _COPIES and name.endswith(".weight"):
                        yield name, _COPIES[part], file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise NotExamined(f"{path.name} cannot be read ({error})") from error


def _own_rows(case: Case, what: str, copied: Tensor) -> Tensor | None:
    """The target's rows that a copy is of; None where shapes or a quantised module do not say."""
    module: Any
    module = case.target.get_input_embeddings() if what == "embedding" else case.target.get_output_embeddings()
    own = getattr(module, "weight", None)
    if own is None or own.ndim != 2 or not own.is_floating_point() or own.is_meta:
        return None
    if (ids := case.drafter.draft_token_ids) is not None and len(copied) == len(ids) < len(own):
        if int(ids.max()) >= len(own):
            return None
        own = own[ids.to(own.device)]
    rows = min(len(own), len(copied))
    return own[:rows].detach() if copied.ndim == 2 and copied.shape[1] == own.shape[1] else None


def _compare(copied: Tensor, own: Tensor) -> tuple[bool, float]:
    """Whether a sample of rows agrees but for rounding, and the share of rows that lie nearest their own token's."""
    rows = torch.linspace(0, len(own) - 1, min(NUM_ROWS, len(own))).long()
    ours, theirs = copied[rows].float(), own[rows.to(own.device)].float().cpu()
    scale = theirs.abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
    is_same = bool(((ours - theirs).abs() <= ROUNDING * scale).all())
    nearest = torch.cdist(ours, theirs).argmin(dim=1)
    return is_same, float((nearest == torch.arange(len(rows))).float().mean())
