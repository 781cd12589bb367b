"""Whether the drafter was trained on prompts in another form: chat template, thinking mode, system prompt.

Answers to the same prompts in another form are other texts, easier or harder to draft whoever drafts them. So drafts
are compared where the target was as sure of its tokens: by five groups of its probability, weighted alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...errors import IncompatibleTargetError
from ...modeling_dspark import DSparkDraftModel
from ...prompts import Prompt
from ..intervals import Floats, Sums
from ..replay import Replay, TargetText
from .case import GREEDY, Case
from .evidence import Evidence, jackknife
from .findings import Finding, NotExamined
from .probes import block_tokens, probing_of

NUM_GROUPS = 5
# Variables that templates of thinking models read.
_THINKING = ("enable_thinking", "thinking")

# The form that most chat models of today are trained with; their tokenizers know its marks.
_CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Render = Callable[[Prompt], Tensor]


@dataclass(frozen=True)
class Form:
    """A way to write prompts down, and what to do where it is the right one."""

    name: str
    mend: str
    render: Render


@dataclass(frozen=True)
class _Drafted:
    """Every block of a text: tokens that it would commit, and the target's probability of slot 1's token."""

    tokens: Tensor
    sureness: Tensor


def check_prompt_form(case: Case) -> tuple[str, list[Finding]]:
    """Acceptance on answers to the same prompts in other forms."""
    forms = forms_of(case.tokenizer, case.source)
    own = case.greedy
    asked = {name: ids.tolist() for name, ids in case.encoded.items()}
    by_id = {prompt.id: prompt for prompt in case.prompts}
    drafter = probing_of(case).best
    drafted = _drafted(case, drafter, own.texts)
    others = []
    for form in forms:
        prompts = {name: form.render(by_id[name]) for name in asked}
        if all(prompts[name].tolist() == asked[name] for name in asked) or not all(len(p) for p in prompts.values()):
            continue
        others.append((form, _drafted(case, drafter, case.decode(prompts, GREEDY).texts)))
    if not others:
        raise NotExamined("there is no other form to try")
    compared = [(form, *_gains(drafted, other, len(others))) for form, other in others]
    case.measured["prompt_forms"] = [
        {"form": form.name, "more_tokens_a_block": raw, "at_equal_sureness": equal} for form, raw, equal in compared
    ]
    better = [(form, raw, equal) for form, raw, equal in compared if raw.is_above_zero and equal.is_above_zero]
    if not better:
        names = ", ".join(form.name for form, *_ in compared)
        return f"nothing accepts more, of {names} ({compared[0][1].num_drafts} drafts and more each)", []
    form, raw, equal = max(better, key=lambda one: one[2].value or 0.0)
    case.causes.append("prompts in another form")
    return "", [
        Finding(
            f"the drafter accepts more where prompts are written {form.name}: it was trained with that form of prompts",
            f"{raw.told('more tokens a block')}; where the target is as sure, "
            f"{equal.told('more')}, the best of {len(compared)} forms tried",
            form.mend,
            evidence=equal,
        )
    ]


def forms_of(tokenizer: PreTrainedTokenizerBase, source: Any) -> list[Form]:
    """Other forms worth trying; those that come out as the present one are left out later."""
    template: Any = tokenizer.chat_template
    forms = []
    own_file = None if source is None else source / "chat_template.jinja"
    if own_file is not None and own_file.is_file():
        beside = own_file.read_text(encoding="utf-8")
        forms.append(_form(tokenizer, "with the chat template that lies beside the drafter", template=beside))
    if template:
        text = template if isinstance(template, str) else " ".join(template.values())
        for name in (name for name in _THINKING if name in text):
            for value in (True, False):
                forms.append(_form(tokenizer, f"with {name}={value}", variables={name: value}))
        if isinstance(template, dict):
            forms += [_form(tokenizer, f"with the template {name!r}", template=template[name]) for name in template]
        forms.append(
            Form(
                "without a chat template",
                "send plain text, tokenizer(prompt), or train a drafter on chats: `dspark train data`",
                lambda prompt: _plain(tokenizer, prompt),
            )
        )
    marks = [tokenizer.convert_tokens_to_ids(mark) for mark in _CHATML_MARKS]
    if all(isinstance(mark, int) and mark != tokenizer.unk_token_id for mark in marks):
        forms.append(_form(tokenizer, "in ChatML", template=_CHATML))
    return forms


def _form(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    *,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Form:
    variables = variables or {}
    if template is None:
        arguments = ", ".join(f"{key}={value}" for key, value in variables.items())
        mend = f"pass {arguments} to apply_chat_template, or train a drafter for the mode in use"
    else:
        mend = "set tokenizer.chat_template to that one, or train a drafter for the template in use"
    return Form(name, mend, lambda prompt: _templated(tokenizer, prompt, template, variables))


def _templated(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, template: str | None, variables: Mapping[str, Any]
) -> Tensor:
    encoded: Any = tokenizer.apply_chat_template(
        [dict(message) for message in prompt.messages],
        chat_template=template,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
        **variables,
    )
    ids: Tensor = encoded["input_ids"][0]
    return ids


def _plain(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Tensor:
    text = "\n".join(message["content"] for message in prompt.messages)
    ids: Tensor = tokenizer(text, return_tensors="pt")["input_ids"][0]
    return ids


def _drafted(case: Case, drafter: DSparkDraftModel, texts: Sequence[TargetText]) -> dict[str, _Drafted]:
    """Of each text, by prompt."""
    if not texts:
        return {}
    try:
        replayed = Replay(case.target, texts, is_soft=True).run(drafter)
    except IncompatibleTargetError as error:
        raise NotExamined(f"drafts cannot be replayed: {error}") from error
    return {
        text.id: _Drafted(block_tokens(one), _sureness(case.target, text))
        for text, one in zip(texts, replayed, strict=True)
    }


@torch.no_grad()
def _sureness(target: Any, text: TargetText) -> Tensor:
    """The target's probability of the token behind each anchor, float32 `[blocks]`."""
    ids = text.input_ids[None].to(target.device)
    logits = target(input_ids=ids, use_cache=False).logits[0, text.prompt_length : -1].float()
    probs: Tensor = logits.softmax(dim=-1).gather(-1, ids[0, text.prompt_length + 1 :, None])[:, 0]
    return probs.cpu()


