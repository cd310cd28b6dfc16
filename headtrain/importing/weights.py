"""The files of a foreign checkpoint: opened as safetensors and JSON only, every fault named by file, tensor or key."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtrain.importing.keys import HeadImportError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS, OTHERS = ("F32", "F16", "BF16"), ("I64", "I32", "BOOL")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
CONVERT = (
    'python -c "import sys, torch; from safetensors.torch import save_file; save_file({k: v.clone() for f in '
    "sys.argv[2:] for k, v in torch.load(f, map_location='cpu', weights_only=True).items()}, sys.argv[1])\""
)


@dataclass(frozen=True)
class Stored:
    """One tensor of a file, not read yet."""

    file: Path
    dtype: str  # in safetensors' words
    shape: tuple[int, ...]


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    try:
        content = json.loads(inside(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise HeadImportError(f"{path.parent}: {path.name} is missing; give the folder of a head") from None
    except OSError as error:
        raise HeadImportError(f"{path}: cannot be opened ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise HeadImportError(f"{path}: not valid JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise HeadImportError(f"{path}: holds a {type(content).__name__}, not an object; copy it again")
    return content


def listed(folder: Path) -> set[str]:
    """The tensor names of the folder's index; none where there is no index."""
    return set(_weight_map(folder)) if (folder / INDEX).is_file() else set()


def stored(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's safetensors files by name, without reading it."""
    if not (folder / INDEX).is_file():
        return _header(_only_file(folder))
    files = _weight_map(folder)
    if (folder / WEIGHTS).is_file() and WEIGHTS not in files.values():
        raise HeadImportError(f"{folder}: {INDEX} does not name {WEIGHTS}, which lies beside it; remove one of them")
    found: dict[str, Stored] = {}
    if gone := sorted(name for name in set(files.values()) if not (folder / name).is_file()):
        raise HeadImportError(f"{folder / INDEX}: names {gone[0]}, which is not there; copy the folder again")
    for name in sorted(set(files.values())):
        file = folder / name
        for tensor, place in _header(file).items():
            if tensor in found:
                raise HeadImportError(f"{folder}: tensor {tensor} is in {found[tensor].file.name} and in {name}")
            if files.get(tensor) != name:
                raise HeadImportError(f"{file}: holds {tensor}, which {INDEX} does not list there")
            found[tensor] = place
    if missing := sorted(files.keys() - found.keys()):
        raise HeadImportError(f"{folder / files[missing[0]]}: tensor {missing[0]} is missing, which {INDEX} lists")
    return found


def read(places: dict[str, Stored]) -> dict[str, Tensor]:
    """The tensors themselves. HeadImportError for one that is quantised, of another type, or not finite."""
    from safetensors import safe_open

    tensors = {}
    for file in sorted({place.file for place in places.values()}):
        with safe_open(file, "pt") as handle:
            for name in sorted(n for n, place in places.items() if place.file == file):
                if (dtype := places[name].dtype) not in (*FLOATS, *OTHERS):
                    raise HeadImportError(
                        f"{file}: tensor {name} is stored as {dtype}; heads are read in {', '.join(FLOATS)}: take the "
                        "checkpoint from before it was quantised"
                    )
                tensors[name] = tensor = handle.get_tensor(name)
                if tensor.is_floating_point() and (bad := int((~torch.isfinite(tensor)).sum())):
                    raise HeadImportError(f"{file}: tensor {name} has {bad} values that are NaN or infinite")
    return tensors


def inside(path: Path) -> Path:
    """The path; HeadImportError where it is a link out of its folder (the Hub cache's links to its blobs are none)."""
    real, home = path.resolve(), path.parent.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if real.parent not in (home, blobs):
        raise HeadImportError(f"{path}: a link to {real}, out of the head's folder; put the file itself there")
    return path


# ------------------------------------------------------------------------------------------------- files


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, of the index."""
    files = read_object(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise HeadImportError(f"{folder / INDEX}: weight_map must be an object of tensor names and their files")
    for tensor, name in files.items():
        if not isinstance(name, str) or "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise HeadImportError(
                f"{folder / INDEX}: tensor {tensor} is said to be in {name!r}; a .safetensors file of this folder must "
                "be named"
            )
    return files


def _only_file(folder: Path) -> Path:
    """The single safetensors file; HeadImportError says what is there instead, and how to convert it."""
    found = sorted(folder.glob("*.safetensors"))
    if len(found) > 1:
        found = [file for file in found if file.name == WEIGHTS] or found
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(file.name for file in found)
        raise HeadImportError(f"{folder}: several files ({names}) and no {INDEX}, which says what is where")
    if pickles := sorted(file for pattern in PICKLES for file in folder.glob(pattern)):
        raise _is_pickle(folder / WEIGHTS, pickles)
    raise HeadImportError(
        f"{folder}: no .safetensors file; if its weights are .bin or .pt files, fetch these (hf download) and convert"
    )


def _is_pickle(made: Path, files: list[Path]) -> HeadImportError:
    shown = " ".join(f"'{file}'" for file in files)
    return HeadImportError(
        f"{made.parent}: {', '.join(file.name for file in files)}: pickled weights can run code, and are not opened "
        f"here; where you trust them, convert them to safetensors:\n  {CONVERT} '{made}' {shown}"
    )


def _header(file: Path) -> dict[str, Stored]:
    from safetensors import SafetensorError, safe_open

    try:
        with open(inside(file), "rb") as handle:
            start = handle.read(64)
    except OSError as error:
        raise HeadImportError(f"{file}: cannot be opened ({error.strerror})") from error
    if start[8:9] != b"{" and start[:1] in (b"P", b"\x80"):  # a zip, as torch.save writes it, or a bare pickle
        raise _is_pickle(file.with_name(WEIGHTS), [file])
    if start.startswith(b"version https://git-lfs"):
        raise HeadImportError(f"{file}: a pointer of Git LFS, not the weights; run `git lfs pull`")
    try:
        with safe_open(file, "pt") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
            return {n: Stored(file, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except SafetensorError as error:
        raise HeadImportError(f"{file}: cannot be read as safetensors ({error}); copy it again") from error
