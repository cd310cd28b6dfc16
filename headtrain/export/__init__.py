"""Export of trained heads to the folders that engines load: `export(head_dir, format, out_dir)`.

A format is one module with a function of the same arguments; the registry below names those that exist.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

_MODULES = {"mtp": "headtrain.export.mtp", "vllm": "headtrain.export.vllm"}


class ExportError(ValueError):
    """A head that is not exported; `faults` lists every reason, each naming its tensor, key or file."""

    def __init__(self, message: str, faults: list[str] | None = None):
        self.faults = faults or []
        super().__init__("\n  ".join([message, *self.faults]))


def formats() -> list[str]:
    """The formats there are; loads nothing heavy."""
    return sorted(_MODULES)


def check_format(format: str) -> str:
    """The format itself; ExportError listing the known ones if there is no such format."""
    if format not in _MODULES:
        raise ExportError(f"export format {format!r} is unknown; there is: {', '.join(formats())}")
    return format


def export(
    head_dir: str | Path,
    format: str,
    out_dir: str | Path,
    target_info: dict[str, Any] | None = None,
    *,
    report: str | Path | None = None,
    dtype: str = "bfloat16",
) -> Path:
    """Checks a trained head's folder against the engine's contract and writes the folder that the engine loads.

    target_info: what the target is known to be; keys `model` and `adapter` (names), `vocab_size`, `hidden_size`,
    `num_layers`, `max_position_embeddings`, each optional and compared with the head where given.
    report: report.json to quote measured acceptance from; default: the one of the run the head lies in.
    dtype: of the written float tensors: bfloat16, float16 or float32.
    Returns out_dir, which is either complete or untouched. Raises ExportError with every fault by name.
    """
    module = import_module(_MODULES[check_format(format)])
    report = Path(report) if report else None
    return module.export(Path(head_dir), Path(out_dir), target_info or {}, report=report, dtype=dtype)
