"""Share a drafter on the Hub, and load it from there: `python examples/push_and_pull.py my-drafter owner/my-drafter`.

Weights, config with calibration, card and reports go up in one commit. Log in first: `hf auth login`. The command
`dspark push` does the same, shows what it would upload, and asks before it does.
"""

import argparse
import sys

import torch

from dspark_hf import DSparkDraftModel
from dspark_hf.errors import DSparkError

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", help="of the drafter")
parser.add_argument("repo_id", help="owner/name")
parser.add_argument("--public", action="store_true", help="default: private")
parser.add_argument("--create-pr", action="store_true", help="propose the change instead of making it")
args = parser.parse_args()

try:
    drafter = DSparkDraftModel.from_pretrained(args.folder)
    drafter.push_to_hub(args.repo_id, private=not args.public, create_pr=args.create_pr)
    print(f"pushed {args.folder} to {args.repo_id}")
    pulled = None if args.create_pr else DSparkDraftModel.from_pretrained(args.repo_id)
except DSparkError as error:  # no connection, no login, no such folder: its one line says what to do
    sys.exit(f"error: {error}")

if pulled is not None:
    ours, theirs = drafter.state_dict(), pulled.state_dict()
    is_same = all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    is_same &= pulled.config.calibration == drafter.config.calibration
    print(f"pulled {args.repo_id}: {'the same drafter' if is_same else 'another drafter'}")
