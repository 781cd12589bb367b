"""What a round of a batch costs on one GPU: T_draft, T_verify, the rest, tokens per second and memory. No weights.

The target has the shape of Qwen3-4B and random weights, the drafter five layers and a block of 7. Random drafts are
never right, so acceptance is planted: drafter, target and acceptance run in full, and then the number of accepted
drafts is replaced, on the device, by a draw at the paper's rates. Text is nonsense; time and memory are real.

Every way generates the same number of tokens after the same prompts, prompts included in the time. Seconds of a
round's stages come from a pass of their own, whose clock waits for the device. Each result is printed, and written to
gpu_check.json and gpu_check.md, as soon as it is there.

    python scripts/gpu_check.py --output runs/check
    python scripts/gpu_check.py --output runs/check --tiny --device cpu
"""

import argparse
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

START_S = time.monotonic()  # before the slow imports: the budget is the caller's time

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM, CompileConfig, Qwen3Config  # noqa: E402

from dspark_hf import DSparkConfig, record_speculation  # noqa: E402
from dspark_hf.decoding import batch, loop, report  # noqa: E402
from dspark_hf.decoding.accept import accept, accepted_lengths, expected_tau  # noqa: E402
from dspark_hf.decoding.types import Acceptance  # noqa: E402
from dspark_hf.evaluation.provenance import collect_provenance, scrub, write_json  # noqa: E402

# Figure 2 of arXiv 2607.05147, DSpark on Qwen3-4B, read from the coordinates of its vector graphics: probability that
# draft k is accepted if all before it were, k = 1 to 7.
ACCEPTANCE = {
    "math": (0.9053, 0.8899, 0.8878, 0.8854, 0.8872, 0.8906, 0.8824),
    "code": (0.8857, 0.8719, 0.8598, 0.8608, 0.8579, 0.8594, 0.8510),
    "chat": (0.7353, 0.7376, 0.7402, 0.7441, 0.7583, 0.7656, 0.7609),
}

QWEN3_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
TINY = QWEN3_4B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Way:
    """One way to generate: layout None is plain generate()."""

    layout: str | None
    is_compiled: bool

    def __str__(self) -> str:
        name = "plain" if self.layout is None else f"DSpark {self.layout}"
        return f"{name}, {'compiled' if self.is_compiled else 'eager'}"


# A stream has another number of tokens in each round, so it is never compiled.
EAGER = (Way(None, False), Way("padded", False), Way("flat", False))
COMPILED = (Way(None, True), Way("padded", True))


@dataclass
class Result:
    """What one configuration gave; None: not reached."""

    way: str
    batch_size: int
    status: str = "measured"
    tokens_per_s: float | None = None
    seconds: list[float] = field(default_factory=list)  # of the timed calls
    tau: float | None = None
    round_ms: float | None = None
    draft_ms: float | None = None
    verify_ms: float | None = None
    overhead_ms: float | None = None
    first_call_s: float | None = None  # compilation included
    num_graphs: int | None = None
    num_cudagraph_skips: int | None = None
    peak_gib: float | None = None


class TimeUp(BaseException):
    """A configuration has used up its seconds. No Exception: nothing on the way may swallow it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeUp inside the block after so many seconds."""

    def ring(*_: object) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class PlantedAcceptance:
    """Stands in for `accept`: does what it does, and then draws how many drafts stand.

    Args:
        rates: Acceptance of slot k if all slots before it were accepted.
    """

    def __init__(self, rates: tuple[float, ...], device: torch.device, seed: int) -> None:
        self._rates = torch.tensor(rates, device=device)
        self._generator = torch.Generator(device)
        self._seed = seed

    def restart(self) -> None:
        """Draw the same numbers again."""
        self._generator.manual_seed(self._seed)

    def __call__(self, drafts: Tensor, *arguments: Any, do_sample: bool) -> Acceptance:
        lengths = arguments[-1]
        acceptance = accept(drafts, *arguments, do_sample=do_sample)
        uniforms = torch.rand(drafts.shape, generator=self._generator, device=drafts.device)
        stands = uniforms < self._rates[: drafts.shape[1]]
        return replace(acceptance, num_accepted=accepted_lengths(stands, lengths))


