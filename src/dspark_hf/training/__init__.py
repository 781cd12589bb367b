"""Training a drafter: answers of the target, anchor blocks, the paper's losses, and a Trainer.

responses       prompts -> answers of the target (JSONL)
records         answers on disk -> token sequences with a loss mask
features        target hidden states of a sequence, online or from a bounded cache on disk
anchors         where blocks start, and which of their slots are supervised
losses          the three losses, as a slow reference and as a chunked pass over the vocabulary
trainer         DSparkTrainer on transformers' Trainer
"""
