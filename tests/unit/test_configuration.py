"""DSparkConfig: what it derives, what it refuses, and that nothing is guessed on load."""

import json

import pytest
from tiny import tiny_drafter, tiny_target
from transformers import (
    BloomConfig,
    CohereConfig,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GraniteConfig,
    LlamaConfig,
    Qwen3Config,
    T5Config,
)

from dspark_hf import CheckpointFormatError, DSparkConfig, DSparkConfigError, DSparkDraftModel
from dspark_hf.target_traits import choose_mask_token_id, spread_target_layers


@pytest.fixture
def target_config():
    return tiny_target().config


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (36, [1, 9, 17, 25, 33]),
        (40, [1, 10, 19, 28, 37]),
        (30, [1, 8, 14, 20, 27]),
        (8, [1, 2, 3, 4, 5]),
        (7, [0, 1, 2, 4, 5]),
        (6, [0, 1, 2, 3, 4]),
        (4, [0, 1, 2]),
        (2, [0]),
        (1, [-1]),
    ],
)
def test_feature_layers_are_spread_as_in_the_recipe(num_layers, expected):
    assert spread_target_layers(num_layers) == expected


@pytest.mark.parametrize("num_layers", range(1, 100))
def test_spread_layers_obey_the_configs_rule(num_layers):
    ids = spread_target_layers(num_layers)
    assert ids == sorted(set(ids))
    assert -1 <= ids[0] <= ids[-1] <= num_layers - 2 or num_layers == 1


def test_from_target_copies_sizes_ids_and_rope():
    target = Qwen3Config(
        vocab_size=500, hidden_size=64, intermediate_size=96, num_hidden_layers=36, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        eos_token_id=[7, 8], pad_token_id=9, bos_token_id=None, rms_norm_eps=1e-5,
    )  # fmt: skip
    config = DSparkConfig.from_target(target)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (500, 64, 96)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert (config.num_target_layers, config.target_layer_ids) == (36, [1, 9, 17, 25, 33])
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert (config.eos_token_id, config.pad_token_id, config.mask_token_id) == ([7, 8], 9, 499)
    assert config.rms_norm_eps == 1e-5


def test_from_target_takes_the_multipliers_that_forward_applies():
    granite = DSparkConfig.from_target(GraniteConfig(embedding_multiplier=12.0, logits_scaling=8.0))
    assert (granite.embedding_multiplier, granite.logit_multiplier) == (12.0, 0.125)
    assert DSparkConfig.from_target(CohereConfig(logit_scale=0.0625)).logit_multiplier == 0.0625


def test_from_target_takes_the_text_part_and_the_full_attention_rope_of_gemma3():
    from transformers import Gemma3Config

    config = DSparkConfig.from_target(Gemma3Config())
    assert config.hidden_size == Gemma3Config().text_config.hidden_size
    assert config.rope_parameters["rope_type"] == "default"


def test_overrides_win(target_config):
    config = DSparkConfig.from_target(target_config, num_hidden_layers=3, target_layer_ids=[-1, 2], mask_token_id=5)
    assert (config.num_hidden_layers, config.target_layer_ids, config.mask_token_id) == (
        3,
        [-1, 2],
        5,
    )


def test_unknown_arguments_fail_with_a_hint(target_config):
    with pytest.raises(DSparkConfigError, match=r"'blok_size' \(did you mean 'block_size'\?\)"):
        DSparkConfig.from_target(target_config, blok_size=3)
    with pytest.raises(DSparkConfigError, match="'nonsense'"):
        DSparkConfig(**DSparkConfig.from_target(target_config).to_dict(), nonsense=1)


