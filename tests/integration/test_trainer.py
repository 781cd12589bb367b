"""`DSparkTrainer`: its loss against one block at a time, its split into batches and processes, and its resume.

Everything runs on a tiny target whose greedy answers are the data, in float32 on one thread.
"""

import json
import logging
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_training as tt
import torch
from safetensors.torch import load_file
from tiny import tiny_target
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from dspark_hf import DSparkDraftModel, record_speculation
from dspark_hf.errors import TrainingDataError
from dspark_hf.model.context_cache import DraftContextCache
from dspark_hf.training.anchors import position_weights
from dspark_hf.training.dataset import collate
from dspark_hf.training.feature_cache import build_feature_cache
from dspark_hf.training.features import TargetReader
from dspark_hf.training.losses import reference_losses
from dspark_hf.training.records import TrainingSequence
from dspark_hf.training.trainer import DSparkTrainer

# -- the loss against a slow reference ------------------------------------------------------------------------------


def batch_of(sequences, anchors):
    """A collated batch with given anchors; `collate` pads both."""
    return collate(
        [
            {"input_ids": s.input_ids, "loss_mask": s.loss_mask, "anchors": torch.tensor(a)}
            for s, a in zip(sequences, anchors, strict=True)
        ]
    )


def ragged_batch():
    """Rows of different lengths: a mask with holes, an anchor without context, blocks cut by the end."""
    sequences = list(tt.answers()[:4])
    holes = sequences[1].loss_mask.clone()
    holes[[8, 11]] = False
    sequences[1] = TrainingSequence("holes", sequences[1].input_ids, holes)
    sequences[2] = TrainingSequence("whole", sequences[2].input_ids, torch.ones_like(sequences[2].loss_mask))
    last = len(sequences[3]) - 2
    return sequences, [[6, 8, 9], [6, 9, 12, 13], [0, 1, 5, 8], [last]]


def block_terms(drafter, ids, mask, anchor, size):
    """`(weight index, cross-entropy, full L1, confidence loss)` of one block's supervised slots, when drafting."""
    target, config = tt.target(), drafter.config
    with torch.no_grad():
        outputs = target(ids[None], output_hidden_states=True)
    features = torch.cat([outputs.hidden_states[i + 1] for i in config.target_layer_ids], dim=-1)
    first = config.first_draft_slot
    block_ids = torch.full((1, first + size), config.mask_token_id)
    block_ids[0, 0] = ids[anchor]
    hidden = drafter(
        drafter.embed(block_ids, target.get_input_embeddings()),
        torch.arange(anchor, anchor + first + size)[None],
        context_features=features[:, :anchor] if anchor else None,
        context_position_ids=torch.arange(anchor)[None] if anchor else None,
        cache=DraftContextCache(config.num_hidden_layers),
    ).last_hidden_state
    anchor_hidden, hidden = (hidden[:, 0] if first else None), hidden[:, first:]
    base = drafter.base_logits(hidden, drafter.borrow_head(target.get_output_embeddings(), config.vocab_size))
    head = drafter.markov_head
    state = None
    if head is not None:
        state = head.start(1)
        if anchor_hidden is not None:  # a recurrent head passes through the anchor's slot
            _, state = head.step(head.embed(ids[None, anchor]), anchor_hidden, state)
    terms = []
    for k in range(size):
        position = anchor + k + 1
        if position >= len(ids) or not bool(mask[anchor : position + 1].all()):
            break
        logits, embedding = base[:, k], None
        if head is not None:
            embedding = head.embed(ids[None, position - 1])
            bias, state = head.step(embedding, hidden[:, k], state)
            logits = logits + bias
        if (draft_ids := drafter.draft_token_ids) is not None:
            logits = torch.full((1, config.vocab_size), -torch.inf).index_copy(1, draft_ids, logits)
        draft_probs = logits.softmax(-1)
        target_probs = outputs.logits[:, position - 1].softmax(-1)
        token = ids[None, position]
        confidence = torch.full((1,), 0.5)
        if drafter.confidence_head is not None:
            confidence = drafter.confidence_head(hidden[:, k], embedding).sigmoid()
        ce, tv, conf = reference_losses(draft_probs, target_probs, token, confidence)
        if float(draft_probs[0, token].detach()) == 0.0:
            ce = torch.zeros(1)  # such a token has no cross-entropy term
        if drafter.confidence_head is None:
            conf = torch.zeros(1)
        terms.append((k, ce[0], tv[0], conf[0]))
    return terms


