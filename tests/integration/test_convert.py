"""Drafters written as other projects store them: exact round trips, refusals, nothing half written."""

import json

import pytest
import torch
import typer.testing
from foreign import FIXTURES, deepspec_gemma4, speculators, tiny_gemma4, zlab
from safetensors.torch import load_file
from tiny import greedy, random_ids, tiny_drafter, tiny_target

import dspark_cli
from dspark_hf import CheckpointFormatError, DSparkDraftModel, IncompatibleTargetError
from dspark_hf.checkpoints import convert
from dspark_hf.checkpoints.convert import FORMATS, convert_drafter
from dspark_hf.model.draft_vocab import offsets_of
from dspark_hf.model.packed_blocks import PackedBlocks

NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
BY_ANCHOR = SLIDING | {"window_start": "anchor", "causal_layers": "sliding"}
DRAFTERS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no_confidence": {"enable_confidence_head": False},
    "no_heads": NO_HEADS,
    "biased_yarn": {
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64,
        },
    },
    "reduced": {"draft_vocab_size": 20},
    "fill_in": {"draft_layout": "fill_in"},
    "fill_in_rnn": {"draft_layout": "fill_in", "markov_head_type": "rnn"},
    "fill_in_no_heads": NO_HEADS | {"draft_layout": "fill_in"},
    "sliding_by_anchor": BY_ANCHOR,
    "sliding_by_anchor_ahead": BY_ANCHOR | {"causal_layers": "none"},
    "sliding_by_slot": SLIDING | {"causal_layers": "sliding"},
    "sliding_by_slot_ahead": SLIDING,
    "causal": {"causal_layers": "all"},
}  # fmt: skip
# What each format cannot express.
REFUSED = {
    "deepspec": {
        "reduced": "a reduced draft vocabulary",
        "fill_in": "filled in behind the anchor",
        "fill_in_rnn": "filled in behind the anchor",
        "fill_in_no_heads": "filled in behind the anchor",
        "sliding_by_anchor": "sliding draft layers",
        "sliding_by_anchor_ahead": "sliding draft layers",
        "sliding_by_slot": "sliding draft layers",
        "sliding_by_slot_ahead": "sliding draft layers",
        "causal": "do not look ahead",
    },
    "speculators": {
        "sliding_by_slot": "counted from each slot",
        "sliding_by_slot_ahead": "counted from each slot",
        "causal": "do not look ahead",
    },
    "specforge": {
        "reduced": "a reduced draft vocabulary",
        "fill_in": "filled in behind the anchor, with heads",
        "fill_in_rnn": "filled in behind the anchor, with heads",
        "sliding_by_anchor": "counted from the anchor",
        "sliding_by_anchor_ahead": "counted from the anchor",
    },
}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def drafter_of(target, name):
    drafter = tiny_drafter(target, **DRAFTERS[name])
    if drafter.config.draft_vocab_size:
        drafter.d2t.copy_(offsets_of(torch.arange(1, 60, 3)))
    return drafter


def fields(config):
    """What a config says about drafting."""
    ignored = ("_name_or_path", "architectures", "transformers_version", "dtype")
    return {key: value for key, value in config.to_dict().items() if key not in ignored}


def expressible():
    return [(to, name) for to in FORMATS for name in DRAFTERS if name not in REFUSED[to]]


@pytest.mark.parametrize(("to", "name"), expressible())
def test_round_trips_are_exact(target, tmp_path, to, name):
    drafter = drafter_of(target, name)
    made = convert_drafter(drafter, to, tmp_path / "there", target=target, target_name="some/target")
    again = DSparkDraftModel.from_pretrained(made.folder).eval()
    assert again.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in drafter.state_dict().items())
    lost = set(made.left_out)
    assert lost == ({"num_target_layers"} if to == "speculators" else set())
    ours, theirs = fields(drafter.config), fields(again.config)
    assert {key for key in ours if ours[key] != theirs[key]} == lost
    ids = random_ids(7)
    assert torch.equal(
        greedy(target, ids, max_new_tokens=8, assistant_model=again), greedy(target, ids, max_new_tokens=8)
    )


