"""Chat templates: prompt ids as serving sends them, and rows whose supervised spans come from the render boundary.

The answer of turn j is what the template prints for messages[:j+1] after what it prints for messages[:j] plus the
generation prompt: no regular expression, no generation tags. The terminator belongs to the answer, the newline that the
template prints after it does not (the target never generates it). Pure functions of a tokenizer and messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headtrain.data_gen.prompts import Reject


class TemplateError(ValueError):
    """The tokenizer has no chat template."""


class CoverageError(ValueError):
    """A whole set in which nothing, or everything, is supervised."""


@dataclass
class ChatRow:
    """Token ids with the supervised spans [start, end). `truncated`: cut at a maximal length."""

    ids: list[int]
    spans: list[tuple[int, int]]
    truncated: bool = False

    def supervised(self) -> list[bool]:
        marks = [False] * len(self.ids)
        for start, end in self.spans:
            marks[start:end] = [True] * (end - start)
        return marks


def require_template(tokenizer: Any) -> None:
    """TemplateError when there is no chat template; none is ever made up, since the served one is what counts."""
    if not getattr(tokenizer, "chat_template", None):
        raise TemplateError(
            f"{getattr(tokenizer, 'name_or_path', None) or 'the tokenizer'}: neither `chat_template` in "
            "tokenizer_config.json nor a chat_template.jinja file exists; put the template that serving uses beside "
            "the weights as chat_template.jinja"
        )


def render(tokenizer: Any, messages: list[dict], generation: bool, template_kwargs: dict | None = None) -> str:
    """The template's text; `generation` adds the header of an answer. Reject with the template's own message."""
    import jinja2

    require_template(tokenizer)
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation, **(template_kwargs or {})
        )
    except jinja2.TemplateError as error:
        raise Reject(f"template_error: {error}") from error


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of rendered text: special tokens in it are read as such, none is added (so no second BOS)."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def prompt_ids(tokenizer: Any, messages: list[dict], template_kwargs: dict | None = None) -> list[int]:
    """The ids serving sends: equal to apply_chat_template(messages, tokenize=True, add_generation_prompt=True)."""
    return encode(tokenizer, render(tokenizer, messages, True, template_kwargs))


def rows(tokenizer: Any, messages: list[dict], template_kwargs: dict | None = None) -> list[ChatRow]:
    """The training rows of a conversation with answers, uncut.

    One row with a span per answer where the template only appends; where it rewrites history (drops earlier thoughts),
    the answer starts a new row with the prompt that serving would have sent. Raises Reject.
    """
    found: list[ChatRow] = []
    for j, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:j], True, template_kwargs)
        full = render(tokenizer, messages[: j + 1], False, template_kwargs)
        if not full.startswith(prompt):
            raise Reject("template_not_prefix_stable")
        answer = _generated(full[len(prompt) :], message.get("content") or "", getattr(tokenizer, "eos_token", None))
        start, span = encode(tokenizer, prompt), _continuation(tokenizer, prompt, answer)
        if not span:
            raise Reject("nothing_supervised")
        if found and start[: len(found[-1].ids)] == found[-1].ids:
            row = found[-1]
            row.ids = start + span
        else:
            row = ChatRow(start + span, [])
            found.append(row)
        row.spans.append((len(start), len(start) + len(span)))
    return found


def _generated(tail: str, content: str, end_token: str | None) -> str:
    """The part of a rendered answer that the target itself produces: up to and including the terminator."""
    after = tail.rfind(content) + len(content) if content and content in tail else 0
    if end_token and end_token in tail[after:]:
        return tail[: tail.index(end_token, after) + len(end_token)]
    if after and not tail[after:].strip():
        return tail[:after]  # no terminator: the answer's own last spaces are the answer's
    return tail.rstrip()


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
