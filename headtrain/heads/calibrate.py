"""A start for EAGLE-3 heads that needs no training step: what can be known in closed form from the captures.

Three things are put into a fresh head. *Features*: fc becomes a ridge regression from the target's taps to the
direction of the token after next in lm_head space; where lm_head varies least it holds codes of the current token and
of the one before. *Reading*: one query head of each group looks at its own slot, adds what the token just read says
about the next (fitted together with fc), and writes its code down as the current one for the next depth. *Copying*:
another one looks for earlier slots whose last tokens are those just read (an induction head), and hands on the token
that followed there. Last, the final norm is scaled to where the loss is lowest.
Training then starts from a head that drafts; see docs/training.md for what that is worth.

Shapes: P sampled slots, F = A T features, T target hidden = H head hidden, J key heads, D head size, C = J D values,
K dimensions of a token's code, V target vocabulary.
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
SLOW = 64  # rope pairs that turn by less than one radian over so many positions match tokens far back
MATCH = 16.0  # attention logit of a slot whose token matches
COPY = 4.0  # size of what copying adds, against unit-size directions
BEFORE = 0.5  # weight of the token before in a match
CARRY = 4.0  # size of the code that a reading head writes down
CODE = 0.22  # dimensions of each code, as a share of the hidden size
READ = 3.0  # size of a token's values beside unit-size features in the regression; larger ones are penalised less
QUIET = 0.1  # what remains of the random weights in the heads that are set
SCALES = [2 ** (-n / 2) for n in range(-2, 11)]  # of the final norm that are tried
TEMPERED = 1024  # tokens they are tried on


@torch.no_grad()
def calibrate(head: Eagle3Head, sample: Batch, parts: TargetParts, seed: int) -> None:
    """Fills fc and two query heads per group of a fresh head whose draft vocabulary and feature sizes are set.

    sample: some packed training rows, on the device to compute on. Deterministic in the seed.
    """
    c, device = head.config, sample.taps_NAT.device
    generator = torch.Generator().manual_seed(seed)
    norm_H = parts.norm_weight.to(device).float()
    tokens_VH = unit(parts.embedding.to(device).float())
    directions_VH = unit(parts.lm_head.to(device).float() / norm_H)
    counts_V = torch.bincount(sample.ids_N, minlength=len(tokens_VH)).float() + 0.1
    code_HK = token_code(tokens_VH, counts_V, int(CODE * c.hidden_size))
    room = principal(directions_VH, counts_V)[1][:, : 2 * code_HK.shape[1]]
    room_2HK = room[:, torch.randperm(room.shape[1], generator=generator).to(device)].chunk(2, 1)
    values_CH = orthogonal(c.num_key_value_heads * c.head_dim, c.hidden_size, generator).to(device)
    copying, reading = _query_heads(head)
    read_CH = torch.zeros_like(values_CH)
    rows = [j * c.head_dim + d for j, _ in reading for d in range(c.head_dim)]  # values that reading heads hand on

    slots = slots_with_next(sample)
    taps_PF = sample.taps_NAT[slots].flatten(1).float() * head.feature_scale.to(device)
    wanted_PH = directions_VH[sample.ids_N[slots + 2]]
    wanted_PH = wanted_PH - wanted_PH @ room @ room.T
    values_PC = READ * (tokens_VH @ values_CH[rows].T)[sample.ids_N[slots + 1]]
    weights = ridge(torch.cat([taps_PF, values_PC], 1), wanted_PH)
    read_CH[rows] = READ * weights[taps_PF.shape[1] :]
    codes_VK = tokens_VH @ code_HK
    fc_FH = weights[: taps_PF.shape[1]]
    for back, room_HK in enumerate(room_2HK):
        fc_FH = fc_FH + ridge(taps_PF, codes_VK[_token_before(sample, slots, back)]) @ room_HK.T
    read_CH[rows] += CARRY * _way_back(tokens_VH @ values_CH[rows].T, codes_VK, counts_V) @ room_2HK[0].T
    size = (taps_PF @ fc_FH).square().mean().sqrt()  # hidden_norm divides by it

    if torch.equal(parts.embedding, parts.lm_head):  # tied: the way back from a token's values to its logit is known
        copied_CH = values_CH / norm_H * norm_H.mean()
    else:
        copied_CH = _way_back(tokens_VH @ values_CH.T, directions_VH, counts_V)
    head.fc.weight.copy_(fc_FH.T)
    room_2HK = [size * room_HK for room_HK in room_2HK]
    _set_heads(head, copying, reading, code_HK, room_2HK, values_CH, COPY * copied_CH, read_CH, generator)
    temper(head, sample)


def _query_heads(head: Eagle3Head) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(key head, query head of its group) of the copying and the reading heads; without groups they take turns."""
    key_heads = range(head.config.num_key_value_heads)
    if head.groups > 1:
        return [(j, 0) for j in key_heads], [(j, 1) for j in key_heads]
    return [(j, 0) for j in key_heads[0::4]], [(j, 0) for j in key_heads[1::4]]  # half of the heads stay free


