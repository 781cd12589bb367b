"""Training MTP and Eagle3: the loss against one anchor at a time, shared features, resuming, and the script for all."""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import tiny_training as tt
import torch
from safetensors.torch import load_file
from tiny import VOCAB, greedy, random_ids, tiny_baseline, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from dspark_hf import AutoregressiveDraftModel, DSparkDraftModel, TrainingDataError
from dspark_hf.model.context_cache import DraftContextCache
from dspark_hf.training.anchors import position_weights
from dspark_hf.training.dataset import collate
from dspark_hf.training.features import TargetReader
from dspark_hf.training.losses import reference_losses
from dspark_hf.training.progress import TauProgress
from dspark_hf.training.recipe import TrainingRequest
from dspark_hf.training.records import TrainingSequence
from dspark_hf.training.run import train_drafter

pytest.importorskip("datasets", reason="answers are written and read with the train extra")

KINDS = ("mtp", "eagle3")
STEPS = 8


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# -- the loss against one anchor at a time --------------------------------------------------------------------------


def slow_terms(drafter, ids, mask, anchor):
    """`(slot, cross-entropy, full L1)` of the supervised slots, token by token as when drafting."""
    target, config = tt.target(), drafter.config
    with torch.no_grad():
        outputs = target(ids[None], output_hidden_states=True)
    features = torch.cat([outputs.hidden_states[i + 1] for i in config.target_layer_ids], dim=-1)
    head = drafter.borrow_head(target.get_output_embeddings(), config.vocab_size)
    cache, state, terms = GrowingCache(), None, []
    for k in range(config.block_size):
        position = anchor + k + 1
        if position >= len(ids) or not bool(mask[anchor : position + 1].all()):
            break
        pairs = slice(0, anchor) if k == 0 else slice(anchor + k - 1, anchor + k)
        inputs = {"context_features": features[:, :anchor]} if k == 0 else {"states": state}
        embeds = drafter.embed(ids[None, pairs.start + 1 : pairs.stop + 1], target.get_input_embeddings())
        result = drafter(embeds, torch.arange(pairs.start, pairs.stop)[None], **inputs, cache=cache)
        state = result.hidden_states[0][:, -1:]
        logits = drafter.base_logits(result.last_hidden_state[:, -1], head)
        if (draft_ids := drafter.draft_token_ids) is not None:
            logits = torch.full((1, config.vocab_size), -torch.inf).index_copy(1, draft_ids, logits)
        token = ids[None, position]
        target_probs = outputs.logits[:, position - 1].softmax(-1)
        ce, tv, _ = reference_losses(logits.softmax(-1), target_probs, token, torch.full((1,), 0.5))
        if float(logits[0, token].detach()) == -torch.inf:
            ce = torch.zeros(1)
        terms.append((k, ce[0], tv[0]))
    return terms


class GrowingCache(DraftContextCache):
    """Concatenates, since what is written in place has no gradient."""

    def __init__(self):
        super().__init__(1)
        self.pair = None

    def append(self, layer_idx, keys, values):
        if self.pair is not None:
            keys, values = torch.cat([self.pair[0], keys], 2), torch.cat([self.pair[1], values], 2)
        self.pair = keys, values
        self.length = keys.shape[2]
        return self.pair


def slow_loss(drafter, sequences, anchors):
    weights = position_weights(drafter.config.block_size, drafter.config.block_size)
    total, weight_sum = torch.zeros(()), 0.0
    for sequence, row in zip(sequences, anchors, strict=True):
        for anchor in row:
            if anchor < 1:  # no pair before it
                continue
            for k, ce, tv in slow_terms(drafter, sequence.input_ids, sequence.loss_mask, anchor):
                total = total + weights[k] * (0.1 * ce + 0.9 * tv)
                weight_sum += float(weights[k])
    return total / weight_sum


def ragged_batch():
    sequences = list(tt.answers()[:4])
    holes = sequences[1].loss_mask.clone()
    holes[[8, 11]] = False
    sequences[1] = TrainingSequence("holes", sequences[1].input_ids, holes)
    sequences[2] = TrainingSequence("whole", sequences[2].input_ids, torch.ones_like(sequences[2].loss_mask))
    return sequences, [[6, 8, 9], [6, 9, 12, 13], [0, 1, 5, 8], [len(sequences[3]) - 2]]


