"""Counts what makes a host wait for an accelerator, on a CPU.

A `DeviceTensor` stands for a tensor on an accelerator: whatever is computed from one is one, and `.cpu()` gives a plain
tensor. What reads it (`item`, `bool`, `tolist`, `cpu`, ...), what has a shape that its values decide (`nonzero`, a bool
index, ...) and what is sent to it (`torch.tensor(..., device=...)`, `.to(device)` of a plain tensor) is noted.
"""

import traceback
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"cpu", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "equal", "allclose"}
SHAPES = {"nonzero", "masked_select", "unique", "isin", "argwhere", "bincount"}
# What C++ calls for item(), bool() and the like, also on tensors that are none of ours; and shapes by values.
DISPATCHED = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero"}

# Arguments of generate() under which a round is read once.
READ_ONCE = [
    {"do_sample": False},
    {"do_sample": False, "eos_token_id": list(range(3, 9))},
    {"do_sample": True, "top_k": 20, "temperature": 0.9, "top_p": 0.9},
    {"do_sample": False, "verification_layout": "flat"},
    {"do_sample": False, "verification_layout": "padded"},
]

NOTED: list[str] = []


class DeviceTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in READS:
            note(f"read by {name}")
            with torch._C.DisableTorchFunctionSubclass():
                args = tuple(arg.as_subclass(torch.Tensor) if isinstance(arg, cls) else arg for arg in args)
                result = func(*args, **kwargs)
            return result.clone() if name == "cpu" else result
        if name in SHAPES or (name == "__getitem__" and has_bool(args[1])):
            note(f"shape by values of {name}")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            note("shape by values of repeat_interleave")
        return super().__torch_function__(func, types, args, kwargs)

    def tolist(self):  # not asked about through the protocol
        note("read by tolist")
        return self.as_subclass(torch.Tensor).tolist()


def has_bool(index):
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


def note(what):
    frames = [f for f in traceback.extract_stack() if "tests" not in f.filename and "torch/" not in f.filename]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    NOTED.append(f"{what} at {where}")


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in DISPATCHED:
            note(f"dispatched {name}")
        return func(*args, **(kwargs or {}))


def put_on_device(module):
    """Let a module's buffers stand on the device as well; what is computed from parameters has an input that does."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.as_subclass(DeviceTensor)


@contextmanager
def counting(monkeypatch):
    """Notes of what happens inside the block."""
    make, send = torch.tensor, torch.Tensor.to

    def tensor(*args, **kwargs):
        if kwargs.get("device") is not None:
            note("sent by torch.tensor")
        return make(*args, **kwargs)

    def to(self, *args, **kwargs):
        target = kwargs.get("device", args[0] if args else None)
        if isinstance(target, torch.device) and not isinstance(self, DeviceTensor):
            note("sent by to")
        return send(self, *args, **kwargs)

    NOTED.clear()
    with monkeypatch.context() as patch, _Dispatched():
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch.Tensor, "to", to)
        yield NOTED
