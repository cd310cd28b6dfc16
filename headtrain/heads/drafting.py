"""What a head that drafts node by node remembers: keys, values, hidden states, and which node lies below which.

A row's true slots are 0 … length-1. The nodes drafted since lie right behind them, node i in slot length + i, at the
rope position of their depth: length - 1 + depth, whatever slot they are in. A node sees the true slots, its ancestors
and itself.

Shapes: B requests, L new true slots, M new nodes, N nodes so far, S slots, W slots looked at, G query heads per key
head, J key heads, D head size, H head hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ROOM = 16  # slots for nodes at the start; more are made when they are needed
BUCKET = 256  # true slots; on a GPU `window` is a multiple


class DraftState:
    """Of B requests with at most `capacity` true slots each, the padding of `settle` included. Room for nodes is extra.

    like: a tensor of the head, for dtype and device. Nothing here waits for the device.
    """

    def __init__(self, batch: int, capacity: int, kv_heads: int, head_dim: int, hidden: int, like: Tensor):
        self.keys = like.new_zeros(batch, capacity + ROOM, kv_heads, head_dim)
        self.values = torch.zeros_like(self.keys)
        self.hidden_BNH = like.new_zeros(batch, ROOM + 1, hidden)  # of the root, then of every node
        self.length_B = torch.zeros(batch, dtype=torch.long, device=like.device)
        self.capacity = capacity
        self.longest = 0  # most true slots of a row, at most
        self.nodes = 0
        self.above_BNN: Tensor | None = None  # bool: node j is node i or lies above it; None: the nodes are a chain

    @property
    def window(self) -> int:
        """How many true slots drafting looks at; rounded up on a GPU, so that one recorded graph serves many steps."""
        rounded = self.longest if self.keys.device.type == "cpu" else -(-self.longest // BUCKET) * BUCKET
        return min(rounded, self.capacity)

    @property
    def graph_key(self) -> tuple[int, int]:
        """What drafting depends on besides its tensors' contents: it changes when a recorded graph no longer fits."""
        return self.window, self.keys.data_ptr()

    def settle(self, width: int, counts_B: Tensor) -> Tensor:
        """Slots for `width` new true tokens per row, int64 [B, L]; the first counts_B[b] are real. Drops all nodes."""
        self.nodes, self.above_BNN = 0, None
        slots_BL = self.length_B[:, None] + torch.arange(width, device=counts_B.device)
        self.length_B += counts_B  # in place: a captured CUDA graph reads it where it is
        self.longest = min(self.longest + width, self.capacity)
        return slots_BL

    def branch(self, parents_BM: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Adds M nodes (None: one, below the last): their slots and positions, int64 [B, M]; their parents' hidden."""
        if parents_BM is None and self.above_BNN is not None:
            parents_BM = torch.full_like(self.length_B[:, None], self.nodes - 1)
        n, m = self.nodes, 1 if parents_BM is None else parents_BM.shape[1]
        self._reserve(n + m)
        self.nodes = n + m
        if parents_BM is None:
            slots_B1 = self.length_B[:, None] + n
            return slots_B1, slots_B1, self.hidden_BNH[:, n : n + 1]
        device, batch = parents_BM.device, len(parents_BM)
        above_BNN = self.above_BNN
        if above_BNN is None:
            above_BNN = torch.ones(n, n, dtype=torch.bool, device=device).tril().expand(batch, n, n)
        seen_BNN = F.pad(above_BNN, (0, m, 1, 0))  # row 0: the root, below no node
        own_BMN = seen_BNN.gather(1, (parents_BM + 1)[..., None].expand(-1, -1, n + m))
        own_BMN[..., n:] = torch.eye(m, dtype=torch.bool, device=device)
        self.above_BNN = torch.cat([seen_BNN[:, 1:], own_BMN], 1)
        features_BMH = self.hidden_BNH.gather(1, (parents_BM + 1)[..., None].expand(-1, -1, self.hidden_BNH.shape[2]))
        slots_BM = self.length_B[:, None] + torch.arange(n, n + m, device=device)
        return slots_BM, self.length_B[:, None] - 1 + own_BMN.sum(-1), features_BMH

    def _reserve(self, nodes: int) -> None:
        if (more := self.capacity + nodes - self.keys.shape[1]) > 0:
            more += nodes  # rather once too much than at every level
            self.keys, self.values = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (self.keys, self.values))
            self.hidden_BNH = F.pad(self.hidden_BNH, (0, 0, 0, more))

    def write(self, slots_BL: Tensor, keys_BLJD: Tensor, values_BLJD: Tensor) -> None:
        rows_B1 = torch.arange(len(slots_BL), device=slots_BL.device)[:, None]
        self.keys[rows_B1, slots_BL], self.values[rows_B1, slots_BL] = keys_BLJD, values_BLJD

    def attend(self, q_BMGJD: Tensor) -> Tensor:
        """Attention of the newest M nodes, or (M = 1, no nodes) of the last true slot: [B, M, G, J, D]."""
        m, window, device = q_BMGJD.shape[1], self.window + self.nodes, q_BMGJD.device
        columns_W = torch.arange(window, device=device)
        if self.above_BNN is None:
            seen_BMW = (columns_W < self.length_B[:, None] + self.nodes)[:, None]
        else:
            seen_BMW = (columns_W < self.length_B[:, None])[:, None].repeat(1, m, 1)
            slots_BN = self.length_B[:, None] + torch.arange(self.nodes, device=device)
            own_BMN = self.above_BNN[:, -m:]
            seen_BMW.scatter_(2, slots_BN[:, None].expand_as(own_BMN), own_BMN)
        return attend(q_BMGJD, self.keys[:, :window], self.values[:, :window], seen_BMW)

    def remember(self, hidden_BMH: Tensor) -> None:
        """Keeps the hidden of the newest M nodes (of the root while there are none), which their children are fed."""
        self.hidden_BNH[:, self.nodes + 1 - hidden_BMH.shape[1] : self.nodes + 1] = hidden_BMH

    def select(self, rows: Tensor) -> None:
        """Keeps only the given requests, in that order, and drops all nodes."""
        self.nodes, self.above_BNN = 0, None
        self.keys, self.values, self.hidden_BNH = self.keys[rows], self.values[rows], self.hidden_BNH[rows]
        self.length_B = self.length_B[rows]


def attend(q_BMGJD: Tensor, keys_BWJD: Tensor, values_BWJD: Tensor, seen_BMW: Tensor) -> Tensor:
    """Attention of M queries, each to the slots that seen_BMW (bool) gives it: [B, M, G, J, D]."""
    m = q_BMGJD.shape[1]
    if m > 1:  # one row for each of a key head's query heads
        seen_BMW = seen_BMW.repeat_interleave(q_BMGJD.shape[2], 1)
    out = F.scaled_dot_product_attention(
        q_BMGJD.permute(0, 3, 1, 2, 4).flatten(2, 3),  # the query heads of a key head stand as more queries
        keys_BWJD.transpose(1, 2),
        values_BWJD.transpose(1, 2),
        attn_mask=seen_BMW[:, None],
    )
    return out.unflatten(2, (m, -1)).permute(0, 2, 3, 1, 4)
