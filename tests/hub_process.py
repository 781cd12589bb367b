"""Programs that talk to a Hub of the tests from a process of their own, with a cache and a login of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
TESTS = Path(__file__).parent


def environment(url: str, home: Path, *, token: str = "hf_alice") -> dict[str, str]:
    """Variables of a process that finds the Hub at `url`, and nothing of this machine's own Hub."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return ours | {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(TESTS)]),
        "NO_COLOR": "1",
        "COLUMNS": "160",
    }


def run_program(
    arguments: list[str], url: str, home: Path, *, token: str = "hf_alice", answer: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments`; `answer` is what is typed, None is nobody there to type."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(url, home, token=token),
        capture_output=True,
        text=True,
        input=answer or "",
        timeout=240,
        check=False,
    )
