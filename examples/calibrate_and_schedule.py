"""Make confidences agree with what the target accepts, measure the machine, and verify only what pays.

    python examples/calibrate_and_schedule.py --prompts my-prompts.jsonl --output my-calibrated-drafter

The commands `dspark calibrate` and `dspark profile` do the same, with every setting as an option. Use prompts that the
drafter was not trained on.
"""

import argparse
from pathlib import Path

from dspark_hf import CalibrationRequest, DSparkDraftModel, calibrate_drafter, zoo
from dspark_hf.evaluation.profiling import profile_pair
from dspark_hf.fitting.measuring import ProfilePlan
from dspark_hf.fitting.profile_store import save_profile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="smollm2-135m-instruct")
parser.add_argument("--drafter", help="default: the one that comes with the package")
parser.add_argument("--prompts", required=True, help="file, folder or data set of the Hub")
parser.add_argument("--output", type=Path, required=True, help="folder of the calibrated drafter")
parser.add_argument("--num-proposals", type=int, default=5000, help="rounds to decode")
parser.add_argument("--batch-size", type=int, default=8)
args = parser.parse_args()

# 1. Decode, fit one map per slot, and judge it on prompts that the fit did not see.
request = CalibrationRequest(
    target=args.target,
    drafter=args.drafter,
    prompts=(args.prompts,),
    output=args.output,
    modes=("greedy",),
    num_proposals=args.num_proposals,
    max_new_tokens=64,
)
fit = calibrate_drafter(request).modes["greedy"]
print(f"calibration error, mean over slots: {fit.mean_ece_before:.4f} before, {fit.mean_ece_after:.4f} after")
if not fit.is_written:
    raise SystemExit("the fit was no better than none; more rounds, or other prompts, may help")

# 2. Measure what steps and drafts cost here; generate() finds the profile in the cache.
target, tokenizer = zoo.load_target(args.target), zoo.load_tokenizer(args.target)
drafter = DSparkDraftModel.from_pretrained(args.output, dtype=target.dtype)
plan = ProfilePlan(num_rows=(1, args.batch_size), contexts=(64,), num_repeats=3)
profile = profile_pair(target, drafter, plan, target_name=args.target, drafter_name=str(args.output))
print(f"profile in {save_profile(profile)}")

# 3. Policy `block` verifies what raises tokens per second by both.
inputs = tokenizer(["2 + 2 ="] * args.batch_size, return_tensors="pt")
output = target.generate(
    **inputs, assistant_model=drafter, verification_policy="block", max_new_tokens=48, return_dict_in_generate=True
)
report = output.speculation
print(f"{report.num_drafted} drafted, {report.num_verified} of them verified, {report.num_accepted} accepted")
