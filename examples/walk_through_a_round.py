"""One round by hand, with every stage's numbers: `python examples/walk_through_a_round.py "What is 2 + 2?"`."""

import sys

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList

from dspark_hf import DSparkCandidateGenerator, zoo
from dspark_hf.decoding.accept import accept
from dspark_hf.decoding.calibrate import calibrate, calibration_for
from dspark_hf.decoding.draft import draft_block
from dspark_hf.decoding.policies.facts import RoundFacts, StepCosts
from dspark_hf.decoding.policies.prefix import PrefixPolicy
from dspark_hf.decoding.sampling import ScoreProcessor
from dspark_hf.decoding.schedule import schedule
from dspark_hf.decoding.verify import TargetRunner, last_logits
from dspark_hf.prompts import Prompt, encode_prompt

torch.set_grad_enabled(False)
target, drafter = (load("smollm2-135m-instruct", "float32") for load in (zoo.load_target, zoo.load_drafter))
tokenizer, config = zoo.load_tokenizer("smollm2-135m-instruct"), drafter.config
question = (sys.argv[1:] or ["Write a Python function that adds two numbers."])[0]
ids = encode_prompt(tokenizer, Prompt("mine", ({"role": "user", "content": question},)))
call, processor = GenerationConfig(do_sample=False, max_length=512), ScoreProcessor(LogitsProcessorList())

# Before the first round: the prompt's forward gives the features of its tokens, and the anchor.
kwargs = {"cache": DynamicCache(config=target.config), "attention_mask": torch.ones_like(ids)}
capture = DSparkCandidateGenerator(drafter, target, call, LogitsProcessorList(), kwargs).model_kwargs_overrides
runner = TargetRunner(target, kwargs, call, capture)
prompt = runner.prefill(ids, lambda outputs: None)
features = torch.cat([prompt.hidden_states[k + 1] for k in config.target_layer_ids], dim=-1)
anchor = last_logits(prompt, 1, ids.device)[0].argmax(dim=-1, keepdim=True)
runner.commit(prompt, 1, 0)
num_context, ids = ids.shape[1], torch.cat([ids, anchor], dim=1)
print(f"features of {num_context} tokens, {features.shape[-1]} wide; anchor {tokenizer.decode(anchor[0])!r}")

masks = torch.full((1, config.block_size - 1), config.mask_token_id)
embeds = drafter.embed(torch.cat([anchor, masks], dim=1), target.get_input_embeddings())
positions = torch.arange(num_context + config.block_size)[None]
hidden = drafter(embeds, positions[:, num_context:], features, positions[:, :num_context]).last_hidden_state
base = drafter.base_logits(hidden, drafter.borrow_head(target.get_output_embeddings(), config.vocab_size))
block = draft_block(drafter, hidden, base, ids, processor, draft_ids=drafter.draft_token_ids, do_sample=False)
print("1 draft     ", [tokenizer.decode(token) for token in block.tokens[0]])

confidence = calibrate(block.confidence_logits, calibration_for(config, call))
print("2 calibrate  up to here all accepted:", *map("{:.2f}".format, confidence.survival[0].tolist()))

costs = StepCosts.of([0.0, *(0.030 + 0.010 * num_tokens for num_tokens in range(1, 2 + config.block_size))], 0.010)
lengths = schedule(PrefixPolicy(), confidence, RoundFacts.of(block, costs=costs))
taus = torch.cat([torch.ones(1), 1 + confidence.survival[0].cumsum(0)])
speeds = " ".join(map("{:.1f}".format, (taus / costs.round_s[1:]).tolist()))
print(f"3 schedule   {int(lengths)} drafts; were a step 30 + 10 B ms, tokens/s by number of drafts: {speeds}")
drafts = block.tokens[:, : int(lengths)]
scores = processor.over_block(ids, drafts, last_logits(runner.verify(ids, drafts), 1 + int(lengths), ids.device))
print("4 verify     the target says", [tokenizer.decode(token) for token in scores[0].argmax(dim=-1)])
accepted = accept(drafts, block.draft_probs, scores, lengths, do_sample=False)
new = [*drafts[0, : int(accepted.num_accepted)], accepted.next_token[0]]
print(f"5 accept     {int(accepted.num_accepted)} drafts and the target's own:", [tokenizer.decode(t) for t in new])
