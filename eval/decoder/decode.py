"""The decoder: draft, verify with one target forward, keep what the target agrees with. One path for every drafter.

Requests are decoded in batches without padding slots: row b's tokens lie in cache slots 0, 1, 2, …, rows grow at their
own pace, and a finished row leaves the batch. A step's forward holds the last accepted token (the root) and the drafts
below it, a chain or a tree. A step waits for the device once, to learn its new tokens.
Shapes: B rows, L positions of one forward, N draft tokens (nodes), W tokens settled at once, V vocabulary, H hidden,
A taps, T steps, U random numbers of a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from headtrain.cache import cache_for
from headtrain.eval.decoder import kernels
from headtrain.eval.decoder.clock import Clock
from headtrain.eval.decoder.drafters.base import Drafter, News
from headtrain.eval.decoder.drafters.none import NoDrafter
from headtrain.eval.decoder.families import check
from headtrain.eval.decoder.graphs import Graphs
from headtrain.eval.decoder.judge import RULES, judge
from headtrain.eval.decoder.layout import cut, lay_out, reach, seen_tokens, taken, visible
from headtrain.eval.decoder.sampling import Sampling
from headtrain.eval.decoder.verify import Verdict
from headtrain.target import Target, TargetStates
from headtrain.tree import DraftTree

NEAR_TIE = 1e-4  # of the largest logit's magnitude
AHEAD = 64  # steps whose random numbers are made, and brought to the device, together


class Step(NamedTuple):
    """One target forward of one request. It emitted accepted + 1 tokens, so nothing after an end token is counted."""

    drafted: int  # how deep the draft was, as far as the token budget could use it
    accepted: int
    nodes: int  # the draft tokens down to that depth; in a chain as many


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
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: dict[int, float] | None = None,
    rule: str = "exact",
    seed: int = 0,
    batch: int | None = None,
    names: list[str] | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    on_step: Callable[[int, list[int], Step | None], None] | None = None,
) -> list[Decoded]:
    """Answers prompts (token ids), `batch` at a time in order of length (None: all at once); results in given order.

    k: how deep a draft goes at most. rule: which drafts stay above temperature 0: `exact`, `block` (block verification,
    chains only) or `typical` (lossy); at temperature 0 each is the target's choice. Above it each request has its own
    random numbers, made from `seed` and its name (default: its index), so that its answer does not depend on its batch.
    `on_tokens(index, new ids)` and `on_step(index, new ids, record)` are called as tokens are settled; the first one,
    which the prompt's own forward gives, has no record. Raises ValueError for an empty prompt, one that with the
    budget exceeds the target's positions, and a target or rule that does not take the drafter's trees.
    """
    if k < 0 or max_new_tokens < 1 or (batch is not None and batch < 1):
        raise ValueError(f"decode: k={k} max_new_tokens={max_new_tokens} batch={batch}: k ≥ 0, the others ≥ 1")
    if rule not in RULES:
        raise ValueError(f"rule {rule!r}: unknown; known rules: {', '.join(RULES)}")
    longest = getattr(target.config, "max_position_embeddings", None)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty: decoding needs at least one token")
        if longest and len(prompt) + max_new_tokens > longest:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with max_new_tokens={max_new_tokens} it exceeds the "
                f"{longest} positions of {target.name}"
            )
    sampling = Sampling(temperature, top_p, top_k, min_p, repetition_penalty, logit_bias)
    if target.device.type == "cuda":
        kernels.install()
    check(target, trees=False)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out = [Decoded() for _ in prompts]
    for at in range(0, len(order), batch or max(1, len(order))):
        rows = order[at : at + (batch or len(order))]
        chunk = _Chunk(target, drafter, [prompts[i] for i in rows], [out[i] for i in rows], rows, k, max_new_tokens)
        chunk.sampling, chunk.rule, chunk.on_tokens, chunk.on_step = sampling, rule, on_tokens, on_step
        if not sampling.greedy:
            chunk.generators = [_generator(seed, names[i] if names else str(i)) for i in rows]
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
        self.generators: list[torch.Generator] = []
        self.eos = target.eos_ids
        self.nodes = drafter.nodes(k)
        self.capacity = max(map(len, prompts)) + budget + self.nodes + 1
        self.cache = cache_for(target.stateful, len(prompts), self.capacity)
        self.last_position = getattr(target.config, "max_position_embeddings", None) or self.capacity
        still = not target.stateful and not target.spread  # what a graph reads lies where it lies, on one device
        self.clock, self.graphs, self.turn = Clock(target.device), Graphs(target.device, record=still), 0

    @torch.inference_mode()
    def run(self) -> None:
        if self.drafter.branches:
            self._allow_trees()
        began = self.clock.now()
        news = self._prefill()
        self.clock.add("prefill", began, self.clock.now())
        while self.decoded:
            observing = self.clock.now()
            self.drafter.observe(news)
            self.clock.add("draft", observing, self.clock.now())
            news = self._step()
        self.clock.add("total", began, self.clock.now())
        spent = self.clock.seconds()
        for row in self.everyone:
            for kind in ("prefill", "draft", "verify", "total"):
                setattr(row, f"{kind}_s", spent[kind] / len(self.everyone))

    def _allow_trees(self) -> None:
        if self.rule == "block":
            raise ValueError(f"rule 'block' verifies chains; drafter {self.drafter.name!r} proposes trees: use 'exact'")
        check(self.target, trees=True)

    def _prefill(self) -> News:
        lengths, device = [len(p) for p in self.prompts], self.target.device
        width = max(lengths)
        tokens_BL = torch.tensor([p + [0] * (width - len(p)) for p in self.prompts], device=device)
        slots_BL = torch.arange(width, device=device).expand(tokens_BL.shape)
        self.drafter.bind(self.target, self.cache)
        self.drafter.start(self.prompts, self.capacity)
        states = self.target.forward(tokens_BL, self.cache, slots_BL, taps=self.drafter.taps, window=width)
        self._replay({}, lengths, tokens_BL, slots_BL)
        self.lengths, self.length_B = lengths, torch.tensor(lengths, device=device)  # tokens in the cache
        self.left_B = torch.full_like(self.length_B, self.budget)  # tokens still allowed
        self.seen_BV = None
        if self.sampling.repetition_penalty != 1:
            self.seen_BV = torch.zeros(len(lengths), self.target.vocab_size, dtype=torch.bool, device=device)
            real_BL = slots_BL < self.length_B[:, None]
            self.seen_BV.scatter_(1, torch.where(real_BL, tokens_BL, tokens_BL[:, :1]), True)
        rows = torch.arange(len(lengths), device=device)
        last_BLH = states.last_BLH[rows, self.length_B - 1][:, None]
        bonus_B = self._judge(last_BLH, DraftTree.chain(tokens_BL[:, :0]), None, self._uniform()).bonus_B
        # The prompt's own tokens are news to the drafter as well: slot i's news is token i + 1.
        news_BW = torch.cat([tokens_BL[:, 1:], tokens_BL[:, :1]], 1)
        news_BW[rows, self.length_B - 1] = bonus_B
        tokens = [[*prompt[1:], token] for prompt, token in zip(self.prompts, bonus_B.tolist(), strict=True)]
        news = News(news_BW, self.length_B.clone(), states.taps_BLAH, states.last_BLH, tokens)
        return self._settle(news, bonus_B, None)

    def _propose(self, uniform_BU: Tensor | None) -> DraftTree:
        # A chain drafts no further than the longest budget. A tree's shape depends on its depth, and must not depend
        # on other requests' budgets.
        room = max(self.budget - len(row.ids) for row in self.decoded) - 1  # a step adds its bonus token too
        depth = self.k if self.drafter.branches else min(self.k, room)
        tree = self.drafter.propose(depth, None if uniform_BU is None else uniform_BU[:, : self.nodes])
        if self.drafter.branches and tree.tokens.shape[1]:
            return replace(tree, chain_shaped=False)  # a chain, too: what it gives must not depend on others' trees
        if not tree.is_chain:
            raise ValueError(f"drafter {self.drafter.name} proposed a tree, but does not say that it branches")
        return DraftTree.chain(tree.tokens, torch.minimum(tree.counts, self.left_B - 1), tree.q)

    def _step(self) -> News:
        began, uniform_BU = self.clock.now(), self._uniform()
        tree = self._propose(uniform_BU)
        proposed = self.clock.now()
        tokens_BL = torch.cat([self.pending_B[:, None], tree.tokens], 1)
        slots_BL, positions_BL, sees_BLL = lay_out(tree, self.length_B)
        before = self.cache.snapshot() if self.target.stateful else {}
        states = self._forward(tokens_BL, slots_BL, positions_BL, sees_BLL)
        verdict = self._judge(states.last_BLH, tree, sees_BLL, uniform_BU)
        taken_BN, sizes = tree.tokens, [tree.counts, tree.counts]
        if sees_BLL is not None:
            verdict = cut(verdict, tree.tokens, self.left_B - 1)
            taken_BN = taken_BN.gather(1, verdict.path_BD.clamp_min(0))
            sizes = reach(tree, positions_BL - slots_BL[:, :1], self.left_B - 1)
        # behind the accepted tokens stands the bonus, as often as there is room
        place_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        news_BW = torch.where(place_L < verdict.accepted_B[:, None], pad(taken_BN, (0, 1)), verdict.bonus_B[:, None])
        emitted_B = verdict.accepted_B + 1
        host = torch.cat([news_BW, torch.stack([emitted_B, *sizes], 1)], 1).tolist()  # the one wait for the device
        new = [row[: row[-3]] for row in host]
        width = max(map(len, new))
        order_BW = None
        if sees_BLL is not None:
            path_BD = verdict.path_BD[:, : width - 1]
            order_BW = pad(path_BD + 1, (1, 0))  # the root, then the path
            if width > 1:
                kernels.compact(self.cache, slots_BL[:, 1], path_BD)
        self._replay(before, [len(tokens) for tokens in new], tokens_BL, slots_BL)
        verified = self.clock.now()
        self.clock.add("draft", began, proposed)
        self.clock.add("verify", proposed, verified)
        news = News(
            news_BW[:, :width], emitted_B, taken(states.taps_BLAH, order_BW, width),
            taken(states.last_BLH, order_BW, width), new,
        )  # fmt: skip
        self.length_B = self.length_B + emitted_B
        self.lengths = [length + len(tokens) for length, tokens in zip(self.lengths, new, strict=True)]
        return self._settle(news, verdict.bonus_B, [row[-2:] for row in host])

    def _forward(self, tokens_BL: Tensor, slots_BL: Tensor, positions_BL: Tensor, sees_BLL: Tensor | None):
        """The target's states. All that a step runs of the target; on a GPU one recorded graph per shape."""
        length = tokens_BL.shape[1]
        window = self.graphs.bucket(max(self.lengths) + length, self.capacity)
        if max(self.lengths) + length > self.last_position:  # drafts beyond every budget have no position of their own
            positions_BL = positions_BL.clamp_max(self.last_position - 1)

        def forward(tokens_BL, slots_BL, positions_BL, sees_BLL) -> TargetStates:
            mask_BLS = None if sees_BLL is None else visible(sees_BLL, slots_BL, window)
            taps = self.drafter.taps
            return self.target.forward(tokens_BL, self.cache, slots_BL, positions_BL, mask_BLS, taps, window)

        return self.graphs.run(("verify", length, window), forward, tokens_BL, slots_BL, positions_BL, sees_BLL)

    def _replay(self, before: dict, counts: list[int], tokens_BL: Tensor, slots_BL: Tensor) -> None:
        """A target with running states: rows that did not keep all tokens go back to `before` and run theirs again."""
        if not self.target.stateful:
            return
        for count in set(counts) - {tokens_BL.shape[1]}:
            rows = torch.tensor([row for row, n in enumerate(counts) if n == count], device=tokens_BL.device)
            part = self.cache.part(rows, before)
            self.target.forward(tokens_BL[rows, :count], part, slots_BL[rows, :count])
            self.cache.put_states(rows, part)

    def _judge(self, last_BLH: Tensor, tree: DraftTree, sees_BLL: Tensor | None, uniform_BU: Tensor | None) -> Verdict:
        seen_BLV = None if self.seen_BV is None else seen_tokens(self.seen_BV, tree, sees_BLL)
        numbers = ()
        if uniform_BU is not None:
            numbers = uniform_BU[:, self.nodes : self.nodes + tree.tokens.shape[1]], uniform_BU[:, -1]
        return judge(self.target, last_BLH, tree, self.sampling, self.rule, seen_BLV, *numbers)

    def _uniform(self) -> Tensor | None:
        """A step's numbers in [0, 1), float64 [B, 2N + 1]: N to draw drafts, N to accept them, one for the bonus."""
        if self.sampling.greedy:
            return None
        turn, self.turn = self.turn % AHEAD, self.turn + 1
        if turn == 0:
            shape = AHEAD, 2 * self.nodes + 1
            rows = [torch.rand(shape, generator=g, dtype=torch.float64) for g in self.generators]
            self.numbers_BTU = torch.stack(rows).to(self.target.device)
        return self.numbers_BTU[:, turn]

    def _settle(self, news: News, bonus_B: Tensor, sizes: list[list[int]] | None) -> News:
        """Adds new tokens to the answers, up to an end token; lets finished rows go. Returns what the others learn.

        sizes: (drafted, nodes) of each row; None after the prefill, of whose tokens only the last is new.
        """
        going = []
        self.pending_B = bonus_B  # the last true token, not yet in the cache
        self.left_B = self.left_B - (1 if sizes is None else news.counts_B)
        for i, row in enumerate(self.decoded):
            tokens, record = news.tokens[i] if sizes else news.tokens[i][-1:], None
            end = next((n for n, token in enumerate(tokens) if token in self.eos), None)
            if end is not None:
                tokens, row.finish = tokens[: end + 1], "stop"
            row.ids += tokens
            if sizes:
                record = Step(sizes[i][0], len(tokens) - 1, sizes[i][1])
                row.steps.append(record)
            if self.on_tokens:
                self.on_tokens(self.requests[i], tokens)
            if self.on_step:
                self.on_step(self.requests[i], tokens, record)
            if end is None and len(row.ids) < self.budget:
                going.append(i)
        if self.seen_BV is not None:
            self.seen_BV.scatter_(1, bonus_B[:, None] if sizes is None else news.tokens_BL, True)
        return news if len(going) == len(self.decoded) else self._keep(going, news)

    def _keep(self, going: list[int], news: News) -> News:
        def kept(values):
            return [values[i] for i in going]

        self.decoded, self.requests, self.lengths = kept(self.decoded), kept(self.requests), kept(self.lengths)
        if not going:
            return news
        rows = torch.tensor(going, device=self.target.device)
        self.length_B, self.left_B, self.pending_B = self.length_B[rows], self.left_B[rows], self.pending_B[rows]
        if self.generators:
            self.generators, self.numbers_BTU = kept(self.generators), self.numbers_BTU[rows]
        if self.seen_BV is not None:
            self.seen_BV = self.seen_BV[rows]
        self.cache.select(rows)
        self.graphs.clear()
        self.drafter.select(rows)
        taps = None if news.taps_BLAH is None else news.taps_BLAH[rows]
        return News(news.tokens_BL[rows], news.counts_B[rows], taps, news.last_BLH[rows], kept(news.tokens))


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
