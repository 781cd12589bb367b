"""Scripts that measure: what they read, and what they write."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from throughput_machines import BLOCK_SIZE, StaircaseMachine, profile_of

from dspark_hf.fitting.profile_store import load_profile, save_profile

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def study(monkeypatch, tmp_path):
    module = script("policy_study", monkeypatch)
    page = tmp_path / "policies.md"
    page.write_text(f"before\n{module.START}\nold\n{module.END}\nafter\n")
    for name, value in {
        "PAGE": page, "FEW_STAIRS": [(1, 8)], "MANY_STAIRS": [(1, 30)], "FEW_ROWS": (1,), "MANY_ROWS": (3,),
        "OTHER_CASES": {3: [(1, 8)]}, "OTHER_ACCEPTANCE": (0.5,),
    }.items():  # fmt: skip
        monkeypatch.setattr(module, name, value)
    return module


def test_the_study_reads_what_dspark_profile_writes(study, tmp_path, monkeypatch, capsys):
    path = save_profile(profile_of(StaircaseMachine()), tmp_path / "profile.json")
    before = study.PAGE.read_text()
    arguments = ["policy_study.py", "--num-rounds", "8", "--profile", str(path), "--profile-rows", "4"]
    monkeypatch.setattr(sys, "argv", arguments)
    study.main()
    assert "| 4 | measured |" in capsys.readouterr().out
    assert study.PAGE.read_text() == before
    monkeypatch.setattr(sys, "argv", [*arguments, "--write"])
    study.main()
    assert "| 4 | measured |" in study.PAGE.read_text()
    profile = load_profile(path)
    costs, num_slots = study.measured_costs(profile, 4)
    assert num_slots == BLOCK_SIZE
    assert costs.round_seconds(9) == pytest.approx(
        profile.step_s(4, 9, 30) + profile.draft_s(4, 30) + profile.overhead_s(4)
    )


def test_the_study_refuses_rows_that_were_not_measured(study, tmp_path, monkeypatch, capsys):
    path = save_profile(profile_of(StaircaseMachine()), tmp_path / "profile.json")
    monkeypatch.setattr(sys, "argv", ["policy_study.py", "--profile", str(path)])
    with pytest.raises(SystemExit):
        study.main()
    assert "8 rows were not measured" in capsys.readouterr().err


class Loaded:
    """Stands for target, drafter and tokenizer."""

    device, dtype, chat_template = torch.device("cpu"), torch.float32, None

    def to(self, dtype):
        return self

    def parameters(self):
        return [torch.zeros(3)]


def test_speeds_of_one_repetition_are_json_without_home_folders(tmp_path, monkeypatch):
    speed = script("batch_speed", monkeypatch)
    nothing = {"mean": 1.0, "half_width": float("nan")}
    row = {"batch_size": 1, "way": "full", "tokens_per_s": 1.0, "ratios": {"plain": nothing}, "tau": 1.0}
    monkeypatch.setattr(speed, "_measured", lambda target, ways, *_: [row] * len(ways))
    monkeypatch.setattr(speed, "load_prompts", lambda path: ["Hello"])
    for name in ("load_target", "load_drafter", "load_tokenizer"):
        monkeypatch.setattr(speed.zoo, name, lambda *_: Loaded())
    monkeypatch.setattr(speed, "encode_prompt", lambda *_: torch.tensor([[1]]))
    path = tmp_path / "speed.json"
    monkeypatch.setattr(
        sys, "argv", ["batch_speed.py", "--batch-size", "1", "--prompts", "/home/someone/p.jsonl", "--json", str(path)]
    )
    speed.main()
    content = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(text))
    assert content["rows"][0]["ratios"]["plain"] == {"mean": 1.0, "half_width": None}
    assert content["settings"]["prompts"] == "~/p.jsonl"
    assert content["kind"] == "batches" and content["pair"]["target_num_bytes"] == 12


@pytest.mark.parametrize("repeats", ["0", "-1", "x"])
def test_no_repeats_are_refused(repeats, monkeypatch, capsys, tmp_path):
    module = script("gpu_check", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path / "out"), f"--repeats={repeats}"])
    with pytest.raises(SystemExit):
        module.main()
    assert f"must be a whole number >= 1, got '{repeats}'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
