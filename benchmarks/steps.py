"""The work that is compared: identical random inputs, our EAGLE-3 training step on them, and what it costs in FLOPs.

Shapes: N tokens of one packed batch, H hidden, D draft vocabulary or depths (as the name says), V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from headtrain.config import TrainConfig
from headtrain.heads.base import Batch, HeadConfig
from headtrain.heads.eagle3 import Eagle3Head
from headtrain.heads.vocab import mapping, trained_pairs

DECAY = 0.8  # weight of depth d is DECAY**d, for every contender
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """Dimensions of the target, which the head takes over."""

    hidden: int = 576
    intermediate: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocab: int = 49152


@dataclass(frozen=True)
class Case:
    """One measurement: who does how much. `supervised` is the share of tokens, at each document's end, that are taught;
    `keep` (ours alone) is train.position_keep."""

    contender: str = "headtrain"  # headtrain | specforge | speculators
    length: int = 2048
    depths: int = 7
    dtype: str = "fp32"
    supervised: float = 1.0
    keep: float = 1.0
    draft_vocab: int = 8192
    documents: int = 1
    shape: Shape = field(default_factory=Shape)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        return cls(**values | {"shape": Shape(**values["shape"])})


@dataclass
class Inputs:
    """Float32 inputs of a case; the same for every contender."""

    batch: Batch
    weights: dict[str, Tensor]  # of the head, under our names
    embedding_VH: Tensor
    lm_head_VH: Tensor
    d2t: Tensor
    t2d: Tensor


def make_inputs(case: Case) -> Inputs:
    """Random inputs, the same for the same case whoever the contender is.

    The target's last hidden states have unit size, so that a final norm with weight 1 leaves them as they are. Rows of
    its lm_head outside the draft vocabulary are small: its choice is in the draft vocabulary at every position.
    """
    s, made = case.shape, torch.Generator().manual_seed(0)

    def normal(*size: int, std: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=made) * std

    vocab = max(s.vocab, case.draft_vocab)
    selected = torch.randperm(vocab, generator=made)[: case.draft_vocab].sort().values
    d2t, t2d = mapping(selected, vocab)
    lm_head = normal(vocab, s.hidden, std=0.1)
    lm_head[~t2d] *= 0.1
    last = normal(case.length, s.hidden)
    last /= last.square().mean(-1, keepdim=True).sqrt()
    choice = torch.cat([(part @ lm_head[selected].T).argmax(-1) for part in last.split(128)])
    ends = [case.length * (i + 1) // case.documents for i in range(case.documents)]
    lengths = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    weights = {
        "fc.weight": normal(s.hidden, 3 * s.hidden, std=0.02),
        "midlayer.self_attn.q_proj.weight": normal(q, 2 * s.hidden, std=0.02),
        "midlayer.self_attn.k_proj.weight": normal(kv, 2 * s.hidden, std=0.02),
        "midlayer.self_attn.v_proj.weight": normal(kv, 2 * s.hidden, std=0.02),
        "midlayer.self_attn.o_proj.weight": normal(s.hidden, q, std=0.02),
        "midlayer.mlp.gate_proj.weight": normal(s.intermediate, s.hidden, std=0.02),
        "midlayer.mlp.up_proj.weight": normal(s.intermediate, s.hidden, std=0.02),
        "midlayer.mlp.down_proj.weight": normal(s.hidden, s.intermediate, std=0.02),
        "lm_head.weight": normal(case.draft_vocab, s.hidden, std=0.02),
    }
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        weights[f"{name}.weight"] = 1 + normal(s.hidden, std=0.1)
    batch = Batch(
        ids_N=torch.randint(vocab, (case.length,), generator=made),
        positions_N=torch.cat([torch.arange(n) for n in lengths]),
        cu_R1=torch.tensor([0, *ends], dtype=torch.int32),
        supervised_N=torch.cat([torch.arange(n) >= n - round(n * case.supervised) for n in lengths]),
        taps_NAT=normal(case.length, 3, s.hidden),
        last_NT=last,
        argmax_N=selected[choice],
        logsumexp_N=torch.zeros(case.length),  # this objective does not read it
    )
    return Inputs(batch, weights, normal(vocab, s.hidden), lm_head, d2t, t2d)


def headtrain_step(case: Case, inputs: Inputs) -> tuple[torch.nn.Module, Callable[[], dict[str, Any]]]:
    """Our head, and its step: forward with the target's projection, loss, backward."""
    s = case.shape
    config = HeadConfig(
        hidden_size=s.hidden, target_hidden_size=s.hidden, intermediate_size=s.intermediate,
        num_attention_heads=s.heads, num_key_value_heads=s.kv_heads, head_dim=s.head_dim,
        vocab_size=len(inputs.lm_head_VH), draft_vocab_size=case.draft_vocab, taps=[2, 15, 27], target_layers=30,
        unroll=case.depths,
    )  # fmt: skip
    head, dtype = Eagle3Head(config), DTYPES[case.dtype]
    head.load_state_dict(inputs.weights | {"d2t": inputs.d2t, "t2d": inputs.t2d}, strict=False)
    head = head.to(dtype)
    head.attach(inputs.embedding_VH.to(dtype), inputs.lm_head_VH.to(dtype))
    head.rules = TrainConfig(
        objective="soft_ce", hard_weight=0.0, feature_weight=0.0, weights="decay", decay=DECAY, noise=0.0,
        position_keep=case.keep,
    )  # fmt: skip
    batch = inputs.batch.to("cpu", dtype)

    def step() -> dict[str, Any]:
        out = head(batch)
        out.loss.backward()
        return {"loss": out.loss.item(), "sum_D": out.loss_D.tolist(), "pairs_D": out.count_D.tolist()}

    return head, step


