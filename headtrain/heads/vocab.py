"""The draft vocabulary: which target tokens a head can propose, and which (slot, depth) pairs that lets it train.

Pure functions. N packed positions, V target vocabulary, D draft vocabulary or depths (as the name says).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from headtrain import vocabfile


def draft_size(size: int | str | None, vocab_size: int) -> int:
    """`head.draft_vocab` as a number; "full" (or None) is the whole vocabulary. ValueError outside 1 … vocab_size."""
    if size in ("full", None) or vocabfile.is_file(size):
        return vocabfile.size_of(size, vocab_size)
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= vocab_size:
        raise ValueError(f"draft_vocab_size={size!r}: give a whole number in 1..{vocab_size}, or full")
    return size


def draft_vocab(
    asked: int | str | None, counts_V: Tensor, backup_V: Tensor, ends: set[int], tokenizer: str | None = None
) -> Tensor:
    """The draft vocabulary that `head.draft_vocab` asks for: ascending target ids, int64 [D].

    A size: the most frequent tokens by counts_V, then by backup_V, end tokens first of all. A file: the one in it,
    which must be for V tokens and the tokenizer of that mark.
    """
    if vocabfile.is_file(asked):
        return torch.tensor(vocabfile.read(asked, len(counts_V), tokenizer).ids)
    return choose_draft_vocab(counts_V, draft_size(asked, len(counts_V)), ends, backup_V)


def choose_draft_vocab(
    counts_V: Tensor, size: int, always: set[int] = frozenset(), backup_V: Tensor | None = None
) -> Tensor:
    """The chosen target ids, ascending int64 [size]: `always`, then by count, by backup count, by lowest id."""
    vocab = len(counts_V)
    size = draft_size(size, vocab)
    backup_V = torch.zeros_like(counts_V) if backup_V is None else backup_V
    forced = torch.zeros(vocab, dtype=torch.long)
    forced[list(always)] = 1
    order = torch.arange(vocab)
    for key in (backup_V, counts_V, forced):  # stable sorts, least important first
        order = order[torch.argsort(key[order], descending=True, stable=True)]
    return order[:size].sort().values


def mapping(selected: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(d2t int64 [D] of offsets: target_id = draft_id + d2t[draft_id]; t2d bool [V])."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[selected] = True
    return selected - torch.arange(len(selected)), t2d


def mapping_hash(t2d_V: Tensor) -> str:
    """sha256 (32 hex digits) of the draft vocabulary's mask."""
    return hashlib.sha256(t2d_V.cpu().numpy().tobytes()).hexdigest()[:32]


def moved_rows(rows_DH: Tensor, old_D: Tensor, new_E: Tensor, target_VH: Tensor) -> tuple[Tensor, int]:
    """The rows [E, H] of an lm_head whose draft vocabulary changes, and how many of them are the old ones.

    old_D, new_E: target ids, ascending int64. An id of both keeps its row of rows_DH; a new one gets the target's.
    """
    stays_E = torch.isin(new_E, old_D)
    rows_EH = target_VH[new_E].to(rows_DH)
    rows_EH[stays_E] = rows_DH[torch.searchsorted(old_D, new_E[stays_E])]
    return rows_EH, int(stays_E.sum())


def coverage(counts_V: Tensor, t2d_V: Tensor) -> tuple[int, int]:
    """(supervised tokens inside the draft vocab, all supervised tokens)."""
    return int(counts_V[t2d_V].sum()), int(counts_V.sum())


def trained_pairs(
    supervised_N: Tensor, argmax_N: Tensor, t2d_V: Tensor | None, cu_R1: Tensor, depths: int
) -> tuple[Tensor, Tensor]:
    """Which (depth, slot) pairs are trained: bool [depths, N]; and which would be with a full vocabulary, likewise.

    Pair (d, p) needs tokens p+1 … p+2+d in one supervised span of one document; a trained one also the teacher's choice
    argmax[p+1+d] in the draft vocabulary.
    """
    n = len(supervised_N)
    index = torch.arange(n, device=supervised_N.device)
    ends = cu_R1[1:].long()
    document_end = ends[torch.searchsorted(ends, index, right=True).clamp(max=len(ends) - 1)]
    # first position at or after p that is unsupervised (or the document's end): the running minimum from the right
    stop = torch.where(supervised_N, document_end, index).flip(0).cummin(0).values.flip(0)
    depth = torch.arange(depths, device=index.device)[:, None]
    label = index + 2 + depth  # [depths, N]
    begins = torch.cat([supervised_N[1:], supervised_N.new_zeros(1)])  # token p+1 is supervised
    stop_next = torch.cat([stop[1:], stop.new_full((1,), n)])
    reachable = begins & (label < torch.minimum(stop_next, document_end))
    if t2d_V is None:
        return reachable, reachable
    known = t2d_V[argmax_N.long()]
    teacher = (index + 1 + depth).clamp(max=n - 1)
    return reachable & known[teacher], reachable
