"""Plants one fault at a time into the decoding code and asks the tests for it: a fault that passes is a missing test.

The faults stand in `mutants.txt` beside this file, under the name of the source file they are planted into:

    == accept.py
    : bias_of_one: what it breaks
    - text that occurs exactly once in the file
    + text that takes its place

A fault that changes nothing that a caller could observe does not belong there. `src` and `tests` are copied; the
checkout is left as it is. Run it with the Python that runs the tests:

    python scripts/mutants.py --jobs 2
    python scripts/mutants.py --only accept.py --only bias_of_one
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/dspark_hf")
DECODING = PACKAGE / "decoding"
TABLE = Path(__file__).with_name("mutants.txt")

# What must notice a fault in a file; the quickest first, since the first failure ends the run.
TESTS = {
    "accept.py": ["unit/test_accept.py", "integration/test_acceptance_inputs.py"],
    "sampling.py": ["unit/test_sampling.py"],
    "schedule.py": ["unit/test_policies.py"],
    "policies/simple.py": ["unit/test_policies.py"],
    **{
        f"policies/{name}.py": ["unit/policies/test_order.py", "unit/policies/test_policy_laws.py"]
        for name in ("facts", "pool", "prefix", "block", "lagged", "floor")
    },
    "policies/depth.py": ["unit/policies/test_depth.py"],
    "policies/history.py": ["unit/policies/test_depth.py"],
    "policies/urgency.py": ["unit/policies/test_urgency.py"],
    "policies/facts.py": ["unit/policies/test_gate.py", "unit/policies/test_order.py"],
    "policies/gate.py": ["unit/policies/test_gate.py"],
    "stopping.py": ["unit/test_stopping.py", "integration/test_stops.py"],
    "draft.py": ["unit/test_sampling.py", "integration/test_drafting_reference.py"],
    "verify.py": [
        "unit/test_verify.py",
        "integration/test_greedy_agreement.py",
        "integration/test_robustness.py",
        "integration/test_stops.py",
    ],
    "outputs.py": ["integration/test_stops.py", "integration/test_stock_faults.py"],
    "loop.py": [
        "unit/test_report.py",
        "integration/test_acceptance_inputs.py",
        "integration/test_stops.py",
        "integration/test_stock_faults.py",
        "integration/test_greedy_agreement.py",
        "integration/test_drafting_reference.py",
        "integration/test_robustness.py",
    ],
    "prefixes.py": ["unit/test_sampling.py"],
    "prompt_inputs.py": ["unit/test_verify.py"],
    "batch.py": [
        "integration/test_acceptance_inputs.py",
        "integration/test_stops.py",
        "integration/test_batches.py",
    ],
    "row_criteria.py": ["integration/test_batches.py", "integration/test_stops.py"],
    "row_layout.py": ["integration/test_layouts.py", "integration/test_batches.py"],
    "row_result.py": ["integration/test_batches.py", "integration/test_stops.py"],
    "row_state.py": ["unit/test_rows.py", "integration/test_batches.py"],
    "row_target.py": ["integration/test_layouts.py", "integration/test_batches.py"],
    "candidate_generator.py": [
        "unit/test_policies.py",
        "integration/test_stock_faults.py",
        "integration/test_greedy_agreement.py",
        "integration/test_drafting_reference.py",
    ],
}

# Imported once; each mutant's process is a fork that has everything but the package.
PRELOADED = [
    "pytest",
    "hypothesis",
    "torch",
    "transformers.generation.utils",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gemma3", "lfm2", "llama", "qwen3")),
]


@dataclass(frozen=True)
class Mutant:
    """One fault: `old` becomes `new` in a file of `decoding/`."""

    file: str
    name: str
    breaks: str
    old: str
    new: str

    def applied_to(self, source: str) -> str:
        """`source` with the fault in it.

        Raises:
            ValueError: the text to replace is not in `source` exactly once.
        """
        if (count := source.count(self.old)) != 1:
            raise ValueError(
                f"mutant {self.name}: the text to replace occurs {count} times in {self.file}, not once; bring "
                f"{TABLE.name} up to date\n{self.old}"
            )
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Verdict:
    """What the tests said: exit code of pytest, None when the time ran out; `first` is the test that failed."""

    code: int | None
    seconds: float
    first: str

    @property
    def word(self) -> str:
        # 1: a test failed; 2 and 4: a test file or conftest.py could not be imported
        killed = {1: "killed", 2: "killed", 4: "killed"}
        return ({None: "timeout", 0: "survived"} | killed).get(self.code, f"error {self.code}")

    @property
    def is_alive(self) -> bool:
        return self.word not in ("killed", "timeout")


def read_mutants(text: str) -> list[Mutant]:
    """The table; a mutant's lines are `: name: what it breaks`, then lines behind `- `, then lines behind `+ `."""
    mutants: list[Mutant] = []
    file = ""
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("== "):
            file = lines.pop(0)[3:]
        if not lines:
            continue
        name, breaks = lines[0].removeprefix(": ").split(": ", 1)
        sides = ["\n".join(line[2:] for line in lines[1:] if line.startswith(sign)) for sign in "-+"]
        assert all(line[:1] in "-+" for line in lines[1:]), f"mutant {name}: lines must start with - or +"
        mutants.append(Mutant(file, name, breaks, *sides))
    return mutants


