"""Responses: the target answers the prompts, batch by batch, and the states of the decode pass are kept as captures.

`plan_batches` fixes once which prompts share a batch; a batch is the unit of work, of sharing between processes and of
resuming, so a restarted run ends with the same ids in any dtype. Held-out prompts are left to the evaluation.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrain.config import RecipeConfig
from headtrain.data_gen import capture, chat, claims, prompts, turns
from headtrain.data_gen.claims import leads
from headtrain.files import Manifest, free_bytes, read_json, sha256_file, write_json

if TYPE_CHECKING:
    from headtrain.data_gen import store
    from headtrain.target import Target

log = logging.getLogger(__name__)

ANSWERED = ("train", "valid")
TOO_LONG = "no_supervised_tokens_after_truncation"


class ResponseError(ValueError):
    """Responses that cannot be planned or finished."""


# ------------------------------------------------------------------------------------------------- the plan

def plan_batches(
    config: RecipeConfig, tokenizer: Any, prompts_folder: str | Path, responses_folder: str | Path
) -> dict[str, Any]:
    """Writes plan.json unless it is there; returns it: {backend, batches: [[[id, tokens, budget], …], …], left_out}.

    To be called by one process at a time. `tokens`: of the prompt (given: of the whole row); `budget`: new tokens
    allowed, over all turns. Rows are sorted by length, longest first, and fill batches up to
    data.responses.batch_tokens. Also `retokenised`, how many given rows are text, and `template`, a mark of the chat
    template.
    """
    path = Path(responses_folder) / "plan.json"
    if path.is_file():
        return read_json(path)
    chat.check_template(tokenizer, config.target.template_kwargs)
    claims.remove_parts(path.parent, path.name)
    given, left_out, rows, retokenised = config.data.responses.backend == "given", Counter(), [], 0
    asked = 0
    for prompt in prompts.load(prompts_folder):
        if prompt.split not in ANSWERED:
            continue
        asked += 1
        if given:
            found, reasons = given_rows(config, tokenizer, prompt)
            left_out.update(reasons)
            if found:
                rows.append([prompt.id, sum(len(row.ids) for row in found), 0])
                retokenised += prompt.token_ids is None
            continue
        try:
            tokens = len(chat.prompt_ids(tokenizer, prompt.messages, config.target.template_kwargs))
        except prompts.Reject as reason:
            left_out[str(reason)] += 1
            continue
        if tokens >= config.data.max_length:
            left_out[TOO_LONG] += 1
            continue
        tokens += sum(len(chat.encode(tokenizer, text)) for text in prompt.follow_ups)
        tokens = min(tokens, config.data.max_length - 1)
        most = config.data.responses.max_new_tokens * (1 + len(prompt.follow_ups))
        budget = min(most, config.data.max_length - tokens)
        rows.append([prompt.id, tokens, budget])
    if not rows:
        reasons = ", ".join(f"{name} {number}" for name, number in left_out.most_common())
        raise ResponseError(f"0 prompts left to answer: {reasons or 'no prompt is in split train or valid'}")
    plan = {
        "backend": config.data.responses.backend,
        "batches": _batches(rows, config.data.responses.batch_tokens),
        "left_out": dict(left_out),
        "retokenised": retokenised,
        "template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:32],
    }
    if left_out := +left_out:
        reasons = ", ".join(f"{name} {number}" for name, number in left_out.most_common(5))
        log.warning("left out of the responses to %d prompts: %s", asked, reasons)
    Path(responses_folder).mkdir(parents=True, exist_ok=True)
    write_json(path, plan)
    return plan


def _batches(rows: list[list], budget: int) -> list[list[list]]:
    """Rows by falling length, in batches of rows x longest row <= budget (one row at least)."""
    batches: list[list[list]] = []
    widest = 0
    for row in sorted(rows, key=lambda r: (-r[1] - r[2], r[0])):
        if batches and (len(batches[-1]) + 1) * widest <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
            widest = row[1] + row[2]
    return batches


def estimate_disk(config: RecipeConfig, hidden: int, taps: int, plan: dict, folder: str | Path, open_only=()) -> str:
    """The upper estimate of what the plan's captures need (of the batches in `open_only`, when given), as text.

    DiskError when the disk that holds `folder` has less, unless data.captures.allow_low_disk.
    """
    rows = [row for n, batch in enumerate(plan["batches"]) if not open_only or n in open_only for row in batch]
    mean = sum(row[1] + row[2] for row in rows) / max(len(rows), 1)
    rule, free = config.data.captures, free_bytes(folder)
    given, online = config.data.responses.backend == "given", rule.mode == "online"
    count = capture.stored_rows(config, len(rows), mean, hidden, taps)
    return capture.check_disk(count, mean, hidden, taps, rule.dtype, free, rule.allow_low_disk, given, online)


# ------------------------------------------------------------------------------------------------- the work

def work(
    config: RecipeConfig,
    target: Target,
    prompts_folder: str | Path,
    responses_folder: str | Path,
    captures_folder: str | Path,
    taps: list[int] | tuple[int, ...],
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Answers the batches of the plan that nobody has answered or is answering; returns how many this process did.

    Captures are written first, then the responses: a batch with responses is done. progress(new tokens of the batch so
    far, at most).
    """
    from headtrain.lean import speed_up
    from headtrain.team import shared

    responses_folder, captures_folder = Path(responses_folder), Path(captures_folder)
    online = config.data.captures.mode == "online"  # then the captures stage makes the few that there are
    job = _Job(config, target, responses_folder, None if online else captures_folder, () if online else tuple(taps))
    plan = plan_batches(config, target.tokenizer, prompts_folder, responses_folder)
    known = {prompt.id: prompt for prompt in prompts.load(prompts_folder)}
    open_batches = {
        n for n in range(len(plan["batches"])) if not (responses_folder / claims.file_name("responses", n)).is_file()
    }
    team = getattr(target, "team", None)  # of processes that run one target together
    if not (team.agree(open_batches) if team else open_batches):
        log.info("all %d batches are answered already; nothing to do", len(plan["batches"]))
        return 0
    log.info(estimate_disk(config, target.hidden_size, len(taps), plan, captures_folder, open_batches))
    if plan["backend"] == "server":
        from headtrain.data_gen import server

        def write(batch: int, chats: list[turns.Chat], left_out: Counter) -> None:
            _write(job, batch, [(c.prompt, c.rows) for c in chats], on_policy=True, left_out=dict(left_out))

        return server.work(config, target, responses_folder, plan, known, write, progress)
    if plan["backend"] == "local":
        speed_up(target)
    done = 0
    unfinished = claims.unfinished(responses_folder, "responses", len(plan["batches"]), captures_folder)
    for batch in shared(team, unfinished):
        rows = plan["batches"][batch]
        meter = claims.Meter(responses_folder, batch, progress, sum(row[2] for row in rows), tells=leads(team))
        asked = [known[row[0]] for row in rows]
        if plan["backend"] == "given":
            _write_given(job, batch, asked, meter, on_policy=plan.get("retokenised") == 0)
        else:
            meter.tell()
            begun = capture.under_way(responses_folder, "responses")
            tokens = sum(row[1] + row[2] for n in begun for row in plan["batches"][n])
            each = capture.bytes_per_token(target.hidden_size, len(taps), config.data.captures.dtype)
            capture.watch_disk(captures_folder, 0 if online else tokens * each)
            _answer(job, batch, asked, meter)
        done += 1
    return done


