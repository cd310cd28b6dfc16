"""A tiny random target, heads of ours that were trained on it, and what our own decoder drafts with them.

A real engine is given the same folders. Heads are trained a little, so that drafts of every depth are accepted now and
then, and every norm and projection is moved away from its start, so that drafts depend on all of them.
Shapes: as in headtrain/heads/base.py.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from headtrain.config import HeadSection, RecipeConfig, TargetConfig, TrainConfig
from headtrain.eval.decoder.decode import NEAR_TIE, decode
from headtrain.eval.decoder.drafters.head import HeadDrafter
from headtrain.eval.decoder.drafters.none import NoDrafter
from headtrain.eval.decoder.sampling import Sampling
from headtrain.heads.base import Batch, Head, load_head, new_head, save_head
from headtrain.heads.drafting import DraftState
from headtrain.target import Target, TargetParts, _register_attention

SIZES = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.15,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
LENGTHS = (6, 3, 17, 1, 40, 9, 25, 90, 12, 5, 30, 8)  # of the prompts
NEW = 48  # tokens of each answer


class NoTokenizer:
    eos_token_id = None


@dataclass
class Step:
    """One step of decoding: the true text's length before it, what was drafted, and how much of that was accepted."""

    length: int
    drafts: list[int]
    accepted: int


@dataclass
class Decoding:
    """Of every prompt: its answer and its steps. accepted: of the drafts at each position, over all steps."""

    answers: list[list[int]]
    steps: list[list[Step]]
    accepted: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(map(len, self.steps))


def make_target(folder: Path, family: str = "llama", **more) -> Target:
    """Writes a random target; its norms are not 1, so that what is before and after one differs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SIZES | more)), dtype=torch.float32)
    scatter(model, 0.3)
    model.save_pretrained(folder)
    return load_target(folder)


def load_target(folder: Path) -> Target:
    from transformers import AutoModelForCausalLM

    _register_attention()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="headtrain", dtype=torch.float32)
    target = Target(model, NoTokenizer(), "tiny")
    target.self_check()
    return target


@torch.no_grad()
def scatter(module: torch.nn.Module, width: float) -> None:
    """Moves every norm and bias, so that none can be left out without a difference."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter += width * torch.randn(parameter.shape, generator=generator)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in LENGTHS]


@cache
def answers(target: Target) -> list[list[int]]:
    """The target's greedy answers, long enough for drafts beyond the last token of a test."""
    return [d.ids for d in decode(target, NoDrafter(), prompts(), k=0, max_new_tokens=NEW + 16)]


@torch.no_grad()
def captured(target: Target, texts: list[list[int]], taps: tuple[int, ...]) -> Batch:
    """All texts in one batch, every token supervised."""
    parts = []
    for text in texts:
        ids = torch.tensor([text])
        states = target.forward(ids, taps=taps)
        logits = target.logits(states.last_BLH[0]).float()
        taps_LAT = states.taps_BLAH[0] if taps else states.last_BLH.new_zeros(len(text), 0, target.hidden_size)
        parts.append((ids[0], torch.arange(len(text)), taps_LAT, states.last_BLH[0], logits.argmax(-1),
                      logits.logsumexp(-1)))  # fmt: skip
    ids, positions, taps_NAT, last, argmax, logsumexp = (torch.cat(x) for x in zip(*parts, strict=True))
    ends = torch.tensor([0, *(len(t) for t in texts)]).cumsum(0).int()
    supervised = torch.ones_like(ids, dtype=torch.bool)
    return Batch(ids, positions, ends, supervised, taps_NAT, last, argmax, logsumexp)


