"""Memory of one way: bytes of weights and caches, and how far the process or the device rises above where it stood."""

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# How deep tensors lie in a cache object: cache, list of layers, layer, buffer, tensor.
_DEPTH = 6
_STATUS = Path("/proc/self/status")
_RESET_PEAK = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Memory:
    """Bytes of one way at one cell, measured while no other way ran.

    Attributes:
        weight_bytes: Of target and assistant, each weight counted once.
        cache_bytes: Most that caches passed to target and assistant held.
        peak_rise_bytes: Peak of the process (resident set) or of the device's allocator above its start; None where the
            system does not tell.
        peak_bytes: The peak itself, everything else in the process included.
    """

    weight_bytes: int
    cache_bytes: int
    peak_rise_bytes: int | None
    peak_bytes: int | None


def measure_memory(models: Iterable[nn.Module], call: Callable[[], object]) -> Memory:
    """Run `call` and watch what it needs.

    Args:
        models: Target, and the assistant if there is one.
    """
    models = list(models)
    device = next(models[0].parameters()).device
    watch = _DevicePeak(device) if device.type == "cuda" else _ProcessPeak()
    with _watching_caches(models) as caches:
        before = watch.begin()
        call()
        peak = watch.peak()
    return Memory(
        weight_bytes=_storage_bytes(weight for model in models for weight in (*model.parameters(), *model.buffers())),
        cache_bytes=caches.most_bytes,
        peak_rise_bytes=None if peak is None or before is None else max(0, peak - before),
        peak_bytes=peak,
    )


class _CacheWatch:
    """Most bytes that caches of each model held, added up over models."""

    def __init__(self) -> None:
        self._most: dict[int, int] = {}

    @property
    def most_bytes(self) -> int:
        return sum(self._most.values())

    def look(self, model: nn.Module, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        """A forward hook: a cache is whatever argument holds tensors and is none."""
        held = _storage_bytes(
            tensor
            for value in kwargs.values()
            if not isinstance(value, Tensor | tuple | list)
            for tensor in _tensors_in(value, _DEPTH)
        )
        self._most[id(model)] = max(held, self._most.get(id(model), 0))


@contextmanager
def _watching_caches(models: list[nn.Module]) -> Iterator[_CacheWatch]:
    watch = _CacheWatch()
    hooks = [model.register_forward_hook(watch.look, with_kwargs=True) for model in models]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, nn.Module):
        if isinstance(value, dict):
            inner: Iterable[Any] = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        else:
            inner = getattr(value, "__dict__", {}).values()
        for one in inner:
            yield from _tensors_in(one, depth - 1)


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages behind the tensors, each once: a view holds the whole."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _DevicePeak:
    """The device's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> int | None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device)


class _ProcessPeak:
    """The process's resident set, where Linux tells it."""

    def begin(self) -> int | None:
        gc.collect()
        with suppress(OSError, AttributeError):  # not glibc: freed memory that was kept may hide a rise
            ctypes.CDLL(None).malloc_trim(0)
        try:
            _RESET_PEAK.write_text("5")
        except OSError:
            return None
        return _status_bytes("VmRSS")

    def peak(self) -> int | None:
        return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    return None
