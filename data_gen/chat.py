"""Chat templates: prompt ids as serving sends them, and rows whose supervised spans come from the render boundary.

The answer of turn j is what the template prints for messages[:j+1] after what it prints for messages[:j] plus the
generation prompt: no regular expression, no generation tags. The terminator belongs to the answer; what the template
prints after it (a newline) or makes up before it (an empty think block) does not, since the target never generates it.
Where in the rendering the answer's own text begins and ends is seen by rendering once more with a mark in it.
Pure functions of a tokenizer and messages.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from headtrain.data_gen.forms import REASONING, Message, Reject

MARK = "zQ7markX9w"  # a text that no template treats specially


class TemplateError(ValueError):
    """A tokenizer without a chat template, or one whose template prints the begin token twice."""


class CoverageError(ValueError):
    """A whole set in which nothing, or everything, is supervised."""


@dataclass
class ChatRow:
    """Token ids with the supervised spans [start, end). `truncated`: cut at a maximal length, or ended by length."""

    ids: list[int]
    spans: list[tuple[int, int]]
    truncated: bool = False

    def supervised(self) -> list[bool]:
        marks = [False] * len(self.ids)
        for start, end in self.spans:
            marks[start:end] = [True] * (end - start)
        return marks


# ------------------------------------------------------------------------------------------------- rendering

def require_template(tokenizer: Any) -> None:
    """TemplateError when there is no chat template; none is ever made up, since the served one is what counts."""
    if not getattr(tokenizer, "chat_template", None):
        raise TemplateError(
            f"{getattr(tokenizer, 'name_or_path', None) or 'the tokenizer'}: neither `chat_template` in "
            "tokenizer_config.json nor a chat_template.jinja file exists; put the template that serving uses beside "
            "the weights as chat_template.jinja, or name its file with target.chat_template"
        )


def check_template(tokenizer: Any, template_kwargs: dict | None = None) -> None:
    """TemplateError when the template is missing, cannot render one question, or prints nothing or two begin tokens."""
    require_template(tokenizer)
    name = getattr(tokenizer, "name_or_path", None) or "the tokenizer"
    try:
        ids = prompt_ids(tokenizer, [{"role": "user", "content": "hello"}], template_kwargs)
    except Reject as reason:
        raise TemplateError(
            f"{name}: its chat template fails for one user message: {reason} {reason.detail}".rstrip()
            + "; correct the template (target.chat_template)"
        ) from None
    if not ids:
        raise TemplateError(f"{name}: its chat template renders a message to nothing")


def render(tokenizer: Any, messages: list[Message], generation: bool, template_kwargs: dict | None = None) -> str:
    """The template's text; `generation` adds the header of an answer. Reject: its own error, or two begin tokens.

    Tools of the first message that has them go to the template; thoughts go by the name it reads; arguments of tool
    calls as they are, or parsed where it cannot take a JSON text or would quote it a second time.
    """
    require_template(tokenizer)
    if not messages:
        raise Reject("assistant_before_any_message")
    options = dict(template_kwargs or {})
    if tools := next((m["tools"] for m in messages if m.get("tools")), None):
        options["tools"] = tools
    source = str(tokenizer.chat_template)
    names = [name for name in REASONING if name in source] or list(REASONING[:1])
    told = [_told(message, names) for message in messages]
    texts = [call["function"]["arguments"] for m in told for call in m.get("tool_calls") or ()]
    texts = [text for text in texts if isinstance(text, str)]
    try:
        found = _apply(tokenizer, told, generation, options)
        quoted = any(json.dumps(text, ensure_ascii=False) in found for text in texts)
    except Reject:
        if not texts:
            raise
        quoted = True
    if quoted:
        found = _apply(tokenizer, [_parsed(message) for message in told], generation, options)
    bos = getattr(tokenizer, "bos_token", None)
    if bos and found.startswith(bos + bos):
        raise Reject("double_bos", f"{bos} is printed twice at the start, which no engine does")
    return found


def _told(message: Message, names: list[str]) -> Message:
    """The message as a template sees it."""
    told = {key: value for key, value in message.items() if key not in ("weight", "finish_reason", "tools")}
    if thought := told.pop("reasoning_content", None):
        told.update(dict.fromkeys(names, thought))
    return told


def _parsed(message: Message) -> Message:
    """The message with the arguments of its tool calls as objects, where they are JSON."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError) as error:
            raise Reject("tool_arguments_are_not_json", str(error)) from error
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _apply(tokenizer: Any, messages: list[Message], generation: bool, options: dict[str, Any]) -> str:
    import jinja2

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation, **options)
    except (
        jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
    ) as error:  # fmt: skip
        raise Reject(f"template_error: {str(error)[:200]}") from error


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of rendered text: special tokens in it are read as such, none is added (so no second BOS)."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def prompt_ids(tokenizer: Any, messages: list[Message], template_kwargs: dict | None = None) -> list[int]:
    """The ids serving sends: equal to apply_chat_template(messages, tokenize=True, add_generation_prompt=True)."""
    return encode(tokenizer, render(tokenizer, messages, True, template_kwargs))