def reachable(case: Case, batch: Batch) -> Tensor:
    """Which (depth, slot) pairs are taught: bool [D, N]."""
    return trained_pairs(batch.supervised_N, batch.argmax_N, None, batch.cu_R1, case.depths)[0]


def entropy_sums(case: Case, inputs: Inputs) -> list[float]:
    """Per depth, the sum over the taught pairs of the teacher's entropy in the draft vocabulary: CE = KL + entropy."""
    teacher_VH = inputs.lm_head_VH[inputs.t2d]
    entropy = torch.zeros(case.length + case.depths + 1, dtype=torch.float64)
    for at in torch.arange(case.length).split(128):
        log_p = torch.log_softmax((inputs.batch.last_NT[at] @ teacher_VH.T).double(), -1)
        entropy[at] = -(log_p.exp() * log_p).sum(-1)
    pairs_DN = reachable(case, inputs.batch)
    return [entropy[pairs_DN[d].nonzero()[:, 0] + 1 + d].sum().item() for d in range(case.depths)]


def expected_pairs(case: Case, batch: Batch) -> Tensor:
    """Slots that are taught at each depth on average, float64 [D]: dropping leaves a share keep^d of them."""
    return reachable(case, batch).sum(1) * case.keep ** torch.arange(case.depths, dtype=torch.float64)


def step_flops(case: Case, batch: Batch) -> float:
    """Floating-point operations of one training step that no exact implementation avoids; a multiply-add counts as 2.

    A matrix product costs 2·rows·in·out forward and as much again for each gradient: of the weights, and of the input.
    With N tokens, M_d slots at depth d, q = (heads + 2 kv_heads)·head_dim and a = heads·head_dim:

        fc (its input needs no gradient)           2 · 2·N·3H·H
        q/k/v, embedding half, once                3 · 2·N·H·q
        q/k/v, hidden half                         3 · 2·(N + Σ_{d≥1} M_d)·H·q
        o_proj and the three of the MLP            3 · 2·Σ M_d·(a·H + 3·H·I)
        attention, scores and mixing               3 · 4·a·(depth-0 keys that the slots see, summed)
        lm_head                                    3 · 2·Σ M_d·H·(draft vocabulary)
        the target's rows of the draft vocabulary  2·(distinct taught positions)·H·(draft vocabulary)

    Left out: what is linear in the length (norms, softmax, the one key per later depth) and what a flash kernel
    computes twice. With dropped positions this is the average.
    """
    s, reach_DN, used_D = case.shape, reachable(case, batch), expected_pairs(case, batch)
    share_D = case.keep ** torch.arange(case.depths, dtype=torch.float64)
    keys = ((reach_DN * (batch.positions_N + 1)).sum(1) * share_D).sum().item()
    taught = torch.zeros(case.length + case.depths + 1, dtype=torch.bool)
    for d, slots_N in enumerate(reach_DN):
        taught[slots_N.nonzero()[:, 0] + 1 + d] = True
    n, h, slots, later = case.length, s.hidden, used_D.sum().item(), used_D[1:].sum().item()
    attention, qkv = s.heads * s.head_dim, (s.heads + 2 * s.kv_heads) * s.head_dim
    fc = 2 * 2 * n * 3 * h * h
    projections = 3 * 2 * (n + n + later) * h * qkv
    layer = 3 * 2 * slots * (attention * h + 3 * h * s.intermediate) + 3 * 4 * attention * keys
    return fc + projections + layer + 2 * (3 * slots + taught.sum().item()) * h * case.draft_vocab
