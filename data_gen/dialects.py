"""How engines are asked for token ids, and how their answers are read: one dialect per engine, pure functions.

An engine's own defaults (those of the model's generation_config among them) would change what is sampled, so every
sampling parameter that it knows is sent. Text is never asked to be tokenised again: ids go in, ids come out.
Names as in vLLM 0.33 (/v1/completions), SGLang 0.5.23 (/generate) and TensorRT-LLM 1.3 (/v1/completions).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PLAIN = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass
class Question:
    """One request. `ids`: the prompt; `budget`: new tokens at most; `seed`: None when greedy; `ends`: end tokens."""

    ids: list[int]
    budget: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    ends: list[int] = field(default_factory=list)


@dataclass
class Reply:
    """One answer as the engine gave it. `ids`: None when it gave none; `stop`: the end token, where it names it."""

    ids: list[int] | None
    finish: str | None  # stop | length | the engine's own word
    text: str | None = None
    stop: Any = None
    prompt_tokens: int | None = None


@dataclass
class Dialect:
    """`version`: path and key of the engine's version; `text`: what in the body makes it give text, if it then does."""

    engine: str
    path: str
    body: Callable[[Question, str, bool], dict[str, Any]]  # of (question, model, adapter)
    read: Callable[[dict[str, Any]], Reply]
    version: tuple[str, str] = ("/version", "version")
    text: dict[str, Any] = field(default_factory=dict)


def _completions(question: Question, model: str) -> dict[str, Any]:
    asked = {
        "model": model, "prompt": question.ids, "max_tokens": question.budget, "stop_token_ids": question.ends,
        "temperature": question.temperature, "top_p": question.top_p, "top_k": 0, **PLAIN,
    }  # fmt: skip
    return asked if question.seed is None else asked | {"seed": question.seed}


def _vllm(question: Question, model: str, adapter: bool) -> dict[str, Any]:
    return _completions(question, model) | {"return_token_ids": True}


def _tensorrt_llm(question: Question, model: str, adapter: bool) -> dict[str, Any]:
    """Without detokenising it gives ids; an end token that is a stop token stays only where stop texts stay."""
    return _completions(question, model) | {"detokenize": False, "include_stop_str_in_output": True}


def _sglang(question: Question, model: str, adapter: bool) -> dict[str, Any]:
    sampling = {
        "max_new_tokens": question.budget, "stop_token_ids": question.ends, "temperature": question.temperature,
        "top_p": question.top_p, "top_k": -1, **PLAIN,
    }  # fmt: skip
    if question.seed is not None:
        sampling["sampling_seed"] = question.seed
    asked = {"input_ids": question.ids, "sampling_params": sampling}
    return asked | ({"lora_path": model} if adapter else {})


def _read_choice(answer: dict[str, Any]) -> Reply:
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    return Reply(
        choice.get("token_ids"), choice["finish_reason"], choice.get("text") or None, choice.get("stop_reason"),
        usage.get("prompt_tokens"),
    )  # fmt: skip


def _read_generate(answer: dict[str, Any]) -> Reply:
    about = answer["meta_info"]
    why = about["finish_reason"]
    return Reply(
        answer.get("output_ids"), why["type"], answer.get("text"), why.get("matched"), about.get("prompt_tokens")
    )


DIALECTS = {  # by what the list of models says owns them
    "vllm": Dialect("vLLM", "/v1/completions", _vllm, _read_choice),
    "sglang": Dialect("SGLang", "/generate", _sglang, _read_generate, ("/server_info", "version")),
    "tensorrt_llm": Dialect(
        "TensorRT-LLM", "/v1/completions", _tensorrt_llm, _read_choice, text={"detokenize": True}
    ),
}
UNKNOWN = Dialect("an OpenAI-compatible server", "/v1/completions", _vllm, _read_choice)
