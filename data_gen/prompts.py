"""Prompts: rows of chat data, repaired, filtered, mixed, and split by content hash.

A row becomes a `Conversation` or is rejected with a counted reason. For `data.responses.backend: local` a prompt is the
conversation up to and including its first user turn (the target answers it; with data.turns, further user turns
follow); for `given` the answers stay.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headtrain.config import DataConfig, PromptFilter, RecipeConfig
from headtrain.data_gen import forms, readers
from headtrain.data_gen.forms import Message, Reject
from headtrain.files import Manifest, read_json, write_json, writing

log = logging.getLogger(__name__)

TOLD = 1000  # rows after which it is looked whether to tell how many are read
READING = "reading.json"  # that note

# The banner that chat-sharing sites put in front of a conversation; it was no part of what the model saw.
BANNERS = ("*This chat conversation is shared from [", "*This conversation is shared from [")
MOST_REASONS = 50  # from then on a new unknown role, for one, is counted as `unknown_role`
REGENERATE = "the answer stands in the reasoning field: its parser lost it; take the server's token ids instead"


class NoPrompts(ValueError):
    """Not one usable prompt; the message has the counters."""


@dataclass
class Conversation:
    """A repaired row, see `forms` and `Prompt`. `id`: hash of the content."""

    id: str
    messages: list[Message]
    follow_ups: list[str] = field(default_factory=list)
    token_ids: tuple[list[int], list[int]] | None = None
    finish: str = "stop"  # of token ids: stop or length


@dataclass
class Prompt:
    """One line of prompts.jsonl; empty fields are left out there. `split`: heldout, valid or train.

    `messages` end with the user (given: an answer); `follow_ups`: user texts asked after the target's own answers.
    `token_ids`: prompt and completion ids that the row brought, and `finish` (stop or length) how the latter end.
    """

    id: str
    split: str
    source: str
    row: int
    messages: list[Message]
    follow_ups: list[str] = field(default_factory=list)
    token_ids: list[list[int]] | None = None
    finish: str = "stop"
    file: str = ""  # of a source with several files: whose row it is


# ------------------------------------------------------------------------------------------------- one row

def content_id(messages: list[Message], follow_ups: Iterable[str] = ()) -> str:
    """sha1, 40 hex digits: of the text when it is a single user message, else of the messages as canonical JSON."""
    told = [{key: message[key] for key in forms.TOLD_BY if key in message} for message in messages]
    told += [{"role": "user", "content": text} for text in follow_ups]
    if len(told) == 1 and told[0].keys() == {"role", "content"} and told[0]["role"] == "user":
        return hashlib.sha1(told[0]["content"].encode()).hexdigest()
    return _hash(told)


def _hash(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha1(text.encode()).hexdigest()


def conversation(row: Any, source: str, data: DataConfig, notes: Counter) -> Conversation:
    """The usable part of one parsed row; raises Reject with the reason. Repairs are counted in `notes`.

    given: the assistant's turns are kept (at least one); local: the first user turn, stripped, ends the prompt.
    """
    given, repairs, later = data.responses.backend == "given", Counter(), []
    if isinstance(row, str | list):  # a bare prompt, or bare messages
        row = {"prompt" if isinstance(row, str) else "messages": row}
    if given and (ids := forms.token_ids(row)):
        return _from_ids(row, source, ids, data)
    turns = _opened(forms.turns_of(row, source), repairs)
    if given:
        messages = _exchanges(turns, data.keep_truncated, repairs)
    else:
        messages, rest = _first_prompt(turns)
        later = _later(rest, data.turns - 1, repairs) if data.turns > 1 else []
    if tools := forms.tools_of(row):
        messages[0]["tools"] = tools
    identity = content_id(messages, later)
    notes.update(repairs)
    return Conversation(identity, messages, later)


def _opened(turns: list[dict], repairs: Counter) -> list[dict]:
    """The turns without a share banner, and without what an assistant says before the first user does."""
    while turns and forms.role_of(turns[0]) == "system" and forms.message(turns[0])["content"].startswith(BANNERS):
        turns = turns[1:]
        repairs["share_banner_removed"] += 1
    asks = next((n for n, turn in enumerate(turns) if forms.role_of(turn) == "user"), None)
    if asks is None:
        raise Reject("no_user_turn")
    head = [turn for turn in turns[:asks] if forms.role_of(turn) in ("system", "developer")]
    if len(head) < asks:
        repairs["leading_assistant_removed"] += 1
    return head + turns[asks:]


def _from_ids(row: dict, source: str, ids: tuple[list[int], list[int]], data: DataConfig) -> Conversation:
    """A row that brings the target's own token ids, which are kept as they are; its text serves the filter alone."""
    cut_off = row.get("finish_reason") in forms.CUT_OFF
    if cut_off and not data.keep_truncated:
        raise Reject("truncated")
    try:
        messages, _ = _first_prompt(_opened(forms.turns_of(row, source), Counter()))
    except Reject:
        messages = []
    if not messages and data.filter != PromptFilter():
        raise Reject("no_text_for_data.filter")
    return Conversation(_hash(ids), messages, token_ids=ids, finish="length" if cut_off else "stop")