class Check:
    """Target, drafter and prompts, and the measurements made with them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        dtype = getattr(torch, arguments.dtype)
        sizes = TINY if arguments.tiny else QWEN3_4B
        config = Qwen3Config(**sizes, pad_token_id=None, bos_token_id=None, eos_token_id=None)
        torch.manual_seed(arguments.seed)
        # Made where and as it is needed: a float32 copy of the weights would take minutes on the host.
        with self.device:
            self.target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
            drafter_config = DSparkConfig.from_target(config, num_hidden_layers=5, block_size=7)
            self.drafter = AutoModel.from_config(drafter_config, dtype=dtype).eval()
        self.planted = PlantedAcceptance(ACCEPTANCE[arguments.domain], self.device, arguments.seed)

    def measure(self, way: Way, batch_size: int, result: Result) -> None:
        """Fill `result`, number by number, so that what was reached stays when time is up."""
        generate = self._call(way, batch_size)
        graphs_before = _graph_counts()
        self._reset_peak()
        seconds, _ = self._timed(generate)
        result.first_call_s = round(seconds, 3)
        num_tokens = batch_size * self.arguments.new_tokens
        for _ in range(self.arguments.repeats):
            with record_speculation() as told:
                seconds, output = self._timed(generate)
            assert output.shape == (batch_size, self.arguments.prompt_tokens + self.arguments.new_tokens)
            result.seconds.append(round(seconds, 4))
            result.tokens_per_s = round(num_tokens * len(result.seconds) / sum(result.seconds), 1)
        result.peak_gib = self._peak_gib()
        if way.is_compiled:
            counts = [now - before for now, before in zip(_graph_counts(), graphs_before, strict=True)]
            result.num_graphs, result.num_cudagraph_skips = counts
        if way.layout is not None:
            result.tau = round(told.tau, 3)
            self._measure_stages(generate, result)

    def _measure_stages(self, generate: Callable[[], Tensor], result: Result) -> None:
        mark = report.StageClock.mark

        def mark_when_done(clock: report.StageClock, stage: str) -> float:
            self._wait()
            return mark(clock, stage)

        with mock.patch.object(report.StageClock, "mark", mark_when_done), record_speculation() as told:
            generate()
        # One forward for the prompt, and one for each round of all rows together.
        num_rounds = told.num_target_forwards - 1
        draft_ms, verify_ms = 1e3 * told.draft_s / num_rounds, 1e3 * told.verify_s / num_rounds
        round_ms = 1e3 * (told.total_s - told.prefill_s) / num_rounds
        result.round_ms, result.draft_ms, result.verify_ms = (round(x, 3) for x in (round_ms, draft_ms, verify_ms))
        result.overhead_ms = round(round_ms - draft_ms - verify_ms, 3)

    def _call(self, way: Way, batch_size: int) -> Callable[[], Tensor]:
        length = self.arguments.prompt_tokens
        drawn = torch.Generator().manual_seed(self.arguments.seed)
        ids = torch.randint(1, self.target.config.vocab_size, (batch_size, length), generator=drawn)
        padding = torch.arange(batch_size) * 7 % max(1, length // 2)
        mask = (torch.arange(length) >= padding[:, None]).long()
        options: dict[str, Any] = {
            "input_ids": (ids * mask).to(self.device),
            "attention_mask": mask.to(self.device),
            "max_new_tokens": self.arguments.new_tokens,
            "do_sample": self.arguments.sample,
            "pad_token_id": 0,
            "cache_implementation": "static",
            "disable_compile": not way.is_compiled,
        }
        if way.is_compiled and self.device.type != "cuda":
            options["compile_config"] = CompileConfig(backend=self.arguments.cpu_backend, mode=None)
            options["compile_config"]._compile_all_devices = True
        if way.layout is not None:
            options |= {"assistant_model": self.drafter, "verification_layout": way.layout}

        def generate() -> Tensor:
            torch.manual_seed(self.arguments.seed)
            self.planted.restart()
            with mock.patch.object(batch, "accept", self.planted), mock.patch.object(loop, "accept", self.planted):
                return self.target.generate(**options)

        return generate

    def _timed(self, generate: Callable[[], Tensor]) -> tuple[float, Tensor]:
        self._wait()
        start_s = time.perf_counter()
        output = generate()
        self._wait()
        return time.perf_counter() - start_s, output

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _reset_peak(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak_gib(self) -> float | None:
        if self.device.type != "cuda":
            return None
        return round(torch.cuda.max_memory_allocated(self.device) / 2**30, 2)


def _graph_counts() -> tuple[int, int]:
    """Graphs compiled, and how often inductor went without a CUDA graph, so far in this process."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]