def slow_loss(drafter, sequences, anchors, *, size=None, decay=None, coefficients=(0.1, 0.9, 1.0)):
    size = size or drafter.config.block_size
    weights = position_weights(drafter.config.block_size, decay or drafter.config.block_size)
    total, weight_sum = torch.zeros(()), 0.0
    for sequence, row in zip(sequences, anchors, strict=True):
        for anchor in row:
            for k, *parts in block_terms(drafter, sequence.input_ids, sequence.loss_mask, anchor, size):
                total = total + weights[k] * sum(c * part for c, part in zip(coefficients, parts, strict=True))
                weight_sum += float(weights[k])
    return total / weight_sum


def gradients(loss, drafter):
    named = dict(drafter.named_parameters())
    grads = torch.autograd.grad(loss, named.values(), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), grads, strict=True)}


def assert_same_loss(made, drafter, expected, batch):
    loss = made.compute_loss(drafter, made._prepare_inputs(batch))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    got, wanted = gradients(loss, drafter), gradients(expected, drafter)
    for name, grad in wanted.items():
        torch.testing.assert_close(got[name], grad, atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("head", tt.HEADS)
def test_loss_and_gradients_equal_one_block_at_a_time(tmp_path, head):
    drafter = tt.drafter(head).train()
    made = tt.trainer(tmp_path, drafter)
    sequences, anchors = ragged_batch()
    expected = slow_loss(drafter, sequences, anchors)
    assert_same_loss(made, drafter, expected, batch_of(sequences, anchors))
    other = slow_loss(drafter, sequences, [row[:1] for row in anchors])
    assert abs(float((other - expected).detach())) > 1e-3, "the blocks must matter"


def test_coefficients_and_decay_are_the_settings(tmp_path):
    drafter = tt.drafter().train()
    options = {"cross_entropy_weight": 0.7, "total_variation_weight": 0.2, "confidence_weight": 0.3, "loss_decay": 1.5}
    made = tt.trainer(tmp_path, drafter, **options)
    sequences, anchors = ragged_batch()
    expected = slow_loss(drafter, sequences, anchors, decay=1.5, coefficients=(0.7, 0.2, 0.3))
    assert_same_loss(made, drafter, expected, batch_of(sequences, anchors))


def test_a_target_head_with_a_bias(tmp_path, monkeypatch):
    target = tiny_target(num_layers=3)
    weight = target.lm_head.weight
    target.lm_head = nn.Linear(weight.shape[1], weight.shape[0])
    target.lm_head.weight = weight
    nn.init.normal_(target.lm_head.bias, generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(tt, "target", lambda: target)
    for name in ("vanilla", "reduced"):
        drafter = tt.drafter(name).train()
        made = tt.trainer(tmp_path, drafter)
        sequences, anchors = ragged_batch()
        assert_same_loss(made, drafter, slow_loss(drafter, sequences, anchors), batch_of(sequences, anchors))


@pytest.mark.parametrize(("step", "size"), [(0, 1), (1, 1), (2, 2), (4, 3), (6, 4), (8, 4), (9, 4)])
def test_blocks_grow_during_the_curriculum(tmp_path, step, size):
    drafter = tt.drafter().train()
    made = tt.trainer(tmp_path, drafter, curriculum_fraction=0.5)
    made.state.max_steps, made.state.global_step = 16, step
    sequences, anchors = ragged_batch()
    batch = batch_of(sequences, anchors)
    assert_same_loss(made, drafter, slow_loss(drafter, sequences, anchors, size=size), batch)


def test_bfloat16_autocast_stays_near_float32(tmp_path):
    sequences, anchors = ragged_batch()
    drafter = tt.drafter().train()
    made = tt.trainer(tmp_path, drafter, bf16=True)
    with made.compute_loss_context_manager():
        loss = made.compute_loss(drafter, made._prepare_inputs(batch_of(sequences, anchors)))
    expected = slow_loss(drafter, sequences, anchors)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=0.03)
    assert float(loss.detach()) != float(expected.detach())
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) and p.grad.dtype == torch.float32 for p in drafter.parameters())


# -- splitting a batch ----------------------------------------------------------------------------------------------


def assert_same_weights(got, expected, atol=1e-5):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=atol, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def run(folder, head="vanilla", **options):
    made = tt.trainer(folder, tt.drafter(head), **options)
    made.train()
    return made


