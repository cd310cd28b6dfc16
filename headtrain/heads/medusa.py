"""Medusa: heads on the target's last hidden state, each of which guesses one token further ahead.

Source: Cai et al., Medusa (arXiv 2401.10774), sections 2.1 and 2.2 (Medusa-1: the target is frozen). Wiring and tensor
names as vLLM up to 0.32 loads them: at slot p, x = the target's hidden after its final norm; head d adds SiLU(W x + b)
to it, once per block; lm_heads[d](x) is for token p+2+d. No head sees a token, so what a depth says does not depend on
the drafts before it: a tree picks its tokens from one list per depth.

Shapes: N packed positions, M trained pairs, D depths (= heads), T target hidden, V draft vocabulary, B requests, L new
tokens, C nodes so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtrain.config import HeadSection, TrainConfig
from headtrain.heads.base import Batch, Head, HeadConfig, HeadOutput, check_tensors
from headtrain.heads.calibrate import ridge
from headtrain.heads.layers import Pairs, Teacher, fused_loss
from headtrain.heads.objectives import OBJECTIVES, WEIGHTS
from headtrain.heads.vocab import draft_size, mapping, trained_pairs
from headtrain.target import TargetParts

ROWS = 1024  # slots whose logits are held at a time


@dataclass
class MedusaConfig(HeadConfig):
    type: str = "medusa"
    blocks: int = 1  # residual blocks of each head
    share_lm_head: bool = False  # one lm_head for all depths
    accuracy: list[list[float]] = field(default_factory=list)  # [depth][rank], see Head.ranked; for static trees


class _Blocks(nn.Module):
    """x + SiLU(W x + b), so many times; at the start it changes nothing."""

    def __init__(self, hidden: int, blocks: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(blocks))
        for p in self.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaState:
    """Of B requests: the logits [B, D, V] and hidden [B, D, T] of every depth, and each node's depth, int64 [B, 1 + C];
    the root's, 0, stands first."""

    def __init__(self, batch: int, c: MedusaConfig, like: Tensor):
        self.logits_BDV = like.new_zeros(batch, c.unroll, c.draft_vocab_size)
        self.hidden_BDT = like.new_zeros(batch, c.unroll, c.hidden_size)
        self.root_B1 = self.depth_BC = torch.zeros(batch, 1, dtype=torch.long, device=like.device)

    @property
    def graph_key(self) -> int:
        return self.logits_BDV.data_ptr()

    def select(self, rows: Tensor) -> None:
        for name, tensor in vars(self).items():
            setattr(self, name, tensor[rows])
        self.depth_BC = self.root_B1