@pytest.mark.parametrize("to", FORMATS)
def test_what_a_format_cannot_express_is_refused_and_nothing_is_written(target, tmp_path, to):
    for name, message in REFUSED[to].items():
        with pytest.raises(CheckpointFormatError, match=f"{to} file cannot express .*{message}.*Nothing was written"):
            convert_drafter(drafter_of(target, name), to, tmp_path / name, target=target, target_name="some/target")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("to", "name"), [(to, name) for to in FORMATS for name in REFUSED[to]])
def test_the_way_out_of_a_refusal_is_one(target, tmp_path, to, name):
    """Every format that is named can hold the drafter, and every one that can is named."""
    with pytest.raises(CheckpointFormatError) as caught:
        convert_drafter(drafter_of(target, name), to, tmp_path / "x", target=target, target_name="some/target")
    way_out = str(caught.value).split("Nothing was written: ")[1]
    others = {other for other in FORMATS if name not in REFUSED[other]}
    assert {other for other in FORMATS if other in way_out} == others
    assert ("none of the other formats can" in way_out) == (not others)


def test_where_no_format_is_left_the_refusal_says_so(target, tmp_path):
    layers = {"layer_types": ["sliding_attention"], "sliding_window": 8, "num_hidden_layers": 1}
    drafter = tiny_drafter(target, draft_vocab_size=20, **layers)
    for to in FORMATS:
        with pytest.raises(CheckpointFormatError, match="none of the other formats can either; serve it with this"):
            convert_drafter(drafter, to, tmp_path / to, target=target, target_name="some/target")


@pytest.mark.parametrize(
    "overrides",
    [{"qk_norm": False}, {"embedding_multiplier": 2.0}, {"logit_multiplier": 0.5}, {"final_logit_softcapping": 3.0}],
    ids=str,
)
@pytest.mark.parametrize("to", FORMATS)
def test_what_no_format_expresses(target, tmp_path, to, overrides):
    drafter = tiny_drafter(target, **overrides)
    with pytest.raises(CheckpointFormatError, match="cannot express"):
        convert_drafter(drafter, to, tmp_path / "there", target=target, target_name="some/target")


@pytest.mark.parametrize("k_eq_v", [True, False])
def test_gemma4_flavour_goes_back_to_deepspec_only(tmp_path, k_eq_v):
    gemma, foreign = tiny_gemma4(), deepspec_gemma4(k_eq_v=k_eq_v)
    drafter = DSparkDraftModel.from_pretrained(foreign.write(tmp_path / "foreign"))
    made = convert_drafter(drafter, "deepspec", tmp_path / "there", target=gemma, target_name="some/gemma")
    stored = load_file(made.folder / "model.safetensors")
    assert stored.keys() == foreign.tensors.keys()
    again = DSparkDraftModel.from_pretrained(made.folder)
    assert fields(again.config) == fields(drafter.config)
    assert torch.equal(stored["embed_tokens.weight"], gemma.get_input_embeddings().weight)
    for to in ("speculators", "specforge"):
        with pytest.raises(CheckpointFormatError, match="style 'gemma4'"):
            convert_drafter(drafter, to, tmp_path / to, target=gemma, target_name="some/gemma")


@pytest.mark.parametrize("name", [name for name in FIXTURES if "gemma4" not in name])
def test_foreign_files_come_back_with_their_own_tensors(target, tmp_path, name):
    """Read and written again in the same format: the same names, the same trained weights, the same drafter."""
    foreign = FIXTURES[name]()
    drafter = DSparkDraftModel.from_pretrained(foreign.write(tmp_path / "foreign"))
    to = "specforge" if name.startswith("zlab") else name.split("_")[0]
    if foreign.cap is not None:
        with pytest.raises(CheckpointFormatError, match="soft cap"):
            convert_drafter(drafter, to, tmp_path / "there")
        return
    made = convert_drafter(drafter, to, tmp_path / "there", target=target, target_name="some/target")
    stored = load_file(made.folder / "model.safetensors")
    original = {key.removeprefix("logit_head."): tensor for key, tensor in foreign.tensors.items()}
    assert stored.keys() == original.keys()
    of_target = ("embed_tokens.weight", "lm_head.weight")
    assert all(torch.equal(stored[key], tensor) for key, tensor in original.items() if key not in of_target)
    again = DSparkDraftModel.from_pretrained(made.folder)
    assert fields(again.config) == fields(drafter.config)


