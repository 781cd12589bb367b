"""Foreign `config.json` files: what is read from them, and refusals that say what was found and what was expected."""

import logging

import pytest
import torch
from foreign import BLOCK, FIXTURES, VOCAB, deepspec, deepspec_gemma4, specforge, speculators, zlab
from tiny import tiny_drafter, tiny_target

from dspark_hf import CheckpointFormatError, DSparkConfig, DSparkConfigError, DSparkDraftModel
from dspark_hf.checkpoints import fields
from dspark_hf.checkpoints import speculators as speculators_reader
from dspark_hf.checkpoints.detect import to_dspark_config_dict


def read(foreign):
    return DSparkConfig.from_dict(to_dspark_config_dict(foreign.config))


def short(value):
    return value[:40] if isinstance(value, str) else ""


def test_class_names_and_model_types_do_not_decide():
    for name, make in FIXTURES.items():
        expected = read(make()).to_dict()
        renamed = make().but(architectures=["SomethingElse"])
        if "deepspec" not in name:  # whose flavours differ by it
            renamed = renamed.but(model_type="dspark")
        assert read(renamed).to_dict() | {"architectures": None} == expected | {"architectures": None}, name


def test_direct_indices_of_hidden_states_become_layers():
    assert read(speculators()).target_layer_ids == [-1, 0, 2]
    assert read(speculators()).num_target_layers is None


@pytest.mark.parametrize(
    ("make", "layout", "num_drafts"),
    [
        (deepspec, "anchor_first", BLOCK),
        (specforge, "anchor_first", BLOCK),
        (speculators, "anchor_first", BLOCK),
        (lambda: speculators(says_layout=False), "fill_in", BLOCK - 1),
        (zlab, "fill_in", BLOCK - 1),
    ],
)
def test_layouts(make, layout, num_drafts):
    config = read(make())
    assert (config.draft_layout, config.block_size, config.num_block_tokens) == (layout, num_drafts, BLOCK)


def test_a_file_from_before_the_layout_key_is_read_as_fill_in_with_one_warning(caplog):
    speculators_reader._warn_of_layout.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert read(speculators(says_layout=None)).draft_layout == "fill_in"
    assert caplog.text.count('add "sample_from_anchor": true') == 1
    caplog.clear()
    assert read(speculators(is_dflash=True, says_layout=None)).draft_layout == "fill_in"
    assert "sample_from_anchor" not in caplog.text, "DFlash was never anything else there"


def test_rope_under_old_and_new_names():
    assert read(zlab()).rope_parameters == {"rope_theta": 1e4, "rope_type": "default"}
    scaled = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    rope = read(zlab().but(rope_scaling=scaled)).rope_parameters
    assert rope == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
    gemma = read(deepspec_gemma4()).rope_parameters
    assert gemma == {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}


def test_layer_types_that_are_not_listed_follow_from_the_window():
    config = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "layer_types": None}
    assert read(zlab().but(**config)).layer_types == ["full_attention", "sliding_attention"]
    plain = read(zlab().but(layer_types=None))
    assert (plain.layer_types, plain.sliding_window) == (["full_attention"] * 2, None)


