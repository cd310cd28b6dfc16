"""Chats of several turns: each user turn is asked after the target's own answers to those before.

The next prompt is what serving would send: the chat template over all messages so far, the target's answers among them
as text. Where it continues the ids that were produced, token for token, the chat stays one row with a span per answer;
where the template rewrites history, or the text tokenises differently, the answer is a row of its own. Ids are never
made anew: every supervised token is one that the target produced behind the ids that stand before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headtrain.config import RecipeConfig
from headtrain.data_gen import chat
from headtrain.data_gen.forms import REASONING, Message, Reject
from headtrain.data_gen.prompts import Prompt


@dataclass
class Chat:
    """A conversation under way. `ids`: the prompt that is asked next; `states`: per row, its capture tensors."""

    prompt: Prompt
    messages: list[Message]
    later: list[str]
    ids: list[int] = field(default_factory=list)
    rows: list[chat.ChatRow] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    turn: int = 0
    left_out: str = ""  # why its later turns are not asked

    @property
    def name(self) -> str:
        """Of the turn, for its random numbers."""
        return f"{self.prompt.id}.{self.turn}" if self.turn else self.prompt.id

    def add(self, answer: list[int], truncated: bool, states: dict[str, Any]) -> None:
        """Takes the answer to `ids` and the states of both."""
        chat.add_span(self.rows, self.ids, answer, truncated)
        self.states[len(self.rows) - 1 :] = [states]


def begin(tokenizer: Any, prompt: Prompt, template_kwargs: dict | None) -> Chat:
    ids = chat.prompt_ids(tokenizer, prompt.messages, template_kwargs)
    return Chat(prompt, list(prompt.messages), list(prompt.follow_ups), ids)


def go_on(chat_: Chat, target: Any, answer: list[int], truncated: bool, config: RecipeConfig) -> bool:
    """Prepares the next turn after an answer; False when there is none, `left_out` saying why one cannot be asked."""
    if not chat_.later:
        return False
    message = None if truncated else answer_message(target.tokenizer, chat_.ids, answer, target.eos_ids)
    if message is None:
        chat_.left_out = f"turns_after_an_answer_that_is_{'cut_off' if truncated else 'no_text'}"
        return False
    messages = [*chat_.messages, message, {"role": "user", "content": chat_.later[0]}]
    try:
        ids = chat.prompt_ids(target.tokenizer, messages, config.target.template_kwargs)
    except Reject as reason:
        chat_.left_out = f"turns_{reason}"
        return False
    if len(ids) >= config.data.max_length:
        chat_.left_out = "turns_beyond_data.max_length"
        return False
    chat_.messages, chat_.later, chat_.ids, chat_.turn = messages, chat_.later[1:], ids, chat_.turn + 1
    return True


def answer_message(tokenizer: Any, prompt: list[int], answer: list[int], ends: set[int]) -> Message | None:
    """The produced ids as a message of the history, as an engine's parser would make it.

    A tokenizer with a `response_template` parses it (thoughts, channels); else it is the text without its end token.
    None when that text has special tokens in it, or when the answer calls a tool, whose result nobody knows.
    """
    if getattr(tokenizer, "response_template", None):
        try:
            message = tokenizer.parse_response(answer, prefix=prompt)
        except (ValueError, LookupError):
            return None
        thought = next((message[key] for key in REASONING if message.get(key)), None)
        said = {"role": "assistant", "content": message.get("content") or ""}
        return None if message.get("tool_calls") else said | ({"reasoning_content": thought} if thought else {})
    body = answer[:-1] if answer and answer[-1] in ends else answer
    text, plain = (
        tokenizer.decode(body, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for skip in (False, True)
    )
    return {"role": "assistant", "content": text} if text == plain else None
