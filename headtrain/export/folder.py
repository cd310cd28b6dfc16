"""Folders of an export: a head's, read; a format's, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from headtrain.export import ExportError
from headtrain.files import read_json, replacing, sha256_file
from headtrain.heads.base import section_config


@dataclass
class HeadFolder:
    """A trained head as it lies on disk."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    start: dict[str, str]  # checksums of its trainable matrices when the head was made (headtrain/heads/start.py)
    source: str = ""  # sha256 of the file of weights; of an export's, of that which it was made from

    @property
    def ours(self) -> dict[str, Any]:
        """The settings that headtrain keeps in config.json, all of them."""
        return self.config["headtrain"]

    @property
    def kind(self) -> str:
        return self.ours["type"]


@dataclass
class Layout:
    """What a format makes of a head."""

    contract: dict[str, Any]
    config: dict[str, Any]  # with our own section, by which it is checked
    tensors: dict[str, Tensor]
    command: Callable[[str, str, int], str]  # what serves it, of target, this folder, and K
    version: str  # of the engine
    k: int | None = None  # the only number of drafts it can be served with; None: any
    ours: bool = True  # whether our section is written too, so that `headtrain eval` reads the folder
    weights: str = "model.safetensors"
    files: dict[str, Callable[[int], str]] = field(default_factory=dict)  # further texts of the folder, of K
    copied: dict[str, Path | bytes] = field(default_factory=dict)  # and further files
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # what the contract does not know
    write: Callable[[Path, Layout], None] | None = None  # writes all of it to a file; None: safetensors, config.json


def read_head(path: Path) -> HeadFolder:
    """ExportError naming the file that is missing or broken."""
    from safetensors import SafetensorError, safe_open

    for name in ("config.json", "model.safetensors"):
        if not (path / name).is_file():
            raise ExportError(f"{path} is not a head's folder: {name} is missing")
    try:
        config = read_json(path / "config.json", "copy the head again")
        with safe_open(path / "model.safetensors", "pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - it is no dict
            told = handle.metadata() or {}
        start = json.loads(told.get("start", "{}"))
    except (ValueError, SafetensorError) as error:
        raise ExportError(f"{path}: cannot be read ({error})") from error
    place = path / "config.json"
    if not isinstance(config, dict):
        raise ExportError(f"{place}: holds a {type(config).__name__}, not an object")
    if "headtrain" not in config:
        raise ExportError(f"{place} has no `headtrain` section; import the head first (headtrain import)")
    try:
        config["headtrain"] = section_config(config["headtrain"], str(place)).to_dict()
    except ValueError as error:
        raise ExportError(str(error)) from error
    return HeadFolder(path, config, tensors, start, told.get("source") or sha256_file(path / "model.safetensors"))


def write_folder(out_dir: Path, layout: Layout, texts: dict[str, str], source: str) -> Path:
    """Writes everything beside out_dir, flushes it, and puts it in place with one rename. source: of the head's."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    config = layout.config if layout.ours else {k: v for k, v in layout.config.items() if k != "headtrain"}
    if not layout.write:
        texts = texts | {"config.json": json.dumps(config, indent=1, ensure_ascii=False) + "\n"}
    check_place(out_dir, {*texts, layout.weights, "manifest.json", *({"adapter"} if layout.copied else ())})
    try:
        with replacing(out_dir) as part:
            if layout.write:
                layout.write(part / layout.weights, layout)
            else:
                tensors = {name: tensor.contiguous() for name, tensor in layout.tensors.items()}
                save_file(tensors, part / layout.weights, metadata={"format": "pt", "source": source})
            (part / layout.weights).chmod(0o644)  # safetensors makes it readable by its owner only
            for name, text in texts.items():
                (part / name).write_text(text, encoding="utf-8")
            for name, content in layout.copied.items():
                (part / name).parent.mkdir(exist_ok=True)
                (part / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    except (OSError, SafetensorError) as error:
        raise ExportError(f"out={out_dir}: cannot be written ({error})") from error
    return out_dir


def check_place(out_dir: Path, ours: set[str]) -> None:
    """ExportError where out_dir holds what an export has not written."""
    if out_dir.exists():
        if not out_dir.is_dir():
            raise ExportError(f"{out_dir} is a file; name a folder")
        if strange := sorted(p.name for p in out_dir.iterdir() if p.name not in ours):
            raise ExportError(f"{out_dir} holds other files ({', '.join(strange)}); name an empty or new folder")