def _first_prompt(turns: list[dict]) -> tuple[list[Message], list[dict]]:
    """(system turns and the first user turn, whose text is stripped; the turns after it)."""
    messages: list[Message] = []
    while not messages or messages[-1]["role"] != "user":
        messages.append(forms.message(turns[len(messages)]))
    messages[-1]["content"] = messages[-1]["content"].strip()
    if not messages[-1]["content"]:
        raise Reject("empty_user")
    return messages, turns[len(messages) :]


def _later(turns: list[dict], most: int, repairs: Counter) -> list[str]:
    """Texts of the next user turns, up to what no answer of the target's own can be put before (a tool's result)."""
    texts: list[str] = []
    for turn in turns:
        try:
            message = forms.message(turn)
        except Reject:
            break
        text = message["content"].strip()
        if message["role"] == "user" and text and len(texts) < most:
            texts.append(text)
        elif message["role"] != "assistant" or message.get("tool_calls"):
            break
    users = sum(forms.ROLES.get(str(forms.name_of(turn))) == "user" for turn in turns)
    if users > len(texts):
        repairs["user_turns_not_asked"] += users - len(texts)
    return texts


def _exchanges(turns: list[dict], keep_truncated: bool, repairs: Counter) -> list[Message]:
    """All turns up to the first fault, ending with an answer; Reject when no exchange lies before it."""
    messages: list[Message] = []
    fault = None
    for turn in turns:
        message = forms.message(turn)  # of the turns behind a fault too: their roles are still checked
        fault = fault or _fault(message, messages[-1] if messages else {}, keep_truncated)
        if not fault:
            messages.append(message)
    asked = len(messages)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise Reject(fault or "no_assistant_turn", REGENERATE if fault == "assistant_content_null" else "")
    if fault:
        repairs[f"cut_before_{fault}"] += 1
    elif len(messages) < asked:
        repairs["trailing_question_removed"] += 1
    return messages


def _fault(message: Message, previous: Message, keep_truncated: bool) -> str | None:
    """Why a message cannot stand behind the one before it, or None."""
    role, blank = message["role"], not message["content"].strip()
    if role == "tool":
        known = previous.get("role") == "tool" or previous.get("tool_calls")
        return None if known else "tool_without_call"
    if role == "user":
        return "empty_user" if blank else None
    if role != "assistant":
        return None
    if previous.get("role") == "assistant":
        return "consecutive_assistant"
    if blank and not message.get("tool_calls"):
        return "assistant_content_null" if message.get("reasoning_content") else "empty_assistant"
    cut_off = message.get("finish_reason") == "length"
    return "truncated" if cut_off and not keep_truncated else None


# ------------------------------------------------------------------------------------------------- the set

def filter_reason(rule: PromptFilter, messages: list[Message]) -> str | None:
    """Why the text of the last user turn fails the filter, or None."""
    text = next(m["content"] for m in reversed(messages) if m["role"] == "user").strip()
    size = len(text)
    if size < rule.min_chars:
        return "too_short"
    if rule.max_chars is not None and size > rule.max_chars:
        return "too_long"
    if sum(ord(c) < 128 for c in text) / max(size, 1) < rule.min_ascii:
        return "too_few_ascii"
    if sum(c.isalpha() or c == " " for c in text) / max(size, 1) < rule.min_letters:
        return "too_few_letters"
    return None


def same_text(found: Conversation) -> str:
    """What two prompts share when one is a duplicate: roles, tools, and texts lower-cased, with spaces collapsed."""
    texts = [(m["role"], m["content"], m.get("tool_calls"), m.get("tools")) for m in found.messages]
    texts += [("user", text, None, None) for text in found.follow_ups]
    return _hash([(role, " ".join(text.lower().split()), *more) for role, text, *more in texts])