# ------------------------------------------------------------------------------------------------- rows

def rows(tokenizer: Any, messages: list[Message], template_kwargs: dict | None = None) -> list[ChatRow]:
    """The training rows of a conversation with answers, uncut. Answers of weight 0 are context alone.

    One row with a span per answer where the template only appends; where it rewrites history (drops earlier thoughts),
    the answer starts a new row with the prompt that serving would have sent. Raises Reject.
    """
    found: list[ChatRow] = []
    for j, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight") == 0:
            continue
        prompt, answer = _boundary(tokenizer, messages[:j], message, template_kwargs)
        start, span = encode(tokenizer, prompt), _continuation(tokenizer, prompt, answer)
        if not span:
            raise Reject("nothing_supervised")
        add_span(found, start, span, message.get("finish_reason") == "length")
    if not found:
        raise Reject("nothing_supervised")
    return found


def add_span(found: list[ChatRow], prompt: list[int], answer: list[int], truncated: bool = False) -> None:
    """Adds an answer: to the last row when its prompt continues that row token for token, else as a row of its own."""
    if not (found and prompt[: len(found[-1].ids)] == found[-1].ids):
        found.append(ChatRow([], []))
    row = found[-1]
    row.ids, row.truncated = prompt + answer, row.truncated or truncated
    row.spans.append((len(prompt), len(row.ids)))


def _boundary(tokenizer: Any, history: list[Message], message: Message, kwargs: dict | None) -> tuple[str, str]:
    """(the text before what the target generates, that text) for an answer after its history."""
    prompt = render(tokenizer, history, True, kwargs)

    def tail(**changes: Any) -> str:
        told = {key: value for key, value in {**message, **changes}.items() if value is not None}
        full = render(tokenizer, [*history, told], False, kwargs)
        if not full.startswith(prompt):
            raise Reject("template_not_prefix_stable")
        return full[len(prompt) :]

    whole, content = tail(), message["content"]
    thought = message.get("reasoning_content") or _inline_thought(content)
    if thought.strip() not in whole:
        raise Reject("reasoning_not_rendered", "the chat template prints this thought nowhere")
    if not all(call["function"]["name"] in whole for call in message.get("tool_calls") or ()):
        raise Reject("tool_call_not_rendered", "the chat template prints this call nowhere")
    made = "" if message.get("reasoning_content") else _made_up(tail, whole, content)
    said = whole[len(made) : _end(tokenizer, tail, whole, message)]
    specials = _special_texts(tokenizer)
    terminator = max((token for token in specials if said.endswith(token)), key=len, default="")
    ends = {terminator, getattr(tokenizer, "eos_token", None)} - {"", None}
    if any(token in said.removesuffix(terminator) for token in ends):
        raise Reject("end_token_in_answer", "the target would have stopped there")
    return prompt + made, said