@pytest.mark.parametrize("reduced", [False, True])
def test_loss_and_gradients_equal_one_anchor_at_a_time(tmp_path, kind, reduced):
    drafter = tiny_baseline(tt.target(), kind, **{"draft_vocab_size": tt.DRAFT_VOCAB} if reduced else {}).train()
    if reduced:
        tt.choose_draft_tokens(drafter)
    made = tt.trainer(tmp_path, drafter)
    sequences, anchors = ragged_batch()
    items = [
        {"input_ids": s.input_ids, "loss_mask": s.loss_mask, "anchors": torch.tensor(a)}
        for s, a in zip(sequences, anchors, strict=True)
    ]
    loss = made.compute_loss(drafter, made._prepare_inputs(collate(items)))
    expected = slow_loss(drafter, sequences, anchors)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    got, wanted = torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)
    for name, ours, theirs in zip(names, got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}")
    assert all(float(grad.abs().sum()) > 0 for grad in got)


def test_bfloat16_autocast_stays_near_float32(tmp_path, kind):
    drafter = tiny_baseline(tt.target(), kind).train()
    made = tt.trainer(tmp_path, drafter, bf16=True)
    sequences, anchors = ragged_batch()
    items = [
        {"input_ids": s.input_ids, "loss_mask": s.loss_mask, "anchors": torch.tensor(a)}
        for s, a in zip(sequences, anchors, strict=True)
    ]
    with made.compute_loss_context_manager():
        loss = made.compute_loss(drafter, made._prepare_inputs(collate(items)))
    expected = slow_loss(drafter, sequences, anchors)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=0.03)
    assert float(loss.detach()) != float(expected.detach())
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) and p.grad.dtype == torch.float32 for p in drafter.parameters())