def test_copies_of_the_target_are_the_targets_own(target, tmp_path):
    drafter = drafter_of(target, "vanilla").to(torch.bfloat16)
    made = convert_drafter(drafter, "deepspec", tmp_path / "there", target=target, target_name="some/target")
    stored = load_file(made.folder / "model.safetensors")
    assert made.num_tensors == len(stored)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert torch.equal(stored["embed_tokens.weight"], target.get_input_embeddings().weight.bfloat16())
    assert torch.equal(stored["lm_head.weight"], target.lm_head.weight.bfloat16())
    assert json.loads((made.folder / "config.json").read_text())["dtype"] == "bfloat16"
    reduced = drafter_of(target, "reduced")
    made = convert_drafter(reduced, "speculators", tmp_path / "reduced", target=target, target_name="some/target")
    stored = load_file(made.folder / "model.safetensors")
    assert stored["t2d"].nonzero().flatten().tolist() == list(range(1, 60, 3))
    assert torch.equal(stored["lm_head.weight"], target.lm_head.weight[1:60:3])
    verifier = json.loads((made.folder / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]}


def test_what_serves_generate_here_is_left_out_by_name(target, tmp_path):
    drafter = tiny_drafter(target, verification_policy="prefix", confidence_threshold=0.2, min_drafts_every=3)
    made = convert_drafter(drafter, "specforge", tmp_path / "there")
    assert set(made.left_out) == {"verification_policy", "confidence_threshold", "min_drafts_every"}


def test_bad_arguments_are_named(target, tmp_path):
    drafter = drafter_of(target, "vanilla")
    with pytest.raises(CheckpointFormatError, match="deepspec, speculators, specforge, got 'vllm'"):
        convert_drafter(drafter, "vllm", tmp_path / "there")
    with pytest.raises(CheckpointFormatError, match="holds copies of weights of the target; name it"):
        convert_drafter(drafter, "deepspec", tmp_path / "there")
    with pytest.raises(CheckpointFormatError, match="holds the name of the target"):
        convert_drafter(drafter, "speculators", tmp_path / "there", target=target)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model.safetensors").write_text("precious")
    for taken in ("full", "full/model.safetensors"):
        with pytest.raises(CheckpointFormatError, match="is not an empty folder"):
            convert_drafter(drafter, "specforge", tmp_path / taken)
    assert (tmp_path / "full" / "model.safetensors").read_text() == "precious"
    unknown = DSparkDraftModel.from_pretrained(speculators().write(tmp_path / "speculators"))
    for to in ("deepspec", "specforge"):
        with pytest.raises(CheckpointFormatError, match="num_target_layers is not known; set it"):
            convert_drafter(unknown, to, tmp_path / "there", target=target, target_name="some/target")


def test_targets_that_do_not_fit_are_refused(target, tmp_path):
    drafter = drafter_of(target, "vanilla")
    with pytest.raises(IncompatibleTargetError, match="number of decoder layers"):
        convert_drafter(drafter, "specforge", tmp_path / "a", target=tiny_target(num_layers=5))
    shallow = DSparkDraftModel.from_pretrained(speculators().write(tmp_path / "speculators"))
    with pytest.raises(IncompatibleTargetError, match=r"reads target layers \[-1, 0, 2\], .* has 3"):
        convert_drafter(shallow, "speculators", tmp_path / "b", target=tiny_target(num_layers=3), target_name="t")
    resized = tiny_target(vocab_size=128)
    made_before = tiny_drafter(resized)
    resized.resize_token_embeddings(129)
    with pytest.raises(IncompatibleTargetError, match="output head .* has 129 rows .* 128 tokens"):
        convert_drafter(made_before, "deepspec", tmp_path / "c", target=resized, target_name="t")
    biased = tiny_target()
    biased.lm_head = torch.nn.Linear(32, 61)
    with pytest.raises(IncompatibleTargetError, match="output head .* cannot be copied"):
        convert_drafter(drafter, "deepspec", tmp_path / "d", target=biased, target_name="t")
    scaled = tiny_target()
    scaled.set_input_embeddings(torch.nn.Sequential(scaled.get_input_embeddings()))
    with pytest.raises(IncompatibleTargetError, match="input embedding .* is a Sequential"):
        convert_drafter(drafter, "deepspec", tmp_path / "e", target=scaled, target_name="t")


@pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()], ids=["disk", "interrupt"])
def test_a_failure_leaves_nothing_behind(target, tmp_path, monkeypatch, failure):
    def fails(tensors, path, **options):
        path.write_text("half")
        raise failure

    monkeypatch.setattr(convert, "save_file", fails)
    with pytest.raises(type(failure)):
        convert_drafter(drafter_of(target, "vanilla"), "specforge", tmp_path / "there")
    assert not list(tmp_path.iterdir())


# -- the command ------------------------------------------------------------------------------------------------------


def run(*arguments):
    done = typer.testing.CliRunner().invoke(dspark_cli.app, ["convert", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_writes_what_the_function_writes(target, tmp_path):
    target.save_pretrained(tmp_path / "target")
    drafter_of(target, "vanilla").save_pretrained(tmp_path / "drafter")
    for to in FORMATS:
        options = ("--to", to, "--output", tmp_path / to, "--target", tmp_path / "target")
        code, out, err = run(tmp_path / "drafter", *options)
        assert (code, err) == (0, ""), err
        assert f"as {to} stores them" in out
        assert ("left out, the format has no place for it: num_target_layers" in out) == (to == "speculators")
        assert DSparkDraftModel.from_pretrained(tmp_path / to).config.block_size == 4
    code, _, err = run(tmp_path / "drafter", "--to", "specforge", "--output", tmp_path / "specforge")
    assert code == 2
    assert "is not an empty folder; choose another one" in err
    code, _, err = run(zlab().write(tmp_path / "zlab"), "--to", "deepspec", "--output", tmp_path / "no")
    assert code == 2
    assert "holds copies of weights of the target; name it" in err


def test_the_short_name_of_a_target_is_written_as_its_hub_id():
    from dspark_hf.zoo import hub_name

    assert hub_name("smollm2-135m-instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert hub_name("some/target") == "some/target"


SERVED = (
    "vanilla",
    "gated",
    "rnn",
    "reduced",
    "fill_in",
    "fill_in_rnn",
    "fill_in_no_heads",
    "sliding_by_anchor",
    "sliding_by_anchor_ahead",
)


@pytest.mark.parametrize("name", SERVED)
@torch.no_grad()
def test_speculators_itself_reads_it_and_computes_the_same(target, tmp_path, name):
    """Their loader and their training forward; the package asks for an older transformers, so it may not be there."""
    pytest.importorskip("speculators", reason="needs the speculators package")
    from speculators import SpeculatorModelConfig
    from speculators.model import SpeculatorModel

    target.save_pretrained(tmp_path / "target")
    drafter, length = drafter_of(target, name), 20
    made = convert_drafter(drafter, "speculators", tmp_path / name, target=target, target_name=str(tmp_path / "target"))
    config = SpeculatorModelConfig.from_pretrained(made.folder)
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = SpeculatorModel.from_pretrained(made.folder, config=config).eval()
    size = config.block_size
    ids = random_ids(length)
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    nothing = torch.zeros(1, length, 32)
    hidden, _, _, _, places = theirs._backbone_forward(
        features, ids, torch.ones_like(ids), nothing, torch.zeros_like(ids), max_anchors=6
    )
    anchors = places[::size][None]
    assert len(anchors[0].unique()) > 3
    block_ids = torch.full((1, 6, size), drafter.config.mask_token_id)
    block_ids[:, :, 0] = ids[0, anchors]
    ours = drafter(
        drafter.embed(block_ids.flatten(1), target.get_input_embeddings()),
        (anchors[:, :, None] + torch.arange(size)).flatten(1),
        context_features=features,
        context_position_ids=torch.arange(length)[None],
        attention_mask=PackedBlocks(anchors, size),
    ).last_hidden_state
    torch.testing.assert_close(ours, hidden, atol=1e-5, rtol=1e-4)
    if drafter.markov_head is None:
        return
    first = drafter.config.first_draft_slot
    blocks, tokens = hidden.view(6, size, -1), ids[0, places].view(6, size)
    previous = torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1) if first else tokens
    bias = theirs.markov_head.block_bias(prev_token_ids=previous, hidden_states=blocks)[:, first:]
    embeddings = drafter.markov_head.embed(previous[:, first:])
    codes = drafter.markov_head.codes(embeddings, blocks[:, first:], blocks[:, 0] if first else None)
    torch.testing.assert_close(drafter.markov_head.markov_w2(codes), bias, atol=1e-5, rtol=1e-4)
