"""One server that answers prompts over HTTP: what is checked before it is used, and one request with its ids.

A server that fits is one that serves the model, tokenises as the target's own tokenizer does, gives token ids, and
answers the same greedy question in the same way twice. `Misfit` is what no waiting mends, `Away` what waiting may.
"""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any

import httpx2 as httpx

from headtrain.config import RecipeConfig
from headtrain.data_gen import chat
from headtrain.data_gen.dialects import DIALECTS, UNKNOWN, Dialect, Question, Reply
from headtrain.privacy import masked

KEY = "HEADTRAIN_SERVER_API_KEY"  # the environment variable with the servers' key; it stands nowhere else
PROBE = "Name 3 fruits – in naïve 日本語 & Ελληνικά:\n\n\tdef f(x): return x**2  # 1,234.5 €\n"
PROBE_TOKENS = 16
PROBE_SECONDS = 60.0  # of one request of a check, at most


class ServerError(ValueError):
    """Servers that cannot be used; the message names the URL and what to do."""


class Misfit(ServerError):
    """A server that answers, but not as the target would, or without token ids."""


class Away(ServerError):
    """A request that failed in a way that says nothing about the row. `reason`: what is counted; `wait`: in seconds."""

    def __init__(self, text: str, reason: str, wait: float | None = None):
        super().__init__(text)
        self.reason, self.wait = reason, wait


class Refused(ServerError):
    """A server that is well and will not, or cannot, answer this row. `reason`: what is counted."""

    def __init__(self, text: str, reason: str):
        super().__init__(text)
        self.reason = reason


def client(config: RecipeConfig, servers: int) -> httpx.AsyncClient:
    """An HTTP client for so many servers at a time. It follows no redirects: the key goes where the user said."""
    rule, key = config.data.responses, os.environ.get(KEY, "").strip()
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        limits=httpx.Limits(max_connections=rule.concurrency * servers + servers, max_keepalive_connections=None),
        timeout=httpx.Timeout(None, connect=10.0),  # the whole of a request is timed in `Server._send`
    )


