"""Train a drafter on your own target: let it answer prompts, train on the answers, generate with the result.

    python examples/train.py --target path/or/hub-id --prompts my-prompts.jsonl --output my-drafter --minutes 60

Both long steps go on where they stopped when the same command is typed again. The commands `dspark train data` and
`dspark train` do the same, with every setting as an option.
"""

import argparse
from pathlib import Path

from dspark_hf import DSparkDraftModel, TrainingRequest, record_speculation, train_drafter, zoo
from dspark_hf.prompts import encode_prompt
from dspark_hf.training.response_prompts import load_prompt_dataset
from dspark_hf.training.responses_command import run_train_data

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="smollm2-135m-instruct")
parser.add_argument("--prompts", required=True, help="file, folder or data set of the Hub")
parser.add_argument("--output", type=Path, required=True, help="folder of the drafter")
parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer")
parser.add_argument("--minutes", type=float, default=60.0)
parser.add_argument("--max-steps", type=int, help="instead of minutes")
args = parser.parse_args()

# 1. What a drafter learns is what its own target says.
answers = args.output.with_name(f"{args.output.name}-answers.jsonl")
summary = run_train_data(args.target, [args.prompts], answers, max_new_tokens=args.max_new_tokens)
print(f"{summary.num_answers} answers with {summary.num_response_tokens} tokens made, {summary.num_resumed} were there")

# 2. Train; a part of the prompts is kept aside, and accepted length on it is shown as it grows.
request = TrainingRequest(
    target=args.target,
    data=(str(answers),),
    output=args.output,
    minutes=None if args.max_steps else args.minutes,
    max_steps=args.max_steps,
)
outcome = train_drafter(request, print)

# 3. Use it.
target, tokenizer = zoo.load_target(args.target), zoo.load_tokenizer(args.target)
drafter = DSparkDraftModel.from_pretrained(outcome.folder)
ids = encode_prompt(tokenizer, load_prompt_dataset(args.prompts)[0])
with record_speculation() as report:
    target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=64)
print(f"{outcome.num_steps} steps; {report.tau:.2f} tokens a round on the first prompt")
