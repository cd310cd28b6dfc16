"""Heads of one decoder layer that read their own output: the training unroll, its loss, and drafting node by node.

At depth 0 a slot's features are the target's, later what the layer put out at the depth before. The layer reads them
together with the token that follows. A head type says how (`_features`, `_read`, `_join`, `_enter`, `_finish`), and has
an nn.Linear `fc`, through which features enter.

Shapes: N packed positions, M active slots of a depth, H hidden, A taps, T target hidden, F features, C = (G J + 2 J) D
queries, keys and values, G query heads per key head, J key heads, D head size, V draft vocabulary, B requests, L new
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headtrain.config import HeadSection, TrainConfig
from headtrain.facts import attention_sizes, mlp_size
from headtrain.heads.base import Batch, Head, HeadConfig, HeadOutput, check_tensors
from headtrain.heads.drafting import DraftState
from headtrain.heads.layers import (
    Pairs,
    Segment,
    Teacher,
    depth_attention,
    fused_loss,
    rope_inverse_frequencies,
    rope_tables,
    rotate,
)
from headtrain.heads.objectives import OBJECTIVES, WEIGHTS, smooth_l1
from headtrain.heads.vocab import draft_size, trained_pairs
from headtrain.target import TargetParts

Layout = Callable[[int], list[Segment]]  # the segments whose slots are drafted from, by depth
BLOCK = 64  # slots that train.position_keep keeps or drops together


class Unrolled(Head):
    output_scale = 1.0  # of what lm_head is given, against the hidden state that feature_weight compares

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = c = config
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.ones(c.vocab_size, dtype=torch.bool))
        self.rules = TrainConfig()  # of training: objective, weights, noise, position_keep
        self.logit_scale = 1.0
        self._lent: dict[str, Tensor] = {}  # the target's frozen tensors: neither parameters nor buffers of the head
        inverse, self._rope_scaling = rope_inverse_frequencies(c.rope, c.head_dim, c.max_position_embeddings)
        self._lent["inverse"] = inverse
        self.groups = c.num_attention_heads // c.num_key_value_heads

    # ------------------------------------------------------------------------------------------------ of each type

    def _features(self, taps: Tensor | None, last: Tensor | None, noise: float = 0.0) -> Tensor:
        """The features [..., F] of depth 0 from taps [..., A, T] and last hidden states [..., T]; noise: its half-width
        where features have unit size."""
        raise NotImplementedError

    def _projections(self) -> tuple[Tensor, ...]:
        """Weights for `_read` and `_join`, put together once for all depths."""
        raise NotImplementedError

    def _read(self, ids: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        """What the layer takes from tokens [...] alone, whatever the depth: [..., any]."""
        raise NotImplementedError

    def _join(self, read: Tensor, features: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """(queries, keys and values [..., C], residual [..., H]) of what was read and features [..., F]."""
        raise NotImplementedError

    def _enter(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The same as `_join` of `_read`, by the head's modules, which may be packed: for drafting."""
        raise NotImplementedError

    def _finish(self, residual: Tensor, attended_GJD: Tensor) -> tuple[Tensor, Tensor]:
        """(output for lm_head [..., H], features of the next depth [..., F]) after attention [..., G, J, D]."""
        raise NotImplementedError

    def _logits(self, output: Tensor) -> Tensor:
        """lm_head, for drafting: [..., V]."""
        raise NotImplementedError

    @property
    def _output_weight(self) -> Tensor:
        """lm_head's weight [V, H], for the loss."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ shared by all

    @staticmethod
    def _sizes(section: HeadSection, parts: TargetParts) -> dict[str, Any]:
        """Settings of the HeadConfig of a fresh head that follow from the recipe and the target."""
        t = parts.config
        heads, key_heads, head_dim = attention_sizes(t)
        return {
            "type": section.type,
            "hidden_size": t.hidden_size,
            "target_hidden_size": t.hidden_size,
            "intermediate_size": section.intermediate or mlp_size(t),
            "num_attention_heads": section.heads or heads,
            "num_key_value_heads": section.kv_heads or key_heads,
            "head_dim": section.head_dim or head_dim,
            "vocab_size": len(parts.lm_head),
            "draft_vocab_size": draft_size(section.draft_vocab, len(parts.lm_head)),
            "rms_norm_eps": getattr(t, "rms_norm_eps", 1e-5),
            "rope": parts.rope,
            "max_position_embeddings": getattr(t, "max_position_embeddings", HeadConfig.max_position_embeddings),
            "target_layers": t.num_hidden_layers,
            "unroll": section.unroll,
        }

    def _frozen(self, name: str) -> Tensor:
        """A lent tensor on the head's device, floating ones (but the rope frequencies) in its dtype."""
        if name not in self._lent:
            raise RuntimeError(f"the head needs the target's {name}: call head.attach(embedding, lm_head) first")
        weight, value = self.fc.weight, self._lent[name]
        dtype = value.dtype if name == "inverse" else weight.dtype
        if value.device != weight.device or value.dtype != dtype:
            value = self._lent[name] = value.to(weight.device, dtype)
        return value

    @property
    def t2d_or_none(self) -> Tensor | None:
        return None if self.config.draft_vocab_size == self.config.vocab_size else self.t2d

    def _split(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [..., G, J, D] (the query heads of a key head are neighbours in the weights), k, v [..., J, D]; roped."""
        c, j = self.config, self.config.num_key_value_heads
        q, k, v = qkv.split([c.num_attention_heads * c.head_dim, j * c.head_dim, j * c.head_dim], -1)
        cos, sin = rope_tables(self._frozen("inverse"), self._rope_scaling, positions)
        q = rotate(q.unflatten(-1, (c.num_attention_heads, c.head_dim)), cos, sin)
        k = rotate(k.unflatten(-1, (j, c.head_dim)), cos, sin)
        return q.unflatten(-2, (j, self.groups)).transpose(-2, -3), k, v.unflatten(-1, (j, c.head_dim))

    # ------------------------------------------------------------------------------------------------ training

    def _unroll(self, batch: Batch, features_NF: Tensor, layout: Layout, depths: int, read_next):
        """Yields (slots [M], output for lm_head [M, H]) for depths 0, 1, …; every depth in one pass over its slots.

        layout(depth): the segments whose slots go on to that depth, each slot of them one of the depth before.
        read_next(depth, slots, weights) gives `_read` of the token that each slot reads.
        """
        run = self._depth
        if self.rules.checkpointing:
            run = partial(checkpoint, self._depth, use_reentrant=False, preserve_rng_state=False)
        weights = self._projections()
        everywhere = torch.arange(len(batch.ids_N), device=batch.ids_N.device)
        diagonals: list[tuple[Tensor, Tensor]] = []
        slots, features, first = everywhere, features_NF, None
        for depth in range(depths):
            segments = layout(depth)
            if not segments:
                return
            before, slots = slots, _slots(segments, everywhere)
            if depth and len(slots) < len(before):
                kept = torch.searchsorted(before, slots)
                features = features.index_select(0, kept)
                diagonals = [(k.index_select(0, kept), v.index_select(0, kept)) for k, v in diagonals]
            reading = slots if depth else everywhere
            positions, read = batch.positions_N[reading] + depth, partial(read_next, depth, reading, weights)
            output, features, *own = run(features, slots, positions, read, weights, first, diagonals, segments)
            if depth == 0:
                first = own
            else:
                diagonals = [*diagonals, own]
            yield slots, output

    def _depth(self, features, slots, positions, read, weights, first, diagonals, segments):
        """One depth: (output for lm_head [M, H], features of the next depth [M, F], k, v).

        At depth 0 (`first` is None) features, positions, keys and values are of all N slots, later of the M drafted
        from; `first` is then the (k, v) of depth 0. read(): `_read` of the slots' tokens.
        """
        qkv, residual = self._join(read(), features, weights)
        q, k, v = self._split(qkv, positions)
        if first is None:
            q, residual, first = q.index_select(0, slots), residual.index_select(0, slots), (k, v)
        else:
            diagonals = [*diagonals, (k, v)]
        attended = depth_attention(q, *first, diagonals, segments, self.config.head_dim**-0.5)
        return *self._finish(residual, attended), k, v

    def forward(self, batch: Batch) -> HeadOutput:
        """Loss Σ_d Σ_pairs weight · objective · parts / count_D[d] over the trained pairs (vocab.trained_pairs).

        With train.position_keep = r < 1 a share r^d of the slots goes on to depth d, each weighted by r^-d.
        """
        c, t, n = self.config, self.rules, len(batch.ids_N)
        trained_DN, reach_DN = trained_pairs(
            batch.supervised_N, batch.argmax_N, self.t2d_or_none, batch.cu_R1, c.unroll
        )
        read_N = self._read(batch.ids_N, self._projections())  # once for all depths
        features_NF = self._features(batch.taps_NAT, batch.last_NT, t.noise if self.training else 0.0)
        layout = _training_layout(_segments(batch, reach_DN[0]), t.position_keep)
        next_token = lambda depth, slots, _: read_N.index_select(0, (slots + 1 + depth).clamp(max=n - 1))  # noqa: E731
        outputs, slot_of, depth_of = [], [], []
        for depth, (slots, output) in enumerate(self._unroll(batch, features_NF, layout, c.unroll, next_token)):
            keep = trained_DN[depth][slots].nonzero()[:, 0]
            outputs.append(output.index_select(0, keep))  # its backward is far faster than that of output[keep]
            slot_of.append(slots[keep])
            depth_of.append(torch.full_like(slot_of[-1], depth))
        count_D = trained_DN.sum(1).float()
        if not outputs or not sum(map(len, outputs)):  # the graph must still reach every parameter on every rank
            loss = sum(p.sum() for p in self.parameters() if p.requires_grad) * 0.0
            zeros = torch.zeros_like(count_D)
            return HeadOutput(loss, zeros, zeros, zeros, reach_DN.sum(1).float())
        x_MH, slot_M, depth_M = torch.cat(outputs), torch.cat(slot_of), torch.cat(depth_of)
        total_D = count_D if batch.count_D is None else batch.count_D
        scale_D = batch.parts / total_D.clamp(min=1) / t.position_keep ** torch.arange(c.unroll, device=count_D.device)
        at_M = slot_M + 1 + depth_M
        draft_id_V = self.t2d.cumsum(0) - 1  # of each target id that is in the draft vocabulary
        last_NT = batch.last_NT.to(x_MH.dtype)
        loss, loss_M, hit_M = fused_loss(
            partial(OBJECTIVES[t.objective], hard=t.hard_weight), partial(WEIGHTS[t.weights], decay=t.decay), scale_D,
            x_MH, self._output_weight, Pairs(slot_M, depth_M, draft_id_V[batch.argmax_N[at_M]]),
            Teacher(last_NT, batch.logsumexp_N, self._frozen("teacher"), self.logit_scale, self.softcap),
        )  # fmt: skip
        if t.feature_weight:
            weight_M = t.feature_weight * t.decay**depth_M * scale_D[depth_M]
            loss = loss + (smooth_l1(x_MH, last_NT[at_M] * self.output_scale) * weight_M).sum()
        per_depth = lambda values: torch.zeros_like(count_D).index_add_(0, depth_M, values)  # noqa: E731
        ones = torch.ones_like(loss_M)
        return HeadOutput(loss, per_depth(loss_M), per_depth(ones), per_depth(hit_M.float()), reach_DN.sum(1).float())

    @torch.no_grad()
    def draft_all(self, batch: Batch, depths: int) -> Tensor:
        n = len(batch.ids_N)
        _, reach_DN = trained_pairs(batch.supervised_N, batch.argmax_N, None, batch.cu_R1, 1)
        drafts = batch.ids_N.new_full((n, depths), -1)

        def read_next(depth, slots, weights):
            ids = batch.ids_N[(slots + 1).clamp(max=n - 1)] if depth == 0 else drafts[slots, depth - 1]
            return self._read(ids, weights)

        segments, features_NF = _segments(batch, reach_DN[0]), self._features(batch.taps_NAT, batch.last_NT)
        for depth, (slots, output) in enumerate(
            self._unroll(batch, features_NF, lambda depth: segments, depths, read_next)
        ):
            drafts[slots, depth] = self.to_target_ids(self._logits(output).argmax(-1))
        return drafts

    # ------------------------------------------------------------------------------------------------ drafting

    @torch.no_grad()
    def start(self, batch: int, capacity: int) -> DraftState:
        c = self.config
        return DraftState(batch, capacity, c.num_key_value_heads, c.head_dim, c.hidden_size, self.fc.weight)

    @torch.no_grad()
    def extend(self, state: DraftState, tokens_BL, taps_BLAT, last_BLT, counts_B) -> tuple[Tensor, Tensor]:
        features_BLF, slots_BL = self._features(taps_BLAT, last_BLT), state.settle(tokens_BL.shape[1], counts_B)
        q_BLGJD, residual_BLH = self._write(state, tokens_BL, features_BLF, slots_BL, slots_BL)
        rows, last = torch.arange(len(counts_B), device=counts_B.device), counts_B - 1
        logits_B1W, hidden_B1F = self._draft(state, q_BLGJD[rows, last][:, None], residual_BLH[rows, last][:, None])
        return logits_B1W[:, 0], hidden_B1F[:, 0]

    @torch.no_grad()
    def expand(self, state: DraftState, tokens_BM, parents_BM=None) -> tuple[Tensor, Tensor]:
        slots_BM, positions_BM, features_BMF = state.branch(parents_BM)
        return self._draft(state, *self._write(state, tokens_BM, features_BMF, slots_BM, positions_BM))

    def select(self, state: DraftState, rows: Tensor) -> None:
        state.select(rows)

    def _write(self, state: DraftState, tokens_BL, features_BLF, slots_BL, positions_BL) -> tuple[Tensor, Tensor]:
        """Puts the keys and values of new slots into the cache; returns their queries [B, L, G, J, D] and residual."""
        qkv, residual = self._enter(tokens_BL, features_BLF)
        q, k, v = self._split(qkv, positions_BL)
        state.write(slots_BL, k, v)
        return q, residual

    def _draft(self, state: DraftState, q_BMGJD, residual_BMH) -> tuple[Tensor, Tensor]:
        """Attention of the newest nodes, or of the last true slot, and the rest of the layer."""
        output, hidden = self._finish(residual_BMH, state.attend(q_BMGJD))
        state.remember(hidden)
        return self._logits(output), hidden

    # ------------------------------------------------------------------------------------------------ the folder

    def load_portable(self, tensors: dict[str, Tensor], where: str) -> None:
        """Fills the head; ValueError lists every missing, unknown or mis-shaped tensor of file `where`."""
        check_tensors(self.portable_tensors(), tensors, where)
        self.load_state_dict(tensors, strict=False)
        self.feature_scale.fill_(1.0)

    def _portable_sizes(self, dtype: torch.dtype) -> dict[str, Any]:
        """What engines read in config.json of every such head. Rope is written in the old and the new way."""
        c = self.config
        scaling = {k: v for k, v in c.rope.items() if k != "rope_theta"}
        return {
            "model_type": "llama",
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.num_key_value_heads,
            "head_dim": c.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": c.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": c.rms_norm_eps,
            "max_position_embeddings": c.max_position_embeddings,
            "rope_theta": c.rope["rope_theta"],
            "rope_scaling": None if c.rope.get("rope_type", "default") == "default" else scaling,
            "rope_parameters": c.rope,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }


# ---------------------------------------------------------------------------------------------------- slots of segments


def _segments(batch: Batch, reach_N: Tensor) -> list[Segment]:
    """The runs of consecutive slots where reach_N is true, with the document each lies in."""
    edges = torch.diff(
        reach_N.to(torch.int8),
        prepend=reach_N.new_zeros(1, dtype=torch.int8),
        append=reach_N.new_zeros(1, dtype=torch.int8),
    )
    firsts, stops = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
    starts = batch.cu_R1.tolist()
    out, document = [], 0
    for first, stop in zip(firsts, stops, strict=True):
        while starts[document + 1] <= first:
            document += 1
        out.append(Segment(starts[document], first, stop))
    return out


def _slots(segments: list[Segment], everywhere: Tensor) -> Tensor:
    return torch.cat([everywhere[s.first : s.stop] for s in segments]) if segments else everywhere[:0]


def _training_layout(spans: list[Segment], keep: float) -> Layout:
    """Each depth loses the last slot of every span (its label lies outside), and with keep < 1 whole blocks of slots.

    A block is of BLOCK slots, with a random phase; it is alive at depth d with probability keep^d, and never again
    once it is not, so that every slot's chain is whole.
    """
    if keep == 1:
        return lambda depth: [Segment(s.document, s.first, s.stop - depth) for s in spans if s.stop - depth > s.first]
    blocks = []
    for span in spans:
        phase = int(torch.randint(BLOCK, ()))
        edges = [span.first, *range(span.first + 1 + phase, span.stop, BLOCK), span.stop]
        lives = torch.rand(len(edges) - 1).clamp(min=1e-9).log() / math.log(keep)
        blocks += [(span, *block) for block in zip(edges, edges[1:], lives.tolist(), strict=False)]

    def layout(depth: int) -> list[Segment]:
        out: list[Segment] = []
        for span, first, stop, life in blocks:
            stop = min(stop, span.stop - depth)
            if stop <= first or life < depth:
                continue
            if out and out[-1].stop == first and out[-1].document == span.document:
                out[-1] = Segment(span.document, out[-1].first, stop)
            else:
                out.append(Segment(span.document, first, stop))
        return out

    return layout