def splits(ids: Iterable[str], held_out: float, valid: float) -> Iterator[str]:
    """The split of each of the ids, which ascend: the lowest are held out, the next are for validation, the rest train.

    A setting below 1 is a share of the space of hashes, else a number of prompts.
    """
    first, edge = 0, held_out if held_out < 1 else 0.0  # how many are held out so far, and the share where they end
    for n, identity in enumerate(ids):
        share = int(identity, 16) / 16 ** len(identity)
        if n == first and (n < int(held_out) if held_out >= 1 else share < held_out):
            first, edge = n + 1, max(edge, share)
            yield "heldout"
        elif n < first + int(valid) if valid >= 1 else share < edge + valid:
            yield "valid"
        else:
            yield "train"


class Selection:
    """The prompts of all sources, in a temporary database on disk, so that memory does not grow with them.

    `counts` and `left_out` (reason → number): read = prompts + all left out. reject(**facts) is told of each row left
    out: source, file, row, reason, and what `detail` helps to find the fault. tell(self) is called every TOLD rows.
    """

    def __init__(
        self, data: DataConfig, reject: Callable[..., None] = lambda **facts: None,
        tell: Callable[[Selection], None] = lambda found: None,
    ):  # fmt: skip
        self.data, self.reject, self.tell = data, reject, tell
        self.counts, self.left_out, self.notes = Counter(), Counter(), Counter()
        self.db = sqlite3.connect("", isolation_level=None)  # "": a file of SQLite's own, gone with the connection
        self.db.execute("PRAGMA synchronous=OFF")
        self.db.execute("BEGIN")
        self.db.execute(
            "CREATE TABLE found (same TEXT PRIMARY KEY, id TEXT, place INT, file TEXT, row INT, body TEXT, out TEXT)"
        )
        for place in range(len(data.prompts)):
            self._read(place)
            if (limit := data.prompts[place].limit) is not None:
                self._keep_lowest(place, limit, "over_limit")
        self._mix()
        kept = self.db.execute("SELECT id FROM found WHERE out IS NULL ORDER BY id")
        by_split = Counter(splits((row[0] for row in kept), data.held_out, data.valid))
        self.counts.update(prompts=by_split.total(), **by_split)
        self.counts.update(self.notes)

    def _read(self, place: int) -> None:
        source = self.data.prompts[place].source
        for file, found in readers.files(self.data.prompts[place]):
            for number, row in found:
                self.counts["read"] += 1
                if self.counts["read"] % TOLD == 0:
                    self.tell(self)
                if isinstance(row, forms.Broken) and self.left_out[row.reason] < 3:  # rejects.jsonl has them all
                    log.warning("%s: %s (%s); the other rows are kept", file, row.detail, row.reason)
                try:
                    self._add(conversation(row, source, self.data, self.notes), place, file, number)
                except Reject as reason:
                    self._leave_out(place, file, number, str(reason), reason.detail)
                except UnicodeEncodeError as error:  # half a surrogate pair, or bytes that are no UTF-8
                    self._leave_out(place, file, number, "invalid_unicode", str(error))
                except RecursionError:
                    self._leave_out(place, file, number, "nested_too_deeply")

    def _add(self, found: Conversation, place: int, file: str, number: int) -> None:
        if found.messages and (reason := filter_reason(self.data.filter, found.messages)):
            raise Reject(reason)
        same = found.id if self.data.responses.backend == "given" else same_text(found)
        told = {key: value for key, value in vars(found).items() if key != "id"}
        body = json.dumps(told, ensure_ascii=False, default=str)  # default: a table's dates and the like
        values = (same, found.id, place, file, number, body)
        if not self.db.execute("INSERT OR IGNORE INTO found VALUES (?, ?, ?, ?, ?, ?, NULL)", values).rowcount:
            first = self.db.execute("SELECT file, row FROM found WHERE same = ?", (same,)).fetchone()
            raise Reject("duplicate", "of {} row {}".format(*first))

    def _leave_out(self, place: int, file: str, number: int, reason: str, detail: str = "") -> None:
        kind, _, odd = reason.partition(": ")
        if odd and reason not in self.left_out and len(self.left_out) >= MOST_REASONS:
            reason, detail = kind, f"{odd} {detail}".strip()
        self.left_out[reason] += 1
        facts = {"source": self.data.prompts[place].source, "file": file, "row": number, "reason": reason}
        self.reject(**facts, **({"detail": detail} if detail else {}))

    def _keep_lowest(self, place: int, number: int, reason: str) -> None:
        """Of a source's prompts only so many stay, lowest content hash first."""
        order = "FROM found WHERE place = ? AND out IS NULL ORDER BY id LIMIT -1 OFFSET ?"
        for file, row in self.db.execute(f"SELECT file, row {order}", (place, number)):
            self._leave_out(place, file, row, reason)
        change = f"UPDATE found SET out = ?, body = '' WHERE same IN (SELECT same {order})"
        self.db.execute(change, (reason, place, number))

    def _mix(self) -> None:
        """With weights, the sources are cut to their shares: as many prompts as the scarcest one allows."""
        weights = [place.weight for place in self.data.prompts]
        if weights[:1] == [None] or not weights:
            return
        have = Counter(dict(self.db.execute("SELECT place, count(*) FROM found WHERE out IS NULL GROUP BY place")))
        unit = min(have[place] / weight for place, weight in enumerate(weights))
        for place, weight in enumerate(weights):
            self._keep_lowest(place, math.floor(unit * weight + 1e-6), "over_weight")

    def __iter__(self) -> Iterator[Prompt]:
        """The prompts, lowest content hash first."""
        places = [place.source for place in self.data.prompts]
        ids = self.db.execute("SELECT id FROM found WHERE out IS NULL ORDER BY id")
        rows = self.db.execute("SELECT id, place, file, row, body FROM found WHERE out IS NULL ORDER BY id")
        marks = splits((row[0] for row in ids), self.data.held_out, self.data.valid)
        for split, (identity, place, file, number, body) in zip(marks, rows, strict=True):
            source = places[place]
            yield Prompt(identity, split, source, number, file="" if file == source else file, **json.loads(body))