def _set_heads(
    head: Eagle3Head, copying, reading, code_HK: Tensor, room_2HK: list[Tensor], values_CH: Tensor, copied_CH: Tensor,
    read_CH: Tensor, generator: torch.Generator,
) -> None:  # fmt: skip
    """Sets attention so that copying heads match the tokens read with slots' last tokens, reading heads with itself.

    Query: a projection of the code of the token read; for copying also one of the token before, from its code in the
    features. Key: for copying the same projections of the slot's current token and the one before, both from the
    features, on rope pairs that turn slowly; for reading that of the token read at the slot, on the other pairs.
    Value: the token read there. Where no pair turns slowly (or fast), nothing is set.
    """
    c, attention, hidden = head.config, head.midlayer.self_attn, head.config.hidden_size
    q, k, v, o = (attention[f"{name}_proj"].weight for name in "qkvo")
    slow = (head._lent["inverse"] * SLOW < 1).repeat(2).to(values_CH.device)

    def match(pairs: Tensor) -> Tensor:
        return orthogonal(c.head_dim, code_HK.shape[1], generator).to(values_CH.device) * pairs[:, None]

    for j in {j for j, _ in copying + reading}:
        keys = slice(j * c.head_dim, (j + 1) * c.head_dim)
        k[keys] *= QUIET
        v[keys] *= QUIET
        v[keys, :hidden] += values_CH[keys].to(v)
    for heads, pairs, output_CH in ((copying, slow, copied_CH), (reading, ~slow, read_CH)):
        strength = MATCH * c.head_dim**0.5 / max(int(pairs.sum()), 1)
        for j, g in heads if bool(pairs.any()) else ():
            keys = slice(j * c.head_dim, (j + 1) * c.head_dim)
            queries = slice((j * head.groups + g) * c.head_dim, (j * head.groups + g + 1) * c.head_dim)
            now_DK, before_DK = match(pairs), match(pairs)
            q[queries] *= QUIET
            q[queries, :hidden] += (strength * now_DK @ code_HK.T).to(q)
            if heads is reading:
                k[keys, :hidden] += (now_DK @ code_HK.T).to(k)
            else:
                q[queries, hidden:] += (BEFORE * strength * before_DK @ room_2HK[0].T).to(q)
                k[keys, hidden:] += (now_DK @ room_2HK[0].T + before_DK @ room_2HK[1].T).to(k)
            o[:, queries] = output_CH[keys].T.to(o)


def _way_back(values_VC: Tensor, directions_VH: Tensor, counts_V: Tensor) -> Tensor:
    """Ridge regression [C, H] from the tokens' values to directions or codes, weighted by how often they occur."""
    weight_V1 = (counts_V + 1).sqrt()[:, None]
    centred = [(x - x.mean(0)) * weight_V1 for x in (values_VC, directions_VH)]
    return ridge(*centred)


def principal(x_VH: Tensor, weight_V: Tensor) -> tuple[Tensor, Tensor]:
    """(variances ascending [H], axes [H, H]) of weighted rows; the mean's own direction counts as variance 0."""
    weight_V1 = (weight_V / weight_V.sum()).sqrt()[:, None]
    mean_H = (x_VH * weight_V1.square()).sum(0)
    spread_VH = (x_VH - mean_H) * weight_V1
    axis_H = mean_H / mean_H.norm().clamp(min=1e-8)
    spread_VH = spread_VH - (spread_VH @ axis_H)[:, None] * axis_H
    return torch.linalg.eigh(spread_VH.T @ spread_VH)


def token_code(tokens_VH: Tensor, counts_V: Tensor, size: int) -> Tensor:
    """The linear map [H, K] from a token's unit-size embedding to a code whose dimensions all vary by about 1."""
    variance_H, axes_HH = principal(tokens_VH, counts_V.sqrt())
    return axes_HH[:, -size:] / variance_H[-size:].clamp(min=1e-4 * variance_H[-1]).sqrt()


def temper(head: Eagle3Head, sample: Batch) -> None:
    """Scales the final norm so that the training loss is lowest: raw, the head is far too sure of its drafts."""
    rows = int(torch.searchsorted(sample.cu_R1, TEMPERED, right=True)) - 1 or 1
    length = int(sample.cu_R1[rows])
    parts, ends = {f.name: getattr(sample, f.name) for f in fields(sample)}, ("_N", "_NT", "_NAT")
    parts |= {name: value[:length] for name, value in parts.items() if value is not None and name.endswith(ends)}
    begin = Batch(**parts | {"cu_R1": sample.cu_R1[: rows + 1]}).to(sample.taps_NAT.device, torch.float32)
    head.to(sample.taps_NAT.device)
    weight_H, losses = head.norm.weight.clone(), []
    for scale in SCALES:
        head.norm.weight.copy_(scale * weight_H)
        losses.append(float(head(begin).loss))
    head.norm.weight.copy_(SCALES[losses.index(min(losses))] * weight_H)


def slots_with_next(sample: Batch) -> Tensor:
    """Slots p whose token p+2 lies in the same document: int64 [P]."""
    ends = sample.cu_R1[1:].long()
    index = torch.arange(len(sample.ids_N), device=ends.device)
    return index[index + 2 < ends[torch.searchsorted(ends, index, right=True)]]


def _token_before(sample: Batch, slots: Tensor, back: int) -> Tensor:
    """The token `back` places before each slot, or its document's first: int64 [P]."""
    starts = sample.cu_R1[:-1].long()
    document = torch.searchsorted(sample.cu_R1[1:].long(), slots, right=True)
    return sample.ids_N[torch.maximum(slots - back, starts[document])]


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
