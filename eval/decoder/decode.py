"""The decoder: draft, verify with one target forward, keep what the target agrees with. One path for every drafter.

Requests are decoded in batches without padding slots: row b's tokens lie in cache slots 0, 1, 2, …, rows grow at their
own pace, and a finished row leaves the batch. A step's forward holds the last accepted token and the drafts, so its
width is 1 + the longest draft.
Shapes: B rows, L positions of one forward, K draft tokens, W tokens settled at once, V vocabulary, H hidden, A taps.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from headtrain.cache import KVCache
from headtrain.eval.decoder.drafters.base import Drafter, News
from headtrain.eval.decoder.drafters.none import NoDrafter
from headtrain.eval.decoder.sampling import Sampling, probabilities
from headtrain.eval.decoder.verify import Verdict, greedy_chain, sampled_chain
from headtrain.target import Target, TargetStates
from headtrain.tree import DraftTree

NEAR_TIE = 1e-4  # of the largest logit's magnitude


class Step(NamedTuple):
    """One target forward of one request. It emitted accepted + 1 tokens, so nothing after an end token is counted."""

    drafted: int
    accepted: int


@dataclass
class Decoded:
    """One request's answer. Seconds are the request's equal share of its batch's wall time."""

    ids: list[int] = field(default_factory=list)  # new tokens, the end token included
    steps: list[Step] = field(default_factory=list)  # without the prefill, which gave ids[0]
    finish: str = "length"  # `stop`: an end token came; `length`: the budget was spent
    draft_s: float = 0.0
    verify_s: float = 0.0
    prefill_s: float = 0.0
    total_s: float = 0.0


def decode(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    *,
    k: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    batch: int | None = None,
    names: list[str] | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> list[Decoded]:
    """Answers prompts (token ids), `batch` at a time in order of length (None: all at once); results in given order.

    Above temperature 0 each request has its own random numbers, made from `seed` and its name (default: its index), so
    that its answer does not depend on its batch. `on_tokens(index, new ids)` is called as tokens are settled.
    Raises ValueError for an empty prompt and for one that with the budget exceeds the target's positions.
    """
    if k < 0 or max_new_tokens < 1 or (batch is not None and batch < 1):
        raise ValueError(f"decode: k={k} max_new_tokens={max_new_tokens} batch={batch}: k ≥ 0, the others ≥ 1")
    longest = getattr(target.config, "max_position_embeddings", None)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty: decoding needs at least one token")
        if longest and len(prompt) + max_new_tokens > longest:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with max_new_tokens={max_new_tokens} it exceeds the "
                f"{longest} positions of {target.name}"
            )
    sampling = Sampling(temperature, top_p, top_k)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out = [Decoded() for _ in prompts]
    for at in range(0, len(order), batch or max(1, len(order))):
        rows = order[at : at + (batch or len(order))]
        names_here = [names[i] if names else str(i) for i in rows]
        chunk = _Chunk(target, drafter, [prompts[i] for i in rows], [out[i] for i in rows], rows, k, max_new_tokens)
        chunk.sampling, chunk.on_tokens = sampling, on_tokens
        if not sampling.greedy:
            chunk.generators = [_generator(seed, name) for name in names_here]
        chunk.run()
    return out


def _generator(seed: int, name: str) -> torch.Generator:
    mark = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(mark[:7], "big"))


