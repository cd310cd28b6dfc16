"""Forward passes of the target that keep its states: answering prompts token by token, and reading given rows at once.

Shapes: B rows of a batch, S slots (the longest row), L new tokens, N positions, A taps, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headtrain.cache import KVCache
from headtrain.target import Target, TargetStates

LOGITS_BYTES = 256 << 20  # full-vocabulary float32 logits held at a time
PREFILL_TOKENS = 2048  # tokens, padding included, of one forward over prompts


@dataclass
class Sampling:
    """How tokens are chosen. temperature 0: the most likely one. `uniform_BS`: one random number per row and step."""

    temperature: float = 0.0
    top_p: float = 1.0
    uniform_BS: Tensor | None = None


def buffer_dtype(stored: str) -> torch.dtype:
    """In which states are held until they are stored with data.captures.dtype=`stored`."""
    return torch.bfloat16 if stored == "float8" else getattr(torch, stored)


class StateBuffers:
    """Everything a batch of rows leaves behind, one slot per token; row b ends at `lengths_B[b]`."""

    def __init__(self, batch: int, slots: int, target: Target, taps: int, dtype: torch.dtype):
        place = {"device": target.device}
        self.ids_BS = torch.zeros(batch, slots, dtype=torch.int64, **place)
        self.lengths_B = torch.zeros(batch, dtype=torch.int64, **place)
        self.taps_BSAH = torch.zeros(batch, slots, taps, target.hidden_size, dtype=dtype, **place)
        self.last_BSH = torch.zeros(batch, slots, target.hidden_size, dtype=dtype, **place)
        self.argmax_BS = torch.zeros(batch, slots, dtype=torch.int32, **place)
        self.logsumexp_BS = torch.zeros(batch, slots, dtype=torch.float32, **place)

    def keep(self, where: tuple[Tensor, Tensor], states: TargetStates, argmax_B: Tensor, logsumexp_B: Tensor) -> None:
        """Stores the states of one new token per row; `where`: rows and slots, int64 [B] each."""
        if states.taps_BLAH is not None:
            self.taps_BSAH[where] = states.taps_BLAH[:, 0].to(self.taps_BSAH.dtype)
        self.last_BSH[where] = states.last_BLH[:, 0].to(self.last_BSH.dtype)
        self.argmax_BS[where] = argmax_B.int()
        self.logsumexp_BS[where] = logsumexp_B

    def keep_rows(self, target: Target, states: TargetStates, lengths_B: Tensor, row: int = 0, first: int = 0) -> None:
        """Stores a forward over the rows from `row` on: the states of each one's tokens `first` … `lengths_B`-1."""
        batch, length = states.last_BLH.shape[:2]
        place = slice(row, row + batch), slice(first, first + length)
        if states.taps_BLAH is not None:
            self.taps_BSAH[place] = states.taps_BLAH
        self.last_BSH[place] = states.last_BLH
        real_BL = first + torch.arange(length, device=lengths_B.device) < lengths_B[:, None]
        argmax_N, logsumexp_N = choices(target, states.last_BLH[real_BL])
        self.argmax_BS[place][real_BL] = argmax_N.int()
        self.logsumexp_BS[place][real_BL] = logsumexp_N

    def share_prefix(self, length: int) -> None:
        """Copies what row 0 has of its first `length` tokens to all rows."""
        for tensor in (self.taps_BSAH, self.last_BSH, self.argmax_BS, self.logsumexp_BS):
            tensor[1:, :length] = tensor[:1, :length]

    @torch.inference_mode()
    def flat(self) -> dict[str, Tensor]:
        """Rows one after another, on the CPU: the tensors of a capture file. The last position of a row is zeros."""
        ends = (torch.arange(len(self.lengths_B), device=self.lengths_B.device), self.lengths_B - 1)
        for tensor in (self.taps_BSAH, self.last_BSH, self.argmax_BS, self.logsumexp_BS):
            tensor[ends] = 0
        slots = self.ids_BS.shape[1]
        real_BS = torch.arange(slots, device=self.lengths_B.device) < self.lengths_B[:, None]
        where = real_BS.flatten().nonzero()[:, 0]
        return {
            "ids": self.ids_BS.flatten()[where].int().cpu(),
            "taps": self.taps_BSAH.flatten(0, 1)[where].cpu(),
            "last": self.last_BSH.flatten(0, 1)[where].cpu(),
            "argmax": self.argmax_BS.flatten()[where].cpu(),
            "logsumexp": self.logsumexp_BS.flatten()[where].cpu(),
        }


