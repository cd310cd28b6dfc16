"""Responses from servers (data.responses.backend=server): many requests at a time, to any number of servers.

What is finished is kept answer by answer in `answers.jsonl`, since a batch of a few hundred answers takes long, and
whatever ends this process must lose none: an answer is one write at the file's end, before the next question is asked.
It is not flushed to disk: the system keeps it when the process is killed; when the machine fails, a line may be
missing or cut and is asked for again. When all rows of a batch are answered, its responses file is written as always.

A failed request is tried again, elsewhere if possible. The server that failed gets no rows until a check finds that it
fits. A row that fails `data.responses.tries` times is left out for the last failure's reason; failures that are the
fault of no row (no server is ready, or all are busy) only wait, up to `data.responses.patience`, and then end the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from headtrain.config import RecipeConfig, TargetConfig
from headtrain.data_gen import claims, turns
from headtrain.data_gen.account import Account
from headtrain.data_gen.client import Away, Refused, Server, ServerError, client
from headtrain.data_gen.dialects import Question
from headtrain.data_gen.prompts import Prompt
from headtrain.files import claimed, read_json, room_for, write_json

log = logging.getLogger(__name__)

JOURNAL = "answers.jsonl"
SEEN = "servers.json"  # engines that answered this run, for the manifest
ENOUGH = 20  # prompts that fail before any is answered end the run
SUSPECT = 8  # rows that a server refuses, none answered between them, before it is checked
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between two tries of a row, or two checks of a server that is away


class Journal:
    """The finished answers of a run that is under way, in a file. `tokens`, `answers`: how many there are.

    Only those of `open_prompts` are kept in memory, until they are taken.
    """

    def __init__(self, path: Path, open_prompts: set[str]):
        self.tokens = self.answers = 0
        self.known: dict[tuple[str, int], tuple[array, str]] = {}
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        end = 0
        with open(path, "rb") as lines:
            for line in lines:
                end += len(line) if line.endswith(b"\n") else 0
                try:
                    row = json.loads(line)
                    ids = array("i", row["ids"])
                    if line.endswith(b"\n") and row["id"] in open_prompts:
                        self.known[row["id"], row["turn"]] = ids, row["finish"]
                except (ValueError, KeyError, TypeError, OverflowError):  # the machine failed while it was written
                    log.warning("%s has a damaged line; that answer is asked for again", path)
                    continue
                self.tokens, self.answers = self.tokens + len(ids), self.answers + 1
        os.ftruncate(self.handle, end)  # a last line that was cut
        self.path, self.end = path, end

    def take(self, name: str, turn: int) -> tuple[list[int], str] | None:
        ids, finish = self.known.pop((name, turn), (None, ""))
        return None if ids is None else (ids.tolist(), finish)

    def add(self, name: str, turn: int, ids: list[int], finish: str) -> None:
        line = json.dumps({"id": name, "turn": turn, "ids": ids, "finish": finish}, separators=(",", ":")) + "\n"
        left = data = line.encode()
        try:
            with room_for(self.path):
                while left:
                    left = left[os.write(self.handle, left) :]
        except OSError:
            os.ftruncate(self.handle, self.end)  # for a shorter answer there may be room
            raise
        self.end += len(data)
        self.tokens, self.answers = self.tokens + len(ids), self.answers + 1

    def close(self) -> None:
        os.close(self.handle)


class Pool:
    """The servers of a run: hands out the one with the fewest requests, checks those that failed until they fit."""

    def __init__(self, servers: list[Server], tokenizer: Any, config: RecipeConfig):
        self.servers, self.tokenizer, self.rule = servers, tokenizer, config.data.responses
        self.changed = asyncio.Condition()
        self.started: asyncio.Task | None = None
        self.checks: dict[Server, asyncio.Task] = {}
        self.reason: Exception | str = ""

    async def start(self) -> None:
        """Checks all servers; Misfit when one does not fit, ServerError when none can be reached."""
        found = await asyncio.gather(*(server.check(self.tokenizer) for server in self.servers), return_exceptions=True)
        for error in found:
            if error is not None and not isinstance(error, Away):
                raise error
        for server, error in zip(self.servers, found, strict=True):
            server.ready = error is None
        if not any(server.ready for server in self.servers):
            raise ServerError(f"no server of data.responses.urls can be used: {'; '.join(map(str, found))}")
        for server, error in zip(self.servers, found, strict=True):
            if error is not None:
                log.warning("%s; going on without it until it answers", error)
                self.doubt(server, error)

    def doubt(self, server: Server, error: Exception) -> None:
        """No more rows for the server until a check finds that it fits."""
        server.ready, server.reason, self.reason = False, str(error), error
        if server not in self.checks:
            self.checks[server] = asyncio.create_task(self._watch(server))

    async def _watch(self, server: Server) -> None:
        wait, told = FIRST_WAIT, False
        while True:
            try:
                await server.check(self.tokenizer)
                break
            except ServerError as error:  # a Misfit too: it may have been started anew with another model
                server.reason, self.reason = str(error), error
                if not told:
                    log.warning("%s; it gets no prompts until it is back", error)
                told = True
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        if told:
            log.warning("%s is back", server.url)
        del self.checks[server]
        async with self.changed:
            server.ready = True
            self.changed.notify_all()

    @asynccontextmanager
    async def one(self, avoid: set[Server]):
        """A ready server for one request, another than those to avoid where there is one. All are checked at the first.

        ServerError after data.responses.patience seconds in which none was ready.
        """
        self.started = self.started or asyncio.create_task(self.start())
        await asyncio.shield(self.started)
        async with self.changed:
            while not (server := self._free(avoid)):
                away = not any(s.ready for s in self.servers)
                try:
                    async with asyncio.timeout(self.rule.patience if away else None):
                        await self.changed.wait()
                except TimeoutError as error:
                    raise ServerError(
                        f"no server was ready for {self.rule.patience:g} s: {self.reason}. Finished responses are "
                        "kept; the same command goes on"
                    ) from error
            server.busy += 1
        try:
            yield server
        finally:
            server.busy -= 1
            async with self.changed:
                self.changed.notify_all()

    def _free(self, avoid: set[Server]) -> Server | None:
        free = [s for s in self.servers if s.ready and s.busy < self.rule.concurrency]
        return min(free, key=lambda s: (s in avoid, s.busy), default=None)


# ------------------------------------------------------------------------------------------------- the work

def check(config: RecipeConfig, tokenizer: Any, vocab: int, ends: set[int]) -> None:
    """Misfit or ServerError, before anything is done, unless the servers can answer for the target."""
    asyncio.run(_with_pool(config, tokenizer, vocab, ends, Pool.start))


def all_kept(folder: Path) -> bool:
    """Whether an answer to every prompt without a responses file is kept: then no server may be needed any more."""
    if not (folder / "plan.json").is_file() or not (folder / JOURNAL).is_file():
        return False
    batches = enumerate(read_json(folder / "plan.json")["batches"])
    missing = [rows for n, rows in batches if not (folder / claims.file_name("responses", n)).is_file()]
    open_prompts = {row[0] for rows in missing for row in rows}
    with open(folder / JOURNAL, "rb") as lines:
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):  # a damaged line
                open_prompts.discard(json.loads(line)["id"])
    return not open_prompts


async def _with_pool(config: RecipeConfig, tokenizer: Any, vocab: int, ends: set[int], do: Callable) -> Any:
    urls = config.data.responses.urls
    async with client(config, len(urls)) as http:
        pool = Pool([Server(url, config, http, vocab, ends) for url in urls], tokenizer, config)
        try:
            return await do(pool)
        finally:
            for task in pool.checks.values():
                task.cancel()


def work(
    config: RecipeConfig,
    target: Any,
    folder: Path,
    plan: dict[str, Any],
    known: dict[str, Prompt],
    write: Callable[[int, list[turns.Chat], Counter], None],
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Answers the open batches of the plan; returns how many. For one process at a time.

    target: tokenizer, vocab_size and eos_ids of it. write(batch, chats, left out) stores a batch that is answered.
    """
    with claimed(folder / "claims" / "servers.lock") as mine:
        if not mine:
            raise ServerError(f"{folder}: another process asks the servers already; wait for it")
        batches = [n for n in range(len(plan["batches"])) if not (folder / claims.file_name("responses", n)).is_file()]
        for batch in batches:
            claims.remove_parts(folder, claims.file_name("responses", batch))
        claims.remove_parts(folder / "claims", "*.json")
        asked = {batch: [known[row[0]] for row in plan["batches"][batch]] for batch in batches}
        journal = Journal(folder / JOURNAL, {prompt.id for batch in asked.values() for prompt in batch})
        most = sum(row[2] for batch in plan["batches"] for row in batch)
        account = Account(folder, plan, set(asked), claims.Meter(folder, "servers", progress, most, journal.tokens))
        run = _Run(config, target, asked, journal, account, write, folder / SEEN)
        try:
            asyncio.run(_with_pool(config, target.tokenizer, target.vocab_size, target.eos_ids, run.answer))
        finally:
            journal.close()
    return len(batches)


