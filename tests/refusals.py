"""What generate() refuses beside a drafter, and what a compatibility table says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny import VOCAB, random_ids, tiny_drafter, tiny_target
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import logits_process as lp

from dspark_hf import DSparkConfig, DSparkDraftModel, IncompatibleTargetError, UnsupportedGenerationError

Pair = tuple[PreTrainedModel, Any]


@dataclass(frozen=True)
class Refusal:
    """One thing that cannot be had together with a drafter.

    Attributes:
        name: What the user asked for, as the table prints it.
        why: The reason, one clause.
        message: A regular expression that the error matches.
        options: Arguments of generate(), or what makes them from the target.
        pair: Makes target and assistant; by default a pair that works.
        error: The class raised.
        runs_plainly: Whether the target can generate without the assistant.
        faults: Numbers of the faults of transformers' own loop that this refusal prevents.
    """

    name: str
    why: str
    message: str
    options: dict[str, Any] | Callable[[PreTrainedModel], dict[str, Any]] = field(default_factory=dict)
    pair: Callable[[], Pair] | None = None
    error: type[Exception] = UnsupportedGenerationError
    runs_plainly: bool = True
    faults: tuple[int, ...] = ()

    def build(self) -> tuple[PreTrainedModel, Any, dict[str, Any]]:
        """Target, assistant and arguments of the call that is refused."""
        target, assistant = (self.pair or working_pair)()
        return target, assistant, dict(self.options(target) if callable(self.options) else self.options)


def working_pair() -> Pair:
    target = tiny_target()
    return target, tiny_drafter(target)


def _of_type(model_type: str, **overrides: Any) -> Callable[[], Pair]:
    """A target of another family beside a drafter that was made for the usual one."""

    def pair() -> Pair:
        sizes = {
            "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": None,
            "eos_token_id": None,
        }  # fmt: skip
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **(sizes | overrides))
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        return auto.from_config(config).eval(), tiny_drafter(tiny_target())

    return pair


def _own_drafter(pair: Callable[[], Pair]) -> Callable[[], Pair]:
    """The same target, with a drafter made for it."""

    def with_drafter() -> Pair:
        target, _ = pair()
        return target, tiny_drafter(target)

    return with_drafter


def _drafter_for(**change: Any) -> Callable[[], Pair]:
    def pair() -> Pair:
        target = tiny_target()
        return target, DSparkDraftModel(DSparkConfig.from_target(target.config, num_hidden_layers=1, **change)).eval()

    return pair


def _assistant(make: Callable[[DSparkDraftModel], Any]) -> Callable[[], Pair]:
    def pair() -> Pair:
        target, drafter = working_pair()
        return target, make(drafter)

    return pair


def _assistant_of(change: Callable[[PreTrainedModel], Any]) -> Callable[[], Pair]:
    """A pair whose target was changed after its drafter was made."""

    def pair() -> Pair:
        target, drafter = working_pair()
        change(target)
        return target, drafter

    return pair


def _resized(size: int, d2t: int | None = None) -> Callable[[], Pair]:
    """A target of 128 tokens, cut to `size` later; its drafter drafts token `d2t` only."""

    def pair() -> Pair:
        target = tiny_target(vocab_size=128)
        drafter = tiny_drafter(target, **({} if d2t is None else {"draft_vocab_size": 1, "mask_token_id": 0}))
        if d2t is not None:
            drafter.d2t.fill_(d2t)
        target.resize_token_embeddings(size, mean_resizing=False)
        return target, drafter

    return pair


def _changing_rope() -> Pair:
    config = tiny_target("llama").config
    config.max_position_embeddings = 24
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    return target, tiny_drafter(target, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


def _takes_extra() -> Pair:
    """A target whose forward takes one argument more."""

    class Takes(LlamaForCausalLM):
        def forward(self, *args: Any, extra: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    target = Takes(tiny_target("llama").config).eval()
    return target, tiny_drafter(target)


def _used_cache(target: PreTrainedModel) -> dict[str, Any]:
    """A cache of an earlier turn, and only the new tokens."""
    cache = DynamicCache(config=target.config)
    target.generate(random_ids(7), do_sample=False, max_new_tokens=6, cache=cache)
    return {"inputs": random_ids(3, seed=5), "cache": cache}


def _guidance(target: PreTrainedModel) -> dict[str, Any]:
    return {"logits_processor": [lp.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, target)]}


def _synth_id(target: PreTrainedModel) -> dict[str, Any]:
    return {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3), "do_sample": True}


def _dia_processor(target: PreTrainedModel) -> dict[str, Any]:
    return {"logits_processor": [lp.DiaEOSDelayPatternLogitsProcessor([0, 1], 1, 10)]}


class _Streams:
    """Takes anything."""

    def put(self, value: Any) -> None: ...

    def end(self) -> None: ...


_MODES = "drafts are checked against one sequence, token by token"
_OTHER_WAY = "it is another way to speculate"
_STATE = "it keeps state between steps, and sees drafts that are later rejected"
_RECURRENT = "its state cannot be taken back behind a rejected draft"
_CACHE = "rejected drafts could not be taken out of it"
_NO_MODEL = "generate() takes the loaded model"
_MADE_FOR = "a drafter reads the hidden states of one target"
_KNOB = "it has no such meaning"
_MOVED = {"trust_remote_code": True}  # these searches live on the Hub now

REFUSALS = [
    # -- other searches
    Refusal("`num_beams` above 1", _MODES, r"num_beams=2 .*set num_beams=1", {"num_beams": 2}, faults=(10,)),
    Refusal(
        "`num_beams` above 1, sampled", _MODES, r"num_beams=3 asks for beam_sample",
        {"num_beams": 3, "do_sample": True}, faults=(10,),
    ),
    Refusal(
        "`num_beam_groups`", _MODES, r"num_beams=2 asks for group_beam_search",
        _MOVED | {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5},
    ),
    Refusal(
        "`force_words_ids`, `constraints`", _MODES, r"force_words_ids=\[\[\[3\]\]\] .*set force_words_ids=None",
        _MOVED | {"num_beams": 2, "force_words_ids": [[[3]]]},
    ),
    Refusal(
        "`penalty_alpha` (contrastive search)", _MODES, r"penalty_alpha=0.6 .*set penalty_alpha=None",
        _MOVED | {"penalty_alpha": 0.6, "top_k": 4},
    ),
    Refusal("`dola_layers`", "it changes what the target says", "dola_layers='high'", {"dola_layers": "high"}),
    # -- other ways to speculate
    Refusal("`prompt_lookup_num_tokens`", _OTHER_WAY, "prompt_lookup_num_tokens=3", {"prompt_lookup_num_tokens": 3}),
    Refusal(
        "`prompt_lookup_num_tokens=0`", _OTHER_WAY, "prompt_lookup_num_tokens=0 .*set it to None",
        {"prompt_lookup_num_tokens": 0},
    ),
    Refusal("`assistant_early_exit`", _OTHER_WAY, "assistant_early_exit=2", {"assistant_early_exit": 2}),
    Refusal("`use_mtp`", _OTHER_WAY, "use_mtp=True", {"use_mtp": True}),
    Refusal("`speculation_type`", _OTHER_WAY, "speculation_type='dflash'", {"speculation_type": "dflash"}),
    Refusal(
        "`assistant_ensemble_weight`", "it gives up the target's law", "assistant_ensemble_weight=0.5",
        {"assistant_ensemble_weight": 0.5},
    ),
    Refusal(
        "`is_assistant`", "it is for the model that drafts, and stops a text where that one is unsure",
        "is_assistant=True", {"is_assistant": True},
    ),
    Refusal(
        "`assistant_tokenizer`", "a drafter has its target's vocabulary", "leave assistant_tokenizer out",
        {"assistant_tokenizer": object()},
    ),
    # -- processors with state
    Refusal("`guidance_scale`", _STATE, "guidance_scale=1.5 .*set it to 1", {"guidance_scale": 1.5}, faults=(5,)),
    Refusal(
        "a guidance processor of your own", _STATE, "UnbatchedClassifierFreeGuidanceLogitsProcessor keeps state",
        _guidance, faults=(5,),
    ),
    Refusal("SynthID watermarks", _STATE, "SynthIDTextWatermarkLogitsProcessor keeps state", _synth_id, faults=(5,)),
    Refusal("Dia's delay pattern", _STATE, "DiaEOSDelayPatternLogitsProcessor keeps state", _dia_processor),
    # -- prompts
    Refusal(
        "`inputs_embeds` without ids", "the drafter sees tokens", "pass input_ids",
        {"inputs": None, "inputs_embeds": torch.zeros(1, 5, 32)}, faults=(8,),
    ),
    Refusal(
        "`inputs_embeds` beside ids", "they need not be those of the ids", "and inputs_embeds; pass input_ids",
        {"inputs_embeds": torch.zeros(1, 5, 32)}, faults=(8,),
    ),
    Refusal(
        "a streamer for a batch", "rows advance by different numbers of tokens", "a batch of 2 rows cannot be streamed",
        {"inputs": random_ids(5).expand(2, -1), "streamer": _Streams()},
    ),
    Refusal(
        "a cache of yours for a batch", "rows are kept each at its own length", "a batch of 2 rows needs a cache for",
        lambda target: {"inputs": random_ids(5).expand(2, -1), "cache": DynamicCache(config=target.config)},
    ),
    Refusal(
        "new tokens alone behind a cache in use", "the drafter needs the features of the whole text",
        "Pass the whole sequence", _used_cache, faults=(1,),
    ),
    Refusal("`prefill_chunk_size` below 1", _KNOB, "prefill_chunk_size must be >= 1", {"prefill_chunk_size": -1}),
    Refusal(
        "`synced_gpus`", "ranks would make different numbers of forwards", "synced_gpus=True", {"synced_gpus": True}
    ),
    # -- caches
    Refusal("`use_cache=False`", _CACHE, "use_cache=False .*leave it at True", {"use_cache": False}),
    Refusal(
        "quantised caches", _CACHE, "QuantizedCache .*cannot be rolled back; use the default cache",
        {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
    ),
    Refusal(
        "a static cache with a sliding window shorter than the text", _CACHE,
        "sliding windows .*up to 24 tokens.*cannot be rolled back", {"cache_implementation": "static"},
        _own_drafter(_of_type("gemma3_text", head_dim=8, sliding_window=8)),
    ),
    Refusal(
        "a static cache shorter than `max_length`", "a draft may reach further than the text does",
        "holds 14 tokens.*reach 24",
        lambda target: {"cache": StaticCache(config=target.config, max_cache_len=14)},
    ),
    Refusal(
        "`cache_implementation=\"paged\"` (continuous batching)", "transformers has no drafting there",
        "assistant_model is not supported for continuous batching", {"cache_implementation": "paged"},
        error=NotImplementedError,
    ),
    # -- targets
    *(
        Refusal(
            f"{name} targets", "drafts are verified by a decoder that has read everything", "is an encoder-decoder",
            pair=_of_type(model_type, **overrides), faults=(9,),
        )
        for name, model_type, overrides in (
            ("T5", "t5", {"d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1}),
            ("BART", "bart", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 1}),
        )
    ),
    *(
        Refusal(
            f"{name} targets", _RECURRENT, "is a recurrent model", pair=_of_type(model_type, **overrides), faults=(9,)
        )
        for name, model_type, overrides in (
            ("Mamba", "mamba", {"state_size": 4}),
            ("RecurrentGemma", "recurrent_gemma", {"lru_width": 32, "head_dim": 8, "num_key_value_heads": 1}),
            ("RWKV", "rwkv", {"attention_hidden_size": 32}),
            ("Jamba", "jamba", {"num_experts": 2, "use_mamba_kernels": False, "attn_layer_period": 2,
                                "attn_layer_offset": 1}),
            ("Falcon-H1", "falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
                                        "mamba_d_state": 8, "mamba_chunk_size": 8}),
            ("Qwen3-Next", "qwen3_next", {
                "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                "linear_value_head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
            }),
            ("MiniMax", "minimax", {"num_local_experts": 2, "head_dim": 8}),
        )
    ),
    # -- the assistant
    Refusal(
        "a name or folder as `assistant_model`", _NO_MODEL, "got 'me/drafter'; load it first",
        pair=_assistant(lambda drafter: "me/drafter"),
    ),
    Refusal(
        "a config as `assistant_model`", _NO_MODEL, "got a DSparkConfig; load it first",
        pair=_assistant(lambda drafter: drafter.config),
    ),
    Refusal(
        "a class as `assistant_model`", _NO_MODEL, "got <class .*DSparkDraftModel.*load it first", pair=_assistant(type)
    ),
    Refusal(
        "a drafter inside `DataParallel`", _NO_MODEL, "pass the drafter inside, assistant_model.module",
        pair=_assistant(torch.nn.DataParallel),
    ),
    Refusal(
        "a drafter on the meta device", "it has no weights", "meta device .*load it", error=IncompatibleTargetError,
        pair=_assistant(lambda drafter: drafter.to("meta")),
    ),
    Refusal(
        "a target whose vocabulary lost the drafter's mask token", "the drafter's blocks are made of it",
        "mask_token_id 127 .* cut to 127; resize the target to at least 128", error=IncompatibleTargetError,
        pair=_resized(127),
    ),
    Refusal(
        "a target whose vocabulary lost all tokens that can be drafted", "nothing would be left to draft",
        "none of the drafter's 1 draft tokens .* cut to 127", error=IncompatibleTargetError,
        pair=_resized(127, d2t=127),
    ),
    Refusal(
        "a target without an output head", "the drafter borrows it", "has no output head .*AutoModelForCausalLM",
        error=IncompatibleTargetError, pair=_assistant_of(lambda target: setattr(target, "lm_head", None)),
        runs_plainly=False,
    ),
    Refusal(
        "a target whose embedding or head has another shape than its config says", "the drafter borrows them",
        r"output head as \[61, 32\].* one of \[70, 32\]", error=IncompatibleTargetError,
        pair=_assistant_of(lambda target: target.set_output_embeddings(torch.nn.Linear(32, 70, bias=False))),
        runs_plainly=False,
    ),
    Refusal(
        "`output_attentions` of Falcon and other old classes, unless loaded with `attn_implementation=\"eager\"`",
        "their forward then sees later tokens", "FalconForCausalLM look at later tokens .*load it with",
        {"return_dict_in_generate": True, "output_attentions": True}, pair=_own_drafter(_of_type("falcon")),
    ),
    Refusal(
        "`dynamic` and `longrope` RoPE beyond the length where it changes", "one forward cannot look at both sides",
        "'dynamic' RoPE, .* within 24", {"max_length": 30}, pair=_changing_rope,
    ),
    Refusal(
        "`prefill_chunk_size` with images, or with inputs that are not cut by token", "a chunk would need its part",
        r"cannot cut the inputs \['extra'\]", {"prefill_chunk_size": 2, "extra": torch.ones(1)}, pair=_takes_extra,
    ),
    *(
        Refusal(
            f"a drafter for a target of another {what}", _MADE_FOR, message, error=IncompatibleTargetError,
            pair=_drafter_for(**change),
        )
        for what, message, change in (
            ("hidden size", "hidden_size 64.*has 32; load the drafter of this target", {"hidden_size": 64}),
            ("vocabulary", "vocab_size 80.* has 61; .*load the drafter of this target", {"vocab_size": 80}),
            ("depth", "decoder layers 9, .* has 4; load the drafter of this target", {"num_target_layers": 9}),
            (
                "depth, where its file does not say which", r"reads target layers \[0, 3\], .* has 4, the last of",
                {"num_target_layers": None, "target_layer_ids": [0, 3]},
            ),
        )
    ),
    # -- knobs of the drafter
    *(
        Refusal(f"`num_assistant_tokens={value!r}`", _KNOB, "a whole number >= 1", {"num_assistant_tokens": value})
        for value in (0, 2.5, "3", True)
    ),
    Refusal("an unknown `verification_policy`", _KNOB, "must be one of .*'best'", {"verification_policy": "best"}),
    *(
        Refusal(
            f"`assistant_confidence_threshold={value!r}` under `threshold`", _KNOB, "must be a probability",
            {"verification_policy": "threshold", "assistant_confidence_threshold": value},
        )
        for value in ("high", 1.5)
    ),
    Refusal(
        "`verification_policy=\"prefix\"` and others that weigh time, without a throughput profile",
        "a draft's worth depends on what a step costs", "no throughput profile is at hand.*use verification_policy=",
        {"verification_policy": "prefix"},
    ),
    Refusal(
        "`verification_policy=\"threshold\"` without a confidence head", "there is nothing to compare",
        "needs a drafter with a confidence head.*use verification_policy='full'",
        {"verification_policy": "threshold"},
        _drafter_for(enable_confidence_head=False, confidence_head_with_markov=False),
    ),
]  # fmt: skip


def attempt(refusal: Refusal) -> tuple[Exception | None, int]:
    """Make the call that must be refused; the error, and how many forwards of any module came before it."""
    target, assistant, options = refusal.build()
    return attempt_with(target, assistant, options)


def attempt_with(target: PreTrainedModel, assistant: Any, options: dict[str, Any]) -> tuple[Exception | None, int]:
    """The same for a call that is already built."""
    forwards: list[str] = []
    models = [model for model in (target, assistant) if isinstance(model, torch.nn.Module)]
    handles = [
        module.register_forward_pre_hook(lambda module, inputs: forwards.append(type(module).__name__))
        for model in models
        for module in model.modules()
    ]
    arguments = {"inputs": random_ids(5), "do_sample": False, "max_length": 24} | options
    try:
        target.generate(**arguments, assistant_model=assistant)
    except (ValueError, NotImplementedError) as error:
        return error, len(forwards)
    finally:
        for handle in handles:
            handle.remove()
    return None, len(forwards)