class _Chunk:
    """One batch of requests from prefill to the last token. Rows that finish leave every tensor and list here."""

    def __init__(self, target, drafter, prompts, decoded, requests, k: int, budget: int):
        self.target, self.drafter, self.prompts, self.k, self.budget = target, drafter, prompts, k, budget
        self.decoded: list[Decoded] = decoded
        self.everyone = list(decoded)
        self.requests: list[int] = requests  # the caller's indices
        self.sampling, self.on_tokens, self.generators = Sampling(), None, []
        self.eos = target.eos_ids
        self.capacity = max(map(len, prompts)) + budget + k + 1
        self.cache = KVCache(len(prompts), self.capacity)

    @torch.inference_mode()
    def run(self) -> None:
        began, self.draft_s, self.verify_s = self._now(), 0.0, 0.0
        self._prefill()
        prefill_s = self._now() - began - self.draft_s
        while self.decoded:
            self._step()
        total_s = self._now() - began
        for row in self.everyone:
            row.total_s, row.prefill_s = total_s / len(self.everyone), prefill_s / len(self.everyone)
            row.draft_s, row.verify_s = self.draft_s / len(self.everyone), self.verify_s / len(self.everyone)

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _prefill(self) -> None:
        lengths, device = [len(p) for p in self.prompts], self.target.device
        width = max(lengths)
        tokens_BL = torch.tensor([p + [0] * (width - len(p)) for p in self.prompts], device=device)
        self.drafter.start(self.prompts, self.capacity)
        states = self.target.forward(tokens_BL, self.cache, taps=self.drafter.taps)
        self.length_B = torch.tensor(lengths, device=device)  # tokens in the cache
        self.left_B = torch.full_like(self.length_B, self.budget)  # tokens still allowed
        rows = torch.arange(len(lengths), device=device)
        nothing = DraftTree.chain(tokens_BL[:, :0])
        verdict = self._judge(states.last_BLH[rows, self.length_B - 1][:, None], nothing, self._uniform())
        # The prompt's own tokens are news to the drafter as well: slot i's news is token i + 1.
        news_BW = torch.cat([tokens_BL[:, 1:], tokens_BL[:, :1]], 1)
        news_BW[rows, self.length_B - 1] = verdict.bonus_B
        bonus = verdict.bonus_B.tolist()
        tokens = [[*prompt[1:], token] for prompt, token in zip(self.prompts, bonus, strict=True)]
        news = News(news_BW, self.length_B.clone(), states.taps_BLAH, states.last_BLH, tokens)
        self._settle(news, verdict.bonus_B, [[token] for token in bonus], None)

    def _step(self) -> None:
        began = self._now()
        uniform = self._uniform()
        room = max(self.budget - len(row.ids) for row in self.decoded) - 1  # a step adds its bonus token too
        tree = self.drafter.propose(min(self.k, room), None if uniform is None else uniform[:, : self.k])
        if not tree.is_chain:
            raise ValueError(f"drafter {self.drafter.name!r} proposed a tree; this decoder verifies chains")
        counts_B = torch.minimum(tree.counts, self.left_B - 1)
        tokens_BK = tree.tokens[:, : min(self.k, room)]
        tree = DraftTree.chain(tokens_BK, counts_B, None if tree.q is None else tree.q[:, : tokens_BK.shape[1]])
        drafted_at = self._now()
        tokens_BL = torch.cat([self.pending_B[:, None], tokens_BK], 1)
        slots_BL = self.length_B[:, None] + torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        states = self.target.forward(tokens_BL, self.cache, slots_BL, taps=self.drafter.taps)
        verdict = self._judge(states.last_BLH, tree, uniform)
        emitted_B = verdict.accepted_B + 1
        news_BW = torch.cat([tokens_BK, verdict.bonus_B[:, None]], 1)
        news_BW.scatter_(1, verdict.accepted_B[:, None], verdict.bonus_B[:, None])
        host = torch.cat([news_BW, emitted_B[:, None], counts_B[:, None]], 1).tolist()  # one copy to the host
        self.verify_s += self._now() - drafted_at
        self.draft_s += drafted_at - began
        new = [row[: row[-2]] for row in host]
        width = max(map(len, new))
        taps = None if states.taps_BLAH is None else states.taps_BLAH[:, :width]
        news = News(news_BW[:, :width], emitted_B, taps, states.last_BLH[:, :width], new)
        self.length_B = self.length_B + emitted_B
        self._settle(news, verdict.bonus_B, new, [row[-1] for row in host])

    def _judge(self, last_BLH: Tensor, tree: DraftTree, uniform: Tensor | None) -> Verdict:
        """lm_head on the real positions only, then the rule for the temperature."""
        real_BL = torch.arange(last_BLH.shape[1], device=last_BLH.device) <= tree.counts[:, None]
        logits_MV = self.target.logits(last_BLH[real_BL])
        if self.sampling.greedy:
            choice_BL = torch.zeros(real_BL.shape, dtype=torch.long, device=logits_MV.device)
            choice_BL[real_BL] = logits_MV.argmax(-1)
            return greedy_chain(choice_BL, tree.tokens, tree.counts)
        p_BLV = torch.zeros(*real_BL.shape, logits_MV.shape[1], device=logits_MV.device)
        p_BLV[real_BL] = probabilities(logits_MV, self.sampling)
        accept_BK = uniform[:, self.k : self.k + tree.tokens.shape[1]]
        return sampled_chain(p_BLV, tree.tokens, tree.counts, tree.q, accept_BK, uniform[:, -1])

    def _uniform(self) -> Tensor | None:
        """This step's numbers in [0, 1), float64 [B, 2K+1]: K to draw drafts, K to accept them, one for the bonus."""
        if self.sampling.greedy:
            return None
        rows = [torch.rand(2 * self.k + 1, generator=g, dtype=torch.float64) for g in self.generators]
        return torch.stack(rows).to(self.target.device)

    def _settle(self, news: News, pending_B: Tensor, new: list[list[int]], drafted: list[int] | None) -> None:
        """Adds new tokens to the answers, up to an end token; lets finished rows go; tells the drafter the rest."""
        going = []
        for i, (row, tokens) in enumerate(zip(self.decoded, new, strict=True)):
            end = next((n for n, token in enumerate(tokens) if token in self.eos), None)
            if end is not None:
                tokens, row.finish = tokens[: end + 1], "stop"
            row.ids += tokens
            if drafted is not None:
                row.steps.append(Step(drafted[i], len(tokens) - 1))
            if self.on_tokens:
                self.on_tokens(self.requests[i], tokens)
            if end is None and len(row.ids) < self.budget:
                going.append(i)
        self.left_B = self.left_B - torch.tensor([len(t) for t in new], device=self.left_B.device)
        self.pending_B = pending_B  # the last true token, not yet in the cache
        if len(going) < len(self.decoded):
            news = self._keep(going, news)
        if going:
            began = self._now()
            self.drafter.observe(news)
            self.draft_s += self._now() - began

    def _keep(self, going: list[int], news: News) -> News:
        self.decoded = [self.decoded[i] for i in going]
        self.requests = [self.requests[i] for i in going]
        if not going:
            return news
        if self.generators:
            self.generators = [self.generators[i] for i in going]
        rows = torch.tensor(going, device=self.target.device)
        self.length_B, self.left_B, self.pending_B = self.length_B[rows], self.left_B[rows], self.pending_B[rows]
        self.cache.select(rows)
        self.drafter.select(rows)
        taps = None if news.taps_BLAH is None else news.taps_BLAH[rows]
        tokens = [news.tokens[i] for i in going]
        return News(news.tokens_BL[rows], news.counts_B[rows], taps, news.last_BLH[rows], tokens)


