"""Targets as users have them, one row a form; `name` and `note` are what a table of supported targets prints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from target_builders import (
    compile_forward,
    compile_in_place,
    compile_wrapper,
    compiled_static_prompt,
    gemma3,
    int8_in_place,
    int8_loaded,
    llava,
    llava_image,
    lora_off,
    lora_saved_modules,
    lora_second,
    lora_target,
    offloaded_to_memory,
    placed,
    quanto_in_place,
    quanto_loaded,
    qwen_vl,
    qwen_vl_image,
    smol_vlm,
    smol_vlm_image,
    text_prompt,
)
from tiny import tiny_target


@dataclass(frozen=True)
class TargetForm:
    """One form.

    Attributes:
        name, note: For readers.
        build: A context that gives the target, made with a scratch folder.
        inputs: generate()'s arguments: the prompt, and options that belong to the form.
        drafter_dtype: What the drafter computes in.
        is_exact: Whether token identity is promised; not where the target itself rounds coarsely.
        is_slow: Takes several seconds.
    """

    name: str
    note: str
    build: Callable[[Path], AbstractContextManager[Any]]
    inputs: Callable[[], dict[str, Any]] = text_prompt
    drafter_dtype: torch.dtype = torch.float32
    is_exact: bool = True
    is_slow: bool = False


def built(make: Callable[[Path], Any]) -> Callable[[Path], AbstractContextManager[Any]]:
    """For targets that need nothing undone."""
    return lambda folder: nullcontext(make(folder))


_BF16 = torch.bfloat16
_OFFLOADED_MIDDLE = ("model.layers.1", "model.layers.2")
_OFFLOADED_ENDS = ("model.embed_tokens", "model.layers.3", "lm_head")

TARGET_FORMS = [
    TargetForm("PEFT LoRA, adapter on", "the adapted model is the target", built(lambda _: lora_target())),
    TargetForm("PEFT LoRA, adapter off", "in `with model.disable_adapter():` the base model is the target", lora_off),
    TargetForm("PEFT LoRA, one of two adapters", "the one chosen with `set_adapter()`", built(lora_second)),
    TargetForm("PEFT LoRA, merged", "after `merge_and_unload()`", built(lambda _: lora_target().merge_and_unload())),
    TargetForm(
        "PEFT LoRA on embedding and head",
        "the drafter borrows the adapted modules",
        built(lambda _: lora_target("q_proj", "embed_tokens", "lm_head")),
    ),
    TargetForm(
        "PEFT `modules_to_save`", "the drafter borrows the trained embedding and head", built(lora_saved_modules)
    ),
    TargetForm(
        "`torch.compile(model)`",
        "generate() runs the model inside, not the compiled call, with and without a drafter",
        built(compile_wrapper),
    ),
    TargetForm(
        "`model.forward = torch.compile(model.forward)`",
        "prompt and verification run compiled",
        built(compile_forward),
        is_slow=True,
    ),
    TargetForm("`model.compile()`", "prompt and verification run compiled", built(compile_in_place), is_slow=True),
    TargetForm(
        '`cache_implementation="static"`, compiled',
        "verification runs compiled, the prompt does not",
        built(lambda _: tiny_target(num_layers=2)),
        compiled_static_prompt,
    ),
    TargetForm("quanto int8 weights", "`quantize()` and `freeze()` in place", built(quanto_in_place)),
    TargetForm(
        "quanto int8 weights and head",
        "the drafter calls the quantised head",
        built(lambda folder: quanto_in_place(folder, with_head=True)),
    ),
    TargetForm(
        "quanto int8 weights, loaded", "`from_pretrained(quantization_config=QuantoConfig(...))`", built(quanto_loaded)
    ),
    TargetForm("torchao int8 weights", "`quantize_()` in place", built(int8_in_place)),
    TargetForm(
        "torchao int8 weights and head",
        "`quantize_()` in place; the drafter calls the quantised head",
        built(lambda folder: int8_in_place(folder, with_head=True)),
    ),
    TargetForm(
        "torchao int8 weights and activations",
        "`quantize_()` in place; rounded activations turn near-ties, as in bfloat16",
        built(lambda folder: int8_in_place(folder, dynamic=True)),
        is_exact=False,
    ),
    TargetForm(
        "torchao int8 weights, loaded", "`from_pretrained(quantization_config=TorchAoConfig(...))`", built(int8_loaded)
    ),
    TargetForm(
        "torchao int8 weights and head, loaded",
        "`TorchAoConfig(..., modules_to_not_convert=[])`",
        built(lambda folder: int8_loaded(folder, with_head=True)),
    ),
    TargetForm('`device_map={"": ...}`', "one device", built(placed)),
    TargetForm(
        "`device_map`, layers on disk",
        "accelerate's hooks load them for each forward",
        built(lambda folder: placed(folder, *_OFFLOADED_MIDDLE)),
    ),
    TargetForm(
        "`device_map`, embedding and head on disk",
        "each draft loads them once more",
        built(lambda folder: placed(folder, *_OFFLOADED_ENDS)),
    ),
    TargetForm(
        "accelerate `cpu_offload()`", "each draft loads embedding and head once more", built(offloaded_to_memory)
    ),
    TargetForm("Gemma 3 with vision, text only", "the drafter is made from `config.get_text_config()`", built(gemma3)),
    TargetForm("Llava, text only", "the drafter is made from `config.get_text_config()`", built(llava)),
    TargetForm("Qwen2.5-VL, text only", "the drafter is made from `config.get_text_config()`", built(qwen_vl)),
    TargetForm("SmolVLM, text only", "the drafter is made from `config.get_text_config()`", built(smol_vlm)),
    TargetForm("Llava with an image", "image positions are context like any other", built(llava), llava_image),
    TargetForm(
        "Qwen2.5-VL with an image",
        "the drafter counts tokens where M-RoPE counts rows and columns",
        built(qwen_vl),
        qwen_vl_image,
    ),
    TargetForm("SmolVLM with an image", "image positions are context like any other", built(smol_vlm), smol_vlm_image),
    TargetForm(
        "float32 target, bfloat16 drafter",
        "the output is the float32 target's",
        built(lambda _: tiny_target()),
        drafter_dtype=_BF16,
    ),
    TargetForm(
        "bfloat16 target, float32 drafter",
        "near-ties may fall otherwise than one token at a time",
        built(lambda _: tiny_target().to(_BF16)),
        is_exact=False,
    ),
    TargetForm(
        "bfloat16 target and drafter",
        "near-ties may fall otherwise than one token at a time",
        built(lambda _: tiny_target().to(_BF16)),
        is_exact=False,
        drafter_dtype=_BF16,
    ),
]