def _top(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """argmax and logsumexp of float32 logits, in place: the logits are spent."""
    best_N, argmax_N = logits_NV.max(-1)
    sums_N = logits_NV.sub_(best_N[:, None]).exp_().sum(-1)
    return argmax_N, sums_N.log_().add_(best_N)


@torch.inference_mode()
def choices(target: Target, last_NH: Tensor) -> tuple[Tensor, Tensor]:
    """The target's most likely token (int64 [N]) and the logsumexp of its logits (float32 [N]) after each state."""
    chunk = max(1, LOGITS_BYTES // (4 * target.vocab_size))
    parts = [_top(target.logits(part).float()) for part in last_NH.split(chunk)]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def sample(logits_BV: Tensor, temperature: float, top_p: float, uniform_B: Tensor) -> Tensor:
    """One token per row from softmax(logits / temperature), cut to the smallest set of mass >= top_p: int64 [B].

    uniform_B in [0, 1) picks the token by the inverse of the cumulative distribution.
    """
    probs_BV = (logits_BV.double() / temperature).softmax(-1)
    order_BV = None
    if top_p < 1:
        probs_BV, order_BV = probs_BV.sort(-1, descending=True)
        probs_BV = probs_BV.masked_fill(probs_BV.cumsum(-1) - probs_BV >= top_p, 0.0)
    sums_BV = probs_BV.cumsum(-1)
    # `right` skips tokens of zero mass in front; the clamp guards against rounding at the upper end
    aim_B1 = (uniform_B.double() * sums_BV[:, -1])[:, None]
    picks_B1 = torch.searchsorted(sums_BV, aim_B1, right=True)
    massless_B1 = (probs_BV > 0).flip(-1).int().argmax(-1, keepdim=True)  # tokens without mass at the end
    picks_B1 = torch.minimum(picks_B1, probs_BV.shape[1] - 1 - massless_B1)
    return (picks_B1 if order_BV is None else order_BV.gather(1, picks_B1))[:, 0]


def _choose(target: Target, last_BH: Tensor, how: Sampling, rows_B: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """(next tokens, argmax, logsumexp) after the given states."""
    if how.temperature == 0:
        argmax_B, logsumexp_B = choices(target, last_BH)
        return target.agreed(argmax_B), argmax_B, logsumexp_B
    logits_BV = target.logits(last_BH).float()
    tokens_B = sample(logits_BV, how.temperature, how.top_p, how.uniform_BS[rows_B, step])
    return target.agreed(tokens_B), *_top(logits_BV)


def shared_prefix(prompts: list[list[int]]) -> int:
    """How many first tokens all prompts share (a template's system turn), leaving each at least one of its own."""
    if len(prompts) < 2:
        return 0
    low, high = min(prompts), max(prompts)
    same = next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return min(same, min(map(len, prompts)) - 1)


def _prefill(
    target: Target, kept: StateBuffers, prompts: list[list[int]], slots: int, taps: tuple[int, ...]
) -> tuple[KVCache, Tensor]:
    """Runs the prompts, a prefix that all share only once: (the filled cache, the state of each last token [B, H]).

    Rows go in groups of at most PREFILL_TOKENS tokens, so that short prompts are not padded to the longest of all.
    """
    device, first = target.device, shared_prefix(prompts)
    lengths_B = torch.tensor([len(p) for p in prompts], device=device)
    prefix = KVCache(1, slots)
    if first:
        kept.keep_rows(target, target.forward(kept.ids_BS[:1, :first], prefix, taps=taps), lengths_B[:1])
        kept.share_prefix(first)
    caches, last, row = [], [], 0
    while row < len(prompts):
        end, longest = row + 1, len(prompts[row])
        while end < len(prompts) and (end + 1 - row) * (max(longest, len(prompts[end])) - first) <= PREFILL_TOKENS:
            longest, end = max(longest, len(prompts[end])), end + 1
        cache = _repeated(prefix, end - row)
        slots_BL = torch.arange(first, longest, device=device).expand(end - row, -1)
        states = target.forward(kept.ids_BS[row:end, first:longest], cache, slots_BL, taps=taps)
        kept.keep_rows(target, states, lengths_B[row:end], row, first)
        last.append(states.last_BLH[torch.arange(end - row, device=device), lengths_B[row:end] - 1 - first])
        caches.append(cache)
        row = end
    return _joined(caches), torch.cat(last)


def _repeated(one: KVCache, rows: int) -> KVCache:
    """A cache of `rows` rows that all start as the only row of `one` (which may be empty)."""
    cache = KVCache(rows, one.capacity)
    for mine, theirs in ((cache.keys, one.keys), (cache.values, one.values)):
        mine.update({layer: tensor.repeat(rows, 1, 1, 1) for layer, tensor in theirs.items()})
    return cache


def _joined(caches: list[KVCache]) -> KVCache:
    """One cache with the rows of all; the parts are emptied layer by layer, so nothing is held twice."""
    if len(caches) == 1:
        return caches[0]
    whole = KVCache(sum(cache.batch for cache in caches), caches[0].capacity)
    for layer in list(caches[0].keys):
        whole.keys[layer] = torch.cat([cache.keys.pop(layer) for cache in caches])
        whole.values[layer] = torch.cat([cache.values.pop(layer) for cache in caches])
    return whole


@torch.inference_mode()
def answer(
    target: Target,
    prompts: list[list[int]],
    budgets: list[int],
    taps: tuple[int, ...],
    dtype: torch.dtype,
    how: Sampling,
    on_tokens: Callable[[int], None] | None = None,
) -> tuple[StateBuffers, list[str]]:
    """The target continues every prompt by at most its budget of new tokens (at least 1), an end token included.

    Returns the buffers, states of all tokens but each row's last included, and why each row ended: stop or length.
    Finished rows leave the batch together, once an eighth of it is done, so the result depends on the batch alone.
    """
    device, starts = target.device, [len(p) for p in prompts]
    slots = max(a + b for a, b in zip(starts, budgets, strict=True))
    kept = StateBuffers(len(prompts), slots, target, len(taps), dtype)
    for row, ids in enumerate(prompts):
        kept.ids_BS[row, : len(ids)] = torch.tensor(ids, device=device)
    starts_B, budgets_B = torch.tensor(starts, device=device), torch.tensor(budgets, device=device)
    ends = torch.tensor(sorted(target.eos_ids), dtype=torch.int64, device=device)
    stopped_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)

    cache, last_BH = _prefill(target, kept, prompts, slots, taps)
    rows_B, slots_B = torch.arange(len(prompts), device=device), starts_B.clone()
    if how.temperature == 0:
        tokens_B = target.agreed(kept.argmax_BS[rows_B, slots_B - 1].long())
    else:
        tokens_B = _choose(target, last_BH, how, rows_B, 0)[0]
    done_B = torch.zeros_like(stopped_B)
    for step in range(max(budgets)):
        kept.ids_BS[rows_B, slots_B] = torch.where(done_B, kept.ids_BS[rows_B, slots_B], tokens_B)
        if on_tokens:
            on_tokens(int((~done_B).sum()))
        stop_B = torch.isin(tokens_B, ends) & ~done_B
        stopped_B[rows_B[stop_B]] = True
        done_B = done_B | stop_B | (step + 1 >= budgets_B[rows_B])
        kept.lengths_B[rows_B] = slots_B + 1
        finished = int(done_B.sum())
        if finished == len(rows_B):
            break
        if finished >= max(1, len(rows_B) // 8):
            alive = (~done_B).nonzero()[:, 0]
            cache.select(alive)
            rows_B, slots_B, done_B = rows_B[alive], slots_B[alive], done_B[alive]
        slots_B = torch.where(done_B, slots_B, slots_B + 1)
        # the newest token lies in the slot before; a finished row repeats its last one, into a slot nobody reads
        fed_B = torch.where(done_B, slots_B, slots_B - 1)
        states = target.forward(kept.ids_BS[rows_B, fed_B][:, None], cache, fed_B[:, None], taps=taps)
        tokens_B, argmax_B, logsumexp_B = _choose(target, states.last_BLH[:, 0], how, rows_B, step + 1)
        kept.keep((rows_B, fed_B), states, argmax_B, logsumexp_B)
    return kept, ["stop" if stopped else "length" for stopped in stopped_B.tolist()]


@torch.inference_mode()
def read_rows(target: Target, rows: list[Tensor], taps: tuple[int, ...], dtype: torch.dtype) -> StateBuffers:
    """One teacher-forced forward over given rows (token ids, [T] each): the states of every token."""
    lengths = [len(row) for row in rows]
    kept = StateBuffers(len(rows), max(lengths), target, len(taps), dtype)
    for n, row in enumerate(rows):
        kept.ids_BS[n, : len(row)] = row.to(target.device)
    kept.lengths_B = torch.tensor(lengths, device=target.device)
    kept.keep_rows(target, target.forward(kept.ids_BS, taps=taps), kept.lengths_B)
    return kept
