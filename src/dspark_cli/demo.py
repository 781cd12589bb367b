"""`dspark demo`."""

import importlib.util
import os
from typing import Annotated

import typer

from .common import DebugOption, DeviceOption, TargetOption, ThreadsOption, readable_errors, require, set_up_torch

# Every way out: the Hub, gradio's statistics, and the package index, the small target's other source.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "GRADIO_ANALYTICS_ENABLED": "False", "PIP_NO_INDEX": "1"}

DrafterOption = Annotated[str, typer.Option(help="Drafter's folder or Hub id, bundled, or untrained.")]
DtypeOption = Annotated[str, typer.Option(metavar="bfloat16|float32|auto", help="auto: the checkpoint's.")]
HostOption = Annotated[str, typer.Option(help="Address to serve at; 0.0.0.0 lets other machines in.")]
PortOption = Annotated[int | None, typer.Option(help="Default: the first free one from 7860 on.")]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Make no request to the outside, whatever is missing.")]
OpenOption = Annotated[bool, typer.Option("--open", help="Open a browser.")]


def demo_command(
    target: TargetOption = "smollm2-135m-instruct",
    drafter: DrafterOption = "bundled",
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "auto",
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    offline: OfflineOption = False,
    open_browser: OpenOption = False,
    threads: ThreadsOption = None,
    debug: DebugOption = False,
) -> None:
    """Serve a page where plain generation races DSpark.

    Needs the extra `demo`. Models named on the page are loaded from folders and from the Hub; the variables
    DSPARK_DEMO_TARGETS, DSPARK_DEMO_DRAFTERS (names parted by commas) and DSPARK_DEMO_MAX_GB limit what may be loaded.

    Exit codes: 0 ended by Ctrl-C, 2 bad input.
    """
    if offline:  # before anything is imported that reads them
        os.environ.update(_OFFLINE)
    with readable_errors(debug, "interrupted before the page was up"):
        require(
            importlib.util.find_spec("gradio") is not None, "gradio", None, 'installed: pip install "dspark-hf[demo]"'
        )
        require(port is None or 0 < port < 65536, "port", port, "1 to 65535")
        set_up_torch(threads)
        from dspark_hf.demo.service import DemoService
        from dspark_hf.demo.shelf import Limits, Shelf
        from dspark_hf.demo.ui import build_demo, launch_options

        service = DemoService(Shelf(dtype, device, Limits.of(os.environ)))
        typer.echo(f"loading {target} with drafter {drafter}")
        service.warm_up(target, drafter)
        page = build_demo(service, target=target, drafter=drafter)
        page.launch(server_name=host, server_port=port, inbrowser=open_browser, **launch_options())