class Server:
    """One server, and what is known of it. `ready`: rows may be sent; `busy`: requests under way.

    answered, failed: requests so far; `reason`: of the last failure.
    """

    def __init__(self, url: str, config: RecipeConfig, http: httpx.AsyncClient, vocab: int, ends: set[int]):
        self.url = re.sub(r"(/v1)?/*$", "", url)
        self.config, self.http, self.vocab, self.ends = config, http, vocab, sorted(ends)
        self.dialect: Dialect = UNKNOWN
        self.model, self.version, self.adapter = "", None, False
        self.ready, self.busy, self.answered, self.failed = False, 0, 0, 0
        self.reason = ""
        self.refused = 0  # rows, one after the other
        self.greedy: list[int] | None = None  # its answer to the check's question

    @property
    def facts(self) -> dict[str, Any]:
        """What the manifest says of it; no address."""
        return {"engine": self.dialect.engine, "version": self.version, "model": self.model}

    # --------------------------------------------------------------------------------------------- requests

    async def ask(self, question: Question) -> tuple[list[int], str]:
        """(the ids produced, stop or length). Away, Refused."""
        return self._checked(question, await self._generate(question, self.config.data.responses.timeout))

    async def _generate(self, question: Question, seconds: float, **changes: Any) -> Reply:
        path, body = self.dialect.path, self.dialect.body(question, self.model, self.adapter) | changes
        answer = await self._send("POST", path, seconds, body)
        try:
            return self.dialect.read(answer)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise Away(f"{self.url}{path}: an answer without {error}", "server_answer_unreadable") from error

    def _checked(self, question: Question, reply: Reply) -> tuple[list[int], str]:
        """The ids up to the first end token. Whatever says that another prompt was answered, or in part, is refused."""
        ids, ends = reply.ids, set(self.ends)
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < self.vocab for i in ids):
            raise Refused(f"{self.url}: no token ids of the target's vocabulary", "server_gave_no_token_ids")
        if reply.prompt_tokens not in (None, len(question.ids)):
            text = f"{self.url}: read {reply.prompt_tokens} prompt tokens, not {len(question.ids)}"
            raise Refused(text, "server_read_other_prompt")
        end = next((n for n, token in enumerate(ids) if token in ends), None)
        if end is not None and end < question.budget:  # an engine may know fewer end tokens
            return ids[: end + 1], "stop"
        if len(ids) > question.budget:
            text = f"{self.url}: {len(ids)} tokens, where {question.budget} were asked for"
            raise Refused(text, "server_gave_too_many_tokens")
        if reply.finish == "stop" and type(reply.stop) is int and reply.stop in ends and len(ids) < question.budget:
            return [*ids, reply.stop], "stop"
        if reply.finish == "length" and ids:
            return ids, "length"
        text = f"{self.url}: {len(ids)} tokens without an end token, finished by {reply.finish}"
        raise Refused(text, "server_gave_no_end_token")

    async def _send(self, method: str, path: str, seconds: float, body: dict | None = None) -> dict[str, Any]:
        """The JSON object that the server answers with."""
        where = f"{self.url}{path}"
        try:
            async with asyncio.timeout(seconds):
                answer = await self.http.request(method, where, json=body)
        except TimeoutError as error:
            raise Away(f"{where} does not answer within {seconds:g} s", "server_timeout") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Away(f"{where} cannot be reached ({_said(error)})", "server_connection") from error
        status = answer.status_code
        if 300 <= status < 400:
            text = f"{where} sends elsewhere ({status}: {self._hidden(answer.headers.get('Location', ''))})"
            raise Away(text, "server_redirects")
        if status in (429, 503):
            raise Away(f"{where} is busy ({status})", "server_busy", _seconds(answer.headers.get("Retry-After")))
        if status >= 400:
            text = f"{where} answers {status}: {self._hidden(answer.text[:300])}"
            if status >= 500 or status in (401, 403, 404, 408):
                raise Away(text, f"server_error_{status}")
            raise Refused(text, f"server_error_{status}")
        try:
            found = answer.json()
        except (ValueError, RecursionError) as error:
            raise Away(f"{where}: an answer that is no JSON", "server_answer_unreadable") from error
        if not isinstance(found, dict):
            raise Away(f"{where}: an answer that is no JSON object", "server_answer_unreadable")
        return found

    def _hidden(self, text: str) -> str:
        """A server's own words in one line, without the key, however short that is."""
        key = os.environ.get(KEY, "").strip()
        line = " ".join((text.replace(key, "***") if key else text).split())
        return masked("".join(c for c in line if c.isprintable()))

    # --------------------------------------------------------------------------------------------- the check

    async def check(self, tokenizer: Any) -> None:
        """Raises Misfit or Away unless the server fits; finds out its engine, version and model."""
        card = await self._find_model()
        longest, needed = card.get("max_model_len"), self.config.data.max_length
        if isinstance(longest, int) and longest < needed:
            raise Misfit(f"{self.url} serves rows of {longest} tokens; data.max_length={needed} needs more")
        kwargs = self.config.target.template_kwargs
        text = chat.render(tokenizer, [{"role": "user", "content": PROBE}], True, kwargs)
        ids = chat.encode(tokenizer, text)
        tokenised = await self._compare_tokens(text, ids)
        question = Question(ids, min(PROBE_TOKENS, needed), ends=self.ends)
        first, second = [await self._greedy(question) for _ in range(2)]
        if first.ids != second.ids:
            raise Misfit(
                f"{self.url} answers the same greedy question in two ways (tokens {first.ids} and {second.ids}); "
                "see that it samples by the request alone, and uses batch-invariant kernels if it has them"
            )
        if self.greedy not in (None, first.ids):
            raise Misfit(f"{self.url} answers the check's question otherwise than earlier in this run: other weights?")
        if not tokenised:
            told = first.text
            if told is None and self.dialect.text:
                told = (await self._generate(question, PROBE_SECONDS, **self.dialect.text)).text
            self._compare_text(tokenizer, first.ids, told if isinstance(told, str) else "")
        self.greedy = first.ids

    async def _find_model(self) -> dict[str, Any]:
        """The card of the model to ask for; sets dialect, version, model."""
        listed = (await self._fit("GET", "/v1/models")).get("data")
        cards = listed if isinstance(listed, list) else []
        cards = [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
        wanted = self.config.data.responses.model
        names = [name for name in (wanted or self.config.target.model,) if name]
        card = next((c for c in cards if c["id"] in names or (not wanted and c.get("root") in names)), None)
        if card is None and not wanted and len(cards) == 1:
            card = cards[0]
        if card is None:
            raise Misfit(
                f"{self.url} does not serve {wanted or self.config.target.model}; it serves "
                f"{', '.join(c['id'] for c in cards) or 'nothing'}: set data.responses.model"
            )
        self.model, self.adapter = card["id"], bool(card.get("parent"))
        self.dialect = DIALECTS.get(str(card.get("owned_by")), UNKNOWN)
        path, key = self.dialect.version
        try:
            self.version = (await self._send("GET", path, PROBE_SECONDS)).get(key)
        except (Away, Refused):  # it does not tell
            self.version = None
        return card

    async def _fit(self, method: str, path: str, body: dict | None = None) -> dict[str, Any]:
        """`_send` for a check: what the server refuses then, it refuses for good."""
        try:
            return await self._send(method, path, PROBE_SECONDS, body)
        except Refused as error:
            raise Misfit(str(error)) from error
        except Away as error:
            if error.reason in ("server_error_401", "server_error_403"):
                raise Misfit(f"{error}; the key is taken from the environment variable {KEY}") from error
            if error.reason == "server_redirects":
                raise Misfit(f"{error}; give the server's own address in data.responses.urls") from error
            raise

    async def _greedy(self, question: Question) -> Reply:
        try:
            reply = await self._generate(question, PROBE_SECONDS)
            if reply.ids is None:
                raise Misfit(self._no_ids())
            self._checked(question, reply)
            return reply
        except Refused as error:
            reason = f"{error}: {self._no_ids()}" if error.reason in ("server_error_400", "server_error_422") else error
            raise Misfit(str(reason)) from error

    def _no_ids(self) -> str:
        return (
            f"{self.url} ({self.dialect.engine}) gives no token ids for a prompt of token ids, and text would have to "
            "be tokenised anew, which changes it; serve the target with vLLM (0.10.2 or later), SGLang or TensorRT-LLM"
        )

    async def _compare_tokens(self, text: str, ids: list[int]) -> bool:
        """Whether the server could be asked how it tokenises; Misfit when it does so otherwise."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        try:
            theirs = (await self._send("POST", "/tokenize", PROBE_SECONDS, body)).get("tokens")
        except Refused:
            return False
        except Away as error:
            if error.reason != "server_error_404":
                raise
            return False
        if isinstance(theirs, list) and theirs != ids:
            at = next((n for n, pair in enumerate(zip(theirs, ids, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(theirs), len(ids)) if at is None else at
            raise Misfit(
                f"{self.url} tokenises otherwise than the target's tokenizer: token {at} of a rendered prompt is "
                f"{theirs[at : at + 1]} there and {ids[at : at + 1]} here; serve the target that target.model names"
            )
        return isinstance(theirs, list)

    def _compare_text(self, tokenizer: Any, ids: list[int], told: str) -> None:
        """Misfit unless the ids it gave are, by the target's tokenizer, the text it gave."""
        ours = {tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False)}
        if _bare(told) not in {_bare(text) for text in ours}:
            raise Misfit(
                f"{self.url}: its answer {told!r} is {min(ours, key=len)!r} by the target's tokenizer; serve the "
                "target that target.model names"
            )


def _bare(text: str) -> str:
    """Without spaces and unfinished characters, which engines treat in their own ways at the ends of a text."""
    return "".join(text.replace("\ufffd", "").split())


def _said(error: Exception) -> str:
    return masked(str(error)) or type(error).__name__


def _seconds(text: str | None) -> float | None:
    """Of a Retry-After header; a date says as much as no header."""
    return min(float(text), 60.0) if text and text.isdecimal() else None