def gather(config: RecipeConfig, folder: str | Path) -> None:
    """The prompts stage: writes prompts.jsonl and rejects.jsonl, and completes the manifest.

    NoPrompts when no row is usable.
    """
    folder = Path(folder)
    if not config.data.prompts:
        raise NoPrompts("data.prompts is empty: name at least one source, e.g. data.prompts=[{source: chats.jsonl}]")
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder / "rejects.jsonl") as part, open(part, "w", encoding="utf-8") as handle:
        try:
            found = Selection(config.data, lambda **facts: print(json.dumps(facts), file=handle), _teller(folder))
        except sqlite3.OperationalError as error:
            raise readers.ReadError(f"the prompts' temporary file: {error}; set TMPDIR to another disk") from error
    counts, left_out = found.counts, found.left_out
    if not counts["prompts"]:
        reasons = ", ".join(f"{name} {number}" for name, number in left_out.most_common()) or "the sources are empty"
        raise NoPrompts(f"0 of {counts['read']} rows usable: {reasons}; {folder / 'rejects.jsonl'} names the rows")
    for name, number in left_out.most_common():
        log.info("left out: %s %d", name, number)
    own = 0  # of the target's own answers, by token ids
    with writing(folder / "prompts.jsonl") as part, open(part, "w", encoding="utf-8") as handle:
        for prompt in found:
            own += prompt.token_ids is not None
            print(_line(prompt), file=handle)
    on_policy = config.data.responses.backend != "given" or own == counts["prompts"]
    Manifest(folder).finish(dict(counts), dict(left_out), on_policy=on_policy)
    (folder / READING).unlink(missing_ok=True)


def _teller(folder: Path) -> Callable[[Selection], None]:
    """Notes how many rows are read, and left out, for whoever watches; at most every two seconds."""
    last = [0.0]

    def tell(found: Selection) -> None:
        if time.monotonic() - last[0] >= 2:
            last[0] = time.monotonic()
            write_json(folder / READING, {"read": found.counts["read"], "left_out": dict(found.left_out)})

    return tell


def status(folder: str | Path) -> dict[str, Any]:
    """{read, left_out} while rows are read."""
    path = Path(folder) / READING
    return read_json(path) if path.is_file() else {"read": 0, "left_out": {}}


def _line(prompt: Prompt) -> str:
    """The prompt as JSON, without fields that hold their default."""
    told = {k: v for k, v in vars(prompt).items() if k == "messages" or v not in (getattr(Prompt, k, None), [])}
    return json.dumps(told, ensure_ascii=False)


def load(folder: str | Path) -> list[Prompt]:
    """The prompts of a prompts folder, lowest content hash first."""
    path = Path(folder) / "prompts.jsonl"
    if not path.is_file():
        raise NoPrompts(f"{path} is missing: run `headtrain generate` first")
    with open(path, encoding="utf-8", newline="\n") as handle:
        return [Prompt(**json.loads(line)) for line in handle if line.strip()]
