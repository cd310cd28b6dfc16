"""Which head a run ends with: the one with the highest τ on validation data, and when more training is no use.

Shapes: N packed positions, K draft tokens, R ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from headtrain.data_gen.store import CaptureStore
from headtrain.files import fsync_folder, read_json, write_json, writing
from headtrain.heads.base import Batch, Head
from headtrain.heads.simulate import Acceptance, accepted_chain, from_histogram, rank_hits
from headtrain.training.batches import collate
from headtrain.training.ranks import Ranks


def simulate(
    head: Head, store: CaptureStore, rows: list, k: int, batch_tokens: int, ranks: Ranks,
    followed: Callable[[Batch], Batch] | None = None,
) -> Acceptance:  # fmt: skip
    """Simulated greedy chain decoding with k drafts over validation rows, which the processes share.

    A head that drafts by depth is told how often each depth's likeliest tokens are right. followed: what becomes of a
    batch on the device where the target is trained too. Every process must call it.
    """
    steps_K1 = torch.zeros(k + 1, dtype=torch.long)
    hits_KR, pairs_K = torch.zeros(k, head.ranks, dtype=torch.long), torch.zeros(k, dtype=torch.long)
    for chosen in packed(rows[ranks.rank :: ranks.world], batch_tokens):
        batch: Batch = collate([store.read(row) for row in chosen], [row.id for row in chosen])
        moved = batch.to(ranks.device, next(head.parameters()).dtype)
        if followed:
            moved = followed(moved)
            batch = moved.to("cpu")
        if head.by_depth:
            ranked_NKR = head.ranked(moved, k).cpu()
            drafts_NK = ranked_NKR[..., 0]
            for total, found in zip((hits_KR, pairs_K), rank_hits(ranked_NKR, batch), strict=True):
                total += found
        else:
            drafts_NK = head.draft_all(moved, k).cpu()
        accepted = accepted_chain(drafts_NK, batch.argmax_N, batch.supervised_N, batch.cu_R1, k)
        steps_K1 += torch.bincount(torch.tensor(accepted, dtype=torch.long), minlength=k + 1)
    if head.by_depth:
        hits_KR, pairs_K = (ranks.sum(total.to(ranks.device)).cpu() for total in (hits_KR, pairs_K))
        shares_KR = (hits_KR / pairs_K.clamp(min=1)[:, None]).double()
        head.config.accuracy = [[round(share, 4) for share in row] for row in shares_KR.tolist()]
    return from_histogram(ranks.sum(steps_K1.to(ranks.device)).cpu())


def packed(rows: list, budget: int) -> Iterator[list]:
    """Rows in order, in groups of at most `budget` tokens (a longer row is a group of its own)."""
    group: list = []
    for row in rows:
        if group and sum(r.tokens for r in group) + row.tokens > budget:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


class Best:
    """The head with the highest τ: training/best/step-N, named by training/best.json."""

    def __init__(self, folder: Path, ranks: Ranks, write: Callable[[Head, Path], None], measure: dict[str, Any]):
        """write: saves a head in a folder. measure: how τ is measured; a head found best by another counts no more."""
        self.folder, self.ranks, self.write, self.measure = folder, ranks, write, measure
        self.path = folder / "best.json"
        known = ranks.agree(read_json(self.path) if ranks.first and self.path.is_file() else None)
        if known and known.get("measure") != measure:
            known = None
        self.step, self.tau = (known["step"], known.get("decoded_tau") or known["tau"]) if known else (None, None)

    def offer(self, head: Head, facts: dict[str, Any], tau: float, step: int) -> None:
        """Keeps the head when its τ is at least as high as the best so far. Every process must call it."""
        if self.tau is None or tau >= self.tau:
            self._keep(head, facts, step)
            self.tau = tau

    def _keep(self, head: Head, facts: dict[str, Any], step: int) -> None:
        self.step = step
        if not self.ranks.first:
            return
        place = self.folder / "best" / f"step-{step:08d}"
        self.write(head, place)
        known = {"step": step, **facts, "measure": self.measure, "folder": str(place.relative_to(self.folder))}
        write_json(self.path, known)
        for old in place.parent.iterdir():
            if old != place:
                shutil.rmtree(old)

    def finish(self, head: Head, step: int, head_folder: Path) -> None:
        """Writes run/head: the best head, or without validation rows the last one. Every process must call it."""
        if self.tau is None:
            self._keep(head, {"tau": None, "alpha": None}, step)
        if self.ranks.first:
            copy_head(self.folder / read_json(self.path)["folder"], head_folder)
        self.ranks.barrier()


def copy_head(source: Path, folder: Path) -> None:
    """Copies a head folder file by file, each whole or absent; config.json last."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: path.name == "config.json"):
        if path.is_dir():
            copy_head(path, folder / path.name)
            continue
        with writing(folder / path.name) as part:
            shutil.copyfile(path, part)
    fsync_folder(folder)
