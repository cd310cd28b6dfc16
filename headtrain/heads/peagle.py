"""P-EAGLE: a few decoder layers that draft all K tokens in one forward.

Source: P-EAGLE (arXiv 2602.01469); wiring as vLLM runs it. At depth 0 a slot reads what an EAGLE-3 head reads; at later
depths it knows neither the token nor the target's state: it reads a mask token and one learned feature vector, at the
rope position p + d. A mask row (p, d) sees the depth-0 rows of its document up to slot p, and (p, 1) … (p, d). Layer 0
is EAGLE-3's; layers 1, 2, … read input_layernorm of the residual stream.

Shapes: N packed positions, M rows (one for each drafted slot and depth), H hidden, F = H features, A taps, T target
hidden, C queries, keys and values, G query heads per key head, J key heads, D head size, V target vocabulary, W draft
vocabulary, B requests, L new tokens, R = L + K - 1 rows of a request, K drafted positions, S slots looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headtrain.config import HeadSection
from headtrain.heads.base import Batch, HeadConfig
from headtrain.heads.drafting import DraftState, attend
from headtrain.heads.eagle3 import Eagle3Head
from headtrain.heads.layers import DecoderLayer, Segment, depth_attention, rms_norm
from headtrain.heads.unrolled import Layout, _slots
from headtrain.target import TargetParts

LAYERS = 4
PIECE = 2048  # slots whose mask rows are computed together; of several pieces, each once more in the backward pass


@dataclass
class PEagleConfig(HeadConfig):
    layers: int = LAYERS
    mask_token: int = 0  # target id whose embedding mask rows read
    own_embedding: bool = False  # the head has a trained embedding instead of the target's


class DraftAhead(DraftState):
    """The true slots' keys and values of all layers, side by side, and what the last `extend` drafted at every depth.

    Mask row d stands in slot length - 1 + d, at that position; the next true slots overwrite it.
    """

    def __init__(self, batch: int, capacity: int, c: PEagleConfig, like: Tensor):
        super().__init__(batch, capacity, c.layers * c.num_key_value_heads, c.head_dim, c.hidden_size, like)
        self._reserve(2 * c.unroll)
        self.logits_BKW = like.new_zeros(batch, c.unroll, c.draft_vocab_size)  # stays where it is: graphs read it
        self.hidden_BKH = like.new_zeros(batch, c.unroll, c.hidden_size)
        self.ready = 0  # depths of it that are of this step
        self.later: list[tuple[Tensor, Tensor]] = []  # (logits, hidden) of further depths
        self.calls = self.deepest = 0  # of expand: in this step, and most in any step

    @property
    def graph_key(self) -> tuple[int, ...]:
        return *super().graph_key, self.ready

    def drafts(self) -> tuple[Tensor, Tensor]:
        """(logits [B, K, W], hidden [B, K, H]) of all depths so far."""
        found = [(self.logits_BKW[:, : self.ready], self.hidden_BKH[:, : self.ready]), *self.later]
        return found[0] if len(found) == 1 else tuple(torch.cat(x, 1) for x in zip(*found, strict=True))

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.logits_BKW, self.hidden_BKH, self.later = self.logits_BKW[rows], self.hidden_BKH[rows], []


class PEagleHead(Eagle3Head):
    Config = PEagleConfig
    config: PEagleConfig

    def __init__(self, config: PEagleConfig):
        super().__init__(config)
        c, norms = config, ("input_layernorm", "post_attention_layernorm")
        self.layers = nn.ModuleDict({str(i): DecoderLayer(c, c.hidden_size, norms) for i in range(1, c.layers)})
        self.mask_hidden = nn.Parameter(torch.randn(1, self.fc.in_features))  # stands for features of unit size
        if c.own_embedding:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.target_hidden_size)

    # ------------------------------------------------------------------------------------------------ set-up

    @classmethod
    def _sizes(cls, section: HeadSection, parts: TargetParts) -> dict[str, Any]:
        token = section.mask_token
        if token is not None and token >= len(parts.lm_head):
            raise ValueError(f"head.mask_token={token}: the target has {len(parts.lm_head)} tokens")
        return super()._sizes(section, parts) | {
            "layers": section.layers or LAYERS,
            "mask_token": -1 if token is None else token,
            "own_embedding": section.train_embedding,
        }

    def start_from(self, parts: TargetParts, selected: Tensor, sample: Batch, seed: int | None) -> None:
        """Later layers start as the identity, so that EAGLE-3's start holds; mask rows see the average features."""
        c = self.config
        if c.mask_token < 0:  # the last that the text does not have: most embeddings end with unused rows
            unused_V = torch.bincount(sample.ids_N, minlength=c.vocab_size) == 0
            c.mask_token = int(unused_V.nonzero()[-1]) if unused_V.any() else c.vocab_size - 1
        for layer in self.layers.values():
            nn.init.zeros_(layer.self_attn["o_proj"].weight)
            nn.init.zeros_(layer.mlp["down_proj"].weight)
        if c.own_embedding:
            self.embed_tokens.weight.data.copy_(parts.embedding)
        super().start_from(parts, selected, sample, seed)
        scale = self.feature_scale.to(sample.taps_NAT.device)
        self.mask_hidden.data.copy_(sample.taps_NAT.float().mean(0).flatten() * scale)

    def train_as(self, section: HeadSection) -> None:
        super().train_as(section)
        if section.train_embedding and not self.config.own_embedding:
            raise ValueError(
                f"head.train_embedding=true: the parent (head.init_from={section.init_from}) has no embedding of its "
                "own; leave it out"
            )
        if self.config.own_embedding:
            self.embed_tokens.weight.requires_grad_(section.train_embedding)

    def scale_features(self, rms_AT: Tensor) -> None:
        before = self.feature_scale
        super().scale_features(rms_AT)
        self.mask_hidden.data *= self.feature_scale / before.to(self.feature_scale.device)

    # ------------------------------------------------------------------------------------------------ the network

    @property
    def _stack(self) -> list[DecoderLayer]:
        return [self.midlayer, *self.layers.values()]

    @property
    def _mask(self) -> tuple[Tensor, Tensor]:
        """What mask rows read: token id [1] and taps [1, A, T]."""
        taps = self.mask_hidden / self.feature_scale.to(self.mask_hidden)
        return self.d2t.new_tensor([self.config.mask_token]), taps.unflatten(-1, (len(self.config.taps), -1))

    def _embed(self, ids: Tensor) -> Tensor:
        if not self.config.own_embedding:
            return super()._embed(ids)
        return rms_norm(self.embed_tokens(ids), self.midlayer.input_layernorm.weight, self.config.rms_norm_eps)

    def _into(self, layer: DecoderLayer, x: Tensor) -> tuple[Tensor, Tensor]:
        """(queries, keys and values [..., C], residual [..., H]) of a layer above the first."""
        return layer.project(rms_norm(x, layer.input_layernorm.weight, self.config.rms_norm_eps)), x

    def _last_norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.norm.weight, self.config.rms_norm_eps)

    # ------------------------------------------------------------------------------------------------ training

    def _unroll(self, batch: Batch, features_NF: Tensor, layout: Layout, depths: int, read_next):
        """Yields (slots [M], output for lm_head [M, H]) for depths 0, 1, …; see `Unrolled`. No depth waits for another.

        Depth 0 runs over the whole text. Mask rows need of it only keys and values, so they go piece by piece; with
        several pieces, or train.checkpointing, what was inside one is computed again when its gradient is due.
        """
        run = lambda function, *inputs: function(*inputs)  # noqa: E731
        if self.rules.checkpointing or len(batch.ids_N) > PIECE:
            run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        everywhere, weights = torch.arange(len(batch.ids_N), device=batch.ids_N.device), self._projections()
        segments_D = list(takewhile(len, map(layout, range(depths))))
        if not segments_D:
            return
        slots_D = [_slots(segments, everywhere) for segments in segments_D]
        enter = lambda: self._join(read_next(0, everywhere, weights), features_NF, weights)  # noqa: E731
        output, cache = self._text(batch, enter, segments_D[0], slots_D[0], run)
        yield slots_D[0], output
        pieces: list[list[Tensor]] = [[] for _ in segments_D[1:]]
        for first in range(0, len(everywhere), PIECE):
            inside = (_between(segments, first, first + PIECE) for segments in segments_D[1:])
            if piece_D := list(takewhile(len, inside)):
                outputs = run(self._masked, cache, piece_D, batch.positions_N, weights)
                for found, output in zip(pieces, outputs, strict=False):
                    found.append(output)
        for slots, found in zip(slots_D[1:], pieces, strict=True):
            yield slots, torch.cat(found)

    def _text(self, batch: Batch, enter: Callable, segments: list[Segment], slots: Tensor, run: Callable):
        """Depth 0: the output [M, H] at `slots`, which are those of `segments`; keys and values [N, J, D] by layer."""
        documents, cache = [Segment(a, a, b) for a, b in pairwise(batch.cu_R1.tolist())], []
        *lower, last = self._stack
        for layer in lower:
            x, *kv = run(self._text_layer, layer, enter, batch.positions_N, documents, None)
            cache.append(kv)
            enter = partial(self._into, self._stack[len(cache)], x)
        x, *kv = run(self._text_layer, last, enter, batch.positions_N, segments, slots)
        return self._last_norm(x), [*cache, kv]

    def _text_layer(self, layer: DecoderLayer, enter: Callable, positions, segments: list[Segment], slots):
        """(residual stream after the layer, of `slots` only where given; keys; values)."""
        qkv, residual = enter()
        q, k, v = self._split(qkv, positions)
        if slots is not None:
            q, residual = q.index_select(0, slots), residual.index_select(0, slots)
        return layer.rest(residual, depth_attention(q, k, v, [], segments, self.config.head_dim**-0.5)), k, v

    def _masked(self, cache, segments_D: list[list[Segment]], positions_N: Tensor, weights) -> tuple[Tensor, ...]:
        """Outputs [M, H] of depths 1, 2, …, given the text's keys and values: one pass over all rows of all depths."""
        everywhere = torch.arange(len(positions_N), device=positions_N.device)
        slots_D = [_slots(segments, everywhere) for segments in segments_D]
        sizes, scale = [len(slots) for slots in slots_D], self.config.head_dim**-0.5
        positions = torch.cat([positions_N[slots] + d for d, slots in enumerate(slots_D, 1)])
        kept = [[_places(wider, slots) for wider in slots_D[:d]] for d, slots in enumerate(slots_D)]
        token, taps = self._mask
        entered = self._join(self._read(token, weights), self._features(taps), weights)
        qkv, residual = (x.expand(len(positions), -1) for x in entered)  # every mask row reads the same
        for (layer, above), text in zip(pairwise([*self._stack, None]), cache, strict=True):
            q_D, k_D, v_D = (x.split(sizes) for x in self._split(qkv, positions))
            attended = []
            for d, segments in enumerate(segments_D):
                diagonals = [(_at(k_D[j], kept[d][j]), _at(v_D[j], kept[d][j])) for j in range(d)]
                attended.append(depth_attention(q_D[d], *text, [*diagonals, (k_D[d], v_D[d])], segments, scale))
            x = layer.rest(residual, torch.cat(attended))
            if above:
                qkv, residual = self._into(above, x)
        return self._last_norm(x).split(sizes)

    # ------------------------------------------------------------------------------------------------ drafting

    @torch.no_grad()
    def start(self, batch: int, capacity: int) -> DraftAhead:
        return DraftAhead(batch, capacity, self.config, self.fc.weight)

    @torch.no_grad()
    def extend(self, state: DraftAhead, tokens_BL, taps_BLAT, last_BLT, counts_B) -> tuple[Tensor, Tensor]:
        """One forward over the new slots and the mask rows of every depth that was asked for in an earlier step; in the
        first step, of all that were trained."""
        (batch, width), device = tokens_BL.shape, tokens_BL.device
        depths = min(self.config.unroll, state.deepest + 1) if state.deepest else self.config.unroll
        slots_BL, masks = state.settle(width, counts_B), torch.arange(depths - 1, device=device)
        padding_BL = torch.arange(width, device=device) >= counts_B[:, None]
        slots_BR = torch.cat([slots_BL + padding_BL * (depths - 1), state.length_B[:, None] + masks], 1)
        token, taps = self._mask
        features = self._features(torch.cat([taps_BLAT.flatten(0, 1).to(taps.dtype), taps]))
        entered = self._enter(torch.cat([tokens_BL.flatten(), token]), features)  # the last row: of all mask rows
        entered = (
            torch.cat([x[:-1].view(batch, width, -1), x[-1].expand(batch, depths - 1, -1)], 1) for x in entered
        )
        wanted_BK = torch.cat([counts_B[:, None] - 1, (width + masks).expand(batch, -1)], 1)
        hidden_BKH = self._run(state, *entered, slots_BR, depths - 1, wanted_BK)
        state.ready, state.calls, state.later = depths, 0, []
        state.logits_BKW[:, :depths], state.hidden_BKH[:, :depths] = self.lm_head(hidden_BKH), hidden_BKH
        return state.logits_BKW[:, 0], hidden_BKH[:, 0]

    @torch.no_grad()
    def expand(self, state: DraftAhead, tokens_BM, parents_BM=None) -> tuple[Tensor, Tensor]:
        """Answers by the nodes' depths. Beyond the depths that `extend` drafted, every `unroll` more take a forward."""
        state.calls += 1
        state.deepest = max(state.deepest, state.calls)
        logits_BKW, hidden_BKH = state.drafts()
        if state.calls == logits_BKW.shape[1]:  # no node can be deeper than that
            state.later.append(self._further(state, state.calls))
            logits_BKW, hidden_BKH = state.drafts()
        _, positions_BM, _ = state.branch(parents_BM)
        at_BM1 = (positions_BM + 1 - state.length_B[:, None])[..., None]
        return tuple(x.gather(1, at_BM1.expand(-1, -1, x.shape[2])) for x in (logits_BKW, hidden_BKH))

    def _further(self, state: DraftAhead, first: int) -> tuple[Tensor, Tensor]:
        """(logits [B, K, W], hidden [B, K, H]) of K = unroll more depths, from `first` on."""
        batch, count = len(state.length_B), self.config.unroll
        state._reserve(first + count)
        slots_BK = state.length_B[:, None] - 1 + torch.arange(first, first + count, device=state.length_B.device)
        token, taps = self._mask
        entered = (x.expand(batch, count, -1) for x in self._enter(token, self._features(taps)))
        hidden_BKH = self._run(state, *entered, slots_BK, first + count - 1)
        return self.lm_head(hidden_BKH), hidden_BKH

    def _run(self, state: DraftAhead, qkv, residual, slots_BR: Tensor, ahead: int, wanted_BK=None) -> Tensor:
        """All layers over rows in given slots, where their keys and values are left: hidden [B, K, H] after the norm.

        A row sees every slot up to its own; `ahead`: slots in use behind the true ones. wanted_BK: the rows whose
        output is needed, which the last layer alone computes; None: all.
        """
        c, window = self.config, state.window + ahead
        seen_BRS = torch.arange(window, device=slots_BR.device) <= slots_BR[..., None]
        rows_B1 = torch.arange(len(slots_BR), device=slots_BR.device)[:, None]
        for number, (layer, above) in enumerate(pairwise([*self._stack, None])):
            q, k, v = self._split(qkv, slots_BR)
            heads = slice(number * c.num_key_value_heads, (number + 1) * c.num_key_value_heads)
            state.keys[rows_B1, slots_BR, heads], state.values[rows_B1, slots_BR, heads] = k, v
            if above is None and wanted_BK is not None:
                q, residual, seen_BRS = (x[rows_B1, wanted_BK] for x in (q, residual, seen_BRS))
            k, v = state.keys[:, :window, heads], state.values[:, :window, heads]
            x = layer.rest(residual, attend(q, k, v, seen_BRS))
            if above:
                qkv, residual = self._into(above, x)
        return self._last_norm(x)

    # ------------------------------------------------------------------------------------------------ the folder

    def portable_tensors(self) -> dict[str, Tensor]:
        """Tensors under the names that vLLM loads: EAGLE-3's, `layers.1` and on, mask_hidden (before fc), and
        embed_tokens where the head has its own."""
        return super().portable_tensors() | {"mask_hidden": self._mask[1].flatten(1)}

    def load_portable(self, tensors: dict[str, Tensor], where: str) -> None:
        """Exports have the norm before attention of layers above the first a second time, as hidden_norm."""
        twins = [f"layers.{i}.hidden_norm.weight" for i in self.layers]
        for name in twins:
            first = tensors.get(name.replace("hidden_norm", "input_layernorm"))
            if name in tensors and first is not None and not torch.equal(tensors[name], first):
                raise ValueError(f"{where}: {name} differs from that layer's input_layernorm; engines apply either")
        super().load_portable({name: t for name, t in tensors.items() if name not in twins}, where)

    def portable_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """config.json for vLLM, to be served with parallel_drafting=true. Other engines draft no P-EAGLE heads."""
        c = self.config
        return super().portable_config(dtype) | {"num_hidden_layers": c.layers, "ptd_token_id": c.mask_token}


# ---------------------------------------------------------------------------------------------------- rows


def _between(segments: list[Segment], first: int, stop: int) -> list[Segment]:
    """The part of the segments in slots first … stop-1."""
    cut = [replace(s, first=max(s.first, first), stop=min(s.stop, stop)) for s in segments]
    return [s for s in cut if s.first < s.stop]


def _places(wider: Tensor, slots: Tensor) -> Tensor | None:
    """Where slots stand among `wider` ones, both ascending; None: they are the same."""
    return None if len(wider) == len(slots) else torch.searchsorted(wider, slots)


def _at(x: Tensor, places: Tensor | None) -> Tensor:
    return x if places is None else x.index_select(0, places)
