"""A draft vocabulary in a file: what `headtrain vocab out=FILE` writes and `head.draft_vocab=FILE` takes.

JSON: `vocab_size` of the target; `tokenizer`, its mark (`facts.text_marks`); `ids`, ascending target ids; `mapping`,
the mark of their mask (`heads.vocab.mapping_hash`); `counts`, how often each stood in the supervised tokens it was
chosen by; `made_from`. Imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from headtrain.config import ConfigError
from headtrain.files import locate, read_json, write_text


@dataclass
class VocabFile:
    ids: list[int]  # ascending target ids
    vocab_size: int  # of the target
    tokenizer: str
    counts: list[int] = field(default_factory=list)
    made_from: dict[str, Any] = field(default_factory=dict)

    @property
    def mapping(self) -> str:
        """As `heads.vocab.mapping_hash` of the mask."""
        mask = bytearray(self.vocab_size)
        for token in self.ids:
            mask[token] = 1
        return hashlib.sha256(mask).hexdigest()[:32]

    def write(self, path: str | Path) -> None:
        written = {
            "vocab_size": self.vocab_size, "tokenizer": self.tokenizer, "mapping": self.mapping,
            "made_from": self.made_from, "ids": self.ids, "counts": self.counts,
        }  # fmt: skip
        write_text(path, json.dumps(written, ensure_ascii=False) + "\n")


def is_file(asked: Any) -> bool:
    """Whether `head.draft_vocab` names a file: neither a number nor `full`."""
    return isinstance(asked, str) and asked != "full"


def size_of(asked: Any, vocab_size: int) -> int:
    """`head.draft_vocab` as a number of tokens; unchecked where it is a number."""
    return len(read(asked).ids) if is_file(asked) else vocab_size if asked in ("full", None) else int(asked)


def read(place: str, vocab_size: int | None = None, tokenizer: str | None = None) -> VocabFile:
    """The draft vocabulary in a file; with `vocab_size` and `tokenizer` (its mark) only one that fits the target.

    ConfigError naming the file and what is wrong with it.
    """
    where, path = f"head.draft_vocab={place}", Path(locate(place)).expanduser()
    if not path.is_file():
        raise ConfigError(f"{where}: no such file; give a size, full, or a file that `headtrain vocab out=…` wrote")
    remedy = "write it again with `headtrain vocab out=…`"
    try:
        found = read_json(path, remedy)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not a text file; {remedy}") from error
    if not isinstance(found, dict) or not {"ids", "vocab_size", "tokenizer", "mapping"} <= found.keys():
        raise ConfigError(f"{where}: it has no ids, vocab_size, tokenizer and mapping; {remedy}")
    ids, size = found["ids"], found["vocab_size"]
    if type(size) is not int or not _ascending(ids, size):
        raise ConfigError(f"{where}: ids must be ascending whole numbers of 0 … vocab_size - 1, one at least; {remedy}")
    file = VocabFile(ids, size, found["tokenizer"], found.get("counts", []), found.get("made_from", {}))
    if file.mapping != found["mapping"]:
        raise ConfigError(f"{where}: ids and mapping do not belong together, it was changed by hand; {remedy}")
    if vocab_size is not None and size != vocab_size:
        raise ConfigError(f"{where}: made for a target with {size:,} tokens; this one has {vocab_size:,}")
    if tokenizer is not None and file.tokenizer != tokenizer:
        raise ConfigError(f"{where}: made with another tokenizer than the target's; {remedy} from the target's answers")
    return file


def _ascending(ids: Any, size: int) -> bool:
    whole = isinstance(ids, list) and bool(ids) and all(type(token) is int for token in ids)
    return whole and ids[0] >= 0 and ids[-1] < size and all(a < b for a, b in pairwise(ids))