def _inline_thought(content: str) -> str:
    """The thought that a content carries in think tags."""
    before, tag, _ = content.partition("</think>")
    return before.partition("<think>")[2] or before if tag else ""


def _made_up(tail: Any, whole: str, content: str) -> str:
    """What the template itself puts before an answer without a thought: the frame of an empty thought, or "".

    It is one when the same answer with a thought is printed in the same frame.
    """
    def probe(**changes: Any) -> str:
        try:
            return tail(**changes)
        except Reject:  # the generation prompt ends the thought already
            return ""

    before, mark, _ = probe(content=MARK + content).partition(MARK)
    if not mark or not before.strip() or not whole.startswith(before):
        return ""
    for changes in ({"reasoning_content": MARK}, {"content": f"<think>\n{MARK}\n</think>\n\n{content}"}):
        thinking = probe(**changes)
        if MARK in thinking and "".join(thinking.replace(MARK, "").split()) == "".join(whole.split()):
            return before
    return ""


def _end(tokenizer: Any, tail: Any, whole: str, message: Message) -> int:
    """Where in the rendered answer its terminator ends; an answer that was cut off has none."""
    content, calls = message["content"], message.get("tool_calls")
    own = content.rstrip()
    space, specials = content[len(own) :], _special_texts(tokenizer)
    changes = {"tool_calls": None, "content": MARK} if calls else {"content": own + MARK + space}
    before, mark, after = tail(**changes).partition(MARK)
    if calls:
        stop = after[: _stop(after, specials)].strip()
        stops = [stop] if stop and stop in whole else [token for token in specials if token in whole]
        return max((whole.rindex(text) + len(text) for text in stops), default=len(whole.rstrip()))
    if not mark or MARK in after or whole != before + after:
        raise Reject("answer_not_rendered", "the chat template does not print this answer as it is")
    if message.get("finish_reason") == "length":
        return len(before)
    if not after.strip():  # no terminator: the answer's own last spaces are the answer's
        return len(before) + (len(space) if after.startswith(space) else 0)
    return len(before) + _stop(after, specials)


def _stop(after: str, specials: frozenset[str]) -> int:
    """Where the first special token behind an answer ends, else the text."""
    places = [(after.index(token), len(token)) for token in specials if token in after]
    return sum(min(places, key=lambda place: (place[0], -place[1]))) if places else len(after.rstrip())


@functools.lru_cache(maxsize=4)
def _special_texts(tokenizer: Any) -> frozenset[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    known = {token.content for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))
    return frozenset(known - {"", None})


def _continuation(tokenizer: Any, prompt: str, answer: str) -> list[int]:
    """Ids of `answer` after `prompt`, with a token boundary between the two."""
    start, whole = encode(tokenizer, prompt), encode(tokenizer, prompt + answer)
    return whole[len(start) :] if whole[: len(start)] == start else encode(tokenizer, answer)


def cut(row: ChatRow, max_length: int) -> ChatRow | None:
    """The row's first `max_length` tokens; None when nothing supervised is left in them."""
    spans = [(start, min(end, max_length)) for start, end in row.spans if start < max_length]
    if not spans:
        return None
    return ChatRow(row.ids[:max_length], spans, row.truncated or len(row.ids) > max_length)


def check_coverage(supervised: int, tokens: int) -> float:
    """Supervised share of a whole set; CoverageError at 0 % or 100 %: training on nothing, or on the users' text."""
    if supervised == 0 or supervised == tokens:
        raise CoverageError(
            f"{supervised} of {tokens} tokens are supervised ({100 if supervised else 0} %): the chat template marks "
            "no boundary between prompt and answer; look at single rows with `headtrain generate inspect=3`"
        )
    return supervised / tokens