def make_head(target: Target, section: HeadSection, folder: Path, source: str | None = None, steps: int = 60) -> Head:
    """Trains a head on the target's own answers and writes its folder; returns it as read again from there.

    source: the target's folder, for modules that stand in its checkpoint.
    """
    texts = [p + a for p, a in zip(prompts(), answers(target), strict=True)]
    parts = TargetParts(
        target.embed.weight, target.lm_head.weight, target.norm.weight.float(), target.config, target.rope(), set(),
        TargetConfig(model=source),
    )  # fmt: skip
    layers = target.num_layers
    taps = () if section.type in ("eagle", "medusa", "mtp") else tuple(section.taps or (2, layers // 2, layers - 3))
    batch = captured(target, texts, taps)
    seen = torch.bincount(batch.ids_N, minlength=target.vocab_size)
    head = new_head(RecipeConfig(head=section, train=TrainConfig()), parts, seen, seen, batch)
    scatter(head, 0.3)
    torch.manual_seed(3)
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        head(batch).loss.backward()
        optimizer.step()
    save_head(head, folder)
    return own(folder, target)


def own(folder: Path, target: Target) -> Head:
    return load_head(folder, target.embed.weight, lm_head=target.lm_head.weight)


@contextmanager
def fed_back_before_norm(head: Head):
    """Drafting from the state before the module's norm; what reads it has a norm of its own, so only weights matter."""
    remember = DraftState.remember
    DraftState.remember = lambda state, hidden_BMH: remember(state, hidden_BMH / head.norm.weight)
    try:
        yield
    finally:
        DraftState.remember = remember


# ------------------------------------------------------------------------------------------------- our own decoder


class Recorder(HeadDrafter):
    """Keeps what it proposes; for one request at a time."""

    def start(self, prompts, capacity):
        self.proposed: list[list[int]] = []
        super().start(prompts, capacity)

    def propose(self, k, uniform_BN=None):
        tree = super().propose(k, uniform_BN)
        self.proposed.append(tree.tokens[0].tolist())
        return tree


def decoded(target: Target, head: Head, prompts: list[list[int]], k: int, new: int = NEW) -> Decoding:
    """The steps of our decoder up to the one that completes `new` tokens, each with k drafts, as engines count them."""
    drafter, found = Recorder(head, Sampling()), Decoding([], [], [0] * k)
    for prompt in prompts:
        row = decode(target, drafter, [prompt], k=k, max_new_tokens=new + k)[0]
        length, steps = len(prompt) + 1, []
        for drafts, step in zip(drafter.proposed, row.steps, strict=True):
            if length - len(prompt) >= new:
                break
            steps.append(Step(length, drafts, step.accepted))
            length += step.accepted + 1
            for position in range(step.accepted):
                found.accepted[position] += 1
        found.answers.append(row.ids[:new])
        found.steps.append(steps)
    return found


# ------------------------------------------------------------------------------------------------- comparing


@dataclass
class Parity:
    """What an engine did beside what ours did. unlike: a line for every difference that no near-tie excuses."""

    steps: int = 0
    drafts: int = 0
    equal: int = 0
    ties: int = 0
    unlike: list[str] = field(default_factory=list)


@torch.no_grad()
def draft_logits(target: Target, head: Head, text: list[int], drafts: list[int]) -> Tensor:
    """The head's logits [W] after the true text and some drafts, computed anew."""
    state = head.start(1, len(text) + 32)
    ids = torch.tensor([text])
    states = target.forward(ids[:, :-1], taps=tuple(head.config.taps))
    count = torch.tensor([len(text) - 1])
    logits = head.extend(state, ids[:, 1:], states.taps_BLAH, states.last_BLH, count)[0][0]
    for token in drafts:
        logits = head.expand(state, torch.tensor([[token]]))[0][0, 0]
    return logits.float()


def tied(logits: Tensor, ids: Tensor, *tokens: int) -> bool:
    """Whether the tokens (target ids; `ids` are those of the logits) lie within a near-tie of the largest logit."""
    allowed = NEAR_TIE * float(logits.abs().max())
    values = [logits[ids == token] for token in tokens]
    return all(len(v) and float(logits.max() - v) < allowed for v in values)


def compare(target: Target, head: Head, prompts: list[list[int]], ours: Decoding, theirs: Decoding) -> Parity:
    """Draft token by draft token, at every true length that both drafted from."""
    found, ids = Parity(), head.to_target_ids(torch.arange(head.config.draft_vocab_size))
    rows = zip(prompts, ours.answers, theirs.answers, ours.steps, theirs.steps, strict=True)
    for number, (prompt, answer, other, steps, others) in enumerate(rows):
        same = next((i for i, (a, b) in enumerate(zip(answer, other, strict=True)) if a != b), len(answer))
        if same < len(answer):
            text = torch.tensor([prompt + answer[:same]])
            logits = target.logits(target.forward(text).last_BLH[0, -1]).float()
            _differ(found, logits, torch.arange(len(logits)), f"prompt {number}, answer", same, answer, other)
        drafted = {step.length: step.drafts for step in others}
        for step in steps:
            if step.length > len(prompt) + same or step.length not in drafted:
                continue
            found.steps += 1
            for place, (a, b) in enumerate(zip(step.drafts, drafted[step.length], strict=True)):
                found.drafts += 1
                if a != b:
                    text = prompt + answer[: step.length - len(prompt)]
                    logits = draft_logits(target, head, text, step.drafts[:place])
                    where = f"prompt {number}, length {step.length}, draft"
                    _differ(found, logits, ids, where, place, step.drafts, drafted[step.length])
                    break
                found.equal += 1
        if same == len(answer) and len(drafted) < len(steps):
            found.unlike.append(f"prompt {number}: {len(drafted)} steps instead of {len(steps)}")
    return found


def _differ(found: Parity, logits: Tensor, ids: Tensor, where: str, at: int, ours: list[int], theirs: list[int]):
    a, b = ours[at], theirs[at]
    if tied(logits, ids, a, b):
        found.ties += 1
        return
    said = {t: [f"{v:.6g}" for v in logits[ids == t].tolist()] for t in (a, b)}
    found.unlike.append(f"{where} {at}: {a} (logit {said[a]}), the engine {b} ({said[b]})")