def _test(copy: str, tests: list[str], log: str) -> None:
    """In a process of its own: pytest on the copy, with nothing of the package imported before."""
    os.setsid()
    os.chdir(copy)
    with open(log, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    source = str(Path(copy, "src"))
    # An editable install comes later in the path.
    sys.path.insert(0, source)
    os.environ["PYTHONPATH"] = source
    sys.dont_write_bytecode = True
    import pytest

    assert "dspark_hf" not in sys.modules
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not full and not gpu"]
    # Of packages that bring a pytest plugin and were imported before the fork; nothing here depends on it.
    options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    code = pytest.main([*options, *(f"tests/{test}" for test in tests)])
    package = sys.modules.get("dspark_hf")
    # Half imported where the fault raises at import; else it must be the copy that was tested.
    if package is not None and not str(package.__file__).startswith(source):
        code = 99
    sys.stdout.flush()
    os._exit(int(code))


def copy_tree(root: Path, folder: Path) -> None:
    """What the tests need, without the drafter that comes with the package (30 MB)."""
    unneeded = shutil.ignore_patterns("__pycache__", "*.egg-info", "bundled")
    for part in ("src", "tests"):
        shutil.copytree(root / part, folder / part, ignore=unneeded)
    for path in (root / "pyproject.toml", *root.glob("*.md")):  # some tests read what the README says
        shutil.copy(path, folder)


def run_tests(root: Path, folder: Path, mutant: Mutant | None, tests: list[str], timeout_s: float) -> Verdict:
    """Copy the tree into `folder`, plant the fault, run the tests."""
    started_s = time.perf_counter()
    copy_tree(root, folder)
    if mutant is not None:
        path = folder / DECODING / mutant.file
        path.write_text(mutant.applied_to(path.read_text()))
    log = folder / "log.txt"
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_test, args=(str(folder), tests, str(log)))
    process.start()
    process.join(timeout_s)
    code = process.exitcode
    if code is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    first = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1] if lines else "")
    shutil.rmtree(folder)
    return Verdict(code, time.perf_counter() - started_s, first)


def check_the_checker(root: Path, folder: Path, tests: list[str]) -> float:
    """The copy as it is must pass, and a copy that raises at import must not: else verdicts mean nothing.

    Returns:
        Seconds that the sound copy took.
    """
    sound = run_tests(root, folder / "sound", None, tests, timeout_s=3600)
    if sound.code != 0:
        raise SystemExit(f"the tests do not pass without any fault ({sound.word}): {sound.first}")
    head = '"""Stage 5'
    broken = Mutant("accept.py", "sentinel", "everything", head, f'raise RuntimeError("planted")\n{head}')
    if run_tests(root, folder / "broken", broken, tests[:1], timeout_s=3600).word != "killed":
        raise SystemExit("a copy that raises at import passed its tests: it is not the copy that is tested")
    return sound.seconds


def chosen(mutants: list[Mutant], only: list[str]) -> list[Mutant]:
    """Those of the given names or files; all when nothing is given."""
    unknown = set(only) - {m.name for m in mutants} - {m.file for m in mutants}
    if unknown:
        raise SystemExit(f"no such mutant or file: {sorted(unknown)}; --list shows them")
    return [m for m in mutants if not only or m.name in only or m.file in only]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a mutant or a file, repeatable")
    parser.add_argument("--list", action="store_true", help="show the table and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested at once")
    args = parser.parse_args()
    mutants = chosen(read_mutants(TABLE.read_text()), args.only)
    if args.list:
        for mutant in mutants:
            print(f"{mutant.file:<22} {mutant.name:<32} {mutant.breaks}")
        return 0
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    multiprocessing.set_forkserver_preload(PRELOADED)
    verdicts: dict[Mutant, Verdict] = {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        folder, root = Path(name), Path(name, "root")
        copy_tree(ROOT, root)  # once: the checkout may be edited meanwhile
        tests = sorted({test for mutant in mutants for test in TESTS[mutant.file]})
        for mutant in mutants:
            mutant.applied_to((root / DECODING / mutant.file).read_text())
        # A fault may make generation run for ever; a slow machine must not look like one.
        timeout_s = 60 + 4 * args.jobs * check_the_checker(root, folder, tests)
        futures = {pool.submit(run_tests, root, folder / m.name, m, TESTS[m.file], timeout_s): m for m in mutants}
        for future in tqdm(as_completed(futures), total=len(futures), unit="mutant"):
            mutant, verdict = futures[future], future.result()
            verdicts[mutant] = verdict
            if verdict.is_alive:
                tqdm.write(f"{verdict.word}: {mutant.file}: {mutant.name}")
    for mutant in mutants:
        verdict = verdicts[mutant]
        print(f"{verdict.word:<9} {verdict.seconds:5.1f} s  {mutant.file:<22} {mutant.name:<32} {verdict.first[:110]}")
    print(dict(Counter(verdict.word for verdict in verdicts.values())))
    alive = [mutant for mutant in mutants if verdicts[mutant].is_alive]
    for mutant in alive:
        print(f"\n{mutant.file}: {mutant.name}: {mutant.breaks}\n- {mutant.old}\n+ {mutant.new}")
    return int(bool(alive))


if __name__ == "__main__":
    sys.exit(main())
