"""Devices twin:0 and twin:1 for tests on a machine without GPUs: tensors that compute on the CPU and refuse to mix.

As on GPUs, an operation takes tensors of one device; only numbers (0 dimensions) of the CPU pass everywhere, indices of
the CPU where indices are meant.
"""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)


class Module:
    """What torch asks of a device's module."""

    def is_initialized(self):
        return True

    def is_available(self):
        return True

    def current_device(self):
        return 0

    def device_count(self):
        return 2

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        pass

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


class Twin(torch.Tensor):
    """A tensor of a twin device; `inner` holds its numbers on the CPU."""

    @staticmethod
    def __new__(cls, inner, device):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=device, requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})

    def tolist(self):
        return self.inner.tolist()

    def __repr__(self, **_):
        return f"{self.inner!r} on {self.device}"


def run(function, args, kwargs):
    leaves = tree_flatten((args, kwargs))[0]
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    twins = [x for x in tensors if isinstance(x, Twin)]
    place = next((x for x in leaves if isinstance(x, torch.device)), None)
    if not twins and (place is None or place.type != "twin"):
        return function(*args, **kwargs)
    devices = {x.device for x in tensors if isinstance(x, Twin) or x.dim()}
    if function in INDEXING:
        devices = {args[0].device, *(x.device for x in args[1] if isinstance(x, Twin))}
    if len(devices) > 1 and function is not aten.copy_.default:
        raise RuntimeError(f"{function}: tensors on {' and '.join(sorted(map(str, devices)))}")
    if place is None:
        place = args[0].device if function is aten.copy_.default else twins[0].device
    own = {id(x.inner): x for x in twins}
    args, kwargs = tree_map(_on_cpu, (args, kwargs))

    def wrapped(x):
        if not isinstance(x, torch.Tensor):
            return x
        before = own.get(id(x))
        if before is not None and before.device == place:
            return before
        x = x if before is None else x.clone()  # it has moved
        return x if place.type == "cpu" else Twin(x, place)

    return tree_map(wrapped, function(*args, **kwargs))


def _on_cpu(x):
    return x.inner if isinstance(x, Twin) else torch.device("cpu") if isinstance(x, torch.device) else x


class Both(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


_known = []


@contextlib.contextmanager
def twins():
    """Inside, torch.device("twin:0") and torch.device("twin:1") can be used."""
    if not _known:
        _setup_privateuseone_for_python_backend("twin", Module())
        _known.append(True)
    made = torch.tensor  # it goes past the dispatch mode

    def tensor(data, device=None, **more):
        return made(data, **more) if device is None else made(data, **more).to(device)

    torch.tensor = tensor
    try:
        with Both():
            yield
    finally:
        torch.tensor = made


def move(module: torch.nn.Module, device) -> None:
    """What `module.to(device)` does."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(parameter.data.to(device), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
