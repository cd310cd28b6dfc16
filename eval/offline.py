"""Acceptance from stored captures alone: what greedy chain drafting would have been credited, without the target.

The head drafts from every slot at once (`draft_all`), and steps are walked along the stored text. Where that text is
the target's greedy one and the states have the decoder's dtype this is τ, step by step as the decoder counts it.
Elsewhere the figure says how far the drafts agree with the stored text, and is named so.
Shapes: T tokens of a row, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrain.eval.acceptance import metrics, tau_interval
from headtrain.files import Manifest

if TYPE_CHECKING:
    from torch import Tensor

    from headtrain.data_gen.store import CaptureRow, CaptureStore, RowInfo
    from headtrain.heads.base import Head


class OfflineError(ValueError):
    """Captures that this head cannot be measured on; the message says why."""


def measure(
    name: str, head: Head, store: CaptureStore, run: Path, ks: list[int], dtype: str, limit: int | None = None
) -> list[dict[str, Any]]:
    """One result per split, source (and all of them, None) and K, over the first `limit` rows of each split.

    dtype: the decoder's, in which the head runs. `exact` results have `tau` and all other metrics of the report; others
    have `agreement_with_stored_text` instead, and `why_not_exact`.
    """
    _check(name, head, store)
    reasons, budget, most = inexact(run, dtype), budget_of(run), max(ks)
    differing, steps = 0, {}
    for row in _first(store.rows, limit):
        read = store.read(row)
        drafts_TK, wrong = _drafts(head, read, most)
        differing += wrong
        for k in ks:
            steps[row.id, k] = steps_of(row, read, drafts_TK, k, budget)
    if differing:
        reasons.append(f"at {differing} positions the stored token is not the target's first choice")
    results = []
    for k in ks:
        for (split, source), rows in _groups(_first(store.rows, limit)).items():
            of_rows = [steps[row.id, k] for row in rows]
            results.append({
                "kind": "offline", "split": split, "source": source, "head": name, "drafter": "head", "k": k,
                "tree": "chain", "temperature": 0.0, "dtype": dtype, "prompts": len(rows), "exact": not reasons,
                "why_not_exact": reasons, **_figures(of_rows, k, exact=not reasons),
                "per_prompt": [
                    {"id": row.id, "drafted": [d for d, _ in own], "accepted": [a for _, a in own]}
                    for row, own in zip(rows, of_rows, strict=True)
                ],
            })  # fmt: skip
    return results


def _check(name: str, head: Head, store: CaptureStore) -> None:
    c = head.config
    if (c.vocab_size, c.target_hidden_size) != (store.index["vocab"], store.hidden):
        raise OfflineError(
            f"head {name}: made for a target with {c.vocab_size} tokens and hidden size {c.target_hidden_size}; the "
            f"captures in {store.folder} are of one with {store.index['vocab']} and {store.hidden}"
        )
    if c.taps and list(c.taps) != list(store.taps):
        raise OfflineError(f"head {name} reads taps {c.taps}; the captures in {store.folder} have {store.taps}")


def inexact(run: Path, dtype: str) -> list[str]:
    """Why the figure would not be the decoder's τ, by what the manifests of responses and captures say."""
    answers, states = (Manifest(run / stage).data.get("made_from", {}) for stage in ("responses", "captures"))
    rule, reasons = answers.get("responses", {}), []
    if rule.get("backend") == "server":
        reasons.append("the answers are servers', whose arithmetic is not the decoder's")
    elif rule.get("backend") != "local":
        reasons.append("the answers are not known to be the target's own")
    if rule.get("temperature") != 0:
        reasons.append(f"the answers were sampled (temperature {rule.get('temperature')})")
    made = {
        "the answers were made": answers.get("target", {}).get("dtype"),
        "the states were computed": states.get("target", {}).get("dtype"), "the states are stored": states.get("dtype"),
    }  # fmt: skip
    made = {what: own or "an unknown dtype" for what, own in made.items()}
    return reasons + [f"{what} in {own}, the decoder runs in {dtype}" for what, own in made.items() if own != dtype]


def budget_of(run: Path) -> tuple[int, int] | None:
    """(new tokens, tokens of a whole row) that the target's answers were allowed; None where there is no such rule."""
    made = Manifest(run / "responses").data.get("made_from", {})
    rule = made.get("responses", {})
    return (rule["max_new_tokens"], made["max_length"]) if rule.get("backend") in ("local", "server") else None


