"""Generate with a drafter, and see what it did: `python examples/generate.py "Why is the sky blue?"`.

Other models: `--target path/or/hub-id --drafter path/or/hub-id`.
"""

import argparse

from dspark_hf import DSparkDraftModel, zoo

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("prompt", nargs="?", default="Tom has 5 apples and buys 7 more. How many apples does he have?")
parser.add_argument("--target", default="smollm2-135m-instruct")
parser.add_argument("--drafter", help="default: the one that comes with the package")
parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
parser.add_argument("--max-new-tokens", type=int, default=64)
args = parser.parse_args()

target = zoo.load_target(args.target)
tokenizer = zoo.load_tokenizer(args.target)
drafter = DSparkDraftModel.from_pretrained(args.drafter) if args.drafter else zoo.load_drafter(args.target)

if tokenizer.chat_template:
    messages = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
else:  # a base model
    inputs = tokenizer(args.prompt, return_tensors="pt")
sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
output = target.generate(
    **inputs,
    **sampling,
    assistant_model=drafter,
    max_new_tokens=args.max_new_tokens,
    return_dict_in_generate=True,
)
print(tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

report = output.speculation
print(f"\n{report.num_new_tokens} tokens in {report.num_target_forwards} target forwards, {report.tau:.2f} a round")
if report.num_verified:  # a policy may find that drafting does not pay
    shares = ", ".join(f"{share:.0%}" for share in report.conditional_acceptance)
    print(f"accepted by slot, of the drafts whose predecessors were: {shares}")
