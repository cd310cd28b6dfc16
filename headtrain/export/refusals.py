"""Which types of head a format takes, known without any head: why not, and the nearest thing that works."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING

from headtrain.engines import EXPORT_FORMATS, TESTED_VERSIONS, release
from headtrain.export import ExportError

if TYPE_CHECKING:
    from headtrain.config import HeadSection

NAMES = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "medusa": "Medusa", "mtp": "MTP", "peagle": "P-EAGLE"}
READ_BY = {  # settings of a head that not every format can say
    "norm_before_residual": ("vllm", "gguf", "speculators"), "norm_output": ("vllm", "sglang", "trtllm", "speculators"),
}  # fmt: skip


def check_heads(kind: str | None, format: str, version: str | None = None) -> None:
    """ExportError where the format, or a release of its engine, takes no heads of a type."""
    if kind not in NAMES:
        raise ExportError(f"head.type={kind}: no such type of head is exported; there is: {', '.join(NAMES)}")
    if version and EXPORT_FORMATS[format] is None:
        raise ExportError(f"engine_version={version}: format={format} is of no engine; leave it out")
    if version:
        release(version)  # ValueError
    reason = _reason(kind, format)
    if isinstance(reason, dict):  # some releases take it
        served = version or TESTED_VERSIONS[EXPORT_FORMATS[format]]
        reason = reason["why"] if release(served) > release(reason["last"]) else None
    if reason:
        raise ExportError(f"format={format} takes no {NAMES[kind]} heads: {reason}")


def newest(kind: str, format: str) -> str | None:
    """The newest known release of a format's engine that takes heads of a type; None: no release does."""
    reason = _reason(kind, format)
    if isinstance(reason, dict):
        return reason["last"]
    return None if reason else TESTED_VERSIONS[EXPORT_FORMATS[format]]


def _reason(kind: str, format: str) -> str | dict[str, str] | None:
    """Why a format takes no heads of a type; as a mapping where the releases up to `last` do."""
    table = json.loads((resources.files("headtrain.export") / "refused.json").read_text(encoding="utf-8"))
    return table.get(format, {}).get(kind)


def versions(text: str | None, formats: list[str]) -> dict[str, str]:
    """`engine_version` by format: one release for a single format, or vllm=0.32.0,sglang=0.5.9 for several."""
    if not text:
        return {}
    parts = [part.strip() for part in text.split(",")]
    if "=" not in text and len(formats) == 1:
        parts = [f"{formats[0]}={text}"]
    found = dict(part.split("=", 1) for part in parts if "=" in part)
    if len(found) < len(parts):
        raise ExportError(f"engine_version={text}: say of which format, such as {formats[0]}={parts[0]}")
    for format, version in found.items():
        if format not in formats:
            raise ExportError(f"engine_version={text}: {format} is none of the formats {', '.join(formats)}")
        release(version)
    return found


def check_plan(
    kind: str, formats: list[str], engine_version: str | None, target: str | None = None,
    head: HeadSection | None = None,
) -> None:  # fmt: skip
    """ExportError where a run could not be exported as it is asked to, before it has begun."""
    of = versions(engine_version, formats)
    for format in formats:
        if format not in EXPORT_FORMATS:
            raise ExportError(f"export format {format!r} is unknown; there is: {', '.join(EXPORT_FORMATS)}")
        check_heads(kind, format, of.get(format))
        if head and kind == "medusa" and head.draft_vocab != "full":
            raise ExportError(
                f"export.formats: {format} takes no Medusa heads with a reduced draft vocabulary "
                f"(head.draft_vocab={head.draft_vocab}); set head.draft_vocab=full"
            )
        for key, readers in READ_BY.items():
            if head and getattr(head, key) and format not in readers:
                raise ExportError(f"export.formats: head.{key}=true is for {', '.join(readers)} only, not for {format}")
        if format == "gguf" and not (target or "").endswith(".gguf"):
            raise ExportError(
                f"export.formats: gguf needs the target's GGUF file, and target.model is {target}; leave it out, and "
                "afterwards call `headtrain export format=gguf target=TARGET.gguf`"
            )
