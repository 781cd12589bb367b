"""`dspark profile`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import (
    DebugOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    ThreadsOption,
    check_output,
    readable_errors,
    require,
    set_up_torch,
)

if TYPE_CHECKING:
    from dspark_hf.fitting.throughput import ThroughputProfile

DrafterOption = Annotated[
    str | None, typer.Option(help="Drafter's folder or Hub id. Default: the bundled one, else untrained.")
]
BatchSizeOption = Annotated[list[int] | None, typer.Option(help="Rows that share a step; may be repeated.")]
ContextOption = Annotated[list[int] | None, typer.Option(help="Tokens before a step; may be repeated.")]
RepeatsOption = Annotated[int, typer.Option(help="Measurements per point.")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Picture of SPS over B. Default: beside the profile.")
]


def profile_command(
    target: TargetOption = "smollm2-135m-instruct",
    drafter: DrafterOption = None,
    batch_size: BatchSizeOption = [1, 2, 4, 8, 16, 32],  # noqa: B006  # typer copies it
    context: ContextOption = [64, 512],  # noqa: B006
    repeats: RepeatsOption = 5,
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "auto",
    seed: Annotated[int, typer.Option(help="Of the order of measurements, untrained weights.")] = 0,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
    plot_file: PlotOption = None,
    debug: DebugOption = False,
) -> None:
    """Measure what target steps and drafts cost on this machine, for policies that weigh drafts against time.

    The profile goes into the user's cache, where generate() finds it: one for each pair of models, dtype, device and
    number of threads. Run it while nothing else runs. Ctrl-C leaves an older profile as it was.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    with readable_errors(debug, "interrupted: nothing was written, an older profile is as it was"):
        from dspark_hf.evaluation.loading import load_drafter, load_target
        from dspark_hf.evaluation.profiling import profile_pair
        from dspark_hf.fitting.fingerprint import Fingerprint
        from dspark_hf.fitting.measuring import ProfilePlan
        from dspark_hf.fitting.profile_plot import SUFFIXES
        from dspark_hf.fitting.profile_store import profile_path

        plan = ProfilePlan(tuple(batch_size or ()), tuple(context or ()), repeats, seed)
        for file in (json_file, plot_file):
            check_output(file)
        is_picture = plot_file is None or plot_file.suffix in SUFFIXES
        require(is_picture, "plot", str(plot_file), f"a file that ends in {' or '.join(SUFFIXES)}")
        set_up_torch(threads)
        model, tokenizer = load_target(target, dtype, device)
        loaded = load_drafter(drafter, model, target, tokenizer, seed=seed)
        path = profile_path(Fingerprint.of(model, loaded.model))
        path.parent.mkdir(parents=True, exist_ok=True)
        check_output(path)
        profile = profile_pair(model, loaded.model, plan, target_name=target, drafter_name=drafter, show_progress=True)
        _store_and_show(profile, path, json_file, plot_file)


def _store_and_show(profile: "ThroughputProfile", path: Path, json_file: Path | None, plot_file: Path | None) -> None:
    from rich.console import Console

    from dspark_hf.evaluation.render_profile import render_profile
    from dspark_hf.fitting.profile_plot import plot_profile
    from dspark_hf.fitting.profile_store import save_profile

    save_profile(profile, path)  # first: whatever happens to the terminal, the numbers are kept
    if json_file is not None:
        save_profile(profile, json_file)
    plot_file = plot_file or path.with_suffix(".png")
    is_drawn = plot_profile(profile, plot_file)
    console = Console()
    render_profile(profile, console)
    written = [path, json_file, plot_file if is_drawn else None]
    for file in filter(None, written):
        console.print(f"written  {file}", markup=False, highlight=False, soft_wrap=True)