@pytest.fixture(scope="module")
def batch_of_8(tmp_path_factory):
    # 20 sequences: the third step of each epoch has four, and with accumulation one micro-batch.
    return run(tmp_path_factory.mktemp("batch"), per_device_train_batch_size=8)


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_changes_nothing(tmp_path, batch_of_8, accumulation):
    options = {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    made = run(tmp_path, **options)
    assert made.state.global_step == batch_of_8.state.global_step == 5
    assert tt.losses(made) == pytest.approx(tt.losses(batch_of_8), abs=1e-5)
    assert_same_weights(tt.trained_weights(made), tt.trained_weights(batch_of_8))


def test_control_another_batch_size_trains_otherwise(tmp_path, batch_of_8):
    made = run(tmp_path, per_device_train_batch_size=4)
    with pytest.raises(AssertionError):
        assert_same_weights(tt.trained_weights(made), tt.trained_weights(batch_of_8))


@pytest.mark.parametrize("head", ["vanilla", "reduced"])
def test_cached_features_train_like_online_ones(tmp_path, monkeypatch, head):
    online = run(tmp_path / "online", head)
    drafter = tt.drafter(head)
    reader = TargetReader(tt.target(), drafter.config)
    cache = build_feature_cache(
        tmp_path / "features", tt.target(), reader, tt.answers(), layer_ids=drafter.config.target_layer_ids,
        max_bytes=10**8,
    )  # fmt: skip
    made = tt.trainer(tmp_path / "cached", drafter, cache=cache)
    monkeypatch.setattr(TargetReader, "read", None)  # the target must not be asked
    made.train()
    assert tt.losses(made) == pytest.approx(tt.losses(online), abs=1e-5)
    assert_same_weights(tt.trained_weights(made), tt.trained_weights(online))


def test_the_heads_have_a_rate_of_their_own(tmp_path):
    start = tt.trained_weights(tt.trainer(tmp_path))
    moved = {}
    for multiplier in (1.0, 10.0):
        made = run(tmp_path, max_steps=1, head_learning_rate_multiplier=multiplier, warmup_steps=0)
        moved[multiplier] = {n: (w - start[n]).abs().max() for n, w in tt.trained_weights(made).items()}
    for name, far in moved[10.0].items():
        is_head = name.startswith(("markov_head.", "confidence_head."))
        # Adam's first step has the size of the rate.
        assert float(far / moved[1.0][name]) == pytest.approx(10.0 if is_head else 1.0, rel=0.02), name
    names = [p for group in made.optimizer.param_groups for p in group["params"]]
    assert len(names) == len(set(names)) == len(list(made.model.parameters()))


# -- processes of their own -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """The folder of training_process.py's runs, and the exit status of each rank."""
    folder = tmp_path_factory.mktemp("processes")
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent), *sys.path])}
    program = [sys.executable, str(here / "training_process.py"), str(folder)]
    with (folder / "errors.txt").open("w") as log:
        # A process group of its own, so that its ranks go with it.
        started = subprocess.Popen(program, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            status = started.wait(timeout=540)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
    errors = (folder / "errors.txt").read_text()
    assert status == 0, errors
    return folder, json.loads((folder / "statuses.json").read_text()), errors


def result_of(processes, name, place=None):
    folder, statuses, errors = processes
    assert set(statuses[name]) == {0}, errors
    place = folder / (place or name)
    return json.loads((place / "result.json").read_text()), load_file(place / "final.safetensors")


@pytest.mark.parametrize(("head", "max_steps"), [("vanilla", 7), ("reduced_rnn", 5), ("rank_0", 5)])
def test_two_processes_train_like_one_with_accumulation(processes, tmp_path, head, max_steps):
    result, weights = result_of(processes, f"pair_{head}")
    assert result["world"] == 2
    options = {"gradient_accumulation_steps": 2, "max_steps": max_steps}
    alone = tt.trainer(tmp_path, tt.drafter(head), sequences=tt.answers(24), **options)
    alone.train()
    assert result["losses"] == pytest.approx(tt.losses(alone), abs=1e-5)
    assert_same_weights(weights, tt.trained_weights(alone))
    values = alone.evaluate()
    assert result["eval"] == pytest.approx(values, abs=1e-5)


def test_a_killed_run_resumes_to_the_same_weights(processes, tmp_path):
    folder, statuses, errors = processes
    assert statuses["killed"] == [-9], errors
    last = get_last_checkpoint(str(folder / "killed"))
    assert last.endswith("checkpoint-4")
    options = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 7}
    whole, made = (tt.trainer(tmp_path / name, sequences=tt.answers(24), **options) for name in ("whole", "again"))
    whole.train()
    made.train(resume_from_checkpoint=last)
    assert made.state.global_step == whole.state.global_step == 7
    assert tt.losses(made) == tt.losses(whole)
    assert_same_weights(tt.trained_weights(made), tt.trained_weights(whole), atol=0)