def _gains(own: dict[str, _Drafted], other: dict[str, _Drafted], num_forms: int) -> tuple[Evidence, Evidence]:
    """How many more tokens a block the other form's answers commit: by and large, and where the target is as sure."""
    names = [name for name in own if name in other]
    if not names:
        raise NotExamined("no prompt has an answer in both forms")
    both = torch.cat([part[name].sureness for part in (own, other) for name in names])
    edges = both.quantile(torch.linspace(0, 1, NUM_GROUPS + 1)[1:-1])
    columns: dict[str, list[float]] = {}
    for side, part in (("own", own), ("other", other)):
        for group in range(NUM_GROUPS):
            chosen = [torch.bucketize(part[name].sureness, edges) == group for name in names]
            columns[f"{side}/{group}/blocks"] = [float(rows.sum()) for rows in chosen]
            columns[f"{side}/{group}/tokens"] = [
                float(part[name].tokens[rows].sum()) for name, rows in zip(names, chosen, strict=True)
            ]
    num_blocks = sum(len(part[name].tokens) for part in (own, other) for name in names)
    drafts = {"num_drafts": num_blocks, "num_comparisons": num_forms}
    return jackknife(columns, _by_and_large, **drafts), jackknife(columns, _at_equal_sureness, **drafts)


def _by_and_large(sums: Sums) -> Floats:
    def rate(side: str) -> Floats:
        tokens, blocks = (np.zeros_like(sums["own/0/blocks"]) for _ in range(2))
        for group in range(NUM_GROUPS):
            tokens = tokens + sums[f"{side}/{group}/tokens"]
            blocks = blocks + sums[f"{side}/{group}/blocks"]
        return tokens / blocks

    return rate("other") - rate("own")


def _at_equal_sureness(sums: Sums) -> Floats:
    """Differences by group, weighted by the blocks of the present form; groups that one side lacks do not count."""
    difference, weight = np.zeros_like(sums["own/0/blocks"]), np.zeros_like(sums["own/0/blocks"])
    for group in range(NUM_GROUPS):
        ours, theirs = (sums[f"{side}/{group}/blocks"] for side in ("own", "other"))
        counts = np.where((ours > 0) & (theirs > 0), ours, 0.0)
        rates = sums[f"other/{group}/tokens"] / np.maximum(theirs, 1) - sums[f"own/{group}/tokens"] / np.maximum(
            ours, 1
        )
        difference, weight = difference + counts * rates, weight + counts
    result: Floats = difference / weight
    return result
