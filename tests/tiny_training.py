"""A tiny training problem: a random target, its own greedy answers, and a trainer on them."""

from __future__ import annotations

import copy
import functools
import os
import signal

import torch
from tiny import VOCAB, tiny_drafter, tiny_target
from transformers import PrinterCallback, TrainerCallback

from dspark_hf.training.dataset import AnchorDataset
from dspark_hf.training.records import TrainingSequence
from dspark_hf.training.settings import DSparkTrainingArguments
from dspark_hf.training.trainer import DSparkTrainer

PROMPT_TOKENS = 6
DRAFT_VOCAB = 30

HEADS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "rank_0": {"markov_rank": 0, "confidence_head_with_markov": False},
    "no_confidence": {"enable_confidence_head": False, "confidence_head_with_markov": False},
    "reduced": {"draft_vocab_size": DRAFT_VOCAB},
    "reduced_rnn": {"draft_vocab_size": DRAFT_VOCAB, "markov_head_type": "rnn"},
    "fill_in": {"draft_layout": "fill_in", "markov_head_type": "rnn"},
    "sliding": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 3,
        "window_start": "anchor",
        "causal_layers": "sliding",
    },
}


MAX_ANCHORS = 4


@functools.cache
def target():
    return tiny_target(num_layers=3)


def drafter(head="vanilla", **overrides):
    """A new drafter; a reduced one drafts a scattered part of the vocabulary."""
    made = tiny_drafter(target(), **HEADS[head] | overrides)
    if made.draft_token_ids is not None:
        choose_draft_tokens(made)
    return made


def choose_draft_tokens(drafter, seed=3):
    size, vocab = drafter.config.draft_vocab_size, drafter.config.vocab_size
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:size].sort().values
    drafter.d2t.copy_(ids - torch.arange(size))
    return ids


@functools.cache
def answers(count=20):
    """`count` conversations of 11 to 30 tokens; the target wrote all but the first six."""
    prompts = torch.randint(1, VOCAB, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    whole = target().generate(prompts, do_sample=False, max_new_tokens=24)
    sequences = []
    for i, ids in enumerate(whole):
        kept = ids[: 11 + (7 * i) % 20].clone()
        sequences.append(TrainingSequence(f"p{i}", kept, torch.arange(len(kept)) >= PROMPT_TOKENS))
    return sequences


def arguments(folder, **overrides):
    settings = {
        "output_dir": str(folder),
        "max_steps": 5,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_decode_prompts": 0,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return DSparkTrainingArguments(**settings | overrides)


def trainer(folder, model=None, *, cache=None, sequences=None, decode_prompts=None, callbacks=None, **overrides):
    args = arguments(folder, **overrides)
    dataset = AnchorDataset(sequences or answers(), max_anchors=MAX_ANCHORS, seed=0, cache=cache)
    made = DSparkTrainer(
        model or drafter(), target(), args, dataset, dataset, decode_prompts=decode_prompts, callbacks=callbacks
    )
    made.remove_callback(PrinterCallback)
    return made


def trained_weights(made):
    return {name: copy.deepcopy(tensor) for name, tensor in made._drafter.state_dict().items()}


def losses(made):
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


class StopTheProcess(TrainerCallback):
    """Ends the process without any clean-up, like `kill -9`, before the step after `at_step`."""

    def __init__(self, at_step):
        self.at_step = at_step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.at_step:
            os.kill(os.getpid(), signal.SIGKILL)
