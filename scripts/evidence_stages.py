"""The stages of `scripts/evidence.py`: which `dspark` command writes what, from what, in how many minutes."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Of all stages together, on two cores of a current server CPU.
MOST_MINUTES = 60


@dataclass(frozen=True)
class Stage:
    """One command.

    Attributes:
        minutes: Budget on two cores of a current server CPU.
        words: Of the command, after `dspark`.
        reads: Files and folders that it depends on.
        writes: What it leaves; the stage is done when all of it is there.
        is_timed: It tells seconds, so that no other such stage may run beside it.
        scratch: What an interrupted run goes on from; removed when the inputs have changed since.
    """

    name: str
    minutes: float
    words: Sequence[str]
    reads: Sequence[Path]
    writes: Sequence[Path]
    scratch: Sequence[Path] = field(default=())
    is_timed: bool = False


@dataclass(frozen=True)
class World:
    """What the stages work on.

    Attributes:
        output: Folder of the evidence.
        work: Folder of what need not be kept.
        drafters: Folders by name, the reference last.
        is_small: For a smoke test: tiny models, few of everything.
    """

    target: str
    output: Path
    work: Path
    prompts: Sequence[Path]
    drafters: dict[str, Path]
    bundled: Path
    dtype: str
    is_small: bool


def stages(world: World) -> list[Stage]:
    """All of them, in order."""
    out, work, small = world.output, world.work, world.is_small
    named = [word for name, folder in world.drafters.items() for word in ("--drafter", f"{name}={folder}")]
    basics = ["--target", world.target, "--dtype", world.dtype]
    folders = list(world.drafters.values())
    sources = [word for path in world.prompts for word in ("--prompts", str(path))]
    texts, few, profile = work / "texts.jsonl", work / "bench-prompts.jsonl", out / "profile.json"
    traces = [work / "traces-greedy.jsonl", work / "traces-sampled.jsonl"]
    bundled = ["--drafter", str(world.bundled)]

    def size(usual: str, tiny: str) -> list[str]:
        return shlex.split(tiny if small else usual)

    return [
        Stage(
            "profile",
            5,
            ["profile", *basics, *bundled, "--json", str(profile), "--plot", str(out / "profile.png"),
             *size("", "--batch-size 1 --batch-size 8 --batch-size 16 --context 16 --repeats 1")],
            [world.bundled],
            [profile, out / "profile.png"],
            is_timed=True,
        ),
        Stage(
            "texts",
            10,
            ["train", "data", *basics, *sources, "--output", str(texts), "--temperature", "0", "--temperature", "1",
             "--answers-per-prompt", "2", *size("--max-new-tokens 160", "--max-new-tokens 12")],
            world.prompts,
            [texts],
            [texts, work / "texts.jsonl.settings.json"],
        ),
        Stage(
            "eval",
            5,
            ["eval", *basics, "--texts", str(texts), "--drafter", f"bundled={world.bundled}",
             "--json", str(out / "eval.json"),
             "--markdown", str(out / "eval.md"), "--figures", str(out)],
            [texts, world.bundled],
            [out / "eval.json", out / "eval.md"],
        ),
        Stage(
            "drafters",
            12,
            ["eval", *basics, *sources, *named, "--json", str(out / "drafters.json"),
             "--markdown", str(out / "drafters.md"), "--rounds", str(work / "rounds"),
             *size("--temperature 0 --temperature 1 --num-prompts 8 --max-new-tokens 48",
                   "--num-prompts 3 --max-new-tokens 12")],
            [*world.prompts, *folders],
            [out / "drafters.json", out / "drafters.md"],
            [work / "rounds"],
        ),
        Stage(
            "bench",
            18,
            ["bench", *basics, "--output", str(out / "bench"), "--prompts-file", str(few), *_bench_drafters(world),
             "--policy", "full", "--policy", "block",
             *size("--num-prompts 12 --sweep-repeats 3",
                   "--num-prompts 2 --max-new-tokens 8 --sweep-new-tokens 4 --sweep-repeats 2 --batch-size 2 "
                   "--context 16 --profile-repeats 1")],
            [few, world.bundled, *folders],
            [out / "bench" / "bench.json", out / "bench" / "bench.md"],
            [out / "bench" / "measurements.jsonl"],
            is_timed=True,
        ),
        *(
            Stage(
                f"traces-{mode}",
                1,
                ["traces", *basics, *bundled, "--texts", str(texts), "--mode", mode, "--output", str(path)],
                [texts, world.bundled],
                [path],
            )
            for mode, path in zip(("greedy", "sampled"), traces, strict=True)
        ),
        Stage(
            "ablate",
            4,
            ["ablate", *(word for path in traces for word in ("--traces", str(path))), "--profile", str(profile),
             "--json", str(out / "ablate.json"), "--markdown", str(out / "ablate.md"),
             "--plot", str(out / "ablate.png"), *size("", "--smoke")],
            [*traces, profile],
            [out / "ablate.json", out / "ablate.md"],
        ),
        Stage(
            "simulate",
            4,
            ["simulate", "--output", str(out / "simulation"), "--traces", str(traces[1]), "--machine", str(profile),
             "--machine", "accelerator", "--machine", "staircase",
             *size("--system plain --system mtp-1 --system full --system prefix --system block --concurrency 1 "
                   "--concurrency 8 --concurrency 32 --concurrency 128 --seeds 3", "--smoke")],
            [traces[1], profile],
            [out / "simulation" / "simulation.json", out / "simulation" / "simulation.md"],
        ),
    ]  # fmt: skip


def _bench_drafters(world: World) -> list[str]:
    """The bundled one first, which runs in the sweeps."""
    named = {"bundled": world.bundled} | world.drafters
    return [word for name, folder in named.items() for word in ("--drafter", f"{name}={folder}")]
