"""A tiny pair that works: a random target with a tokenizer, and a drafter trained on its answers in seconds."""

from __future__ import annotations

import copy
import functools
import tempfile

import torch
from tiny import VOCAB, tiny_drafter, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, PrinterCallback

from dspark_hf.evaluation.doctor import examine_pair
from dspark_hf.prompts import Prompt
from dspark_hf.training.dataset import AnchorDataset
from dspark_hf.training.records import TrainingSequence
from dspark_hf.training.settings import DSparkTrainingArguments
from dspark_hf.training.trainer import DSparkTrainer

NUM_PROMPTS = 12
PROMPT_WORDS = 6
NEW_TOKENS = 24
STEPS, RATE = 120, 1e-2
LAYERS = [0, 1]  # of four, so that layers one on and one back exist


def word(token):
    """Without digits, which some tokenizers take one by one."""
    return chr(97 + token // 26) + chr(97 + token % 26)


def tokenizer(chat_template=None):
    words = Tokenizer(WordLevel({word(i): i for i in range(VOCAB)}, unk_token=word(0)))
    words.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token=word(0))
    made.chat_template = chat_template
    return made


@functools.cache
def target(seed=0):
    return tiny_target(num_layers=4, seed=seed)


@functools.cache
def prompts():
    ids = torch.randint(1, VOCAB - 1, (NUM_PROMPTS, PROMPT_WORDS), generator=torch.Generator().manual_seed(0))
    texts = [" ".join(word(int(i)) for i in row) for row in ids]
    return [Prompt(f"p/{i}", ({"role": "user", "content": text},)) for i, text in enumerate(texts)]


@functools.cache
def trained(**overrides):
    """A drafter that has learnt the target's answers to the prompts by heart."""
    drafter = tiny_drafter(target(), initializer_range=0.1, target_layer_ids=LAYERS, **overrides)
    words = tokenizer()
    ids = torch.cat([words(p.messages[0]["content"], return_tensors="pt")["input_ids"] for p in prompts()])
    whole = target().generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS + 4)
    sequences = [TrainingSequence(f"p{i}", row, torch.arange(len(row)) >= PROMPT_WORDS) for i, row in enumerate(whole)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = DSparkTrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            learning_rate=RATE,
            per_device_train_batch_size=NUM_PROMPTS,
            num_decode_prompts=0,
            eval_strategy="no",
            save_strategy="no",
            logging_steps=50,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        dataset = AnchorDataset(sequences, max_anchors=NEW_TOKENS, seed=0)
        trainer = DSparkTrainer(drafter, target(), arguments, dataset)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return drafter.eval()


def healthy():
    """A copy of the trained drafter, to plant faults into."""
    return copy.deepcopy(trained())


def examine(drafter, **overrides):
    settings = {
        "target": target(),
        "tokenizer": tokenizer(),
        "prompts": prompts(),
        "max_new_tokens": NEW_TOKENS,
        "with_speed": False,
    } | overrides
    return examine_pair(drafter=drafter, **settings)


def faults(report):
    """Names of the checks that found a fault."""
    return [check for check, _ in report.faults]