def steps_of(
    row: RowInfo, read: CaptureRow, drafts_TK: Tensor, k: int, budget: tuple[int, int] | None
) -> list[tuple[int, int]]:
    """(drafted, accepted) of each step of a row, all of its answers one after another.

    A decoder drafts as far as its budget goes: it does not know that an end token is near.
    """
    import torch

    from headtrain.heads.simulate import accepted_chain, spans

    next_T, cu_2 = read.ids.long().roll(-1), torch.tensor([0, row.tokens])
    out = []
    for start, end in spans(read.supervised, cu_2):
        allowed = min(budget[0], budget[1] - start) if budget else end - start
        only_T = torch.zeros_like(read.supervised)
        only_T[start:end] = True
        emitted = 1
        for accepted in accepted_chain(drafts_TK, next_T, only_T, cu_2, k):
            out.append((min(k, allowed - emitted - 1), accepted))
            emitted += accepted + 1
    return out


def _drafts(head: Head, read: CaptureRow, k: int) -> tuple[Tensor, int]:
    """(target ids of every slot's chain [T, K], supervised tokens that are not the target's choice)."""
    import torch

    from headtrain.heads.base import Batch

    length = len(read.ids)
    batch = Batch(
        read.ids.long(), torch.arange(length), torch.tensor([0, length], dtype=torch.int32), read.supervised.bool(),
        read.taps, read.last, read.argmax.long(), read.logsumexp,
    )  # fmt: skip
    parameter = next(head.parameters())
    drafts_TK = head.draft_all(batch.to(parameter.device, parameter.dtype), k).cpu()
    return drafts_TK, int((read.supervised[1:] & (read.ids[1:] != read.argmax[:-1])).sum())


def _first(rows: list[RowInfo], limit: int | None) -> Iterator[RowInfo]:
    seen: dict[str, int] = {}
    for row in rows:
        seen[row.split] = seen.get(row.split, 0) + 1
        if limit is None or seen[row.split] <= limit:
            yield row


def _groups(rows: Iterator[RowInfo]) -> dict[tuple[str, str | None], list[RowInfo]]:
    """Rows by (split, None), and by (split, source) where a split has several sources."""
    groups: dict[tuple[str, str | None], list[RowInfo]] = {}
    for row in rows:
        for source in (None, row.source):
            groups.setdefault((row.split, source), []).append(row)
    whole = {split: len(of_split) for (split, source), of_split in groups.items() if source is None}
    return {key: own for key, own in sorted(groups.items(), key=str) if key[1] is None or len(own) < whole[key[0]]}


def _figures(of_rows: list[list[tuple[int, int]]], k: int, exact: bool) -> dict[str, Any]:
    numbers = metrics(of_rows, k)
    if exact:
        return numbers | {"tau_ci": tau_interval(of_rows)}
    agreement = {"tokens_per_step": numbers["tau"], "share_by_position": numbers["alpha"]}
    return {"tau": None, "steps": numbers["steps"], "agreement_with_stored_text": agreement}


# ------------------------------------------------------------------------------------------- for a terminal

def table(made: dict[str, Any]) -> str:
    """The figures of all results, and why they are not τ where they are not."""
    results = made["results"]
    deepest = max(result["k"] for result in results)
    shares = [f"α{n}" if results[0]["exact"] else f"{n}" for n in range(1, deepest + 1)]
    lines = [["head", "split", "source", "K", "rows", "steps", "τ" if results[0]["exact"] else "agreement", *shares]]
    for r in results:
        agreed = r.get("agreement_with_stored_text")
        values = [agreed["tokens_per_step"], *agreed["share_by_position"]] if agreed else [r["tau"], *r["alpha"]]
        numbers = ["–" if value is None else f"{value:.2f}" for value in values]
        line = [r["head"], r["split"], r["source"] or "all", str(r["k"]), str(r["prompts"]), str(r["steps"]), *numbers]
        lines.append(line + [""] * (len(lines[0]) - len(line)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    if why := results[0]["why_not_exact"]:
        text.append("agreement with stored text (tokens per step, and the share of steps by position), not τ: ")
        text[-1] += "; ".join(why)
    return "\n".join(text)
