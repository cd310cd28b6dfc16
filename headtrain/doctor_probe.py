"""The doctor's probe: a few short answers of the target, and what the head drafts along them, computed twice.

The target answers greedily. Along its answers the head's folder, read as engines read it, drafts by a plain path of its
own (doctor_plain.py): its logits and drafts must be those of headtrain's head, its acceptance that of the report. Then
the folder is read with one mistake at a time. Where a mistaken reading drafts better than the right one, the head was
trained with that mistake, or exported with its opposite.
Shapes: T tokens, H hidden, A taps, S slots of the answers, K drafts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtrain.doctor_checks import FAULT, OK, OTHER_TARGET, WARNING, Case, Finding, fault, warning
from headtrain.doctor_plain import KINDS, Drafts, Ends, PlainHead, Reading, as_served
from headtrain.engines import TapsError
from headtrain.eval.decoder.decode import decode
from headtrain.eval.decoder.drafters.head import HeadDrafter
from headtrain.eval.decoder.drafters.none import NoDrafter
from headtrain.eval.decoder.sampling import Sampling
from headtrain.expected import Expected
from headtrain.facts import head_rope
from headtrain.heads.base import Head, load_head
from headtrain.target import Target

CLOSE = 1e-3  # of the largest logit's magnitude, between two ways to compute the same
UNLIKE = 3.0  # standard errors by which acceptance must be below the report's
SURE = 4.0  # standard errors by which a mistaken reading must be better
GAIN = 0.05  # share of accepted drafts (and drafts per slot), or of clearness, by which it must be better


@dataclass
class Text:
    """A prompt of P tokens with the target's greedy answer, and the target's states at every tap that is looked at."""

    ids_T: Tensor
    prompt: int
    taps: dict[int, Tensor]  # tap -> [T, H]
    last_TH: Tensor  # after the final norm


def probe(
    case: Case, folder: Path, target: Target, prompts: list[list[int]], *, k: int, new: int, expected: Expected | None
) -> Iterator[Finding]:
    """Findings about states, logits, first drafts and acceptance. prompts: token ids; new: answer tokens of each."""
    yield Finding("states", OK, "lm_head(final norm(last block)) gives the target's own logits on a probe")
    head = _loaded(folder, target)
    if isinstance(head, Finding):
        yield head
        head = None
    answers = decode(target, NoDrafter(), prompts, k=0, max_new_tokens=new)
    texts = [(prompt, prompt + answer.ids) for prompt, answer in zip(prompts, answers, strict=True)]
    steps: list[int] = []  # accepted drafts of each
    if case.kind in KINDS:
        steps = yield from _plain(case, head, target, texts, k)
    elif head is not None:
        k = min(k, head.config.unroll) if head.by_depth else k
        decoded = decode(target, HeadDrafter(head, Sampling()), prompts, k=k, max_new_tokens=new)
        steps = [step.accepted for answer in decoded for step in answer.steps]
    if steps:
        yield _acceptance(steps, k, expected)
    elif head is not None:
        says = f"the target's answers are too short for drafts of {k} tokens"
        yield warning("acceptance", says, "nothing is known of it", "give other prompts, or a smaller k")


def _loaded(folder: Path, target: Target) -> Head | Finding:
    try:
        embedding, lm_head = target.lent()
        head = load_head(folder, embedding, target.dtype, lm_head).to(target.device)
    except ValueError as error:
        return fault("drafts", f"headtrain cannot load the head: {error}")
    if beyond := [tap for tap in head.config.taps if not 1 <= tap <= target.num_layers]:
        return fault("drafts", f"tap {beyond[0]} does not exist: the target has {target.num_layers} blocks")
    ids = head.to_target_ids(torch.arange(head.config.draft_vocab_size, device=target.device))
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        return fault("drafts", f"draft ids lead to {int(ids.min())} … {int(ids.max())}, outside of the target's tokens")
    return head


# ----------------------------------------------------------------------------------------------------- two ways

def _plain(case: Case, head: Head | None, target: Target, texts: list, k: int):
    """Findings of the plain path; returns the accepted drafts of every step along the answers."""
    blocks = target.num_layers
    try:
        served = as_served(case.engine, case.kind, case.config, blocks, case.sglang)
        readings = {"": ("", served)} | variants(case, served, blocks)
        wanted = sorted({tap for _, reading in readings.values() for tap in reading.taps} | {blocks})
        rows = [_states(target, ids, len(prompt), tuple(wanted)) for prompt, ids in texts]
        ends = Ends(target.embed.weight.float().cpu(), target.lm_head.weight.float().cpu(),
                    case.parts.norm_weight.float())  # fmt: skip
        plain = PlainHead(case.kind, case.config, case.tensors, ends, served)
        runs = [_run(plain, row, k) for row in rows]
        slots = [_slots(plain, row, k) for row in rows]
    except (TapsError, KeyError, RuntimeError, IndexError) as error:
        yield fault("drafts", f"the folder cannot be run as engines read it ({_reason(error)})")
        return []
    if head is not None:
        yield _compared(head, rows, runs, k)
    yield _explained(case, rows, ends, readings, _joined(slots), k)
    return [step for row, _ in slots for step in _walk(row.tolist())]


def _reason(error: BaseException) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]


def _states(target: Target, ids: list[int], prompt: int, taps: tuple[int, ...]) -> Text:
    ids_T = torch.tensor(ids)
    states = target.forward(ids_T[None].to(target.device), taps=taps)
    by_tap = dict(zip(taps, states.taps_BLAH[0].float().cpu().unbind(1), strict=True))
    return Text(ids_T, prompt, by_tap, states.last_BLH[0].float().cpu())


def _run(plain: PlainHead, row: Text, k: int, forced: bool = False) -> Drafts:
    reading = plain.reading
    taps_TAH = torch.stack([row.taps[tap] for tap in reading.taps], 1) if reading.taps else row.last_TH[:, None]
    last_TH = row.last_TH if reading.normed_last else row.taps[max(row.taps)]
    return plain.drafts(row.ids_T, taps_TAH, last_TH, k, forced)


def _slots(plain: PlainHead, row: Text, k: int) -> tuple[Tensor, Tensor]:
    """Accepted drafts and clearness of the answer's slots. A chain ends at its first wrong draft, so that it accepts as
    many when it is fed the true tokens."""
    accepted_S, clear_S = _run(plain, row, k, forced=True).accepted(row.ids_T)
    return accepted_S[row.prompt - 1 :], clear_S[row.prompt - 1 :]


def _joined(slots: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    accepted, clear = zip(*slots, strict=True)
    return torch.cat(accepted).float(), torch.cat(clear)


def _walk(slots: list[int]) -> Iterator[int]:
    """The accepted drafts of the steps that a server takes along an answer."""
    at = 0
    while at < len(slots):
        yield slots[at]
        at += slots[at] + 1


def _compared(head: Head, rows: list[Text], runs: list[Drafts], k: int) -> Finding:
    """The head's own first drafts after each prompt beside the plain path's."""
    gap, largest, same, total = 0.0, 0.0, 0, 0
    device = head.d2t.device
    for row, (drafts_TK, _, first_TR) in zip(rows, runs, strict=True):
        p, slot = row.prompt, row.prompt - 1
        taps = torch.stack([row.taps[tap] for tap in head.config.taps], 1) if head.config.taps else row.last_TH[:, None]
        state = head.start(1, p + k)
        given = row.ids_T[1 : p + 1], taps[:p].to(head.fc.weight), row.last_TH[:p].to(head.fc.weight)
        logits, _ = head.extend(state, *(x[None].to(device) for x in given), torch.tensor([p], device=device))
        gap = max(gap, float((logits[0].float().cpu() - first_TR[slot]).abs().max()))
        largest = max(largest, float(first_TR[slot].abs().max()))
        chain = [head.to_target_ids(logits.argmax(-1))]
        while len(chain) < k:
            chain.append(head.to_target_ids(head.expand(state, chain[-1][:, None])[0][:, 0].argmax(-1)))
        same += int((torch.cat(chain).cpu() == drafts_TK[slot]).sum())
        total += k
    numbers = {"largest_gap": gap, "largest_logit": largest, "equal_drafts": same, "drafts": total}
    if gap <= CLOSE * largest and same == total:
        says = f"computed in a second way, {total} first drafts are the same and logits within {gap:.1g}"
        return Finding("drafts", OK, says, numbers=numbers)
    found = fault("drafts", f"read as engines read it, the folder is another head: {same} of {total} first drafts are "
                  f"the same, logits are off by {gap:.2g} (the largest is {largest:.2g})")  # fmt: skip
    found.numbers = numbers
    return found


# ----------------------------------------------------------------------------------------------------- explanations

def variants(case: Case, served: Reading, blocks: int) -> dict[str, tuple[str, Reading]]:
    """Name -> (how to mend it, the folder read with that one thing changed)."""
    found: dict[str, tuple[str, Reading]] = {}

    def add(name: str, mend: str = "", **change: Any) -> None:
        reading = replace(served, **change)
        if reading != served and all(1 <= tap <= blocks for tap in reading.taps):
            found[name] = mend, reading

    flag = "the flag in config.json is not the one of training; export the head again"
    add("not shifted (slot p reads token p, not p+1)", "train it again with tokens shifted by one", shifted=False)
    add("with the target's embedding", "leave embed_tokens.weight out", embedding="target")
    for name, rope in {"trained": case.ours.get("rope"), "target's": head_rope(case.parts.config)}.items():
        if rope:
            add(f"with the {name} rope (theta {rope['rope_theta']:g})", "write that rope into config.json",
                rope=tuple(sorted({**rope, "rope_theta": float(rope["rope_theta"])}.items())))  # fmt: skip
    if case.kind == "eagle":
        add("with last states before the final norm", "capture after the final norm and train again", normed_last=False)
        return found
    for step in (-1, 1):
        taps = tuple(tap + step for tap in served.taps)
        add(f"with taps {list(taps)}", "the layer ids are off by one; export the head again", taps=taps)
    if case.ours.get("taps"):
        add(f"with the trained taps {case.ours['taps']}", taps=tuple(case.ours["taps"]))
    add(f"with norm_output={str(not served.norm_output).lower()}", flag, norm_output=not served.norm_output)
    add(f"with norm_before_residual={str(not served.norm_before_residual).lower()}", flag,
        norm_before_residual=not served.norm_before_residual)  # fmt: skip
    add("with the target's final norm before lm_head", "norm.weight is not the trained one", final_norm="target")
    if "d2t" in case.tensors:
        add("with d2t as target ids", "d2t must hold offsets, target_id - draft_id", absolute_map=True)
    return found


def _explained(
    case: Case, rows: list[Text], ends: Ends, readings: dict[str, tuple[str, Reading]], served: tuple[Tensor, Tensor],
    k: int,
) -> Finding:  # fmt: skip
    """Whether a mistaken reading drafts better than the served one, slot by slot: a fault where it has more drafts
    accepted, a warning where the right tokens only stand out more."""
    table, better = {}, []
    for name, (mend, reading) in readings.items():
        if not name:
            continue
        plain = PlainHead(case.kind, case.config, case.tensors, ends, reading)
        here = _joined([_slots(plain, row, k) for row in rows])
        gains = [_gain(new_S, old_S) for new_S, old_S in zip(here, served, strict=True)]
        table[name] = {"accepted": float(here[0].mean()), "clearness": float(here[1].nanmean())}
        better += [(FAULT, gains[0], name, mend)] if gains[0] > GAIN * max(1.0, float(served[0].mean())) else []
        better += [(WARNING, gains[1], name, mend)] if gains[1] > GAIN * float(served[1].nanmean().abs()) else []
    own = {"accepted": float(served[0].mean()), "clearness": float(served[1].nanmean())}
    numbers = {"as_served": own, "otherwise": table, "slots": len(served[0])}
    if not better:
        says = f"no other reading of the folder drafts better ({len(table)} tried on {len(served[0])} tokens)"
        return Finding("reading", OK, says, numbers=numbers)
    status, _, name, mend = max(better, key=lambda found: (found[0] == FAULT, found[1]))
    old, new = 1 + own["accepted"], 1 + table[name]["accepted"]
    says = f"read {name}, the head settles {new:.2f} tokens a step; as served {old:.2f}"
    if status == WARNING:
        says += f" (its right tokens stand out {table[name]['clearness']:.1f} instead of {own['clearness']:.1f} σ)"
    costs = f"{max(0.0, 1 - old / new):.0%} of the tokens per step on these prompts"
    return Finding("reading", status, says, costs, mend or OTHER_TARGET, numbers)


def _gain(new_S: Tensor, old_S: Tensor) -> float:
    """Mean gain where it is SURE standard errors above 0, else 0. Slots without a value do not count."""
    difference = (new_S - old_S)[~(new_S - old_S).isnan()]
    if len(difference) < 2:
        return 0.0
    gain, error = float(difference.mean()), float(difference.std()) / math.sqrt(len(difference))
    return gain if gain > SURE * error else 0.0


def _acceptance(steps: list[int], k: int, expected: Expected | None) -> Finding:
    """Simulated acceptance beside the report's."""
    tau, count = 1 + sum(steps) / len(steps), len(steps)
    alpha = [sum(step > depth for step in steps) / count for depth in range(k)]
    wanted = expected.tau(k) if expected else None
    numbers = {"tau": tau, "alpha": alpha, "k": k, "steps": count, "expected_tau": wanted,
               "expected_alpha": expected.alpha[:k] if wanted else None}  # fmt: skip
    says = f"τ {tau:.2f} over {count} steps of K = {k}, α {' '.join(f'{a:.2f}' for a in alpha)}"
    if wanted:
        says += f"; the report has τ {wanted:.2f} on {expected.suite}"
    share = (tau - 1) / (wanted - 1) if wanted and wanted > 1 else 1.0
    below = wanted and wanted - tau > UNLIKE * statistics.pstdev(steps) / math.sqrt(count)
    if tau < 1.05 or (below and share < 0.5):
        found = fault("acceptance", says)
    elif below and share < 0.75:
        found = warning("acceptance", says, mend="measure on more prompts (limit=…), of the kind that is served")
    else:
        found = Finding("acceptance", OK, says + ("" if wanted else "; no report to compare with"))
    found.numbers = numbers
    return found