class _Run:
    """The chats of all open batches, and how many of each batch are still to be answered."""

    def __init__(
        self, config: RecipeConfig, target: Any, asked: dict[int, list[Prompt]], journal: Journal, account: Account,
        write: Callable, seen: Path,
    ):  # fmt: skip
        self.config, self.rule, self.target, self.asked = config, config.data.responses, target, asked
        self.journal, self.account, self.write, self.seen = journal, account, write, seen
        self.chats: dict[int, dict[str, turns.Chat]] = {batch: {} for batch in asked}
        self.left_out: dict[int, Counter] = {batch: Counter() for batch in asked}
        self.failed: Counter = Counter()
        self.empty: dict[int, Counter] = {}  # batches without an answer
        self.told = 0  # prompts of which a warning said that they are left out

    async def answer(self, pool: Pool) -> None:
        """All chats, `concurrency` of them to each server at a time, in the order of the plan."""
        _note_servers(self.seen, pool.servers)
        rows = ((batch, prompt) for batch in list(self.asked) for prompt in self.asked[batch])
        lanes = self.rule.concurrency * len(pool.servers)
        telling = asyncio.create_task(self.account.keep_telling(pool.servers))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(lanes):
                    group.create_task(self._lane(rows, pool))
            self._see_that_some_are_answered(1)
            for batch, left_out in self.empty.items():
                self.write(batch, [], left_out)
        except* Exception as errors:  # the first one ended the others
            raise errors.exceptions[0] from None
        finally:
            telling.cancel()
            self.account.tell(pool.servers)
            _note_servers(self.seen, pool.servers)
            for server in pool.servers:
                log.info("%s (%s %s): %d answers", server.url, server.dialect.engine, server.version, server.answered)

    async def _lane(self, rows: Iterator[tuple[int, Prompt]], pool: Pool) -> None:
        for batch, prompt in rows:
            chat = turns.begin(self.target.tokenizer, prompt, self.config.target.template_kwargs)
            reason = await self._chat(chat, pool)
            if reason:
                self.left_out[batch][reason] += 1
                self.failed[reason] += 1
                self._see_that_some_are_answered(ENOUGH)
            self.account.settle(chat, reason)
            self.chats[batch][prompt.id] = chat
            if len(self.chats[batch]) == len(self.asked[batch]):
                self._finish(batch)

    def _finish(self, batch: int) -> None:
        chats = [self.chats[batch][prompt.id] for prompt in self.asked.pop(batch)]
        left_out = self.left_out.pop(batch)
        for chat in chats:
            if chat.left_out:
                left_out[chat.left_out] += len(chat.later)
        del self.chats[batch]
        if found := [chat for chat in chats if chat.rows]:
            self.write(batch, found, left_out)
        else:  # is written at the end: until then a new start asks for it once more
            self.empty[batch] = left_out

    def _see_that_some_are_answered(self, failed: int) -> None:
        """ServerError where so many prompts failed and none was ever answered: then it is not the prompts."""
        if not self.journal.answers and self.failed.total() >= failed:
            reasons = ", ".join(f"{name} {number}" for name, number in self.failed.most_common())
            raise ServerError(f"no prompt was answered, {self.failed.total()} failed: {reasons}; see the servers' logs")

    async def _chat(self, chat: turns.Chat, pool: Pool) -> str:
        """Asks all turns; why the chat is left out, or nothing. Later turns that cannot be had are the chat's own."""
        while True:
            found = self.journal.take(chat.prompt.id, chat.turn)
            if found is None:
                try:
                    found = await self._answer(chat, pool)
                except (Away, Refused) as error:
                    log.log(logging.WARNING if self.told < 5 else logging.INFO, "%s is left out: %s", chat.name, error)
                    self.told += 1
                    if not chat.rows:
                        return error.reason
                    chat.left_out, chat.later = f"turns_{error.reason}", ["", *chat.later]  # this turn too
                    return ""
                self.journal.add(chat.prompt.id, chat.turn, *found)
                self.account.meter.add(len(found[0]))
            ids, finish = found
            chat.add(ids, finish == "length", {})
            if not turns.go_on(chat, self.target, ids, finish == "length", self.config):
                return ""

    async def _answer(self, chat: turns.Chat, pool: Pool) -> tuple[list[int], str]:
        """One turn, tried until it is answered; the last Away or Refused when it is not."""
        budget = min(self.rule.max_new_tokens, self.config.data.max_length - len(chat.ids))
        rule, seed = self.rule, _seed(self.config.seed, chat.name) if self.rule.temperature > 0 else None
        question = Question(chat.ids, budget, rule.temperature, rule.top_p, seed, sorted(self.target.eos_ids))
        failed: list[Server] = []
        until = time.monotonic() + rule.patience
        while True:
            async with pool.one(set(failed)) as server:
                try:
                    found = await server.ask(question)
                    server.answered, server.refused = server.answered + 1, 0
                    return found
                except (Away, Refused) as error:
                    last = error
                    server.failed, server.reason, server.refused = server.failed + 1, str(error), server.refused + 1
                    if isinstance(error, Away) or server.refused >= SUSPECT:  # it may serve something else by now
                        server.refused = 0
                        pool.doubt(server, error)
                    if error.reason != "server_busy":
                        failed.append(server)
                        until = time.monotonic() + rule.patience
            if len(failed) >= rule.tries:
                raise last
            if time.monotonic() > until and last.reason == "server_busy":
                raise ServerError(f"{last} for {rule.patience:g} s; lower data.responses.concurrency")
            pause = last.wait if isinstance(last, Away) else 0
            await asyncio.sleep(min(FIRST_WAIT * 2 ** len(failed), LONGEST_WAIT) if pause is None else pause)


def seen(folder: Path) -> list[dict[str, Any]]:
    """Engine, version and served name of the servers that answered."""
    return read_json(folder / SEEN)


def _note_servers(path: Path, servers: list[Server]) -> None:
    """Adds what is known of the servers to what answered earlier parts of this run."""
    seen = read_json(path) if path.is_file() else []
    seen += [server.facts for server in servers if server.model and server.facts not in seen]
    write_json(path, [facts for n, facts in enumerate(seen) if facts not in seen[:n]])


def _seed(seed: int, name: str) -> int:
    """Of a request: of the run and the prompt, in 31 bits, which every engine takes."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big") >> 1


def end_ids(target: TargetConfig, text_config: Any, tokenizer: Any) -> set[int]:
    """Every token id that ends a response, as `Target.eos_ids`, without loading weights."""
    from transformers import GenerationConfig

    from headtrain.target import model_path

    try:
        rule = GenerationConfig.from_pretrained(model_path(target), revision=target.revision)
    except OSError:  # there is no generation_config.json
        rule = GenerationConfig.from_model_config(text_config)
    ids = rule.eos_token_id
    return {*(ids if isinstance(ids, list) else [] if ids is None else [ids])} | ({tokenizer.eos_token_id} - {None})