REFUSED = [
    # gaps
    (deepspec().but(num_target_layers=None), r"DeepSpec drafter lacks \['num_target_layers'\]"),
    (deepspec().but(head_dim=None), r"lacks \['head_dim'\]"),
    (deepspec().but(markov_head_type=None), r"lacks \['markov_head_type'\]"),
    (deepspec().but(rope_parameters=None), "rope_theta None, expected a number"),
    (deepspec_gemma4().but(global_head_dim=None), r"Gemma4 flavour lacks \['global_head_dim'\]"),
    (deepspec_gemma4().but(num_global_key_value_heads=None), "num_global_key_value_heads"),
    (speculators().but(mask_token_id=None), r"speculators drafter lacks \['mask_token_id'\]"),
    (specforge().but(dflash_config={"mask_token_id": None}), r"SpecForge drafter lacks \['mask_token_id'\]"),
    (zlab().but(block_size=None), r"DFlash drafter lacks \['block_size'\]"),
    # contradictions
    (specforge().but(rope_theta=5.0), r"rope_theta as 10000\.0 and as 5\.0"),
    (specforge().but(markov_rank=3), "markov_rank as 6 and as 3"),
    (zlab().but(dflash_config={"block_size": 9}), "block_size as 9 and as 5"),
    (zlab().but(layer_types=["sliding_attention"] * 2), "contradicts itself: layer_types has sliding layers"),
    (
        zlab(slides=True).but(use_sliding_window=False),
        "sliding_window is 4 with use_sliding_window False; expected a window",
    ),
    (speculators().but(dflash_config={"mask_token_id": 3}), "both a speculators drafter and one with dflash_config"),
    # other architectures
    (speculators().but(speculators_model_type="eagle3"), "'eagle3', expected 'dspark' or 'dflash'"),
    (speculators().but(projector_type="domino"), "projector_type 'domino', expected 'dflash'"),
    (speculators().but(target_hidden_size=64), "target_hidden_size 64, expected 32"),
    (zlab().but(dflash_config={"projector_type": "domino"}), "projector_type 'domino'"),
    (zlab().but(dflash_config={"selector_rank": 8}), "selector_rank 8, expected none"),
    (zlab().but(dflash_config={"shift_label": True}), "shift_label True, expected False"),
    (zlab().but(dflash_config={"attention_mode": "mla"}), r"attention_mode \['mla'\], expected 'gqa' or 'mha'"),
    (zlab().but(input_embedding_scale=8.0), "input_embedding_scale 8.0, expected 1"),
    (specforge().but(dflash_config={"projector_type": "domino"}), "'domino', expected 'dspark'"),
    (deepspec().but(layer_types=["sliding_attention"] * 2, sliding_window=4, use_sliding_window=True), "layer_types"),
    (deepspec_gemma4().but(enable_moe_block=True), "enable_moe_block True, expected False"),
    (deepspec_gemma4().but(hidden_size_per_layer_input=8), "hidden_size_per_layer_input 8, expected 0"),
    (deepspec_gemma4().but(use_double_wide_mlp=True, num_kv_shared_layers=2), "num_kv_shared_layers 2, expected 0"),
    (deepspec().but(ttt_length=7, block_size=None), "a DeepSpec Eagle3 drafter has num_hidden_layers 2, expected 1"),
    (deepspec().but(ttt_length=7, num_hidden_layers=1, target_layer_ids=None), r"lacks \['target_layer_ids'\]"),
    (deepspec().but(model_type="llama"), "a DeepSpec drafter of another flavour"),
    # values of no meaning
    (zlab().but(block_size=1), "block_size 1, expected 2 or more"),
    (zlab().but(block_size="16"), "block_size '16', expected a whole number"),
    (zlab().but(is_causal="yes"), "is_causal 'yes', expected true, false or null"),
    (zlab().but(is_causal=True, dflash_config={"causal": False}), "gives is_causal as True and as False"),
    (zlab().but(layer_types=None, num_hidden_layers=10**9), "num_hidden_layers 1000000000, expected a number"),
    (zlab().but(rope_scaling=[1]), r"rope_parameters \[1\], expected an object"),
    (zlab().but(layer_types=5), "layer_types 5, expected a list"),
    (zlab().but(dflash_config={"attention_modes": 3}), "attention_mode 3, expected"),
    (deepspec().but(layer_types="full_attention"), "expected a list"),
    (speculators().but(block_size=0), "block_size 0, expected a whole number"),
    (speculators().but(sample_from_anchor="no"), "sample_from_anchor 'no', expected true or false"),
    (speculators().but(aux_hidden_state_layer_ids=["a"]), r"aux_hidden_state_layer_ids \['a'\], expected a list"),
    (speculators().but(transformer_layer_config=5), "transformer_layer_config 5, expected an object"),
    (zlab().but(dflash_config=7), "whose dflash_config is 7, no object"),
]


@pytest.mark.parametrize(("foreign", "message"), REFUSED, ids=short)
def test_refusals_say_what_was_found_and_what_was_expected(foreign, message):
    with pytest.raises(CheckpointFormatError, match=message):
        read(foreign)


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        (deepspec().but(markov_rank=0), "confidence_head_with_markov needs markov_rank"),
        (deepspec().but(target_layer_ids=[0, 3]), "between -1"),
        (zlab().but(dflash_config={"target_layer_ids": [2, 1]}), "strictly increasing"),
        (speculators().but(aux_hidden_state_layer_ids=[-1, 2]), "must not go below -1"),
        (speculators().but(draft_vocab_size=VOCAB + 1), "draft_vocab_size"),
        (specforge().but(dflash_config={"mask_token_id": VOCAB}), "mask_token_id must be a token id"),
    ],
    ids=short,
)
def test_values_obey_the_rules_of_every_drafter(foreign, message):
    with pytest.raises(DSparkConfigError, match=message):
        read(foreign)


NO_FLOAT = 10**400  # JSON has no largest number


