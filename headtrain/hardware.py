"""What this machine can do, found out without importing torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

CPU_FACTS = Path("/proc/cpuinfo")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}  # x86, and ARM's


def gpu_ids() -> list[str]:
    """The CUDA devices this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [item.strip() for item in visible.split(",") if item.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return [str(n) for n, _ in enumerate(line for line in listing.stdout.splitlines() if line.startswith("GPU "))]


def fast_bf16(device: str) -> bool:
    """Whether bfloat16 is worth using on `device` (target.device): on GPUs, and on CPUs with instructions for it.

    Elsewhere a bfloat16 product takes several times as long as a float32 one.
    """
    if device != "cpu" and gpu_ids():
        return True
    facts = CPU_FACTS.read_text(errors="replace") if CPU_FACTS.is_file() else ""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", facts, re.MULTILINE)
    return found is not None and not BF16_FLAGS.isdisjoint(found[1].split())
