"""What `test_remote_code.py` runs in a fresh interpreter, in which the package cannot be imported until it says so.

`outputs` runs in both interpreters; this file imports nothing of the package and no helper that does.
"""

import dataclasses
import importlib.abc
import json
import logging
import sys
from pathlib import Path


class HidesThePackage(importlib.abc.MetaPathFinder):
    """As if dspark_hf were not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dspark_hf":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def outputs(target, drafter):
    """Tokens and counts of calls that take every way through the loop, by name."""
    import torch

    def ids(*lengths):
        rows = [torch.arange(3, 3 + 5 * n, 5) % 60 + 1 for n in lengths]
        return torch.stack([torch.nn.functional.pad(row, (max(lengths) - len(row), 0)) for row in rows])

    batch = ids(4, 9, 6)
    single = {"input_ids": ids(7), "max_new_tokens": 24}
    calls = {
        "greedy": single | {"do_sample": False},
        "threshold": single
        | {"do_sample": False, "verification_policy": "threshold", "assistant_confidence_threshold": 0.3},
        "sampled": single | {"do_sample": True, "temperature": 0.8, "top_k": 20},
        "batch": {"input_ids": batch, "attention_mask": (batch > 0).long(), "pad_token_id": 0, "max_new_tokens": 16}
        | {"do_sample": False, "verification_layout": "flat"},
        "sampled batch": {"input_ids": batch, "attention_mask": (batch > 0).long(), "pad_token_id": 0}
        | {"max_new_tokens": 16, "do_sample": True, "num_return_sequences": 2},
        "static": single | {"do_sample": False, "cache_implementation": "static"},
    }
    return {name: _output(target, drafter, options) for name, options in calls.items()}


def _output(target, drafter, options):
    import torch

    torch.manual_seed(0)
    output = target.generate(**options, assistant_model=drafter, return_dict_in_generate=True)
    counts = dataclasses.asdict(output.speculation)
    return {
        "tokens": output.sequences.tolist(),
        "counts": {name: count for name, count in counts.items() if not name.endswith("_s")},
    }


def _copy_of(drafter):
    return type(drafter).__module__.rpartition(".")[0]


def without_the_package(root, target):
    """Drafters of a folder, of one saved again, and of a repository in the cache of the Hub's client."""
    from transformers import AutoModel

    def load(name):
        return AutoModel.from_pretrained(name, trust_remote_code=True).eval()

    try:
        AutoModel.from_pretrained(root / "drafter")
        refused = ""
    except ValueError as error:
        refused = str(error)
    drafter = load(root / "drafter")
    drafter.save_pretrained(root / "again")
    again = load(root / "again")
    from_hub = load("org/drafter")
    return {
        "refused": refused,
        "drafter": outputs(target, drafter),
        "saved again": outputs(target, again),
        "of the Hub": outputs(target, from_hub),
        "copies": [_copy_of(one) for one in (drafter, again, from_hub)],
    }, drafter


def beside_the_package(root, target, drafter):
    """The package comes into a process that has a drafter with its own code."""
    import torch
    from transformers import AutoModel, GenerationConfig
    from transformers.generation import GenerationMixin

    wrapped = GenerationMixin._assisted_decoding
    import dspark_hf

    loaded = AutoModel.from_pretrained(root / "drafter", trust_remote_code=True).eval()
    with dspark_hf.record_speculation() as report:
        results = {"package": outputs(target, loaded), "remote": outputs(target, drafter)}
    results["copies"] = [_copy_of(loaded), _copy_of(drafter)]
    results["recorded calls"] = report.num_calls
    results["is wrapped once"] = wrapped is GenerationMixin._assisted_decoding
    dspark_hf.uninstall()
    results["remote after uninstall"] = outputs(target, drafter)
    results["has argument"] = hasattr(GenerationConfig, "verification_policy")
    try:
        target.generate(torch.tensor([[1, 2, 3]]), assistant_model=loaded, max_new_tokens=4)
        results["package after uninstall"] = "served"
    except AttributeError:  # as any assistant that cannot generate
        results["package after uninstall"] = "not served"
    return results


def main(root):
    """Write `results.json`."""
    hidden = HidesThePackage()
    sys.meta_path.insert(0, hidden)
    try:
        import dspark_hf  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        raise SystemExit("the package is not hidden")
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    target = AutoModelForCausalLM.from_pretrained(root / "target").eval()
    results, drafter = without_the_package(root, target)
    results["modules of the package"] = [name for name in sys.modules if name.split(".")[0] == "dspark_hf"]
    sys.meta_path.remove(hidden)
    found = {"without": results, "beside": beside_the_package(root, target, drafter)}
    (root / "results.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
