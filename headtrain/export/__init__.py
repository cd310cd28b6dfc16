"""Export of trained heads to the folders that engines load: `export(head_dir, format, out_dir)`.

A format is one module of this package. Most say what a head's config and tensors become (`layout`), and the rest is the
same for all (headtrain/export/build.py): check against the engine's contract, cast, README, a folder that is whole or
absent. A module that writes something else than a folder of safetensors has an `export` of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headtrain.engines import EXPORT_FORMATS


class ExportError(ValueError):
    """A head that is not exported; `faults` lists every reason, each naming its tensor, key or file."""

    def __init__(self, message: str, faults: list[str] | None = None):
        self.faults = faults or []
        super().__init__("\n  ".join([message, *self.faults]))


def formats() -> list[str]:
    """The formats there are; loads nothing heavy."""
    return sorted(EXPORT_FORMATS)


def check_format(format: str) -> str:
    """The format itself; ExportError listing the known ones if there is no such format."""
    if format not in EXPORT_FORMATS:
        raise ExportError(f"export format {format!r} is unknown; there is: {', '.join(formats())}")
    return format


def known_target(head_dir: str | Path) -> dict[str, Any]:
    """What the run that a head lies in says about its target (`target_info` of `export`); {} outside of a run."""
    from headtrain.configload import load_resolved

    settings = Path(head_dir).parent / "config.yaml"
    if not settings.is_file():
        return {}
    target = load_resolved(settings).target
    return {"model": target.model, "adapter": target.adapter, "family": target.family}


def export(
    head_dir: str | Path,
    format: str,
    out_dir: str | Path,
    target_info: dict[str, Any] | None = None,
    *,
    report: str | Path | None = None,
    dtype: str = "bfloat16",
    engine_version: str | None = None,
) -> Path:
    """Checks a trained head's folder against the engine's contract and writes the folder that the engine loads.

    target_info: what the target is known to be; keys `model` and `adapter` (names; an adapter that is False is merged
    into it already), `family` (its model_type), `architectures`, `vocab_size`, `hidden_size`, `num_layers`,
    `max_position_embeddings`, each optional; sizes are compared with the head. Default: the target of the run the head
    lies in.
    report: report.json to quote measured acceptance from; default: the one of that run.
    dtype: of the written float tensors: bfloat16, float16 or float32. engine_version: of the engine that will serve it,
    where it is not the one the contract was read from.
    Returns out_dir, which is either complete or untouched. Raises ExportError with every fault by name.
    """
    from headtrain.export import build

    report = Path(report) if report else None
    options = {"report": report, "dtype": dtype, "version": engine_version}
    return build.export(Path(head_dir), check_format(format), Path(out_dir), target_info, **options)


def audit(
    head_dir: str | Path, format: str, engine_version: str | None = None, target_info: dict[str, Any] | None = None
) -> list[str]:
    """Every reason for which `export` would refuse this head: each missing, unknown, mis-shaped, non-finite or never
    trained tensor and each wrong key by name, or why the engine cannot run it. Writes nothing; [] = none.
    """
    from headtrain.export import build

    return build.audit(Path(head_dir), check_format(format), target_info, engine_version)
