"""Tiny pairs, tokenizers and requests for tests of the demo."""

from tiny import VOCAB, OracleDrafter, greedy, random_ids, tiny_drafter, tiny_target
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from dspark_hf.demo.lanes import Job, Lane
from dspark_hf.demo.shelf import BUNDLED, UNTRAINED, Limits
from dspark_hf.evaluation import ComparisonSettings
from dspark_hf.evaluation.settings import ComparisonError
from dspark_hf.training.answering import pad_left


def word_tokenizer():
    """Ids 0 to VOCAB - 1 are the words w0, w1, ..."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w1")


def byte_tokenizer():
    """One id for each byte."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=letters)


def job_of(target, rows=((5, 9, 3),), **settings):
    ids, mask = pad_left([list(row) for row in rows], target.device)
    return Job(target, word_tokenizer(), ids, mask, ComparisonSettings(**{"max_new_tokens": 12} | settings))


def lanes_of(*drafters, policy="full"):
    return [Lane(i, drafter, None if drafter is None else policy) for i, drafter in enumerate(drafters)]


def oracle_for(target, prompt=(5, 9, 3), *, num_new=40, **overrides):
    """A drafter that is right with probability 0.7 about the greedy text after `prompt`."""
    ids = random_ids(len(prompt)).clone()
    ids[0] = ids.new_tensor(prompt)
    return OracleDrafter.for_target(target, greedy(target, ids, max_new_tokens=num_new)[0], **overrides)


class TinyShelf:
    """A shelf with one tiny pair under the default names; `broken` names raise what they map to."""

    def __init__(self, target=None, drafters=None, broken=None, limits=None):
        self.limits = limits or Limits()
        self._target = target or tiny_target()
        self._drafters = drafters or {
            BUNDLED: tiny_drafter(self._target),
            UNTRAINED: tiny_drafter(self._target, seed=5, block_size=3),
        }
        self._broken = broken or {}
        self.num_loads = 0

    def holds(self, drafter, target):
        return self.num_loads > 0

    def target(self, name):
        if name in self._broken:
            raise self._broken[name]
        self.num_loads += 1
        return self._target, word_tokenizer()

    def drafter(self, name, target_name):
        if name in self._broken:
            raise self._broken[name]
        if name not in self._drafters:
            raise ComparisonError(f"drafter {name!r} is not a folder")
        return self._drafters[name]
