"""`dspark demo`."""

import importlib.util
import os
import socket
from typing import Annotated

import typer

from .common import (
    DebugOption,
    DeviceOption,
    DtypeOption,
    TargetOption,
    ThreadsOption,
    readable_errors,
    require,
    set_up_torch,
)

# Every way out: the Hub, gradio's statistics, and the package index, the small target's other source.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "GRADIO_ANALYTICS_ENABLED": "False", "PIP_NO_INDEX": "1"}

_OPEN_TO_OTHERS = (
    "whoever reaches {host} can have any model loaded, folders of this machine included; DSPARK_DEMO_TARGETS and "
    "DSPARK_DEMO_DRAFTERS name the only ones"
)

DrafterOption = Annotated[str, typer.Option(help="Drafter's folder or Hub id, bundled, or untrained.")]
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
        # Before the models are loaded, which takes longest.
        why_not = _why_not_free(host, port or 0)
        address = host if port is None else f"{host}:{port}"
        require(why_not is None, "--host and --port", address, f"an address that is free to serve at ({why_not})")
        set_up_torch(threads)
        from dspark_hf.demo.service import DemoService
        from dspark_hf.demo.shelf import Limits, Shelf
        from dspark_hf.demo.ui import build_demo, launch_options

        limits = Limits.of(os.environ)
        if not _is_own_machine(host) and (limits.targets is None or limits.drafters is None):
            typer.echo(_OPEN_TO_OTHERS.format(host=host), err=True)
        service = DemoService(Shelf(dtype, device, limits))
        typer.echo(f"loading {target} with drafter {drafter}")
        service.warm_up(target, drafter)
        page = build_demo(service, target=target, drafter=drafter)
        page.launch(server_name=host, server_port=port, inbrowser=open_browser, **launch_options())


def _why_not_free(host: str, port: int) -> str | None:
    """What hinders serving at `host`, on port 0 for any; gradio would say that no port is empty."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _is_own_machine(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