@dataclass
class _Job:
    """What all batches of a worker share."""

    config: RecipeConfig
    target: Target
    responses_folder: Path
    captures_folder: Path | None  # None: the states are not kept
    taps: tuple[int, ...]


def _answer(job: _Job, batch: int, asked: list[prompts.Prompt], meter: claims.Meter) -> None:
    """One batch: decode, turn by turn, then the captures file, then the responses file."""
    import torch

    from headtrain.data_gen import store

    began, config, target, taps = time.monotonic(), job.config, job.target, job.taps
    chats = [turns.begin(target.tokenizer, prompt, config.target.template_kwargs) for prompt in asked]
    tensors, open_chats, left_out = {}, chats, Counter()
    while open_chats:
        tensors, answers = _ask(job, open_chats, meter)
        told = list(zip(open_chats, answers, strict=True))
        open_chats = [c for c, (ids, cut_off) in told if turns.go_on(c, target, ids, cut_off, config)]
    for chat_ in chats:
        if chat_.left_out:
            left_out[chat_.left_out] += len(chat_.later)
    if any(c.turn for c in chats):  # else the one pass wrote them in this very order
        states = [state for c in chats for state in c.states]
        tensors = {name: torch.cat([state[name] for state in states]) for name in tensors}
    found = [(c.prompt, c.rows) for c in chats]
    rows = [row for prompt, own in found for row in _infos(prompt, own)]
    tensors["supervised"] = torch.tensor([mark for _, own in found for row in own for mark in row.supervised()])
    if job.captures_folder:
        kept, finite, not_finite = capture.keep_finite(rows, tensors, capture.once_more(config, target, taps))
    if not leads(target.team):
        return
    if job.captures_folder:
        told = capture.facts(config, target, taps) | {"left_out": not_finite}
        store.write_unit(job.captures_folder, "captures", batch, kept, finite, **told)
    small = {name: tensors[name] for name in ("ids", "supervised")}
    seconds = round(time.monotonic() - began, 3)
    meter.tell(left_out=dict(left_out))
    store.write_unit(
        job.responses_folder, "responses", batch, rows, small, on_policy=True, seconds=seconds, left_out=dict(left_out)
    )


