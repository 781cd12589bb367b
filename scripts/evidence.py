"""All evidence anew: every table and figure below docs/evidence, each by one `dspark` command, in order.

A stage is skipped when what it writes is there for the same command, inputs and source; `evidence.json` says what
each was made from, and how long it took. Ctrl-C keeps what is done: the same command goes on. Drafters are the bundled
one and those that `make train-baselines` left in `baselines/`; without one, its rows are missing, and a later run adds
them. Stages that time this machine run beside those that only count, in two processes with half of the CPUs each;
`--lanes 1` runs one stage after the other, with all of them.

    python scripts/evidence.py --prompts PROMPTS --list
    python scripts/evidence.py --prompts PROMPTS --dtype float32    # on a CPU without bfloat16 products
    python scripts/evidence.py --smoke
"""

import argparse
import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evidence_stages import Stage, World, stages

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "dspark_hf"
TARGET = "smollm2-135m-instruct"
SHIPPED_PROMPTS = SOURCE / "data" / "demo_prompts.jsonl"
# By name in tables; the last is what paired differences are against.
BASELINES = {
    "MTP-1": "mtp",
    "Eagle3": "eagle3",
    "DFlash": "dflash",
    "DSpark-gated": "dspark-gated",
    "DSpark-rnn": "dspark-rnn",
    "DSpark": "dspark-vanilla",
}


# -- what a stage was made from ------------------------------------------------------------------------------------


