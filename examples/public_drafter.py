"""Load a drafter that another project trained: DeepSpec, speculators, SpecForge or z-lab; from a folder or the Hub.

    python examples/public_drafter.py --target Qwen/Qwen3-4B --drafter path/or/hub-id

The format is recognised by what config.json says. Only safetensors are read, and no code of the repository runs.
"""

import argparse
import sys

from dspark_hf import DSparkDraftModel, zoo
from dspark_hf.errors import DSparkError

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", required=True, help="folder or Hub id of the model that the drafter was trained for")
parser.add_argument("--drafter", required=True)
parser.add_argument("--prompt", default="Tom has 5 apples and buys 7 more. How many apples does he have?")
parser.add_argument("--max-new-tokens", type=int, default=64)
args = parser.parse_args()

try:
    target = zoo.load_target(args.target, "auto")
    tokenizer = zoo.load_tokenizer(args.target)
    drafter = DSparkDraftModel.from_pretrained(args.drafter, dtype=target.dtype).to(target.device)
except (DSparkError, OSError) as error:  # no such folder, no connection to the Hub, a format that is not read
    sys.exit(f"error: {error}")

config = drafter.config
head = f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none (parallel drafts)"
print(f"gamma {config.block_size}, {config.num_hidden_layers} draft layers, sequential head {head}")
print(f"reads target layers {config.target_layer_ids} of {config.num_target_layers}")

inputs = tokenizer(args.prompt, return_tensors="pt").to(target.device)
output = target.generate(
    **inputs, assistant_model=drafter, max_new_tokens=args.max_new_tokens, return_dict_in_generate=True
)
print(tokenizer.decode(output.sequences[0], skip_special_tokens=True))
print(f"{output.speculation.tau:.2f} tokens a round")

# As this package saves it: without copies of the target's embedding and head.
# drafter.save_pretrained("my-drafter")
