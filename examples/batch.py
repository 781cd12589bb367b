"""A batch of prompts, with and without a drafter: `python examples/batch.py`.

Rows accept different numbers of drafts; each keeps its own place in the caches. Which share of the drafts is worth
verifying depends on the machine: run `dspark profile` once, and the default policy uses what it measured.
"""

import argparse
import time

from dspark_hf import zoo

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--max-new-tokens", type=int, default=48)
args = parser.parse_args()

target = zoo.load_target("smollm2-135m-instruct")
tokenizer = zoo.load_tokenizer("smollm2-135m-instruct")
drafter = zoo.load_drafter("smollm2-135m-instruct")

questions = [
    "Tom has 5 apples and buys 7 more. How many apples does he have?",
    "A pen costs 3 dollars. How much do 12 pens cost?",
    "Write a Python function that adds two numbers.",
    "What is the capital of France?",
]
tokenizer.padding_side = "left"
inputs = tokenizer.apply_chat_template(
    [[{"role": "user", "content": question}] for question in questions],
    add_generation_prompt=True,
    padding=True,
    return_tensors="pt",
    return_dict=True,
)


def timed(**extra: object) -> tuple:
    """Output of a greedy call, and its tokens per second; texts end at different lengths, so padding counts too."""
    start = time.perf_counter()
    output = target.generate(
        **inputs, do_sample=False, max_new_tokens=args.max_new_tokens, return_dict_in_generate=True, **extra
    )
    num_tokens = output.sequences[:, inputs["input_ids"].shape[1] :].numel()
    return output, num_tokens / (time.perf_counter() - start)


plain, plain_speed = timed()
output, speed = timed(assistant_model=drafter)
for question, row, report in zip(questions, output.sequences, output.speculation_by_row, strict=True):
    text = tokenizer.decode(row[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{question}\n  {text}\n  [{report.tau:.2f} tokens a round]\n")
print(f"{speed:.0f} tokens/s with the drafter, {plain_speed:.0f} without, first calls of each (a benchmark repeats)")
