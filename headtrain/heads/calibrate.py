"""A start for EAGLE-3 heads that needs no training step: what can be known in closed form from the captures.

Two things are put into a fresh head. *Features*: fc becomes the ridge regression from the target's taps to the
direction of the token after next in lm_head space, plus a code of the current token. *Copying*: one query head of each
group looks for earlier slots whose current token is the token just read (an induction head), and hands on the token
that followed there. Training then starts from a head that drafts; see docs/training.md for what that is worth.

Shapes: P sampled slots, A taps, T target hidden = H head hidden, J key heads, D head size, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headtrain.heads.base import Batch
from headtrain.target import TargetParts

if TYPE_CHECKING:
    from headtrain.heads.eagle3 import Eagle3Head

RIDGE = 1e-2  # of the mean diagonal of the Gram matrix
SLOW = 64  # a rope pair serves for matching when it turns by less than one radian over so many positions
MATCH = 16.0  # attention logit of a slot whose token matches
COPY = 4.0  # size of what copying adds, against unit-size features
QUIET = 0.1  # what remains of the random weights in the copying heads
SCALES = [2 ** (-n / 2) for n in range(-2, 11)]  # of the final norm that are tried
TEMPERED = 1024  # tokens they are tried on
KEYS = ("q_proj", "k_proj", "v_proj")


@torch.no_grad()
def calibrate(head: Eagle3Head, sample: Batch, parts: TargetParts, seed: int) -> None:
    """Fills fc and the copying heads of a fresh head whose draft vocabulary and feature sizes are set.

    sample: some packed training rows, on the device to compute on. Deterministic in the seed.
    """
    c, device = head.config, sample.taps_NAT.device
    generator = torch.Generator().manual_seed(seed)
    turn_HH = orthogonal(c.hidden_size, c.hidden_size, generator).to(device)
    norm_H = parts.norm_weight.to(device).float()
    tokens_VH = unit(parts.embedding.to(device).float())
    directions_VH = unit(parts.lm_head.to(device).float() / norm_H)

    slots = _slots_with_next(sample)
    taps_PF = sample.taps_NAT[slots].flatten(1).float() * head.feature_scale.to(device)
    wanted_PH = directions_VH[sample.ids_N[slots + 2]] + tokens_VH[sample.ids_N[slots]] @ turn_HH.T
    head.fc.weight.copy_(ridge(taps_PF, wanted_PH).T)
    values_CH = orthogonal(c.num_key_value_heads * c.head_dim, c.hidden_size, generator).to(device)
    if torch.equal(parts.embedding, parts.lm_head):  # tied: the way back from a token's code to its logit is known
        output_CH = values_CH / norm_H * norm_H.mean()
    else:
        counts_V = torch.bincount(sample.ids_N, minlength=len(tokens_VH))
        output_CH = _way_back(tokens_VH @ values_CH.T, directions_VH, counts_V)
    _copying_heads(head, turn_HH, values_CH, COPY * output_CH, generator)
    _temper(head, sample)


def _temper(head: Eagle3Head, sample: Batch) -> None:
    """Scales the final norm so that the training loss is lowest: raw, the head is far too sure of its drafts."""
    rows = int(torch.searchsorted(sample.cu_R1, TEMPERED, right=True)) - 1 or 1
    length = int(sample.cu_R1[rows])
    parts = {f.name: getattr(sample, f.name) for f in fields(sample)}
    parts |= {name: value[:length] for name, value in parts.items() if name.endswith(("_N", "_NT", "_NAT"))}
    begin = Batch(**parts | {"cu_R1": sample.cu_R1[: rows + 1]}).to(sample.taps_NAT.device, torch.float32)
    head.to(sample.taps_NAT.device)
    weight_H, losses = head.norm.weight.clone(), []
    for scale in SCALES:
        head.norm.weight.copy_(scale * weight_H)
        losses.append(float(head(begin).loss))
    head.norm.weight.copy_(SCALES[losses.index(min(losses))] * weight_H)


def _way_back(codes_VC: Tensor, directions_VH: Tensor, counts_V: Tensor) -> Tensor:
    """Ridge regression [C, H] from the tokens' codes to their lm_head directions, weighted by how often they occur."""
    weight_V1 = (counts_V.float() + 1).sqrt()[:, None]
    centred = [(x - x.mean(0)) * weight_V1 for x in (codes_VC, directions_VH)]
    return ridge(*centred)


def _copying_heads(
    head: Eagle3Head, turn_HH: Tensor, values_CH: Tensor, output_CH: Tensor, generator: torch.Generator
) -> None:
    """Makes the first query head of each group an induction head.

    Query: a projection of the token read; key: the same projection of the slot's current token, from its code in the
    features; value: the token read at that slot (`values_CH`, C = J D), which `output_CH` turns into its logit. Only
    rope pairs that turn slowly take part in the match.
    """
    c, attention = head.config, head.midlayer.self_attn
    size, hidden = c.head_dim, c.hidden_size
    slow = (head._lent["inverse"] * SLOW < 1).repeat(2).to(values_CH.device)
    if not bool(slow.any()):
        return
    strength = MATCH * size**0.5 / int(slow.sum())
    for j in range(0, c.num_key_value_heads, 1 if head.groups > 1 else 2):  # some query heads stay free
        match_DH = orthogonal(size, hidden, generator).to(values_CH.device) * slow[:, None]
        queries = slice(j * head.groups * size, (j * head.groups + 1) * size)  # the group's first query head
        keys = slice(j * size, (j + 1) * size)
        for name, rows in zip(KEYS, (queries, keys, keys), strict=True):
            attention[name].weight[rows] *= QUIET
        attention["q_proj"].weight[queries, :hidden] += (strength * match_DH).to(attention["q_proj"].weight)
        attention["k_proj"].weight[keys, hidden:] += (match_DH @ turn_HH.T).to(attention["k_proj"].weight)
        attention["v_proj"].weight[keys, :hidden] += values_CH[keys].to(attention["v_proj"].weight)
        attention["o_proj"].weight[:, queries] = output_CH[keys].T.to(attention["o_proj"].weight)


def _slots_with_next(sample: Batch) -> Tensor:
    """Slots p whose token p+2 lies in the same document: int64 [P]."""
    ends = sample.cu_R1[1:].long()
    index = torch.arange(len(sample.ids_N), device=ends.device)
    return index[index + 2 < ends[torch.searchsorted(ends, index, right=True)]]


def ridge(inputs_PF: Tensor, outputs_PH: Tensor) -> Tensor:
    """The weights [F, H] that least squares with a small penalty gives for outputs from inputs."""
    gram = inputs_PF.T @ inputs_PF
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    return torch.linalg.solve(gram, inputs_PF.T @ outputs_PH)


def unit(x: Tensor) -> Tensor:
    """Rows of root mean square 1."""
    return x / (x.square().mean(-1, keepdim=True) + 1e-8).sqrt()


def orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random rows of length 1, orthogonal to each other (in blocks of `columns` where there are more)."""
    blocks = -(-rows // columns)
    return torch.cat([torch.linalg.qr(torch.randn(columns, columns, generator=generator))[0] for _ in range(blocks)])[
        :rows
    ]
