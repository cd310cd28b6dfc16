"""The draft vocabulary of a foreign head: which target id a row of its lm_head stands for, whichever way it is said."""

from __future__ import annotations

import torch
from torch import Tensor

from headtrain.heads.vocab import mapping
from headtrain.importing.foreign import Foreign


def settle_vocab(f: Foreign, vocab: int, draft: int, rows: list[str]) -> None:
    """Leaves d2t (offsets) and t2d in the tensors, the draft ids in ascending order of their target ids; neither with
    the whole vocabulary. rows: the names of the tensors with a row per draft id."""
    d2t, t2d = f.tensors.pop("d2t", None), f.tensors.pop("t2d", None)
    if t2d is not None and (t2d.dtype != torch.bool or t2d.shape != (vocab,)):
        raise f.fault(f"t2d is {t2d.dtype} {list(t2d.shape)}, not bool [{vocab}], one for each token of the target")
    if d2t is not None and (d2t.dtype not in (torch.int64, torch.int32) or d2t.shape != (draft,)):
        raise f.fault(f"d2t is {d2t.dtype} {list(d2t.shape)}, not int64 [{draft}], one for each draft token")
    if d2t is None and t2d is not None and int(t2d.sum()) == draft:
        ids = t2d.nonzero()[:, 0]
        if draft < vocab:
            f.said.append("d2t is not there: made from t2d")
    elif d2t is None and draft < vocab:
        raise f.fault(f"d2t is missing: which of the {vocab} tokens the {draft} rows of lm_head are is not known")
    elif d2t is None:
        ids = torch.arange(vocab)
    else:
        ids = _target_ids(f, d2t.long(), t2d, vocab)
    reorder(f, ids, rows)
    if draft < vocab:
        f.tensors["d2t"], f.tensors["t2d"] = mapping(ids.sort().values, vocab)


def reorder(f: Foreign, ids: Tensor, rows: list[str]) -> None:
    """Puts the rows into ascending order of the target ids they stand for."""
    order = ids.argsort()
    if not torch.equal(order, torch.arange(len(ids))):
        for name in rows:
            f.tensors[name] = f.tensors[name][order]
        f.said.append("the rows of lm_head are put into the order of their target ids; what is drafted stays the same")


def _target_ids(f: Foreign, d2t: Tensor, t2d: Tensor | None, vocab: int) -> Tensor:
    """The target id of each draft id, from offsets or, where only that is possible, from absolute ids."""

    def possible(ids: Tensor) -> bool:
        return bool(((ids >= 0) & (ids < vocab)).all()) and len(ids.unique()) == len(ids)

    def marked(ids: Tensor) -> bool:
        return t2d is None or (int(t2d.sum()) == len(ids) and bool(t2d[ids].all()))

    offsets, absolute = torch.arange(len(d2t)) + d2t, d2t
    found = [ids for ids in (offsets, absolute) if possible(ids)]
    if not found:
        raise f.fault(f"d2t leads to no {len(d2t)} different tokens of the target's {vocab}, as offsets or as ids")
    agreeing = [ids for ids in found if marked(ids)]
    if not agreeing:
        raise f.fault("t2d does not mark the tokens that d2t leads to; one of the two is of another head")
    if agreeing[0] is absolute:
        f.said.append("d2t holds target ids; turned into offsets, target id - draft id, which is what engines read")
    elif len(agreeing) == 2 and not torch.equal(offsets, absolute):
        f.said.append("d2t could hold target ids as well: read as offsets, target id - draft id, as engines do")
    return agreeing[0]
