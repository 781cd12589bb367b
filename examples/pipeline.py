"""A drafter inside transformers' pipeline: `python examples/pipeline.py`.

Pass the loaded drafter, not its name. Lists of prompts run one after the other, as pipelines do by default.
"""

import argparse

from transformers import pipeline

from dspark_hf import record_speculation, zoo

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--max-new-tokens", type=int, default=64)
args = parser.parse_args()

generator = pipeline(
    "text-generation",
    model=zoo.load_target("smollm2-135m-instruct"),
    tokenizer=zoo.load_tokenizer("smollm2-135m-instruct"),
    assistant_model=zoo.load_drafter("smollm2-135m-instruct"),
)
questions = ["Solve for x: 2x + 6 = 14.", "Write a Python function that adds two numbers."]
chats = [[{"role": "user", "content": question}] for question in questions]

with record_speculation() as report:
    results = generator(chats, max_new_tokens=args.max_new_tokens, do_sample=False, return_full_text=False)

answers = [result[0]["generated_text"] for result in results]
for question, text in zip(questions, answers, strict=True):
    print(f"{question}\n  {text}\n")
print(f"{report.num_calls} calls, {report.num_target_forwards} target forwards, {report.tau:.2f} tokens a round")