def _ask(job: _Job, chats: list[turns.Chat], meter: claims.Meter) -> tuple[dict[str, Any], list]:
    """One turn of all chats, noted in them: (the pass's tensors, per chat the ids produced and whether cut off)."""
    from headtrain.data_gen import passes

    config, target, rule = job.config, job.target, job.config.data.responses
    ids = [c.ids for c in chats]
    budgets = [min(rule.max_new_tokens, config.data.max_length - len(row)) for row in ids]
    how = passes.Sampling(rule.temperature, rule.top_p)
    if rule.temperature > 0:
        how.uniform_BS = uniforms(config.seed, [c.name for c in chats], max(budgets)).to(target.device)
    dtype = passes.buffer_dtype(config.data.captures.dtype)
    kept, finish = passes.answer(target, ids, budgets, job.taps, dtype, how, meter.add)
    lengths, tensors, answers = kept.lengths_B.tolist(), kept.flat(), []
    for n, parts in enumerate(zip(*(tensor.split(lengths) for tensor in tensors.values()), strict=True)):
        states = dict(zip(tensors, parts, strict=True))
        answers.append((states["ids"][len(ids[n]) :].tolist(), finish[n] == "length"))
        chats[n].add(*answers[-1], states)
    return tensors, answers


def _infos(prompt: prompts.Prompt, rows: list[chat.ChatRow]) -> list[store.RowInfo]:
    """What the stores note of a prompt's rows; several are numbered."""
    from headtrain.data_gen import store

    names = [prompt.id] if len(rows) == 1 else [f"{prompt.id}.{n}" for n in range(len(rows))]
    return [
        store.RowInfo(
            name, prompt.split, prompt.source, len(row.ids), "length" if row.truncated else "stop", row.spans[0][0],
            sum(end - start for start, end in row.spans),
        )
        for name, row in zip(names, rows, strict=True)
    ]  # fmt: skip


def uniforms(seed: int, ids: list[str], count: int):
    """float32 [rows, count] in [0, 1): each prompt has its own generator, seeded by the run's seed and its id."""
    import torch

    rows = []
    for identity in ids:
        mark = int.from_bytes(hashlib.sha256(f"{seed}:{identity}".encode()).digest()[:7], "big")
        rows.append(torch.rand(count, generator=torch.Generator().manual_seed(mark)))
    return torch.stack(rows)


# ------------------------------------------------------------------------------------------------- given answers

def given_rows(config: RecipeConfig, tokenizer: Any, prompt: prompts.Prompt) -> tuple[list[chat.ChatRow], Counter]:
    """The training rows of a conversation's own answers, cut to data.max_length, and what was left out or cut.

    Token ids that the data brings stay as they are.
    """
    try:
        if prompt.token_ids is None:
            whole = chat.rows(tokenizer, prompt.messages, config.target.template_kwargs)
        else:
            whole = [_given_ids(tokenizer, *prompt.token_ids, prompt.finish == "length")]
    except prompts.Reject as reason:
        return [], Counter({str(reason): 1})
    found = [chat.cut(row, config.data.max_length) for row in whole]
    return [row for row in found if row], Counter({TOO_LONG: found.count(None)})


def _given_ids(tokenizer: Any, prompt: list[int], completion: list[int], truncated: bool) -> chat.ChatRow:
    if max(*prompt, *completion) >= len(tokenizer):
        raise prompts.Reject("token_id_beyond_the_vocabulary")
    rows: list[chat.ChatRow] = []
    chat.add_span(rows, prompt, completion, truncated)
    return rows[0]


def _write_given(job: _Job, batch: int, asked: list[prompts.Prompt], meter: claims.Meter, on_policy: bool) -> None:
    found = [(prompt, given_rows(job.config, job.target.tokenizer, prompt)[0]) for prompt in asked]
    meter.add(sum(len(row.ids) for _, own in found for row in own))
    meter.tell()
    _write(job, batch, found, on_policy=on_policy)


def _write(job: _Job, batch: int, found: list[tuple[prompts.Prompt, list[chat.ChatRow]]], **facts: Any) -> None:
    """The responses file of a batch of which there are no states yet: (prompt, its rows)."""
    import torch

    from headtrain.data_gen import store

    rows = [row for _, own in found for row in own]
    tensors = {
        "ids": torch.tensor([i for row in rows for i in row.ids], dtype=torch.int32),
        "supervised": torch.tensor([mark for row in rows for mark in row.supervised()], dtype=torch.bool),
    }
    infos = [info for prompt, own in found for info in _infos(prompt, own)]
    store.write_unit(job.responses_folder, "responses", batch, infos, tensors, **facts)