# ------------------------------------------------------------------------------------------------- identity

@dataclass
class Identity:
    """Whether a speculative greedy answer equals the plain one. `notes`: both logits at every difference."""

    identical: bool
    near_ties: int
    notes: list[str]


def compare(
    target: Target, prompt: list[int], plain: list[int], speculative: list[int], max_new_tokens: int
) -> Identity:
    """Token for token; a difference is excused only where the two tokens are a near-tie of the target.

    At a difference the target's fp32 logits are computed anew. When the two tokens are its top two within 1e-4 of the
    largest magnitude, the tie is counted and the comparison goes on with the plain answer to the prompt plus the
    speculative text so far; any other difference ends it.
    """
    notes, near_ties = [], 0
    while True:
        at = next((i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), None)
        if at is None:
            if len(plain) != len(speculative):
                notes.append(f"equal tokens, but {len(plain)} plain and {len(speculative)} speculative ones")
            return Identity(len(plain) == len(speculative), near_ties, notes)
        prefix = prompt + speculative[:at]
        states: TargetStates = target.forward(torch.tensor([prefix], device=target.device))
        with torch.inference_mode():
            logits = target.logits(states.last_BLH[0, -1]).float()
        top, allowed = float(logits.max()), NEAR_TIE * float(logits.abs().max())
        a, b = float(logits[plain[at]]), float(logits[speculative[at]])
        tie = top - a < allowed and top - b < allowed
        notes.append(
            f"token {at}: plain {plain[at]} (logit {a:.7g}), speculative {speculative[at]} (logit {b:.7g}), largest "
            f"{top:.7g}: {'a near-tie' if tie else 'not a near-tie'}"
        )
        if not tie:
            return Identity(False, near_ties, notes)
        near_ties += 1
        plain = speculative[: at + 1]
        if plain[-1] not in target.eos_ids and len(plain) < max_new_tokens:
            rest = decode(target, NoDrafter(), [prompt + plain], k=0, max_new_tokens=max_new_tokens - len(plain))
            plain = plain + rest[0].ids
