"""A toy head and toy stores for tests of the trainer.

Also started as a process: `python toy.py RUN OPTIONS_JSON …` trains one or more runs; the option `kill_at` kills the
process while it writes the checkpoint of that step, `fail_rank` makes one process fail.

The toy language: the next token is a fixed permutation of the present one, so a head can learn it in a few steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from headtrain.config import RecipeConfig
from headtrain.data_gen import store
from headtrain.heads.base import Batch, Head, HeadConfig, HeadOutput
from headtrain.heads.vocab import mapping, trained_pairs

VOCAB, HIDDEN, TAPS, DEPTHS = 48, 32, 2, 3


def language():
    """(embedding [V, T], lm_head [V, T], next token [V]) of the toy target."""
    made = torch.Generator().manual_seed(11)
    embedding = torch.randn(VOCAB, HIDDEN, generator=made)
    lm_head = torch.randn(VOCAB, HIDDEN, generator=made)
    lm_head = 4 * lm_head / lm_head.norm(dim=1, keepdim=True)
    return embedding, lm_head, torch.randperm(VOCAB, generator=made)


def row(seed: int, prompt: int, answer: int):
    """One capture row: a random prompt, then the target's greedy answer."""
    embedding, lm_head, following = language()
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (prompt,), generator=made).tolist()
    for _ in range(answer):
        ids.append(int(following[ids[-1]]))
    ids = torch.tensor(ids, dtype=torch.int32)
    choice = following[ids.long()]
    last = lm_head[choice]
    taps = torch.stack([embedding[ids.long()], 0.1 * torch.randn(len(ids), HIDDEN, generator=made)], 1)
    supervised = torch.arange(len(ids)) >= prompt
    for tensor in (taps, last):
        tensor[-1] = 0
    logsumexp = (last @ lm_head.T).logsumexp(-1)
    return SimpleNamespace(
        ids=ids, supervised=supervised, taps=taps, last=last, argmax=choice.int(), logsumexp=logsumexp
    )


def make_run(
    run: Path, train: int = 24, valid: int = 6, poison: tuple[int, ...] = (), dtype: str = "float32"
) -> None:
    """Writes run/responses and run/captures. Training rows numbered in `poison` get taps that overflow in the head."""
    rows, infos = [], []
    for n in range(train + valid):
        made = row(n, 3 + n % 4, 8 + n % 9)
        if n in poison:
            made.taps[2] = 1e30
        rows.append(made)
        split = "train" if n < train else "valid"
        infos.append(
            store.RowInfo(f"{split}-{n:03d}", split, "toy", len(made.ids), "length", 3 + n % 4, 8 + n % 9)
        )
    flat = {name: torch.cat([getattr(r, name) for r in rows]) for name in vars(rows[0])}
    responses = {name: flat[name] for name in ("ids", "supervised")}
    store.write_unit(run / "responses", "responses", 0, infos, responses, on_policy=True)
    store.write_index(run / "responses", "responses", 1)
    facts = {"norm": "post_norm", "taps": list(range(1, TAPS + 1)), "hidden": HIDDEN, "dtype": dtype}
    store.write_unit(run / "captures", "captures", 0, infos, flat, **facts)
    store.write_index(run / "captures", "captures", 1)


