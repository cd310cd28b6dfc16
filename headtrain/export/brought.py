"""The adapter that a head brings: low-rank factors of its target, trained along with it (head.medusa2)."""

from __future__ import annotations

import json
from pathlib import Path

from headtrain.export import ExportError
from headtrain.files import read_json

ADAPTER = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors")


def adapter_of(head_dir: Path, target: str | None) -> dict[str, Path | bytes]:
    """Its files by their names in a head's folder; {} where the head brings none. ExportError for a part of one.

    target: what the target is called in it; None: the last part of its place.
    """
    config, weights = (head_dir / name for name in ADAPTER)
    if not config.parent.is_dir():
        return {}
    if gone := [file for file in (config, weights) if not file.is_file()]:
        raise ExportError(f"{gone[0]} is missing: the head was trained along with that adapter; copy the head again")
    told = read_json(config, "copy the head again")
    told["base_model_name_or_path"] = target or Path(str(told.get("base_model_name_or_path"))).name
    return {ADAPTER[0]: (json.dumps(told, indent=1) + "\n").encode(), ADAPTER[1]: weights}