def test_training_lowers_the_loss_and_raises_tau(tmp_path, kind):
    drafter = tiny_baseline(tt.target(), kind)
    prompts = [answer.input_ids[None, : tt.PROMPT_TOKENS] for answer in tt.answers()[:3]]
    options = {"max_steps": 60, "learning_rate": 1e-2, "per_device_train_batch_size": 10, "num_decode_prompts": 3}
    made = tt.trainer(tmp_path, drafter, decode_prompts=prompts, decode_new_tokens=8, logging_steps=20, **options)
    before = made.evaluate()
    made.train()
    after = made.evaluate()
    assert after["eval_loss"] < 0.8 * before["eval_loss"]
    assert after["eval_expected_tau"] > before["eval_expected_tau"] + 0.15
    assert after["eval_tau_greedy"] > before["eval_tau_greedy"]


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A target with tokenizer, and its greedy answers."""
    folder = tmp_path_factory.mktemp("baselines")
    target = tiny_target("llama", num_layers=8)
    target.save_pretrained(folder / "target")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w1").save_pretrained(folder / "target")
    prompts = torch.cat([random_ids(6, seed=i) for i in range(40)])
    with (folder / "answers.jsonl").open("w") as file:
        for i, ids in enumerate(greedy(target, prompts, max_new_tokens=12).tolist()):
            file.write(json.dumps({"id": f"p/{i}", "prompt_ids": ids[:6], "response_ids": ids[6:]}) + "\n")
    return folder


def request(root, output, kind, **changes):
    settings = {
        "max_steps": STEPS, "batch_size": 4, "max_anchors": 4, "draft_vocab_size": 40, "dtype": "float32",
        "device": "cpu", "num_evaluations": 1, "drafter_type": kind,
    }  # fmt: skip
    return TrainingRequest(
        target=str(root / "target"), data=(str(root / "answers.jsonl"),), output=output, **settings | changes
    )


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_equal_weights(folder, other):
    ours, theirs = weights(folder), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(w, theirs[name]) for name, w in ours.items())


@pytest.fixture(scope="module")
def finished(root):
    """Runs with features of their own, by kind."""
    return {kind: train_drafter(request(root, root / kind, kind), lambda line: None) for kind in KINDS}


def test_a_run_leaves_a_drafter_with_report(root, finished, kind):
    outcome = finished[kind]
    assert outcome.is_finished and outcome.metrics["eval_tau_greedy"] >= 1.0
    drafter = DSparkDraftModel.from_pretrained(outcome.folder, dtype=torch.float32)
    assert type(drafter) is AutoregressiveDraftModel
    assert drafter.config.drafter_type == kind
    assert drafter.config.block_size == (1 if kind == "mtp" else 5)
    report = json.loads((outcome.folder / "reports" / "training.json").read_text())
    assert report["num_steps"] == STEPS and report["is_finished"]
    assert report["metrics"]["eval_expected_tau"] <= 1 + drafter.config.block_size


def test_an_interrupted_run_ends_with_the_same_weights(root, finished, kind, tmp_path, monkeypatch):
    original = TauProgress.on_step_end

    def on_step_end(self, args, state, control, **kwargs):
        original(self, args, state, control, **kwargs)
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TauProgress, "on_step_end", on_step_end)
    assert not train_drafter(request(root, tmp_path / "out", kind), lambda line: None).is_finished
    monkeypatch.undo()
    assert train_drafter(request(root, tmp_path / "out", kind), lambda line: None).is_finished
    assert_equal_weights(tmp_path / "out", finished[kind].folder)


def test_drafters_share_the_features_of_one_cache(root, finished, tmp_path, monkeypatch):
    """A DSpark run makes it; baselines read their layers, fewer or the final states, out of it."""
    shared = {"feature_cache": tmp_path / "features"}
    blocks = {"num_hidden_layers": 1, "markov_rank": 4, "block_size": 3}
    train_drafter(request(root, tmp_path / "dspark", "dspark", **shared, **blocks), lambda line: None)
    read = TargetReader.read
    lengths = []

    def spy(self, input_ids, *args):
        lengths.append(input_ids.shape[0])
        return read(self, input_ids, *args)

    monkeypatch.setattr(TargetReader, "read", spy)
    for kind in KINDS:
        train_drafter(request(root, tmp_path / kind, kind, **shared), lambda line: None)
        assert_equal_weights(tmp_path / kind, finished[kind].folder)
    assert sum(lengths) < 40, "the texts were to be read from the cache"
    assert not list(tmp_path.glob("*/features"))


def test_a_cache_of_the_final_states_alone_keeps_the_usual_layers_too(root, finished):
    manifest = json.loads((finished["mtp"].folder / "features" / "features.json").read_text())
    own = json.loads((finished["eagle3"].folder / "features" / "features.json").read_text())
    assert manifest["identity"] == own["identity"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter_type": "medusa"}, "drafter_type must be one of"),
        ({"markov_rank": 4}, "markov_rank cannot be chosen for drafter_type 'eagle3'"),
        ({"drafter_type": "mtp", "block_size": 2}, "block_size must be 1 for drafter_type 'mtp'"),
        ({"draft_vocab_size": None, "initial_drafter": "x"}, "fixes drafter_type"),
    ],
)
def test_bad_settings_are_refused(root, tmp_path, changes, message):
    with pytest.raises(TrainingDataError, match=message):
        request(root, tmp_path, **{"kind": "eagle3"} | {"kind": changes.pop("drafter_type", "eagle3")} | changes)


# -- the script for all of them -------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch):
    path = Path(__file__).parents[2] / "scripts" / "train_baselines.py"
    spec = importlib.util.spec_from_file_location("train_baselines", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_baselines", module)
    spec.loader.exec_module(module)
    small = {"draft_vocab_size": 40}
    blocks = small | {"num_hidden_layers": 1, "markov_rank": 4}
    monkeypatch.setattr(
        module, "DRAFTERS", {name: shape | (blocks if "markov_rank" in shape else small)
                             for name, shape in module.DRAFTERS.items()}
    )  # fmt: skip
    return module


def test_the_script_trains_on_equal_terms_and_goes_on(root, tmp_path, script, capsys, monkeypatch):
    command = ["--data", str(root / "answers.jsonl"), "--target", str(root / "target"), "--output", str(tmp_path)]
    command += ["--max-steps", "3", "--dtype", "float32", "--device", "cpu"]
    assert script.main([*command, "--only", "mtp", "dspark-rnn"]) == 0
    assert script.main([*command, "--only", "mtp", "eagle3"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("== mtp: done before") == 1
    rows = json.loads((tmp_path / "baselines.json").read_text())["drafters"]
    assert list(rows) == ["dspark-rnn", "eagle3", "mtp"]
    assert len({(row["num_steps"], row["num_sequences"], row["data_sha256"]) for row in rows.values()}) == 1
    shared = ("batch_size", "max_anchors", "seed", "learning_rate", "held_out_fraction", "max_length")
    assert len({tuple(row["settings"][name] for name in shared) for row in rows.values()}) == 1
    table = (tmp_path / "baselines.md").read_text()
    assert "| eagle3 | 3 |" in table and (tmp_path / "baselines.png").stat().st_size > 1000
    taus = rows["eagle3"]["tau_by_step"]
    assert rows["eagle3"]["steps"] == [1, 2, 3] and len(taus) == 3 and min(taus) >= 1
    firsts = rows["eagle3"]["acceptance_1_by_step"]
    cells = [f"{tau:.3f}; {first:.3f}" for tau, first in zip(taus, firsts, strict=True)]
    assert f"| eagle3 |  | {' | '.join(cells)} |" in table  # quarters of three steps
    assert (tmp_path / "features" / "features.json").is_file()
    # other data under the same name is another run, which the trainer refuses to mix
    other = root / "other.jsonl"
    other.write_text((root / "answers.jsonl").read_text().replace('"p/1"', '"p/100"'))
    command[1] = str(other)
    assert script.main([*command, "--only", "mtp"]) == 2
    assert "holds a run with other data" in capsys.readouterr().err