def test_two_killed_processes_resume_to_the_same_weights(processes):
    # Both reach the signal at the same step, unless the other's end is noticed first.
    assert -9 in processes[1]["pair_killed"]
    whole, whole_weights = result_of(processes, "pair_vanilla")
    result, weights = result_of(processes, "pair_resumed", "pair_killed")
    assert result["losses"] == whole["losses"]
    assert_same_weights(weights, whole_weights, atol=0)


@pytest.mark.parametrize(
    ("step", "options"),
    # three steps an epoch, the last of which has a single micro-batch
    [(2, {}), (3, {}), (1, {"curriculum_fraction": 0.8}), (2, {"dataloader_num_workers": 1})],
    ids=str,
)
def test_resume_from_any_step(tmp_path, step, options):
    options = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 1} | options
    whole = run(tmp_path, **options)
    made = tt.trainer(tmp_path / "again", tt.drafter(seed=99), **options)
    made.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert_same_weights(tt.trained_weights(made), tt.trained_weights(whole), atol=0)


def test_the_first_step_of_a_growing_block_has_its_own_denominator(tmp_path):
    """Before its first step a drafter may still be in eval mode, in which blocks are whole."""
    made = tt.trainer(tmp_path, tt.drafter().eval(), curriculum_fraction=1.0, max_steps=4)
    batches = []
    original = made.compute_loss

    def spy(model, inputs, **kwargs):
        batches.append({name: tensor.clone() for name, tensor in inputs.items()})
        return original(model, inputs, **kwargs)

    made.compute_loss = spy
    made.train()
    first = batches[0]
    sequences = [
        TrainingSequence("", ids[: int(mask.nonzero().max()) + 1], mask[: int(mask.nonzero().max()) + 1])
        for ids, mask in zip(first["input_ids"], first["loss_mask"], strict=True)
    ]
    anchors = [row[row >= 0].tolist() for row in first["anchors"]]
    expected = slow_loss(tt.drafter(), sequences, anchors, size=1)
    assert tt.losses(made)[0] == pytest.approx(float(expected.detach()), abs=1e-5)


# -- training as a whole --------------------------------------------------------------------------------------------


def prompts():
    return [sequence.input_ids[None, : tt.PROMPT_TOKENS] for sequence in tt.answers()[:3]]


def test_training_lowers_the_loss_and_raises_tau(tmp_path):
    drafter = tt.drafter("reduced", num_hidden_layers=1)
    options = {"max_steps": 60, "learning_rate": 1e-2, "per_device_train_batch_size": 10, "num_decode_prompts": 3}
    made = tt.trainer(tmp_path, drafter, decode_prompts=prompts(), decode_new_tokens=8, logging_steps=20, **options)
    before = made.evaluate()
    made.train()
    after = made.evaluate()
    assert after["eval_loss"] < 0.8 * before["eval_loss"]
    assert after["eval_expected_tau"] > before["eval_expected_tau"] + 0.3
    assert after["eval_tau_greedy"] > before["eval_tau_greedy"]
    assert {"loss", "cross_entropy", "expected_tau", "acceptance_1", "acceptance_4"} <= made.state.log_history[1].keys()


def test_evaluation_reports_what_decoding_did(tmp_path):
    drafter = tt.drafter().train()
    made = tt.trainer(tmp_path, drafter, decode_prompts=prompts(), num_decode_prompts=2, decode_new_tokens=20)
    values = made.evaluate(metric_key_prefix="held")
    target = tt.target()
    with record_speculation() as report:
        for ids in prompts()[:2]:
            target.generate(ids, do_sample=False, max_new_tokens=20, assistant_model=drafter)
    assert values["held_tau_greedy"] == pytest.approx(report.tau)
    assert 1.0 <= values["held_tau_sampled"] <= 5.0
    again = made.evaluate(metric_key_prefix="held")
    assert {k: v for k, v in again.items() if k != "epoch"} == {k: v for k, v in values.items() if k != "epoch"}
    assert drafter.training