# -- results ----------------------------------------------------------------------------------------------------------


class Record:
    """All results so far, in one JSON file and one table."""

    def __init__(self, check: Check) -> None:
        arguments = check.arguments
        self.results: list[Result] = []
        self._folder: Path = arguments.output
        provenance = collect_provenance(
            check.device, check.target.dtype, seed=arguments.seed, n=max(arguments.batch_size)
        )
        self._head = {
            "provenance": asdict(provenance),
            "settings": {
                key: scrub(str(value)) if key == "output" else value for key, value in vars(arguments).items()
            },
            "target": {key: getattr(check.target.config, key) for key in QWEN3_4B},
            "planted_acceptance": ACCEPTANCE[arguments.domain],
            "expected_tau": round(float(expected_tau(torch.tensor(ACCEPTANCE[arguments.domain]))), 3),
            "num_parameters": {"target": check.target.num_parameters(), "drafter": check.drafter.num_parameters()},
            "setup_s": round(elapsed_s(), 1),
        }

    def add(self, result: Result) -> None:
        """Print and write; a reader finds the last whole state of both files, whenever this process ends."""
        self.results.append(result)
        print(_row(result, self.results), flush=True)
        content = self._head | {"elapsed_s": round(elapsed_s(), 1), "results": [asdict(r) for r in self.results]}
        write_json(self._folder / "gpu_check.json", content)
        partial = self._folder / ".gpu_check.md.partial"
        partial.write_text(self._table(), encoding="utf-8")
        os.replace(partial, self._folder / "gpu_check.md")

    def _table(self) -> str:
        provenance = self._head["provenance"]
        versions = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
        lines = [HEADER, *(_row(result, self.results) for result in self.results), "", NOTES]
        lines += [f"{provenance['device']}, {provenance['dtype']}; {versions}.", f"`{provenance['command']}`"]
        return "\n".join(lines) + "\n"


COLUMNS = ("batch", "way", "tokens/s", "over plain", "tau", "round, ms", "draft", "verify", "rest", "first call, s")
COLUMNS += ("graphs (without CUDA graph)", "peak, GiB", "status")
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
NOTES = (
    "Random weights and planted acceptance; tau counts the token of the target's own. Tokens/s: whole calls, prompt "
    "included, without the first call, which compiles. Over plain: plain generate() on its static cache, compiled or "
    "eager as the way itself. The round's parts are timed in a call of their own, which waits for the device after "
    "each stage. Flat is eager only: a stream has another number of tokens in each round.\n"
)


def _row(result: Result, results: list[Result]) -> str:
    plain = str(Way(None, result.way.endswith("compiled")))
    base = [r.tokens_per_s for r in results if (r.way, r.batch_size) == (plain, result.batch_size) and r.tokens_per_s]
    ratio = f"{result.tokens_per_s / base[0]:.2f}x" if base and result.tokens_per_s else None
    graphs = None if result.num_graphs is None else f"{result.num_graphs} ({result.num_cudagraph_skips})"
    cells = [
        result.batch_size, result.way, result.tokens_per_s, ratio, result.tau, result.round_ms, result.draft_ms,
        result.verify_ms, result.overhead_ms, result.first_call_s, graphs, result.peak_gib, result.status,
    ]  # fmt: skip
    return f"| {' | '.join('' if cell is None else str(cell) for cell in cells)} |"