def fingerprint(stage: Stage) -> str | None:
    """Of command, the package's source and inputs; None where an input is missing."""
    digest = hashlib.sha256(json.dumps([_source(), *map(_relative, stage.words)]).encode())
    for path in stage.reads:
        files = sorted(p for p in path.rglob("*") if _counts(p)) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            return None
        for file in files:
            digest.update(f"{file.name}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _counts(path: Path) -> bool:
    """Whether a file of a folder is an input: what a drafter or a list of prompts is made of."""
    return path.suffix in (".safetensors", ".jsonl") or path.name == "config.json"


@functools.cache
def _source() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        digest.update(path.relative_to(SOURCE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


class Manifest:
    """What each stage was made from, in `evidence.json`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: dict[str, dict[str, object]] = {}
        self._lock = threading.Lock()
        self._read()

    def _read(self) -> None:
        if self._path.is_file():
            self.entries = json.loads(self._path.read_text(encoding="utf-8"))

    def note(self, name: str, **facts: object) -> None:
        """Replace what is known of a stage."""
        with self._lock:
            self._read()  # another process may have run other stages meanwhile
            self.entries[name] = facts
            partial = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
            partial.write_text(json.dumps(self.entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            os.replace(partial, self._path)

    def is_done(self, stage: Stage, mark: str) -> bool:
        """Whether its files are there and of this fingerprint."""
        return self.entries.get(stage.name, {}).get("done") == mark and all(path.exists() for path in stage.writes)

    def has_begun(self, stage: Stage, mark: str) -> bool:
        """Whether an unfinished run had the same inputs."""
        return self.entries.get(stage.name, {}).get("begun") == mark


# -- running ---------------------------------------------------------------------------------------------------------


def run_all(table: Sequence[Stage], manifest: Manifest, num_lanes: int) -> dict[str, str]:
    """What each stage came to, in order. With two lanes, those that time something run in one, the others in another.

    A stage that reads what the other lane writes begins when that is there.
    """
    lanes = [list(table)]
    if num_lanes > 1:
        lanes = [[stage for stage in table if stage.is_timed is timed] for timed in (True, False)]
    num_threads = None if num_lanes == 1 else max(1, (os.cpu_count() or 1) // num_lanes)
    ended = {stage.name: threading.Event() for stage in table}
    writers = {path: stage.name for stage in table for path in stage.writes}

    def run_lane(lane: Sequence[Stage]) -> dict[str, str]:
        results = {}
        try:
            for stage in lane:
                for name in {writers[path] for path in stage.reads if path in writers}:
                    ended[name].wait()
                results[stage.name] = run_stage(stage, manifest, num_threads)
                ended[stage.name].set()
        finally:
            for stage in lane:  # nobody waits for a lane that was interrupted
                ended[stage.name].set()
        return results

    with ThreadPoolExecutor(len(lanes)) as pool:
        found = {name: result for results in pool.map(run_lane, lanes) for name, result in results.items()}
    return {stage.name: found[stage.name] for stage in table}


def run_stage(stage: Stage, manifest: Manifest, num_threads: int | None = None) -> str:
    """`done`, `there`, `waits` (an input is missing) or `failed`; KeyboardInterrupt passes."""
    mark = fingerprint(stage)
    if mark is None:
        return "waits"
    if manifest.is_done(stage, mark):
        return "there"
    if not manifest.has_begun(stage, mark):
        for path in stage.scratch:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        manifest.note(stage.name, begun=mark)
    for path in (*stage.writes, *stage.scratch):
        path.parent.mkdir(parents=True, exist_ok=True)
    words = [_relative(word) for word in stage.words]  # reports tell the command, and no folder of this machine
    print(f"\n== {stage.name}, budget {stage.minutes:g} min\n$ {shlex.join(['dspark', *words])}", flush=True)
    start_s = time.monotonic()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), _paths()]))}
    if num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    code = subprocess.call([sys.executable, "-m", "dspark_cli", *words], env=environment, cwd=ROOT)
    minutes = (time.monotonic() - start_s) / 60
    if code == 130:
        raise KeyboardInterrupt
    if code != 0 or not all(path.exists() for path in stage.writes):
        print(f"{stage.name} failed with exit code {code}", file=sys.stderr)
        return "failed"
    files = sorted(path.name for path in stage.writes)
    command = shlex.join(["dspark", *words])
    manifest.note(
        stage.name, done=mark, minutes=round(minutes, 2), budget_minutes=stage.minutes, command=command, files=files
    )
    return "done"


def _paths() -> str:
    return os.environ.get("PYTHONPATH", "")


def _relative(word: str) -> str:
    """A word without the folder of this repository."""
    return word.replace(f"{ROOT}/", "")


def first_prompts(sources: Iterable[Path], folder: Path, most: int) -> list[Path]:
    """Files of at most so many prompts, of every file or file of a folder, under its name."""
    files = [file for path in sources for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    names = [file.name for file in files]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        sys.exit(f"evidence: two files are called {twice[0]}, which names a data set in the tables; rename one")
    for file in files:
        write_lines(folder / file.name, lines_of(file)[:most])
    return [folder / file.name for file in files]


def few_prompts(files: Iterable[Path], output: Path, per_source: int) -> None:
    """The first prompts of each file, in turn, so that the first N are of all kinds."""
    lists = [lines_of(file) for file in files]
    write_lines(output, [lines[i] for i in range(per_source) for lines in lists if i < len(lines)])


def lines_of(file: Path) -> list[str]:
    """Those that are not empty."""
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_lines(output: Path, lines: Iterable[str]) -> None:
    """Into a folder that need not be there."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 all there, 1 a stage failed or waits for an input, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts", type=Path, action="append", help="JSONL or a folder of them; default: shipped ones"
    )
    parser.add_argument("--num-prompts", type=int, default=16, help="most of each file (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32 (default: %(default)s)")
    parser.add_argument("--baselines", type=Path, default=ROOT / "baselines", help="folder of `make train-baselines`")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "evidence")
    parser.add_argument("--only", action="append", help="name of a stage; may be repeated")
    parser.add_argument("--lanes", type=int, choices=(1, 2), default=2, help="stages side by side (default: 2)")
    parser.add_argument("--list", action="store_true", help="show the stages, and run none")
    parser.add_argument("--smoke", action="store_true", help="tiny random models, a few of everything, elsewhere")
    arguments = parser.parse_args(argv)
    world = smoke_world(ROOT / "build" / "evidence-smoke") if arguments.smoke else real_world(arguments)
    table = stages(world)
    unknown = set(arguments.only or ()) - {stage.name for stage in table}
    if unknown:
        parser.error(f"there is no stage {sorted(unknown)[0]}; there are {', '.join(stage.name for stage in table)}")
    table = [stage for stage in table if not arguments.only or stage.name in arguments.only]
    if arguments.list:
        for stage in table:
            print(f"{stage.minutes:5g} min  {stage.name:<15} {shlex.join(['dspark', *map(_relative, stage.words)])}")
        return 0
    world.output.mkdir(parents=True, exist_ok=True)
    if not arguments.smoke:
        copy_summary(arguments.baselines, world.output)
    few_prompts(world.prompts, world.work / "bench-prompts.jsonl", 4)
    manifest = Manifest(world.output / "evidence.json")
    try:
        results = run_all(table, manifest, arguments.lanes)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print("\n" + "\n".join(f"{result:<7} {name}" for name, result in results.items()))
    return 0 if set(results.values()) <= {"done", "there"} else 1


def copy_summary(baselines: Path, output: Path) -> None:
    """What training the baselines cost and came to."""
    for path in sorted(baselines.glob("baselines.*")):
        shutil.copyfile(path, output / path.name)


def real_world(arguments: argparse.Namespace) -> World:
    """The real target with the drafters that are there."""
    prompts = arguments.prompts or [SHIPPED_PROMPTS]
    for path in prompts:
        if not path.exists():
            sys.exit(f"evidence: there are no prompts {path}; name a JSONL file or a folder of them")
    folders = {name: arguments.baselines / folder for name, folder in BASELINES.items()}
    missing = [name for name, folder in folders.items() if not (folder / "config.json").is_file()]
    if missing:
        print(f"without {', '.join(missing)}: `make train-baselines` makes them", file=sys.stderr)
    bundled = SOURCE / "bundled" / TARGET
    drafters = {name: folder for name, folder in folders.items() if name not in missing}
    work = ROOT / "build" / "evidence"
    if arguments.num_prompts < 1:
        sys.exit(f"evidence: --num-prompts must be >= 1, got {arguments.num_prompts}")
    prompts = first_prompts(prompts, work / "prompts", arguments.num_prompts)
    drafters = drafters or {"bundled": bundled}
    return World(TARGET, arguments.output, work, prompts, drafters, bundled, arguments.dtype, is_small=False)


def smoke_world(root: Path) -> World:
    """Tiny random models and a few prompts of their words, made anew."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    os.environ["DSPARK_HF_CACHE"] = str(root / "cache")
    make_tiny_models(root)
    prompts = root / "prompts.jsonl"
    lines = [{"id": f"words{i % 2}/{i}", "prompt": f"w{i + 1} w{i + 4} w{2 * i + 3}"} for i in range(12)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    drafters = {"other": root / "other", "tiny": root / "tiny"}
    return World(
        str(root / "target"), root / "out", root / "work", [prompts], drafters, root / "tiny", "float32", is_small=True
    )


def make_tiny_models(root: Path) -> None:
    """A target `target` with a tokenizer of words, and drafters `tiny` and `other`, below `root`."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from dspark_hf import DSparkConfig, DSparkDraftModel

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w1"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w1", pad_token="w0")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, pad_token_id=0, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    target.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    for name in ("tiny", "other"):
        drafter = DSparkConfig.from_target(config, num_hidden_layers=1, block_size=3, markov_rank=8)
        DSparkDraftModel(drafter).save_pretrained(root / name)


if __name__ == "__main__":
    sys.exit(main())
