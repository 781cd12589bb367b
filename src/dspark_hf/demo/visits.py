"""Whose race is to be stopped: one switch for each visitor and tab."""

import threading


class Visits:
    """Switches by visitor and tab; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._switches: dict[tuple[str, str], threading.Event] = {}

    def begin(self, visitor: str, tab: str) -> None:
        """A new race was asked for; it waits, or runs, until its end or [`stop`]."""
        with self._lock:
            self._switches[visitor, tab] = threading.Event()

    def switch(self, visitor: str, tab: str) -> threading.Event:
        """The switch of the race that was asked for last, set once it is to stop, and for who has left meanwhile."""
        with self._lock:
            switch = self._switches.get((visitor, tab))
        if switch is None:
            switch = threading.Event()
            switch.set()
        return switch

    def stop(self, visitor: str, tab: str) -> None:
        """Stop the visitor's race of this tab, if there is one."""
        with self._lock:
            switch = self._switches.get((visitor, tab))
        if switch is not None:
            switch.set()

    def leave(self, visitor: str) -> None:
        """The visitor has closed the page: stop all of their races and forget them."""
        with self._lock:
            mine = [key for key in self._switches if key[0] == visitor]
            switches = [self._switches.pop(key) for key in mine]
        for switch in switches:
            switch.set()
