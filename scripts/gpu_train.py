"""Parts of gpu_train.sh that need the package: an environment's check, held-out answers, a checkpoint as a drafter."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace


def check(target: str) -> None:
    """Import what the run needs, fetch the target's weights, and say what the run has to work with."""
    import datasets
    import torch
    import transformers

    from dspark_hf import zoo

    print(f"torch {torch.__version__}, transformers {transformers.__version__}, datasets {datasets.__version__}")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    print(f"GPU: {name}; target: {zoo.resolve(target)}")


def write_held_out(sources: list[Path], fraction: float, most: int, output: Path) -> None:
    """The answers that training with this `fraction` holds out, at most `most`, from all over the files."""
    from dspark_hf.training.records import data_files, split_held_out

    rows = [json.loads(line) for path in data_files(list(sources)) for line in path.read_bytes().splitlines()]
    # The split reads nothing but the ids.
    _, chosen = split_held_out([SimpleNamespace(id=row["id"], row=row) for row in rows], fraction)
    held_out = [item.row for item in chosen]
    step = max(1, -(-len(held_out) // most))
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in held_out[::step]]
    output.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} of {len(held_out)} held-out answers, of {len(rows)} in all")


def salvage(folder: Path) -> None:
    """Make a drafter of the last checkpoint of a training that was killed: its weights in bfloat16, its history.

    Raises:
        SystemExit: no checkpoint is whole.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from dspark_hf.training.run import latest_checkpoint

    checkpoint = latest_checkpoint(folder / "checkpoints")
    if checkpoint is None:
        raise SystemExit(f"{folder} holds no whole checkpoint")
    weights = load_file(checkpoint / "model.safetensors")
    halves = {name: w.to(torch.bfloat16) if w.is_floating_point() else w for name, w in weights.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "trainer_state.json").write_text((checkpoint / "trainer_state.json").read_text())
    config = json.loads((checkpoint / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2) + "\n")
    print(f"drafter of {checkpoint.name} in {folder}")


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    checked = parts.add_parser("check")
    checked.add_argument("target")
    held_out = parts.add_parser("held-out")
    held_out.add_argument("sources", type=Path, nargs="+")
    held_out.add_argument("--fraction", type=float, required=True)
    held_out.add_argument("--most", type=int, required=True)
    held_out.add_argument("--output", type=Path, required=True)
    salvaged = parts.add_parser("salvage")
    salvaged.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.part == "check":
        check(given.target)
    elif given.part == "held-out":
        write_held_out(given.sources, given.fraction, given.most, given.output)
    else:
        salvage(given.folder)


if __name__ == "__main__":
    main()
