"""A drafter pushed with its code, pulled where the package is not installed."""

import json

from hub_process import run_program
from remote_code_process import outputs

from dspark_hf import DSparkDraftModel
from dspark_hf.hub import remote_code

PULL = """
import json, sys
from remote_code_process import HidesThePackage, outputs

sys.meta_path.insert(0, HidesThePackage())
import torch
from transformers import AutoModel, AutoModelForCausalLM

torch.set_num_threads(1)
target = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
try:
    AutoModel.from_pretrained("acme/drafter", trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
else:
    raise SystemExit("code ran without trust")
drafter = AutoModel.from_pretrained("acme/drafter", trust_remote_code=True).eval()
try:
    drafter.push_to_hub("acme/again")
except ModuleNotFoundError as error:
    assert error.name == "dspark_hf", error
else:
    raise SystemExit("pushed without the package")
print(json.dumps({"module": type(drafter).__module__, "outputs": outputs(target, drafter)}))
"""


def test_code_travels_and_gives_the_same_tokens_and_counts(hub, target, drafter, tmp_path, monkeypatch):
    drafter.push_to_hub("acme/drafter")
    assert not [name for name in hub.repos["acme/drafter"].files() if name.endswith(".py")]
    monkeypatch.setattr(DSparkDraftModel, "_auto_class", None)
    DSparkDraftModel.register_for_auto_class()
    drafter.push_to_hub("acme/drafter")
    files = hub.repos["acme/drafter"].files()
    assert {name: text.encode() for name, text in remote_code.code_files().items()}.items() <= files.items()
    target.save_pretrained(tmp_path / "target")
    done = run_program(["-c", PULL, str(tmp_path / "target")], hub.url, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["module"].startswith("transformers_modules.acme.drafter.")
    assert found["outputs"] == outputs(target, drafter)