class ToyHead(Head):
    """No attention: hidden of depth d = norm * tanh(mix [embedding of token p+1+d; features or previous hidden])."""

    def __init__(self):
        super().__init__()
        self.config = HeadConfig(
            type="toy", hidden_size=HIDDEN, target_hidden_size=HIDDEN, vocab_size=VOCAB, draft_vocab_size=40,
            taps=list(range(1, TAPS + 1)), unroll=DEPTHS,
        )  # fmt: skip
        torch.manual_seed(5)
        self.fc = nn.Linear(TAPS * HIDDEN, HIDDEN, bias=False)
        self.mix = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.lm_head = nn.Linear(HIDDEN, 40, bias=False)
        d2t, t2d = mapping(torch.arange(40), VOCAB)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)
        self.register_buffer("feature_scale", torch.ones(TAPS * HIDDEN))
        self._lent, self.noise = {}, 0.0

    def attach(self, embedding, lm_head=None):
        self._lent = {"embedding": embedding, "teacher": lm_head[self.t2d]}

    def step(self, tokens, features):
        embedded = self._lent["embedding"].to(features.dtype)[tokens]
        return self.norm * torch.tanh(self.mix(torch.cat([embedded, features], -1)))

    def forward(self, batch: Batch) -> HeadOutput:
        trained, reach = trained_pairs(batch.supervised_N, batch.argmax_N, self.t2d, batch.cu_R1, DEPTHS)
        teacher = (batch.last_NT @ self._lent["teacher"].to(batch.last_NT.dtype).T).float().softmax(-1)
        taps = batch.taps_NAT.flatten(1) * self.feature_scale.to(batch.taps_NAT.dtype)
        taps = taps + 0 * taps.square()  # a poisoned row overflows
        hidden, sums, correct = self.fc(taps + self.noise * torch.rand_like(taps)), [], []
        for depth in range(DEPTHS):
            hidden = self.step(batch.ids_N.roll(-1 - depth), hidden)
            logits = self.lm_head(hidden).float()
            at = teacher.roll(-1 - depth, 0)
            loss = -(at * logits.log_softmax(-1)).sum(-1)
            sums.append(torch.where(trained[depth], loss, 0.0).sum())
            right = self.to_target_ids(logits.argmax(-1)) == batch.argmax_N.roll(-1 - depth)
            correct.append((right & trained[depth]).sum())
        loss_D, weights = torch.stack(sums), 0.8 ** torch.arange(DEPTHS)
        loss = (weights * loss_D * batch.parts / batch.count_D.clamp(min=1)).sum()
        return HeadOutput(
            loss, loss_D.detach(), trained.sum(1).float(), torch.stack(correct).float(), reach.sum(1).float()
        )

    def draft_all(self, batch: Batch, depths: int):
        taps = batch.taps_NAT.flatten(1) * self.feature_scale.to(batch.taps_NAT.dtype)
        tokens, features, drafts = batch.ids_N.roll(-1), self.fc(taps), []
        for _ in range(depths):
            features = self.step(tokens, features)
            tokens = self.to_target_ids(self.lm_head(features).argmax(-1))
            drafts.append(tokens)
        return torch.stack(drafts, 1)

    def portable_tensors(self):
        tensors = dict(self.state_dict())
        tensors["fc.weight"] = tensors["fc.weight"] * tensors.pop("feature_scale")
        return tensors

    def portable_config(self, dtype):
        return {"headtrain": self.config.to_dict()}


def toy_head(config: RecipeConfig | None = None, *_) -> ToyHead:
    """The untrained toy; `train.noise` of the config is noise on its features, which also get a size."""
    head = ToyHead()
    head.attach(*language()[:2])
    head.noise = config.train.noise if config else 0.0
    head.lm_head.weight.requires_grad_(not (config and config.head.freeze_lm_head))
    with torch.no_grad():
        head.feature_scale[:] = torch.linspace(0.5, 2, TAPS * HIDDEN)
        head.fc.weight /= head.feature_scale
    return head


def read_head(folder: Path) -> ToyHead:
    """The head in a folder that `save_head` wrote."""
    from safetensors.torch import load_file

    head = toy_head()
    head.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    head.feature_scale.fill_(1.0)
    return head


def recipe(**train) -> RecipeConfig:
    """A recipe for the toy; `seed`, `k`, `logger`, `freeze_lm_head`, `lora` (its rank), `targets` besides the keys of
    `train`."""
    config = RecipeConfig()
    config.target.device = "cpu"
    config.seed, config.eval.k = train.pop("seed", 7), [train.pop("k", 3)]
    config.logger = train.pop("logger", "none")
    config.head.freeze_lm_head = train.pop("freeze_lm_head", False)
    config.head.lora.rank, config.head.lora.targets = train.pop("lora", None), train.pop("targets", None)
    defaults = {"batch_tokens": 64, "lr": 5e-3, "precision": "fp32", "steps": 12, "warmup": 0.1, "log_every": 4}
    for key, value in (defaults | train).items():
        if not hasattr(config.train, key):
            raise KeyError(key)
        setattr(config.train, key, value)
    return config


def train_toy(run: Path, **train) -> None:
    from headtrain.training import trainer

    trainer.build_head = toy_head
    trainer.train(recipe(**train), run)


def kill_at(step: int) -> None:
    """SIGKILL while the checkpoint of `step` is complete but for its last file and its name."""
    from headtrain.training import checkpoint

    def flush(part: Path) -> None:
        if part.name == f".step-{step:08d}.part":
            with open(part / "weights.safetensors", "r+b") as handle:
                handle.truncate(100)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint._flush = flush


def fail_rank(rank: int) -> None:
    """Process `rank` fails in its third step."""
    from headtrain.training import trainer

    done, original = [], trainer.optimizer_step

    def step(*args):
        done.append(1)
        if len(done) == 3 and args[-1].rank == rank:
            raise RuntimeError(f"process {rank} fails on purpose")
        return original(*args)

    trainer.optimizer_step = step


if __name__ == "__main__":
    from headtrain.training import trainer

    leave, trainer.leave = trainer.leave, lambda: None
    for run, options in zip(sys.argv[1::2], map(json.loads, sys.argv[2::2]), strict=True):
        for trap in (kill_at, fail_rank):
            if trap.__name__ in options:
                trap(options.pop(trap.__name__))
        train_toy(Path(run), **options)
    leave()
