"""Export of a trained MTP module: the target's whole checkpoint with the module in it, as any engine loads the target.

Nothing else of the checkpoint changes, and every tensor keeps its dtype (`dtype` of other formats does not apply).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headtrain.config import TargetConfig
from headtrain.configload import load_resolved
from headtrain.export import ExportError
from headtrain.files import read_json


def export(head_dir: Path, out_dir: Path, target_info: dict[str, Any], *, report: Path | None, dtype: str) -> Path:
    """See `headtrain.export.export`. The target is the one of the run that the head lies in."""
    from headtrain.heads.base import load_head
    from headtrain.heads.mtp_checkpoint import write_back

    if not (head_dir / "config.json").is_file():
        raise ExportError(f"{head_dir} is not a head's folder: config.json is missing")
    kind = read_json(head_dir / "config.json", "copy the head again").get("headtrain", {}).get("type")
    if kind != "mtp":
        raise ExportError(f"{head_dir / 'config.json'}: headtrain.type={kind!r}; mtp takes: mtp")
    write_back(load_head(head_dir), _folder(head_dir), out_dir)
    return out_dir


def _folder(head_dir: Path) -> Path:
    """The folder of the target's checkpoint."""
    from transformers.utils.hub import cached_file

    from headtrain.target import model_path

    settings = head_dir.parent / "config.yaml"
    if not settings.is_file():
        raise ExportError(f"{head_dir} lies in no run folder ({settings} is missing), which says what its target is")
    target: TargetConfig = load_resolved(settings).target
    if target.adapter:
        raise ExportError(
            f"target.adapter={target.adapter}: the module was trained with it, and the checkpoint of {target.model} is "
            "without; merge it into the target first, and train on that"
        )
    return Path(cached_file(model_path(target), "config.json", revision=target.revision)).parent