@pytest.mark.parametrize("old_name", [{"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {"rope_theta": 5.0}])
def test_old_names_of_rope_do_not_get_past_its_rules(target_config, saved, old_name):
    with pytest.raises(DSparkConfigError, match=next(iter(old_name))):
        DSparkConfig.from_target(target_config, **old_name)
    before = DSparkConfig.from_pretrained(saved).rope_parameters
    edit(saved, **old_name)
    assert DSparkConfig.from_pretrained(saved).rope_parameters == before


def test_encoder_decoder_targets_are_refused():
    with pytest.raises(DSparkConfigError, match="encoder-decoder"):
        DSparkConfig.from_target(T5Config())


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
BAD_VALUES = [
    ({"block_size": 0}, "block_size must be >= 1, got 0"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be >= 1"),
    ({"head_dim": 7}, "head_dim must be even"),
    ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads"),
    ({"mask_token_id": 61}, "mask_token_id must be a token id of the target, 0 to 60, got 61"),
    ({"mask_token_id": -1}, "mask_token_id"),
    ({"target_layer_ids": []}, "at least one"),
    ({"target_layer_ids": [2, 1]}, "strictly increasing"),
    ({"target_layer_ids": [1, 1]}, "strictly increasing"),
    ({"target_layer_ids": [0, 3]}, r"between -1 \(embedding output\) and 2"),
    ({"target_layer_ids": [-2]}, "target_layer_ids"),
    ({"markov_rank": -1}, "markov_rank must be >= 0"),
    ({"markov_rank": 0}, "confidence_head_with_markov needs markov_rank"),
    ({"markov_head_type": "lstm"}, "markov_head_type must be one of"),
    ({"layer_types": ["full_attention"]}, "one entry per draft layer"),
    ({"layer_types": ["linear_attention"] * 5}, "may only hold"),
    ({"layer_types": ["sliding_attention"] * 5}, "sliding_window must be >= 1"),
    ({"layer_types": ["sliding_attention"] * 5, "sliding_window": 0}, "sliding_window must be >= 1"),
    ({"sliding_window": 128}, "sliding_window must be None"),
    ({"window_start": "block"}, "window_start must be one of"),
    ({"causal_layers": "some"}, "causal_layers must be one of"),
    ({"causal_layers": "sliding"}, "causal_layers must be 'none' or 'all'"),
    ({"layer_style": "gemma3"}, "layer_style must be one of"),
    ({"attention_k_eq_v": True}, "attention_k_eq_v must be False"),
    ({"layer_style": "gemma4", "qk_norm": False}, "qk_norm must be True"),
    ({"num_target_layers": 0}, "num_target_layers must be >= 1"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_parameters"),
    ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    ({"draft_layout": "fill"}, "draft_layout must be one of"),
    ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "partial_rotary_factor"),
    (
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 2.0}},
        "at most 1",
    ),
    ({"verification_policy": "best"}, "verification_policy must be one of"),
    ({"confidence_threshold": 1.5}, "confidence_threshold must be a probability"),
    ({"final_logit_softcapping": 0.0}, "final_logit_softcapping must be > 0"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps must be a finite number > 0"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
    ({"embedding_multiplier": float("nan")}, "embedding_multiplier"),
    ({"logit_multiplier": 0.0}, "logit_multiplier"),
    ({"initializer_range": -1.0}, "initializer_range"),
    ({"attention_dropout": 2.0}, "attention_dropout must be a probability"),
    ({"hidden_act": "foo"}, "hidden_act must be an activation"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings must be False"),
    ({"num_hidden_layers": 10**7}, "num_hidden_layers must be <= "),
    ({"block_size": 100_000}, "block_size must be <= "),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": True}}, "rope_theta"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}, "rope_theta"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, r"rope_parameters\['factor'\]"),
    ({"rope_parameters": YARN | {"partial_rotary_factor": 1e9}}, r"partial_rotary_factor'\] must be 1, or left out"),
    ({"rope_parameters": YARN | {"partial_rotary_factor": "x"}}, r"partial_rotary_factor'\] must be 1, or left out"),
    ({"rope_parameters": YARN | {"beta_fast": "x"}}, r"beta_fast'\] must be a finite number >= 0, or left out"),
    ({"rope_parameters": YARN | {"beta_slow": -1}}, r"beta_slow'\] must be a finite number >= 0"),
    ({"rope_parameters": YARN | {"attention_factor": 10**400}}, r"attention_factor'\] must be a finite number >= 0"),
    (
        {"rope_parameters": YARN | {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": None}},
        r"factor'\] must be a number > 0",
    ),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ({"target_layer_ids": list(range(10_000))}, r"got \[0, 1, 2.{190,210}$"),
    ({"block_size": "7"}, "expected int, got str"),
    ({"rope_parameters": [1]}, "rope_parameters"),
]


@pytest.mark.parametrize(("overrides", "message"), BAD_VALUES, ids=lambda value: str(value)[:40])
def test_bad_values_name_the_field_and_the_rule(target_config, overrides, message):
    with pytest.raises(DSparkConfigError, match=message):
        DSparkConfig.from_target(target_config, **overrides)


def test_whole_numbers_are_taken_for_real_ones(target_config):
    config = DSparkConfig.from_target(target_config, confidence_threshold=1, logit_multiplier=2)
    assert (config.confidence_threshold, config.logit_multiplier) == (1.0, 2.0)


@pytest.mark.parametrize("not_a_config", ["some/path", None, {}])
def test_from_target_wants_a_config(not_a_config):
    with pytest.raises(DSparkConfigError, match=r"pass model\.config"):
        DSparkConfig.from_target(not_a_config)


def test_configs_with_fields_that_differ_by_layer_are_refused():
    with pytest.raises(DSparkConfigError, match="gemma4"):
        DSparkConfig.from_target(Gemma4TextConfig())


def test_a_missing_size_names_the_way_out(target_config):
    fields = DSparkConfig.from_target(target_config).to_dict()
    del fields["hidden_size"]
    with pytest.raises(DSparkConfigError, match=r"hidden_size.*from_target"):
        DSparkConfig(**fields)


def test_targets_without_a_length_limit_and_with_widths_per_layer():
    assert DSparkConfig.from_target(BloomConfig(hidden_size=64, n_head=4)).max_position_embeddings == 2048
    gemma = Gemma3nTextConfig()
    assert DSparkConfig.from_target(gemma).intermediate_size == max(gemma.intermediate_size)


def test_mask_id_is_unused_by_the_tokenizer():
    class Token:
        def __init__(self, content):
            self.content = content

    class Tokenizer:
        added_tokens_decoder = {3: Token("<|im_end|>"), 5: Token("<|reserved_special_token_1|>")}

        def __init__(self, *ids):
            self.ids = ids

        def get_vocab(self):
            return {f"token{i}": i for i in self.ids}

    assert choose_mask_token_id(100, Tokenizer(*range(45), *range(50, 90))) == 90  # a padding row
    assert choose_mask_token_id(100, Tokenizer(*range(100))) == 5
    assert choose_mask_token_id(100, None) == 99


# -- loading ------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path)
    return tmp_path


def edit(folder, **changes):
    path = folder / "config.json"
    content = {k: v for k, v in (json.loads(path.read_text()) | changes).items() if v != "REMOVE"}
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "field", ["mask_token_id", "block_size", "target_layer_ids", "markov_rank", "num_target_layers"]
)
def test_a_missing_field_is_an_error_not_a_guess(saved, field):
    edit(saved, **{field: "REMOVE"})
    with pytest.raises(CheckpointFormatError, match=field):
        DSparkDraftModel.from_pretrained(saved)


def test_a_dtype_that_torch_does_not_have_is_refused(saved):
    edit(saved, dtype="foo")
    with pytest.raises(CheckpointFormatError, match="foo"):
        DSparkConfig.from_pretrained(saved)


def test_an_unknown_key_in_a_file_is_ignored_with_a_warning(saved, caplog):
    edit(saved, made_by="someone")
    DSparkConfig.from_pretrained(saved)
    assert "made_by" in caplog.text


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"speculators_model_type": "dspark"}, "a speculators drafter lacks"),
        (
            {"model_type": "qwen3", "block_size": 16, "dflash_config": {"mask_token_id": 3}},
            "a DFlash drafter lacks",
        ),
        ({"model_type": "qwen3", "dflash_config": {"projector_type": "dspark"}}, "a SpecForge drafter lacks"),
        ({"model_type": "qwen3", "ttt_length": 7}, "Eagle3"),
        (
            {
                "model_type": "mistral",
                "block_size": 7,
                "target_layer_ids": [1],
                "mask_token_id": 4,
            },
            "another flavour",
        ),
        (LlamaConfig().to_dict(), "no drafter"),
    ],
)
def test_foreign_folders_are_refused_by_name(tmp_path, content, found):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointFormatError, match=found):
        DSparkDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("content", ["[1, 2]", "{}", "3"])
def test_a_config_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises((CheckpointFormatError, OSError)):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_deepspec_config_without_target_depth_is_refused(tmp_path):
    content = {"model_type": "qwen3", "block_size": 7, "target_layer_ids": [1], "mask_token_id": 4}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointFormatError, match="num_target_layers"):
        DSparkConfig.from_pretrained(tmp_path)
