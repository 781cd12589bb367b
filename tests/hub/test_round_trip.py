"""Push, pull and generate, each in a process of its own with an empty cache: tokens and numbers are the same."""

import hashlib
import json

from hub_process import run_program

GENERATE = """
import dataclasses, json, sys
import torch
from tiny import random_ids, tiny_target
from dspark_hf import DSparkDraftModel

torch.set_num_threads(1)
source = sys.argv[1]
drafter = DSparkDraftModel.from_pretrained(source)
target = tiny_target()
found = {"calibration": drafter.config.calibration}
for name, options in {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8},
    "scheduled": {"do_sample": False, "verification_policy": "threshold", "assistant_confidence_threshold": 0.5},
}.items():
    torch.manual_seed(0)
    out = target.generate(
        random_ids(8), assistant_model=drafter, max_new_tokens=24, return_dict_in_generate=True, **options
    )
    report = dataclasses.asdict(out.speculation)
    numbers = {key: value for key, value in report.items() if "_s" != key[-2:] and "seconds" not in key}
    found[name] = {"tokens": out.sequences.tolist(), "numbers": json.loads(json.dumps(numbers, default=str))}
print(json.dumps(found))
if len(sys.argv) > 2:
    drafter.push_to_hub(sys.argv[2], private=True)
"""


def test_a_drafter_does_the_same_after_the_way_over_the_hub(hub, folder, tmp_path):
    there = run_program(["-c", GENERATE, str(folder), "acme/drafter"], hub.url, tmp_path / "one")
    assert there.returncode == 0, there.stderr
    back = run_program(["-c", GENERATE, "acme/drafter"], hub.url, tmp_path / "two")
    assert back.returncode == 0, back.stderr
    before, after = (json.loads(done.stdout.splitlines()[-1]) for done in (there, back))
    assert before == after
    assert before["greedy"]["numbers"] and before["calibration"]["greedy"]["temperatures"] == [1.0, 1.25, 0.5, 2.0]
    repo = hub.repos["acme/drafter"]
    assert repo.is_private and len(repo.history()) == 2
    assert repo.files()["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "two").rglob("model.safetensors")}
    assert digests == {hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()}
