"""Chat in the terminal, streamed token by token; an empty line ends it: `python examples/chat.py`.

Streaming and a drafter go together: tokens come in small groups, as rounds end, and the text is the target's own.
"""

import argparse

from transformers import TextStreamer

from dspark_hf import record_speculation, zoo

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
parser.add_argument("--max-new-tokens", type=int, default=256)
args = parser.parse_args()

target = zoo.load_target("smollm2-135m-instruct")
tokenizer = zoo.load_tokenizer("smollm2-135m-instruct")
drafter = zoo.load_drafter("smollm2-135m-instruct")
sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
messages = []


def answer() -> str:
    """Stream the target's answer to the messages so far, and return it."""
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with record_speculation() as report:
        ids = target.generate(
            **inputs,
            **sampling,
            assistant_model=drafter,
            max_new_tokens=args.max_new_tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
    print(f"[{report.num_new_tokens / report.total_s:.0f} tokens/s, {report.tau:.2f} tokens a round]\n")
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


while True:
    try:
        text = input("you: ").strip()
        if not text:
            break
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": answer()})
    except (EOFError, KeyboardInterrupt):
        break