# -- the run ----------------------------------------------------------------------------------------------------------


def elapsed_s() -> float:
    """Seconds since the start of this process, imports included."""
    return time.monotonic() - START_S


def run_all(check: Check, record: Record) -> None:
    """Measure one configuration after the other while the budget lasts; a failure ends only its own."""
    arguments = check.arguments
    ways = [EAGER] if arguments.no_compile else [EAGER, COMPILED]
    last_s: dict[Way, float] = {}
    for way, size in [(way, size) for group in ways for size in arguments.batch_size for way in group]:
        result = Result(str(way), size)
        left_s, start_s = arguments.budget_s - elapsed_s(), elapsed_s()
        if left_s < max(last_s.get(way, 0.0), 1.0):
            result.status = f"skipped: {max(left_s, 0):.0f} s are left of {arguments.budget_s:.0f} s"
        else:
            _measure_within(check, way, size, result, min(arguments.limit_s, left_s))
            last_s[way] = elapsed_s() - start_s
        record.add(result)


def _measure_within(check: Check, way: Way, size: int, result: Result, limit_s: float) -> None:
    try:
        with within(limit_s):
            check.measure(way, size, result)
        return
    except TimeUp:
        result.status = f"stopped at its limit of {limit_s:g} s"
    except torch.OutOfMemoryError:
        result.status = "failed: out of memory"
    except Exception as error:
        first_line = str(error).partition("\n")[0].replace("|", "/")[:200]
        result.status = f"failed: {type(error).__name__}: {first_line}"
    if way.is_compiled:  # what was being compiled is in no known state
        torch._dynamo.reset()


def at_least_one(text: str) -> int:
    """An argument that is a whole number >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def main() -> int:
    """Exit code 1 when a configuration failed; what was skipped or stopped is no failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder; made if it is not there")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-size", type=int, action="append", help="may be repeated; default 1, 4, 16, 64, 128")
    parser.add_argument("--prompt-tokens", type=int, help="of the longest prompt of a batch; default 128")
    parser.add_argument("--new-tokens", type=int, help="default 96")
    parser.add_argument("--repeats", type=at_least_one, default=1, help="timed calls of each configuration")
    parser.add_argument("--domain", choices=sorted(ACCEPTANCE), default="code", help="whose acceptance is planted")
    parser.add_argument("--sample", action="store_true", help="temperature 1 in place of greedy")
    parser.add_argument("--no-compile", action="store_true", help="eager configurations only")
    parser.add_argument("--cpu-backend", default="eager", help="of torch.compile where there is no CUDA")
    parser.add_argument("--budget-s", type=float, default=240.0, help="for everything, imports and models included")
    parser.add_argument("--limit-s", type=float, default=80.0, help="for one configuration, compilation included")
    parser.add_argument("--tiny", action="store_true", help="to try the script: a tiny shape, and less of it")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    batch_sizes, prompt_tokens, new_tokens = ([1, 3], 16, 24) if arguments.tiny else ([1, 4, 16, 64, 128], 128, 96)
    arguments.batch_size = arguments.batch_size or batch_sizes
    arguments.prompt_tokens = arguments.prompt_tokens or prompt_tokens
    arguments.new_tokens = arguments.new_tokens or new_tokens
    arguments.output.mkdir(parents=True, exist_ok=True)
    check = Check(arguments)
    record = Record(check)
    print(HEADER, flush=True)
    run_all(check, record)
    return int(any(result.status.startswith("failed") for result in record.results))


if __name__ == "__main__":
    raise SystemExit(main())
