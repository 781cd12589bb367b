"""Races on a Space whose GPU is lent for one call at a time (ZeroGPU)."""

import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

from .race import readable
from .service import DemoService, RaceRequest, new_tally
from .tally import RaceTally

# Seconds that one race may hold the GPU.
GPU_LEASE_S = 60

Races = Callable[[RaceRequest, threading.Event], Iterator[RaceTally]]


def races_on_lent_gpu(service: DemoService, gpu: Callable[..., Any]) -> Races:
    """`service.tallies`, inside a function that `spaces.GPU` wraps.

    That function runs in a process of its own: requests and tallies cross over by value, a visitor's switch does not,
    so it is asked for here. Models are loaded here too, since what is loaded there is lost after the call.

    Args:
        gpu: `spaces.GPU`, or what behaves like it.
    """

    def tallies_on_gpu(request: RaceRequest) -> Iterator[RaceTally]:
        yield from service.tallies(request, threading.Event())

    lent: Callable[[RaceRequest], Generator[RaceTally, None, None]] = gpu(duration=GPU_LEASE_S)(tallies_on_gpu)

    def tallies(request: RaceRequest, stopped: threading.Event) -> Iterator[RaceTally]:
        tally = new_tally(request)
        tally.notice = "Waiting for the GPU …"
        yield tally
        try:
            service.load(request)
        except Exception as error:  # as in a race: whatever it is, the reader is told
            tally.error = readable(error)
            yield tally
            return
        views = lent(request)
        for tally in views:
            if stopped.is_set():
                views.close()
                tally.was_stopped = True
                yield tally
                return
            yield tally

    return tallies