def test_evaluation_means_are_the_slow_ones(tmp_path):
    made = tt.trainer(tmp_path, tt.drafter(), per_device_eval_batch_size=3, curriculum_fraction=1.0)
    made.state.max_steps = 16  # at step 0 training's blocks have one slot; an evaluation's are whole
    values = made.evaluate()
    anchors = [made.eval_dataset[i]["anchors"].tolist() for i in range(len(tt.answers()))]
    expected = slow_loss(made._drafter, tt.answers(), anchors)
    assert values["eval_loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    # expected tau from the same blocks, one by one
    reached, accepted = torch.zeros(4), torch.zeros(4)
    for sequence, row in zip(tt.answers(), anchors, strict=True):
        for anchor in row:
            survival = 1.0
            for k, _, tv, _ in block_terms(made._drafter, sequence.input_ids, sequence.loss_mask, anchor, 4):
                reached[k] += survival
                survival *= 1 - 0.5 * float(tv.detach())
                accepted[k] += survival
    conditional = accepted / reached
    assert [values[f"eval_acceptance_{k}"] for k in range(1, 5)] == pytest.approx(conditional.tolist(), abs=1e-5)
    assert values["eval_expected_tau"] == pytest.approx(1 + float(conditional.cumprod(0).sum()), abs=1e-4)


def test_evaluation_leaves_random_states_as_they_were(tmp_path):
    made = tt.trainer(tmp_path, decode_prompts=prompts(), num_decode_prompts=1, decode_new_tokens=4)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    made.evaluate()
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate() and (states[2] == np.random.get_state()[1]).all()


def test_evaluation_during_training_changes_no_weight_and_no_report(tmp_path, batch_of_8):
    options = {"eval_strategy": "steps", "eval_steps": 1, "num_decode_prompts": 1, "decode_new_tokens": 4}
    made = tt.trainer(tmp_path, decode_prompts=prompts(), per_device_train_batch_size=8, **options)
    made.train()
    assert_same_weights(tt.trained_weights(made), tt.trained_weights(batch_of_8), atol=0)
    reports = [
        [{k: v for k, v in entry.items() if k != "grad_norm"} for entry in m.state.log_history if "loss" in entry]
        for m in (made, batch_of_8)
    ]
    assert reports[0] == reports[1]


def test_decoding_warns_of_nothing(tmp_path, caplog):
    made = tt.trainer(tmp_path, decode_prompts=prompts(), num_decode_prompts=1, decode_new_tokens=4)
    logger = logging.getLogger("transformers")
    logging.Logger.warning_once.cache_clear()  # transformers says some things once a process
    logger.addHandler(caplog.handler)
    try:
        made.evaluate()
    finally:
        logger.removeHandler(caplog.handler)
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# -- settings and the target ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_decay", 0.0), ("loss_decay", -1.0), ("head_learning_rate_multiplier", 0.0),
        ("curriculum_fraction", -0.1), ("curriculum_fraction", 1.1), ("num_decode_prompts", -1),
        ("decode_new_tokens", 0), ("cross_entropy_weight", -0.1), ("total_variation_weight", -1.0),
        ("confidence_weight", -1.0), ("loss_decay", float("nan")), ("confidence_weight", float("nan")),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(tmp_path, name, value):
    with pytest.raises(TrainingDataError, match=f"{name} .*{value}"):
        tt.arguments(tmp_path, **{name: value})


def test_a_head_that_is_not_linear_is_refused(tmp_path, monkeypatch):
    target = tiny_target(num_layers=3)
    target.lm_head = nn.Sequential(target.lm_head)
    monkeypatch.setattr(tt, "target", lambda: target)
    with pytest.raises(TrainingDataError, match="Sequential"):
        tt.trainer(tmp_path)


def test_the_target_is_neither_trained_nor_saved(tmp_path):
    before = {name: weight.clone() for name, weight in tt.target().state_dict().items()}
    made = run(tmp_path, max_steps=3, learning_rate=1e-2, save_strategy="steps", save_steps=3)
    after = tt.target().state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert not any(p.requires_grad or p.grad is not None for p in tt.target().parameters())
    assert not tt.target().training
    names = {name for name, _ in tt.drafter().named_parameters()}
    assert set(made.model.state_dict()) == names
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert set(saved) == names
    assert not any(module is tt.target() for module in made.model.modules())
    held = {id(p) for group in made.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in made.model.parameters()}


def test_a_checkpoint_loads_as_a_drafter(tmp_path):
    made = run(tmp_path, "reduced", max_steps=2, save_strategy="steps", save_steps=2)
    again = DSparkDraftModel.from_pretrained(tmp_path / "checkpoint-2")
    assert torch.equal(again.draft_token_ids, made._drafter.draft_token_ids)
    assert_same_weights(again.state_dict(), tt.trained_weights(made), atol=0)


def test_float16_is_refused(tmp_path):
    args = tt.arguments(tmp_path)
    args.fp16 = True
    with pytest.raises(TrainingDataError, match="fp16 is True.*bf16=True or float32"):
        DSparkTrainer(tt.drafter(), tt.target(), args)
