"""A tiny target, a drafter that is often right about it, and both as folders with what commands and programs read."""

import json
from pathlib import Path

import torch
from tiny import VOCAB, greedy, random_ids, tiny_drafter, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast


def near_target():
    """Its next token depends mostly on the last one."""
    made = tiny_target("llama", num_layers=3)
    for layer in made.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.02
        layer.mlp.down_proj.weight.data *= 0.02
    return made


def near_drafter(target, **overrides):
    """A drafter that is often right: its Markov head says what the target would without its layers."""
    drafter = tiny_drafter(target, **{"markov_rank": target.config.hidden_size} | overrides)
    embedding = target.get_input_embeddings().weight.data
    drafter.norm.weight.data.zero_()
    drafter.markov_head.markov_w1.weight.data.copy_(embedding / embedding.square().mean(-1, keepdim=True).sqrt())
    drafter.markov_head.markov_w2.weight.data.copy_(target.get_output_embeddings().weight.data)
    return drafter


def save_tokenizer(folder, vocab_size=VOCAB):
    """A tokenizer of the words w0, w1, ..., with padding and a chat template; every other word is w1."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w1"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w1", pad_token="w0")
    tokenizer.chat_template = "{% for m in messages %}w2 {{ m['content'] }} {% endfor %}w3"
    tokenizer.save_pretrained(folder)


def write_pair(root: Path) -> None:
    """Folders `target` and `my-drafter`, and `my-prompts.jsonl` and `answers.jsonl`, below `root`."""
    target = near_target()
    target.save_pretrained(root / "target")
    save_tokenizer(root / "target")
    torch.manual_seed(0)
    near_drafter(target, block_size=2, num_hidden_layers=1).save_pretrained(root / "my-drafter")
    lines = [{"id": f"p/{i}", "prompt": f"w{i} w{i + 3} w{i + 5}"} for i in range(1, 49)]
    (root / "my-prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (root / "answers.jsonl").open("w") as file:
        for i in range(60):
            ids = greedy(target, random_ids(6, seed=i), max_new_tokens=14)[0].tolist()
            file.write(json.dumps({"id": f"p/{i}", "prompt_ids": ids[:6], "response_ids": ids[6:]}) + "\n")