@pytest.mark.parametrize("make", [deepspec, deepspec_gemma4, speculators, specforge, zlab])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer_types", 5),
        ("layer_types", [["full_attention"]]),
        ("rms_norm_eps", NO_FLOAT),
        ("rope_parameters", {"rope_type": "default", "rope_theta": NO_FLOAT}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": float("nan")}),
        ("target_layer_ids", float("nan")),
        ("attention_modes", 7),
    ],
    ids=short,
)
def test_values_of_another_kind_are_refused_as_such(make, name, value):
    config = make().config
    nested = [inner for inner in config.values() if isinstance(inner, dict)]
    places = [place for place in [config, *nested] if name in place]
    if name == "attention_modes" and "dflash_config" in config:
        places = [config["dflash_config"]]
    if not places:
        pytest.skip(f"this format has no {name}")
    for place in places:
        place[name] = value
    with pytest.raises((CheckpointFormatError, DSparkConfigError)) as raised:
        DSparkConfig.from_dict(to_dspark_config_dict(config))
    assert len(str(raised.value)) < 1000


def test_of_three_places_the_two_that_differ_are_named():
    with pytest.raises(CheckpointFormatError, match="as 4 and as 5; expected one value"):
        fields.agreed("x", "n", {"n": 4}, {"n": 4}, {"n": 5})
    assert fields.agreed("x", "n", {"n": 4}, {}, {"n": 4}) == 4


def test_our_own_sliding_drafter_must_say_how_its_window_is_meant(tmp_path):
    fields = read(zlab(slides=True)).to_dict()
    assert DSparkConfig.from_dict(dict(fields)).sliding_window == 4
    for name in ("window_start", "causal_layers", "sliding_window"):
        with pytest.raises(CheckpointFormatError, match=name):
            DSparkConfig.from_dict({key: value for key, value in fields.items() if key != name})


# -- weights ----------------------------------------------------------------------------------------------------------


def load(foreign, folder):
    return DSparkDraftModel.from_pretrained(foreign.write(folder))


def with_tensors(foreign, **changes):
    tensors = {name: t for name, t in (foreign.tensors | changes).items() if t is not None}
    return type(foreign)(**vars(foreign) | {"tensors": tensors})


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        (deepspec().but(num_hidden_layers=1, layer_types=["full_attention"]), r"11 weights .*layers\.1"),
        (deepspec().but(markov_rank=0, enable_confidence_head=False), r"4 weights .*confidence_head"),
        (
            with_tensors(zlab(), **{"layers.0.attention_conv.base_kernel": torch.ones(2, 3)}),
            "1 weights .*attention_conv",
        ),
        (with_tensors(deepspec(), **{"layers.0.mlp.up_proj.weight": None}), r"lacks 1 .*up_proj"),
        (with_tensors(deepspec_gemma4(), **{"layers.1.layer_scalar": None}), r"lacks 1 .*layer_scalar"),
        (with_tensors(speculators(), d2t=torch.zeros(VOCAB, dtype=torch.long)), "does not mention"),
        (with_tensors(speculators(reduced=True), d2t=None), r"lacks 1 .*d2t"),
        (
            with_tensors(speculators(reduced=True), t2d=torch.arange(VOCAB) < 17),
            "t2d marks 17 tokens, and d2t names 17, which are not the same",
        ),
    ],
    ids=short,
)
def test_weights_that_do_not_fit_the_config_are_refused(tmp_path, foreign, message):
    with pytest.raises(CheckpointFormatError, match=message):
        load(foreign, tmp_path)


def test_legacy_names_are_not_written_again(tmp_path):
    drafter = load(specforge("legacy"), tmp_path / "foreign")
    drafter.save_pretrained(tmp_path / "ours")
    again = DSparkDraftModel.from_pretrained(tmp_path / "ours")
    assert again.state_dict().keys() == drafter.state_dict().keys()
    assert torch.equal(again.markov_head.markov_w1.weight, drafter.markov_head.markov_w1.weight)
    from safetensors import safe_open

    with safe_open(tmp_path / "ours" / "model.safetensors", framework="pt") as file:
        assert not [name for name in file.keys() if "logit_head" in name]  # noqa: SIM118


def test_a_factor_that_is_no_number_is_refused_though_nothing_trains_it(tmp_path):
    drafter = tiny_drafter(tiny_target(), layer_style="gemma4")
    drafter.layers[1].layer_scalar.fill_(float("nan"))
    drafter.save_pretrained(tmp_path)
    with pytest.raises(CheckpointFormatError, match=r"hold NaN or infinity, among them \['layers.1.layer_scalar'\]"):
        DSparkDraftModel.from_pretrained(tmp_path)
