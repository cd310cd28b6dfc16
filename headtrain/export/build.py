"""The way of every export: read the head, lay it out for the engine, check it, cast it, write the folder."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from headtrain.engines import TapsError, servable_name
from headtrain.export import ExportError, known_target
from headtrain.export.brought import adapter_of
from headtrain.export.contracts import FLOATS, faults, load_contract
from headtrain.export.folder import HeadFolder, Layout, read_head, write_folder
from headtrain.export.readme import ENGINES, drafts, measured, readme
from headtrain.export.refusals import check_heads
from headtrain.files import read_json
from headtrain.heads.start import unchanged


def export(
    head_dir: Path, format: str, out_dir: Path, info: dict[str, Any] | None, *,
    report: Path | None, dtype: str, version: str | None,
) -> Path:  # fmt: skip
    """See `headtrain.export.export`."""
    if dtype not in FLOATS:
        raise ExportError(f"export dtype {dtype!r} is unknown; there is: {', '.join(FLOATS)}")
    head = read_head(head_dir)
    if out_dir.resolve() == head_dir.resolve():
        raise ExportError(f"out={out_dir} is the head itself, which an export would replace; name another folder")
    info = _with_family(head, known_target(head_dir) if info is None else info)
    check_heads(head.kind, format, version)
    if own := _own(head, format, "export"):
        return own(head, out_dir, info, format=format, report=report, dtype=dtype, version=version)
    plain = servable_name(info.get("model")) if info.get("adapter") is None else "TARGET"
    if copied := adapter_of(head_dir, plain if plain != "TARGET" else None):
        info = info | ({"adapter": "adapter/"} if info.get("adapter") is None else {})
    layout = lay_out(head, format, info, version)
    layout.copied = copied
    if found := head_faults(head, info) + layout_faults(head, layout):
        raise ExportError(f"{head_dir} does not meet the contract of {_name(layout)}:", list(dict.fromkeys(found)))
    layout.tensors = {n: t.to(FLOATS[dtype]) if t.is_floating_point() else t for n, t in layout.tensors.items()}
    layout.config |= {key: dtype for key in ("torch_dtype", "dtype") if key in layout.config}
    if found := faults(layout.contract, layout.config, layout.tensors):  # float16 can overflow
        raise ExportError(f"{head_dir} cannot be written as {dtype}:", found)
    if layout.copied:
        layout.notes.append("adapter/ has low-rank factors of the target, trained along with the head (peft's format)")
    if best_is_start(head):
        layout.notes.append("its weights are those it started with: validation found no step of training better")
    row = measured(head_dir, report)
    texts = {name: text(drafts(layout, row)) for name, text in layout.files.items()}
    return write_folder(out_dir, layout, texts | {"README.md": readme(layout, info, row)}, head.source)


def audit(head_dir: Path, format: str, info: dict[str, Any] | None, version: str | None) -> list[str]:
    """See `headtrain.export.audit`."""
    try:
        head = read_head(head_dir)
        info = _with_family(head, known_target(head_dir) if info is None else info)
        check_heads(head.kind, format, version)
        if own := _own(head, format, "audit"):
            return own(head, info, format=format, version=version)
        layout = lay_out(head, format, info, version)
    except ExportError as error:
        return error.faults or [str(error)]
    return list(dict.fromkeys(head_faults(head, info) + layout_faults(head, layout)))


def _with_family(head: HeadFolder, info: dict[str, Any]) -> dict[str, Any]:
    """SGLang counts layers by the target's family; a recipe need not say it, and a head may lie outside of its run."""
    return info if info.get("family") else info | {"family": head.ours["made_for"].get("family")}


def _own(head: HeadFolder, format: str, function: str) -> Any:
    """The function of a format that does not lay out safetensors: of format=…, or of MTP modules in any format."""
    return getattr(_module("mtp" if head.kind == "mtp" else format), function, None)


def _module(format: str) -> ModuleType:
    return import_module(f"headtrain.export.{format}")


def contract_for(engine: str, kind: str, version: str | None) -> tuple[dict[str, Any], str]:
    """(contract, the engine's version)."""
    contract = load_contract(engine, kind)
    return contract, version or contract["version"]


def lay_out(head: HeadFolder, format: str, info: dict[str, Any], version: str | None) -> Layout:
    """What the format makes of the head. ExportError where the engine cannot run it."""
    try:
        return _module(format).layout(head, info, version)
    except TapsError as error:
        raise ExportError(f"{head.path}: format={format}: {error}") from error


def _name(layout: Layout) -> str:
    return f"{ENGINES[layout.contract['engine']]} {layout.version}"


def layout_faults(head: HeadFolder, layout: Layout) -> list[str]:
    """Faults of the head's own layout, then those against the engine's contract that say more.

    What stands there as the engine wants it, as in an exported folder, is judged by the engine's contract alone.
    """
    native = _module("vllm").native(head)
    written = [key for key in ("architectures", "eagle_config") if head.config.get(key) == layout.config.get(key)]
    found = [
        line
        for line in faults(native.contract, native.config, native.tensors)
        if not line.startswith(tuple(f"config.json: {key}" for key in written))
    ]
    own = faults(layout.contract, layout.config, layout.tensors)
    if found:  # a faulty tensor is named once, as the head has it
        own = [line for line in own if line.startswith("config.json")]
    return found + own + layout.faults


def head_faults(head: HeadFolder, info: dict[str, Any]) -> list[str]:
    """Where the head was made for another target than the one named, and what training has not changed."""
    config = head.config
    theirs = {
        "vocab_size": config.get("vocab_size"),
        "hidden_size": config.get("target_hidden_size") or config.get("hidden_size"),
        "num_layers": head.ours["target_layers"],
        "max_position_embeddings": config.get("max_position_embeddings"),
    }
    found = [
        f"the target has {key} {info[key]}, but the head was made for {value}"
        for key, value in theirs.items()
        if info.get(key) is not None and info[key] != value
    ]
    same = unchanged(head.tensors, head.start)
    if len(same) < len(head.start):
        return found + [f"tensor {name} is what it was when the head was made: it was never trained" for name in same]
    if same and not best_is_start(head):
        found.append(f"no matrix has changed since the head was made ({', '.join(same)}): it was never trained")
    return found


def best_is_start(head: HeadFolder) -> bool:
    """Whether validation found no step of training better than the head's start, which the run ends with then."""
    best = head.path.parent / "training" / "best.json"
    known = read_json(best) if best.is_file() else {}
    return known.get("step") == 0 and known.get("tau") is not None