# ------------------------------------------------------------------------------------------------- the end

def finish(config: RecipeConfig, responses_folder: str | Path, captures_folder: str | Path) -> dict[str, Any]:
    """Writes the index and completes the manifest of the responses; that of the captures too when none is missing.

    Returns the counts. CoverageError when nothing or everything is supervised.
    """
    from headtrain.data_gen import store

    claims.remove_parts(Path(responses_folder), "*.json")
    plan = read_json(Path(responses_folder) / "plan.json")
    index = store.write_index(responses_folder, "responses", len(plan["batches"]))
    rows = store.ResponseStore(responses_folder).rows
    tokens, supervised = sum(row.tokens for row in rows), sum(row.supervised for row in rows)
    share = chat.check_coverage(supervised, tokens)
    counts = {"rows": len(rows), "tokens": tokens, "supervised": supervised, "supervised_share": round(share, 4)}
    counts.update(Counter(row.split for row in rows))
    counts["supervised_train"] = sum(row.supervised for row in rows if row.split == "train")
    counts.update(Counter(f"finish_{row.finish}" for row in rows))
    counts["truncated"] = counts.get("finish_length", 0)
    log.info("%d rows, %d tokens, %.1f %% supervised", len(rows), tokens, 100 * share)
    log.info("%d rows end by length, without an end token", counts["truncated"])
    if plan["backend"] == "given":
        counts["retokenised"] = plan.get("retokenised", 0)
        asked = sum(map(len, plan["batches"]))
        log.info("%d of %d prompts were tokenised from text, not from token ids", counts["retokenised"], asked)
    if not index["on_policy"]:
        log.warning("these responses are the data's own answers, not the target's: off-policy")
    left_out = Counter(plan["left_out"]) + store.left_out(responses_folder, "responses", len(plan["batches"]))
    more = {"index": sha256_file(Path(responses_folder) / "index.json")}
    if plan["backend"] == "server":
        from headtrain.data_gen import server

        more["servers"] = server.seen(Path(responses_folder))
        if served_none := left_out - Counter(plan["left_out"]):
            log.warning("left out of the servers' responses: %s", ", ".join(f"{k} {n}" for k, n in served_none.items()))
    Manifest(responses_folder).finish(
        counts, dict(left_out), on_policy=index["on_policy"], template=plan.get("template"), **more
    )
    if index["files"] and not capture.missing(responses_folder, captures_folder):
        capture.finish(config, responses_folder, captures_folder)
    return counts


def status(responses_folder: str | Path, memory: dict[str, Any] | None = None) -> dict[str, Any]:
    """How far the answers are: claims.progress_of, and estimate: new tokens at most; expected: new tokens, by how long
    the answers are so far; prompts: answered or left out since; of: prompts in all; left_out: of the plan too;
    row_tokens: of finished batches, with their prompts; rows_expected: likewise of all.

    memory: a dict that the caller keeps from call to call, which saves reading the plan again. Without a plan all is 0.
    """
    path, memory = Path(responses_folder) / "plan.json", {} if memory is None else memory
    if "plan" not in memory and path.is_file():
        plan = read_json(path)
        memory["plan"] = [  # of each batch: prompts, their tokens, new tokens at most
            (len(batch), sum(row[1] for row in batch if row[2]), sum(row[2] or row[1] for row in batch))
            for batch in plan["batches"]
        ]
        memory["left_out"], memory["done"] = Counter(plan["left_out"]), {}
    sizes, left_out = memory.get("plan", []), memory.get("left_out", Counter())
    found = claims.progress_of(Path(responses_folder), "responses", len(sizes), memory.get("done"))
    done, servers, estimate = found["done"], found["servers"], sum(size[2] for size in sizes)
    settled = servers["settled"] if servers else sum(sizes[n][2] for n in done)
    told = found["tokens"] if servers else sum(note.get("tokens", 0) for note in done.values())
    share = told / settled if settled else 1.0
    expected = max(found["tokens"], round(told + (estimate - settled) * share))
    return {
        **found, "estimate": estimate, "expected": expected, "left_out": left_out + found["left_out"],
        "prompts": servers["prompts"] if servers else sum(sizes[n][0] for n in done),
        "of": sum(size[0] for size in sizes),
        "row_tokens": sum(sizes[n][1] for n in done) + told, "rows_expected": sum(size[1] for size in sizes) + expected,
    }
