"""Kernels in C for decoding on a CPU (rows.c), where a compiler is there; compiled once per machine, into the cache.

The product of a few rows with a large frozen weight: torch's products read it at half of the memory's speed or, for
several rows, wait for it in turns with the arithmetic; the kernel asks for it ahead. It reads bf16 weights as they are,
on CPUs without bf16 instructions too. And attention of a few queries over a row's keys, where torch's spends most of
the time on preparations.
Shapes: I inputs, O outputs; B rows, L new tokens, N query heads, J key heads, S slots, D head size.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from headtrain.files import cache_dir, locked
from headtrain.hardware import CPU_FACTS

SOURCE = Path(__file__).with_name("rows.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")  # OpenMP: torch's own threads, already loaded
MULTIPLE = 16  # of inputs, and of the head size of attention
WIDEST = 256  # head


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or error
        logging.getLogger(__name__).info("decoding on the CPU goes without its own kernels: %s", detail)
        return None


@functools.cache
def rows_kernel() -> Callable[[Tensor, Tensor], Tensor] | None:
    """(x [..., I], weight [O, I]) -> fp32 [..., O]; the weight contiguous, I a multiple of 16. None without gcc."""
    library = _library()
    if library is None:
        return None
    function = library.headtrain_rows
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3 + [ctypes.c_int] * 2
    function.restype = None

    def product(x: Tensor, weight_OI: Tensor) -> Tensor:
        outputs, inputs = weight_OI.shape
        x = x.float().contiguous()
        y = x.new_empty(*x.shape[:-1], outputs)
        function(
            x.data_ptr(), weight_OI.data_ptr(), y.data_ptr(), x.numel() // inputs, inputs, outputs,
            weight_OI.dtype == torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
        return y

    return product


@functools.cache
def attention_kernel() -> Callable[..., Tensor] | None:
    """(q [B, L, N, D], k and v [B, J, S, D], mask fp32 [B, L, S] or None, scale) -> fp32 [B, L, N, D].

    None without gcc. D is a multiple of 16, up to 256; k and v are fp32 or bf16, each D values side by side.
    """
    library = _library()
    if library is None:
        return None
    function = library.headtrain_attend
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 9 + [ctypes.c_float] + [ctypes.c_int] * 2
    function.restype = None

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        if k.stride() != v.stride():
            k, v = k.contiguous(), v.contiguous()
        q, (rows, length, heads, _) = q.float().contiguous(), q.shape
        out = torch.empty_like(q)
        function(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), None if mask is None else mask.data_ptr(), out.data_ptr(),
            rows, k.shape[1], heads // k.shape[1], length, k.shape[2], k.shape[3], *k.stride()[:3], scale,
            k.dtype == torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
        return out

    return attend


def _compiled() -> Path:
    """The shared library for this CPU and source. OSError without a compiler, CalledProcessError when it fails."""
    compiler = shutil.which("gcc")
    if compiler is None or platform.system() != "Linux":
        raise OSError("it needs gcc, on Linux")
    flags = [
        line for line in CPU_FACTS.read_text(errors="replace").splitlines() if line.startswith(("flags", "Features"))
    ]
    mark = hashlib.sha256("\n".join([SOURCE.read_text(), *FLAGS, *flags[:1]]).encode()).hexdigest()[:16]
    path = cache_dir() / "native" / f"rows-{mark}.so"
    with locked(path.with_suffix(".lock")):
        if not path.is_file():
            part = path.with_suffix(".part")
            subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(part)], check=True, capture_output=True, text=True)
            part.rename(path)
    return path