class MedusaHead(Head):
    Config = MedusaConfig
    by_depth = True
    config: MedusaConfig

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = c = config
        self.blocks = nn.ModuleList(_Blocks(c.hidden_size, c.blocks) for _ in range(c.unroll))
        lm_heads = 1 if c.share_lm_head else c.unroll
        self.lm_heads = nn.ModuleList(
            nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False) for _ in range(lm_heads)
        ).requires_grad_(not c.freeze_lm_head)
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.ones(c.vocab_size, dtype=torch.bool))
        self.rules = TrainConfig()  # of training: objective, weights
        self.logit_scale = 1.0
        self._lent: dict[str, Tensor] = {}

    # ------------------------------------------------------------------------------------------------ set-up

    @classmethod
    def fresh(cls, section: HeadSection, parts: TargetParts) -> MedusaHead:
        (vocab, hidden), t = parts.lm_head.shape, parts.config
        return cls(
            MedusaConfig(
                hidden_size=hidden,
                target_hidden_size=hidden,
                vocab_size=vocab,
                draft_vocab_size=draft_size(section.draft_vocab, vocab),
                max_position_embeddings=t.max_position_embeddings,
                target_layers=t.num_hidden_layers,
                unroll=section.unroll,
                freeze_lm_head=section.freeze_lm_head,
                blocks=section.blocks,
                share_lm_head=section.share_lm_head,
            )
        )

    def start_from(self, parts: TargetParts, selected: Tensor, sample: Batch, seed: int | None) -> None:
        """Every head says what the target's own lm_head says of this state.

        With a seed, and an lm_head for each depth: of the state that the target will have at that depth, as far as a
        ridge regression on the supervised slots can tell it from this one (it is folded into the rows).
        """
        last_NT, rows_VT = sample.last_NT.float(), parts.lm_head[selected].to(sample.last_NT.device).float()
        pairs = sample.supervised_N, sample.argmax_N, None, sample.cu_R1
        for depth, lm_head in enumerate(self.lm_heads):
            slots = trained_pairs(*pairs, depth + 1)[1][depth].nonzero()[:, 0]
            told = seed is not None and not self.config.share_lm_head and len(slots)
            ahead_TT = ridge(last_NT[slots], last_NT[slots + 1 + depth]) if told else None
            lm_head.weight.data.copy_(rows_VT if ahead_TT is None else rows_VT @ ahead_TT.T)

    def train_as(self, section: HeadSection) -> None:
        """ValueError where the recipe asks for other heads than there are."""
        for key in ("unroll", "blocks", "share_lm_head"):
            asked, own = getattr(section, key), getattr(self.config, key)
            if asked != own:
                raise ValueError(f"head.{key}={asked}: the parent (head.init_from) has {own}; set head.{key}={own}")
        self.config.freeze_lm_head = section.freeze_lm_head
        self.lm_heads.requires_grad_(not section.freeze_lm_head)

    def outputs(self) -> list[nn.Linear]:
        return list(self.lm_heads)

    def attach(self, embedding: Tensor, lm_head: Tensor | None = None) -> None:
        if lm_head is not None:
            self._lent["teacher"] = lm_head[self.t2d.to(lm_head.device)]

    def _teacher(self, batch: Batch, last_NT: Tensor) -> Teacher:
        if "teacher" not in self._lent:
            raise RuntimeError("training needs the target's lm_head: call head.attach(embedding, lm_head) first")
        self._lent["teacher"] = lm_head_VT = self._lent["teacher"].to(last_NT)
        return Teacher(last_NT, batch.logsumexp_N, lm_head_VT, self.logit_scale, self.softcap)

    @property
    def t2d_or_none(self) -> Tensor | None:
        return None if self.config.draft_vocab_size == self.config.vocab_size else self.t2d

    # ------------------------------------------------------------------------------------------------ training

    def forward(self, batch: Batch) -> HeadOutput:
        """Loss Σ_d Σ_pairs weight · objective · parts / count_D[d] over the trained pairs (vocab.trained_pairs)."""
        t, depths = self.rules, self.config.unroll
        pairs = batch.supervised_N, batch.argmax_N, self.t2d_or_none, batch.cu_R1
        trained_DN, reach_DN = trained_pairs(*pairs, depths)
        depth_M, slot_M = trained_DN.nonzero(as_tuple=True)  # depth by depth
        draft_id_V = self.t2d.cumsum(0) - 1  # of each target id that is in the draft vocabulary
        label_M = draft_id_V[batch.argmax_N[slot_M + 1 + depth_M]]
        last_NT = batch.last_NT.to(self.lm_heads[0].weight.dtype)
        read_NT = last_NT if batch.read_NT is None else batch.read_NT.to(last_NT.dtype)
        count_D, counts = trained_DN.sum(1).float(), trained_DN.sum(1).tolist()
        x = [f(read_NT.index_select(0, slots)) for f, slots in zip(self.blocks, slot_M.split(counts), strict=True)]
        rows = [(torch.cat(x), slot_M, depth_M, label_M)]
        if not self.config.share_lm_head:
            rows = list(zip(x, *(values.split(counts) for values in rows[0][1:]), strict=True))
        scale_D = batch.parts / (count_D if batch.count_D is None else batch.count_D).clamp(min=1)
        found = [
            fused_loss(
                partial(OBJECTIVES[t.objective], hard=t.hard_weight), partial(WEIGHTS[t.weights], decay=t.decay),
                scale_D, x_MT, lm_head.weight, Pairs(*which), self._teacher(batch, last_NT),
                chunk=ROWS if self.config.share_lm_head else ROWS * depths,  # counts every depth of a slot
            )
            for lm_head, (x_MT, *which) in zip(self.lm_heads, rows, strict=True)
            if len(x_MT)
        ]  # fmt: skip
        loss = sum(own for own, _, _ in found)
        if not all(counts):  # the graph must still reach every parameter on every rank
            loss = loss + 0.0 * sum(p.sum() for p in self.parameters() if p.requires_grad)
        zeros = torch.zeros_like(count_D)
        loss_D, correct_D = (
            zeros.index_add(0, depth_M, torch.cat([zeros[:0], *(own[n].float() for own in found)])) for n in (1, 2)
        )
        return HeadOutput(loss, loss_D, count_D, correct_D, reach_DN.sum(1).float())

    # ------------------------------------------------------------------------------------------------ drafting

    def _at(self, last_XT: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """(logits over the draft vocabulary [..., V], hidden [..., T]) of one head."""
        hidden = self.blocks[depth](last_XT)
        return self.lm_heads[0 if self.config.share_lm_head else depth](hidden), hidden

    @torch.no_grad()
    def ranked(self, batch: Batch, depths: int) -> Tensor:
        if depths > self.config.unroll:
            raise ValueError(f"k={depths}: this head drafts at most {self.config.unroll} tokens (eval.k, head.unroll)")
        _, reach_1N = trained_pairs(batch.supervised_N, batch.argmax_N, None, batch.cu_R1, 1)
        last_NT = batch.last_NT.to(self.lm_heads[0].weight.dtype)
        ranked = batch.ids_N.new_full((len(last_NT), depths, self.ranks), -1)
        for slots in reach_1N[0].nonzero()[:, 0].split(ROWS):
            for depth in range(depths):
                values, ids = self._at(last_NT[slots], depth)[0].topk(self.ranks)
                ids, order = ids.sort()  # of equal logits the lower id stands first, as for argmax
                order = values.gather(1, order).sort(descending=True, stable=True).indices
                ranked[slots, depth] = self.to_target_ids(ids.gather(1, order))
        return ranked

    def draft_all(self, batch: Batch, depths: int) -> Tensor:
        return self.ranked(batch, depths)[..., 0]

    @torch.no_grad()
    def start(self, batch: int, capacity: int) -> MedusaState:
        return MedusaState(batch, self.config, self.lm_heads[0].weight)

    @torch.no_grad()
    def extend(self, state: MedusaState, tokens_BL, taps_BLAT, last_BLT, counts_B) -> tuple[Tensor, Tensor]:
        """All depths at once; in place, since a recorded CUDA graph reads them where they are."""
        last_BT = last_BLT[torch.arange(len(counts_B), device=counts_B.device), counts_B - 1]
        last_BT = last_BT.to(state.hidden_BDT.dtype)
        for depth in range(self.config.unroll):
            state.logits_BDV[:, depth], state.hidden_BDT[:, depth] = self._at(last_BT, depth)
        state.depth_BC = state.root_B1
        return state.logits_BDV[:, 0], state.hidden_BDT[:, 0]

    @torch.no_grad()
    def expand(self, state: MedusaState, tokens_BM, parents_BM=None) -> tuple[Tensor, Tensor]:
        before_BC = state.depth_BC
        depth_BM = 1 + (before_BC[:, -1:] if parents_BM is None else before_BC.gather(1, parents_BM + 1))
        state.depth_BC = torch.cat([before_BC, depth_BM], 1)
        rows_B1 = torch.arange(len(depth_BM), device=depth_BM.device)[:, None]
        return state.logits_BDV[rows_B1, depth_BM], state.hidden_BDT[rows_B1, depth_BM]

    def select(self, state: MedusaState, rows: Tensor) -> None:
        state.select(rows)

    # ------------------------------------------------------------------------------------------------ the folder

    def portable_tensors(self) -> dict[str, Tensor]:
        """Tensors under vLLM's names; `token_map`, the draft vocabulary's target ids, only with a reduced one."""
        tensors = dict(self.state_dict())
        del tensors["d2t"], tensors["t2d"]
        if self.t2d_or_none is not None:
            tensors["token_map"] = self.to_target_ids(torch.arange(len(self.d2t), device=self.d2t.device))
        return tensors

    def load_portable(self, tensors: dict[str, Tensor], where: str) -> None:
        """Fills the head; ValueError lists every missing, unknown or mis-shaped tensor of file `where`."""
        check_tensors(self.portable_tensors(), tensors, where)
        if "token_map" in tensors:
            self.d2t, self.t2d = mapping(tensors["token_map"], self.config.vocab_size)
        self.load_state_dict({name: t for name, t in tensors.items() if name != "token_map"}, strict=False)

    def portable_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """config.json that vLLM up to 0.32 reads, plus our own section."""
        c = self.config
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": c.hidden_size,
            "vocab_size": c.vocab_size,
            "truncated_vocab_size": c.draft_vocab_size,
            "medusa_num_heads": c.unroll,
            "medusa_num_layers": c.blocks,
            "medusa_fc_bias": True,
            "original_lm_head": c.share_lm_head,
            "max_position_embeddings": c.max_position_embeddings,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "headtrain": c.to_dict(),
        }
