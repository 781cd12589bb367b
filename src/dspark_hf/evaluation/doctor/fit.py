"""Checks of what configs say: whether drafter and target can work together at all."""

from typing import Any

from ...decoding.target_refusals import refuse_kind, refuse_target
from ...errors import DSparkError
from ..provenance import dtype_name
from .case import Case
from .findings import Finding, NotExamined


def check_sizes(case: Case) -> tuple[str, list[Finding]]:
    """Hidden size, depth, vocabulary, feature layers, mask id: what generate() would refuse."""
    try:
        refuse_kind(case.target)
        refuse_target(case.target, case.drafter)
    except DSparkError as error:
        case.misfit = str(error)
        case.causes.append("a target that does not fit")
        mend = "load the drafter of this target, or the target of this drafter"
        return "", [Finding(str(error), "certain: generate() refuses the pair", mend)]
    config = case.drafter.config
    return (
        f"hidden size {config.hidden_size}, {config.num_target_layers} target layers, features of "
        f"{config.target_layer_ids}, {config.block_size} drafts, layout {config.draft_layout}"
    ), []


def check_vocabulary(case: Case) -> tuple[str, list[Finding]]:
    """Sizes of tokenizer, target and drafter; the mask's id; which of the target's tokens can be drafted."""
    config = case.drafter.config
    theirs = case.target.config.get_text_config(decoder=True).vocab_size
    findings = []
    if (num_tokens := len(case.tokenizer)) > theirs:
        findings.append(
            Finding(
                f"the tokenizer knows {num_tokens} tokens and the target {theirs}: it is another model's, or tokens "
                "were added to it alone",
                "certain: read off both",
                "load the tokenizer of this target, or call target.resize_token_embeddings(len(tokenizer))",
            )
        )
    if theirs != config.vocab_size and case.misfit is None:
        findings.append(
            Finding(
                f"the drafter was made for {config.vocab_size} tokens and the target has {theirs}; tokens that only "
                "one of them has are never drafted",
                "certain: read off both configs",
                "nothing to do where tokens were added; else load the drafter of this target",
                is_fault=False,
            )
        )
    detail = f"{theirs} tokens, mask {config.mask_token_id} {_name(case, config.mask_token_id)}"
    if (ids := case.drafter.draft_token_ids) is not None:
        detail += f", {len(ids)} can be drafted"
        if case.misfit is None:
            share, count = _coverage(case, set(ids.tolist()))
            case.measured["draft_vocabulary"] = {"share_of_target_tokens": share, "num_tokens": count}
            detail += f": {share:.1%} of {count} that the target wrote"
    return detail, findings


def check_dtypes(case: Case) -> tuple[str, list[Finding]]:
    """The dtypes in use, and the one that the drafter was saved in."""
    used = {"target": dtype_name(case.target.dtype), "drafter": dtype_name(case.drafter.dtype)}
    case.measured["dtypes"] = used
    detail = f"target {used['target']}, drafter {used['drafter']}"
    if used["target"] == used["drafter"]:
        return detail, []
    return detail, [
        Finding(
            f"target and drafter compute in different dtypes ({detail}); numbers are converted at the boundary",
            "certain: read off both",
            "load the drafter with dtype=target.dtype; a calibration or profile belongs to one of them",
            is_fault=False,
        )
    ]


def _coverage(case: Case, draftable: set[int]) -> tuple[float, int]:
    try:
        texts = case.greedy.texts
    except NotExamined:
        return 0.0, 0
    written = [token for text in texts for token in text.input_ids[text.prompt_length :].tolist()]
    return sum(token in draftable for token in written) / max(1, len(written)), len(written)


def _name(case: Case, token_id: int) -> str:
    tokenizer: Any = case.tokenizer
    name = tokenizer.convert_ids_to_tokens(token_id) if token_id < len(tokenizer) else None
    return "(unused)" if name is None else f"({name})"
