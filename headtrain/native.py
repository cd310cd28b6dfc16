"""The product of a few rows with a large frozen weight on a CPU, by a kernel in C (rows.c) where a compiler is there.

Decoding reads every weight for a few rows. torch's products read it at half of the memory's speed or, for several
rows, wait for it in turns with the arithmetic; the kernel asks for it ahead. It reads bf16 weights as they are, on CPUs
without bf16 instructions too. It is compiled once per machine, into the cache.
Shapes: I inputs, O outputs.
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
MULTIPLE = 16  # of inputs


@functools.cache
def rows_kernel() -> Callable[[Tensor, Tensor], Tensor] | None:
    """(x [..., I], weight [O, I]) -> fp32 [..., O]; the weight contiguous, I a multiple of 16. None without gcc."""
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", None) or error
        logging.getLogger(__name__).info("decoding on the CPU goes without its own kernel: %s", detail)
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
