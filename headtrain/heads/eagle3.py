"""EAGLE-3: one decoder layer over [token embedding; fused target features], unrolled over its own hidden states.

Source: Li et al., EAGLE-3 (arXiv 2503.01840). Wiring as vLLM, SGLang, TensorRT-LLM and llama.cpp run it:
features = fc(taps); x = features (or their norm); attention over [input_layernorm(e); hidden_norm(features)];
x += attention; x += mlp(post_attention_layernorm(x)); logits = lm_head(norm(x)); x, before the norm, is the next
depth's features.

Shapes: N packed positions, M active slots of a depth, H hidden, A taps, G query heads per key head, J key heads, D head
size, V draft vocabulary, B requests, L new tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headtrain.config import HeadSection, TrainConfig
from headtrain.engines import check_taps, default_taps
from headtrain.heads.base import Batch, Head, HeadConfig, HeadOutput, feature_size
from headtrain.heads.calibrate import calibrate
from headtrain.heads.drafting import DraftState
from headtrain.heads.layers import (
    Pairs,
    Segment,
    Teacher,
    depth_attention,
    fused_loss,
    rms_norm,
    rope_inverse_frequencies,
    rope_tables,
    rotate,
)
from headtrain.heads.objectives import OBJECTIVES, WEIGHTS, smooth_l1
from headtrain.heads.vocab import draft_size, trained_pairs
from headtrain.target import TargetParts

Layout = Callable[[int], list[Segment]]  # the segments whose slots are drafted from, by depth
BLOCK = 64  # slots that train.position_keep keeps or drops together


class _Layer(nn.Module):
    """Parameters of the decoder layer, under the names engines load (`midlayer.*`)."""

    def __init__(self, c: HeadConfig):
        super().__init__()
        h, i = c.hidden_size, c.intermediate_size
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim

        def linear(inputs, outputs):
            return nn.Linear(inputs, outputs, bias=False)

        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(2 * h, q),
                "k_proj": linear(2 * h, kv),
                "v_proj": linear(2 * h, kv),
                "o_proj": linear(q, h),
            }
        )
        self.mlp = nn.ModuleDict({"gate_proj": linear(h, i), "up_proj": linear(h, i), "down_proj": linear(i, h)})
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, nn.Module())
            getattr(self, name).weight = nn.Parameter(torch.ones(h))


class Eagle3Head(Head):
    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = c = config
        self.fc = nn.Linear(len(c.taps) * c.target_hidden_size, c.hidden_size, bias=False)
        self.midlayer = _Layer(c)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(c.hidden_size))
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(not c.freeze_lm_head)
        # Captured features differ in size by orders of magnitude from one dimension to the next. Training sees them
        # divided by their root mean square; a saved head has this folded into fc: engines see plain features.
        self.register_buffer("feature_scale", torch.ones(len(c.taps) * c.target_hidden_size))
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.ones(c.vocab_size, dtype=torch.bool))
        self.rules = TrainConfig()  # of training: objective, weights, noise, position_keep
        self.logit_scale = 1.0
        self._lent: dict[str, Tensor] = {}  # the target's frozen tensors: neither parameters nor buffers of the head
        inverse, self._rope_scaling = rope_inverse_frequencies(c.rope, c.head_dim, c.max_position_embeddings)
        self._lent["inverse"] = inverse
        self.groups = c.num_attention_heads // c.num_key_value_heads

    # ------------------------------------------------------------------------------------------------ set-up

    @classmethod
    def fresh(cls, section: HeadSection, parts: TargetParts) -> Eagle3Head:
        t = parts.config
        heads = section.heads or t.num_attention_heads
        head = cls(
            HeadConfig(
                type=section.type,
                hidden_size=t.hidden_size,
                target_hidden_size=t.hidden_size,
                intermediate_size=section.intermediate or t.intermediate_size,
                num_attention_heads=heads,
                num_key_value_heads=section.kv_heads or getattr(t, "num_key_value_heads", None) or heads,
                head_dim=section.head_dim or getattr(t, "head_dim", None) or t.hidden_size // heads,
                vocab_size=len(parts.lm_head),
                draft_vocab_size=draft_size(section.draft_vocab, len(parts.lm_head)),
                rms_norm_eps=getattr(t, "rms_norm_eps", 1e-5),
                rope=parts.rope,
                max_position_embeddings=t.max_position_embeddings,
                taps=check_taps(section.taps or default_taps(t.num_hidden_layers), t.num_hidden_layers),
                target_layers=t.num_hidden_layers,
                unroll=section.unroll,
                norm_before_residual=section.norm_before_residual,
                norm_output=section.norm_output,
                freeze_lm_head=section.freeze_lm_head,
            )
        )
        for p in head.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        return head

    def train_as(self, section: HeadSection) -> None:
        super().train_as(section)
        self.config.freeze_lm_head = section.freeze_lm_head
        self.lm_head.weight.requires_grad_(not section.freeze_lm_head)

    def attach(self, embedding: Tensor, lm_head: Tensor | None = None) -> None:
        self._lent["embedding"] = embedding
        if lm_head is not None:
            self._lent["teacher"] = lm_head[self.t2d.to(lm_head.device)]

    def start_from(self, parts: TargetParts, selected: Tensor, sample: Batch, seed: int | None) -> None:
        self.lm_head.weight.data.copy_(parts.lm_head[selected])
        self.norm.weight.data.copy_(parts.norm_weight)
        self.scale_features(feature_size(sample))
        nn.init.normal_(self.fc.weight, std=0.02)
        if seed is not None:
            self.attach(parts.embedding, parts.lm_head)
            calibrate(self, sample, parts, seed)

    def scale_features(self, rms_AT: Tensor) -> None:
        scale = 1.0 / rms_AT.flatten().clamp(min=1e-6).to(self.fc.weight.device)
        self.fc.weight.data *= self.feature_scale / scale
        self.feature_scale = scale

    def _fuse(self, taps: Tensor, noise: float = 0.0) -> Tensor:
        """fc over the taps, [..., A, T] -> [..., H]; with uniform noise of that half-width on unit-size features."""
        taps = taps.flatten(-2).to(self.fc.weight.dtype) * self.feature_scale.to(self.fc.weight.dtype)
        return self.fc(taps + (torch.rand_like(taps) * 2 - 1) * noise if noise else taps)

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

    # ------------------------------------------------------------------------------------------------ the layer

    def _projections(self) -> tuple[Tensor, Tensor]:
        """q, k and v weights stacked and split into their embedding and hidden halves, each [(G J + 2 J) D, H]."""
        attention = self.midlayer.self_attn
        stacked = torch.cat([attention[f"{n}_proj"].weight for n in "qkv"])
        return stacked.chunk(2, 1)

    def _embed(self, ids: Tensor) -> Tensor:
        embedded = F.embedding(ids, self._frozen("embedding"))
        return rms_norm(embedded, self.midlayer.input_layernorm.weight, self.config.rms_norm_eps)

    def _split(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [..., G, J, D] (the query heads of a key head are neighbours in the weights), k, v [..., J, D]; roped."""
        c, j = self.config, self.config.num_key_value_heads
        q, k, v = qkv.split([c.num_attention_heads * c.head_dim, j * c.head_dim, j * c.head_dim], -1)
        cos, sin = rope_tables(self._frozen("inverse"), self._rope_scaling, positions)
        q = rotate(q.unflatten(-1, (c.num_attention_heads, c.head_dim)), cos, sin)
        k = rotate(k.unflatten(-1, (j, c.head_dim)), cos, sin)
        return q.unflatten(-2, (j, self.groups)).transpose(-2, -3), k, v.unflatten(-1, (j, c.head_dim))

    def _residual(self, features: Tensor) -> Tensor:
        return self._normed(features) if self.config.norm_before_residual else features

    def _normed(self, features: Tensor) -> Tensor:
        return rms_norm(features, self.midlayer.hidden_norm.weight, self.config.rms_norm_eps)

    def _finish(self, residual: Tensor, attended_GJD: Tensor) -> tuple[Tensor, Tensor]:
        """(normed output for lm_head, hidden fed back) from the residual and the attention's output [..., G, J, D]."""
        layer, eps = self.midlayer, self.config.rms_norm_eps
        x = residual + layer.self_attn["o_proj"](attended_GJD.transpose(-2, -3).flatten(-3))
        inner = rms_norm(x, layer.post_attention_layernorm.weight, eps)
        x = x + layer.mlp["down_proj"](F.silu(layer.mlp["gate_proj"](inner)) * layer.mlp["up_proj"](inner))
        normed = rms_norm(x, self.norm.weight, eps)
        return normed, normed if self.config.norm_output else x

    # ------------------------------------------------------------------------------------------------ training

    def _unroll(self, batch: Batch, features_NH: Tensor, layout: Layout, depths: int, embed_next):
        """Yields (slots [M], normed output [M, H]) for depths 0, 1, …; every depth in one pass over its slots.

        layout(depth): the segments whose slots go on to that depth, each slot of them one of the depth before.
        embed_next(depth, slots) gives the embedding half of q/k/v, [M, (G J + 2 J) D], for the token each slot reads.
        """
        run = self._depth
        if self.rules.checkpointing:
            run = partial(checkpoint, self._depth, use_reentrant=False, preserve_rng_state=False)
        _, w_hidden = self._projections()
        everywhere = torch.arange(len(batch.ids_N), device=batch.ids_N.device)
        diagonals: list[tuple[Tensor, Tensor]] = []
        slots, features, first = everywhere, features_NH, None
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
            positions, embedded = batch.positions_N[reading] + depth, partial(embed_next, depth, reading)
            normed, features, *own = run(features, slots, positions, embedded, w_hidden, first, diagonals, segments)
            if depth == 0:
                first = own
            else:
                diagonals = [*diagonals, own]
            yield slots, normed

    def _depth(self, features, slots, positions, embedded, w_hidden, first, diagonals, segments):
        """One depth: (normed output [M, H], hidden fed back [M, H], k, v).

        At depth 0 (`first` is None) features, positions, keys and values are of all N slots, later of the M drafted
        from; `first` is then the (k, v) of depth 0. embedded(): the embedding half of q/k/v.
        """
        q, k, v = self._split(embedded() + F.linear(self._normed(features), w_hidden), positions)
        if first is None:
            q, features, first = q.index_select(0, slots), features.index_select(0, slots), (k, v)
        else:
            diagonals = [*diagonals, (k, v)]
        attended = depth_attention(q, *first, diagonals, segments, self.config.head_dim**-0.5)
        return *self._finish(self._residual(features), attended), k, v

    def forward(self, batch: Batch) -> HeadOutput:
        """Loss Σ_d Σ_pairs weight · objective · parts / count_D[d] over the trained pairs (vocab.trained_pairs).

        With train.position_keep = r < 1 a share r^d of the slots goes on to depth d, each weighted by r^-d.
        """
        c, t, n = self.config, self.rules, len(batch.ids_N)
        trained_DN, reach_DN = trained_pairs(
            batch.supervised_N, batch.argmax_N, self.t2d_or_none, batch.cu_R1, c.unroll
        )
        w_embed, _ = self._projections()
        embedded_N = F.linear(self._embed(batch.ids_N), w_embed)  # once for all depths
        features_NH = self._fuse(batch.taps_NAT, t.noise if self.training else 0.0)
        layout = _training_layout(_segments(batch, reach_DN[0]), t.position_keep)
        next_token = lambda depth, slots: embedded_N.index_select(0, (slots + 1 + depth).clamp(max=n - 1))  # noqa: E731
        outputs, slot_of, depth_of = [], [], []
        for depth, (slots, normed) in enumerate(self._unroll(batch, features_NH, layout, c.unroll, next_token)):
            keep = trained_DN[depth][slots].nonzero()[:, 0]
            outputs.append(normed.index_select(0, keep))  # its backward is far faster than that of normed[keep]
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
            x_MH, self.lm_head.weight, Pairs(slot_M, depth_M, draft_id_V[batch.argmax_N[at_M]]),
            Teacher(last_NT, batch.logsumexp_N, self._frozen("teacher"), self.logit_scale),
        )  # fmt: skip
        if t.feature_weight:
            weight_M = t.feature_weight * t.decay**depth_M * scale_D[depth_M]
            loss = loss + (smooth_l1(x_MH, last_NT[at_M]) * weight_M).sum()
        per_depth = lambda values: torch.zeros_like(count_D).index_add_(0, depth_M, values)  # noqa: E731
        ones = torch.ones_like(loss_M)
        return HeadOutput(loss, per_depth(loss_M), per_depth(ones), per_depth(hit_M.float()), reach_DN.sum(1).float())

    @torch.no_grad()
    def draft_all(self, batch: Batch, depths: int) -> Tensor:
        n = len(batch.ids_N)
        _, reach_DN = trained_pairs(batch.supervised_N, batch.argmax_N, None, batch.cu_R1, 1)
        drafts = batch.ids_N.new_full((n, depths), -1)
        w_embed, _ = self._projections()

        def embed_next(depth, slots):
            ids = batch.ids_N[(slots + 1).clamp(max=n - 1)] if depth == 0 else drafts[slots, depth - 1]
            return F.linear(self._embed(ids), w_embed)

        segments = _segments(batch, reach_DN[0])
        unrolled = self._unroll(batch, self._fuse(batch.taps_NAT), lambda depth: segments, depths, embed_next)
        for depth, (slots, normed) in enumerate(unrolled):
            drafts[slots, depth] = self.to_target_ids(self.lm_head(normed).argmax(-1))
        return drafts

    # ------------------------------------------------------------------------------------------------ drafting

    @torch.no_grad()
    def start(self, batch: int, capacity: int) -> DraftState:
        c = self.config
        return DraftState(batch, capacity, c.num_key_value_heads, c.head_dim, c.hidden_size, self.fc.weight)

    @torch.no_grad()
    def extend(self, state: DraftState, tokens_BL, taps_BLAT, last_BLT, counts_B) -> tuple[Tensor, Tensor]:
        features_BLH, slots_BL = self._fuse(taps_BLAT), state.settle(tokens_BL.shape[1], counts_B)
        q_BLGJD = self._write(state, tokens_BL, features_BLH, slots_BL, slots_BL)
        rows, last = torch.arange(len(counts_B), device=counts_B.device), counts_B - 1
        logits_B1W, hidden_B1H = self._draft(state, q_BLGJD[rows, last][:, None], features_BLH[rows, last][:, None])
        return logits_B1W[:, 0], hidden_B1H[:, 0]

    @torch.no_grad()
    def expand(self, state: DraftState, tokens_BM, parents_BM=None) -> tuple[Tensor, Tensor]:
        slots_BM, positions_BM, features_BMH = state.branch(parents_BM)
        q_BMGJD = self._write(state, tokens_BM, features_BMH, slots_BM, positions_BM)
        return self._draft(state, q_BMGJD, features_BMH)

    def select(self, state: DraftState, rows: Tensor) -> None:
        state.select(rows)

    def _write(self, state: DraftState, tokens_BL, features_BLH, slots_BL, positions_BL) -> Tensor:
        """Puts the keys and values of new slots into the cache; returns their queries [B, L, G, J, D]."""
        attention = self.midlayer.self_attn
        x = torch.cat([self._embed(tokens_BL), self._normed(features_BLH)], -1)
        q, k, v = self._split(torch.cat([attention[f"{n}_proj"](x) for n in "qkv"], -1), positions_BL)
        state.write(slots_BL, k, v)
        return q

    def _draft(self, state: DraftState, q_BMGJD, features_BMH) -> tuple[Tensor, Tensor]:
        """Attention of the newest nodes, or of the last true slot, and the rest of the layer."""
        normed, hidden = self._finish(self._residual(features_BMH), state.attend(q_BMGJD))
        state.remember(hidden)
        return self.lm_head(normed), hidden

    # ------------------------------------------------------------------------------------------------ the folder

    def portable_tensors(self) -> dict[str, Tensor]:
        """Tensors under the names every engine loads; d2t and t2d only with a reduced vocabulary."""
        tensors = dict(self.state_dict())
        tensors["fc.weight"] = (self.fc.weight.float() * tensors.pop("feature_scale").float()).to(self.fc.weight.dtype)
        if self.t2d_or_none is None:
            del tensors["d2t"], tensors["t2d"]
        return tensors

    def load_portable(self, tensors: dict[str, Tensor], where: str) -> None:
        """Fills the head; ValueError lists every missing, unknown or mis-shaped tensor of file `where`."""
        wanted = self.portable_tensors()
        faults = [f"{name} is missing" for name in wanted.keys() - tensors.keys()]
        faults += [f"{name} is not a tensor of this head" for name in tensors.keys() - wanted.keys()]
        faults += [
            f"{name} has shape {list(tensors[name].shape)}, not {list(wanted[name].shape)}"
            for name in wanted.keys() & tensors.keys()
            if tensors[name].shape != wanted[name].shape
        ]
        if faults:
            raise ValueError(f"{where}: " + "; ".join(sorted(faults)))
        self.load_state_dict(tensors, strict=False)
        self.feature_scale.fill_(1.0)

    def portable_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """config.json that vLLM, SGLang, TensorRT-LLM and llama.cpp read alike, plus our own section."""
        c = self.config
        scaling = {k: v for k, v in c.rope.items() if k != "rope_theta"}
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.num_key_value_heads,
            "head_dim": c.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": c.vocab_size,
            "draft_vocab_size": c.draft_vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": c.rms_norm_eps,
            "max_position_embeddings": c.max_position_embeddings,
            "rope_theta": c.rope["rope_theta"],
            "rope_scaling": None if c.rope.get("rope_type", "default") == "default" else scaling,
            "rope_parameters": c.rope,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "norm_before_residual": c.norm_before_residual,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "eagle_aux_hidden_state_layer_ids": list(c.taps),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in c.taps], "use_aux_hidden_state": True},
        }
        if c.norm_output:
            config["norm_output"] = True
        if c.target_hidden_size != c.hidden_size:
            config["target_hidden_size"] = c.target_hidden_size
        if len(c.taps) != 3:
            config["num_aux_hidden_states"] = len(c.taps)
        return config | {"headtrain": c.to_dict()}


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
