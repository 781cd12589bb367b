"""Makes the targets of `target_forms`: adapted, compiled, quantised, offloaded, multimodal.

Packages are imported where they are used, so that the table can be read without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB, random_ids, tiny_target
from transformers import AutoModelForCausalLM, PreTrainedModel

NO_TORCHAO = "torchao is not among the test packages: it prints whenever transformers is imported; .ci/run adds it"
IMAGE_ID = 60  # stands in the prompt for a part of the image


def text_prompt() -> dict[str, Any]:
    return {"input_ids": random_ids(9, vocab_size=56)}


# -- PEFT ---------------------------------------------------------------------------------------------------------

ATTENTION_AND_MLP = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def lora_target(*modules: str, **settings: Any) -> Any:
    """A LoRA model whose adapters matter: neither factor is zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        target_modules=list(modules or ATTENTION_AND_MLP),
        init_lora_weights=False,
        **settings,
    )
    return get_peft_model(tiny_target(), config).eval()


@contextmanager
def lora_off(folder: Path) -> Iterator[Any]:
    target = lora_target()
    with target.disable_adapter():
        yield target


def lora_second(folder: Path) -> Any:
    target = lora_target()
    torch.manual_seed(4)
    target.add_adapter("second", target.peft_config["default"])
    target.set_adapter("second")
    return target.eval()


def lora_saved_modules(folder: Path) -> Any:
    target = lora_target("q_proj", modules_to_save=["embed_tokens", "lm_head"])
    torch.manual_seed(5)
    for module in (target.get_input_embeddings(), target.get_output_embeddings()):
        torch.nn.init.normal_(module.modules_to_save["default"].weight, std=0.3)
    return target


# -- torch.compile ------------------------------------------------------------------------------------------------


def counting_backend(name: str = "eager") -> tuple[Callable[..., Any], list[int]]:
    """A backend for torch.compile, and a list that grows by one for each graph it compiles."""
    graphs: list[int] = []
    compile_graph = torch._dynamo.lookup_backend(name)

    def backend(graph: Any, example_inputs: Any, **options: Any) -> Any:
        graphs.append(1)
        return compile_graph(graph, example_inputs)

    return backend, graphs


def compile_wrapper(folder: Path) -> Any:
    return torch.compile(tiny_target(), backend="eager")


def compile_forward(folder: Path) -> PreTrainedModel:
    target = tiny_target(num_layers=2)
    target.forward = torch.compile(target.forward, backend="eager", dynamic=True)
    return target


def compile_in_place(folder: Path) -> PreTrainedModel:
    target = tiny_target(num_layers=2)
    target.compile(backend="eager", dynamic=True)
    return target


def compiled_static_prompt(backend: Any = "eager") -> dict[str, Any]:
    from transformers import CompileConfig

    config = CompileConfig(backend=backend, mode=None)
    config._compile_all_devices = True  # on a CPU generate() compiles for this flag only
    return text_prompt() | {"cache_implementation": "static", "compile_config": config}


# -- quantised ----------------------------------------------------------------------------------------------------


def int8_in_place(folder: Path, *, with_head: bool = False, dynamic: bool = False) -> PreTrainedModel:
    pytest.importorskip("torchao", reason=NO_TORCHAO)
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    target = tiny_target()
    config = Int8DynamicActivationInt8WeightConfig() if dynamic else Int8WeightOnlyConfig()
    quantize_(
        target,
        config,
        filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and (with_head or name != "lm_head"),
    )
    return target


def int8_loaded(folder: Path, *, with_head: bool = False) -> PreTrainedModel:
    pytest.importorskip("torchao", reason=NO_TORCHAO)
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    tiny_target().save_pretrained(folder)
    config = TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=[] if with_head else None)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).eval()


def quanto_in_place(folder: Path, *, with_head: bool = False) -> PreTrainedModel:
    from optimum.quanto import freeze, qint8, quantize

    target = tiny_target()
    quantize(target, weights=qint8, exclude=None if with_head else "lm_head")
    freeze(target)
    return target


def quanto_loaded(folder: Path) -> PreTrainedModel:
    from transformers import QuantoConfig

    tiny_target().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=QuantoConfig(weights="int8")).eval()


# -- offloaded ----------------------------------------------------------------------------------------------------


def placed(folder: Path, *on_disk: str) -> PreTrainedModel:
    """Loaded by a device map that puts `on_disk` on the disk and the rest in memory."""
    tiny_target().save_pretrained(folder / "model")
    modules = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm", "model.rotary_emb"]
    places = {name: "disk" if name in on_disk else "cpu" for name in [*modules, "lm_head"]}
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=places if on_disk else {"": "cpu"}, offload_folder=folder / "offload"
    ).eval()


def offloaded_to_memory(folder: Path) -> PreTrainedModel:
    from accelerate import cpu_offload

    return cpu_offload(tiny_target(), execution_device=torch.device("cpu"))


# -- multimodal ---------------------------------------------------------------------------------------------------

_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.3,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip


def gemma3(folder: Path) -> PreTrainedModel:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = _TEXT | {"pad_token_id": 0, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    config = Gemma3Config(
        text_config=text, vision_config=_VISION, mm_tokens_per_image=4, image_token_id=IMAGE_ID, boi_token_id=59,
        eoi_token_id=58,
    )  # fmt: skip
    return _random(Gemma3ForConditionalGeneration, config)


def llava(folder: Path) -> PreTrainedModel:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    text = _TEXT | {"model_type": "llama"}
    vision = _VISION | {"model_type": "clip_vision_model"}
    return _random(
        LlavaForConditionalGeneration, LlavaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE_ID)
    )


def qwen_vl(folder: Path) -> PreTrainedModel:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLConfig(
        text_config=_TEXT | {"rope_parameters": rope},
        vision_config={
            "depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32,
            "patch_size": 4, "fullatt_block_indexes": [0], "window_size": 8,
        },
        image_token_id=IMAGE_ID, video_token_id=59, vision_start_token_id=58, vision_end_token_id=57,
    )  # fmt: skip
    return _random(Qwen2_5_VLForConditionalGeneration, config)


def smol_vlm(folder: Path) -> PreTrainedModel:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    config = SmolVLMConfig(
        text_config=_TEXT | {"model_type": "llama"}, vision_config=_VISION, image_token_id=IMAGE_ID, scale_factor=2,
        pad_token_id=0,
    )  # fmt: skip
    return _random(SmolVLMForConditionalGeneration, config)


def _random(cls: Any, config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return cls(config).eval()


def image_prompt(num_tokens: int, shape: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """A prompt with an image of random pixels `shape`, which the target turns into `num_tokens` positions."""
    text = random_ids(9, vocab_size=56)
    ids = torch.cat([text[:, :3], torch.full((1, num_tokens), IMAGE_ID), text[:, 3:]], dim=1)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "pixel_values": pixels} | more


def llava_image() -> dict[str, Any]:
    return image_prompt(16, (1, 3, 28, 28))


def smol_vlm_image() -> dict[str, Any]:
    return image_prompt(4, (1, 1, 3, 28, 28))


def qwen_vl_image() -> dict[str, Any]:
    prompt = image_prompt(4, (16, 3 * 2 * 4 * 4), image_grid_thw=torch.tensor([[1, 4, 4]]))
    return prompt | {"mm_token_type_ids": (prompt["input_ids"] == IMAGE_ID).long()}
