"""The weights of a head in training, wherever DeepSpeed keeps them, made whole for checkpoints, averages and drafting.

The optimizer works on flat fp32 tensors. Without ZeRO each is one parameter; with it a flat tensor joins many
parameters, and every process holds a part of it. `Shards` knows where the pieces of a parameter lie, so that
anything laid out like the flat tensors (weights, moments, an average) can be gathered and put back by parameter name,
whatever the number of processes and the ZeRO stage were.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headtrain.heads.base import Head, HeadOutput
from headtrain.training.lora import Factors
from headtrain.training.medusa2 import Student
from headtrain.training.ranks import Ranks

FACTORS, TARGET = "lora", "target"  # first parts of the names of factors: of the head, of the target


class Answer(nn.Module):
    """The head as DeepSpeed runs it, with the factors of its LoRA, or with a target in training, where there is one.

    The anchor is a scalar that wants a gradient, and adds nothing to the loss.
    DeepSpeed prepares its backward pass by hooks on the forward's tensors. It finds those of a tuple but not those of a
    dataclass; and under ZeRO 3, where this module is one leaf whose weights come and go together, an input that wants a
    gradient is what tells it when all the weights have theirs.
    """

    def __init__(self, head: Head, factors: Factors | None = None, student: Student | None = None):
        super().__init__()
        self.head, self.factors, self.student = head, factors, student

    def weights(self) -> dict[str, nn.Parameter]:
        """Every parameter by name: the head's, and those of factors (the target's after `target.`)."""
        own = dict(self.head.named_parameters())
        found = self.factors.named_parameters(FACTORS) if self.factors else ()
        of_target = self.student.weights() if self.student else {}
        own |= {name: p for name, p in found if "lora_" in name}
        return own | {f"{TARGET}.{name}": p for name, p in of_target.items()}

    def take(self, tensors: dict[str, Tensor], assign: bool = False) -> None:
        """Takes over tensors by the names of `weights` and of the head's buffers. assign: these very tensors; those of
        the target are then left out."""
        own = {n: tensor for n, tensor in tensors.items() if not n.startswith((f"{FACTORS}.", f"{TARGET}."))}
        self.head.load_state_dict(own, assign=assign)
        if self.factors:
            given = {name.removeprefix(f"{FACTORS}."): t for name, t in tensors.items() if name not in own}
            self.factors.load_state_dict(given, strict=False, assign=assign)
        if self.student and not assign:
            for name, p in self.student.weights().items():
                p.data.copy_(tensors[f"{TARGET}.{name}"])

    def forward(self, batch: Any, anchor: Tensor) -> tuple[Tensor, ...]:
        if self.factors:
            self.factors.lend()
        more = torch.zeros_like(anchor)
        if self.student and self.student.joint:
            read_NT = self.student.last_states(batch)
            more = self.student.distill * self.student.loss(self.head, batch, read_NT)
            batch = replace(batch, read_NT=read_NT)
        elif self.student:  # the graph must still reach every parameter
            more = 0.0 * sum(p.sum() for p in self.student.parameters())
        loss, *sums = vars(self.head(batch)).values()
        return (loss + more + 0.0 * anchor, *sums)


def answer(engine: Any, batch: Any) -> HeadOutput:
    """The training forward, through the engine."""
    return HeadOutput(*engine(batch, torch.zeros((), device=batch.ids_N.device, requires_grad=True)))


@dataclass(frozen=True)
class Place:
    """Where a parameter lies here: in flat tensor number `flat`, whose elements `inside` are its elements `of`."""

    shape: torch.Size
    flat: int
    inside: slice
    of: slice


class Shards:
    """`flats`: the fp32 tensors that the optimizer updates on this process; `places`: parameter name -> Place."""

    def __init__(self, engine: Any, ranks: Ranks):
        self.optimizer, self.ranks = engine.optimizer, ranks
        named = {name: p for name, p in engine.module.weights().items() if p.requires_grad}
        groups = getattr(self.optimizer, "bit16_groups", None) or getattr(self.optimizer, "bf16_groups", None)
        self.flats: list[Tensor]
        if hasattr(self.optimizer, "fp32_partitioned_groups_flat"):  # ZeRO 3 splits each parameter over all processes
            self.flats = self.optimizer.fp32_partitioned_groups_flat
            self.places = {name: self._split(p) for name, p in named.items()}
        else:
            self.flats = [p for group in self.optimizer.param_groups for p in group["params"]]
            if groups:
                index = {id(p): number for number, group in enumerate(groups) for p in group}
                self.places = {name: self._fragment(p, index[id(p)]) for name, p in named.items()}
            else:
                index = {id(p): number for number, p in enumerate(self.flats)}
                self.places = {name: _all_of(p, index[id(p)]) for name, p in named.items()}
        self.split = groups is not None or hasattr(self.optimizer, "fp32_partitioned_groups_flat")

    def _split(self, p: Any) -> Place:
        flat, start, size = self.optimizer.grad_position[self.optimizer.get_param_id(p)]
        first = self.ranks.rank * size
        count = max(0, min(size, p.ds_numel - first))  # the last parts are padded
        return Place(p.ds_shape, flat, slice(start, start + count), slice(first, first + count))

    @staticmethod
    def _fragment(p: Any, flat: int) -> Place:
        if p._hp_mapping is None:  # all of it lies on other processes
            return Place(p.shape, flat, slice(0, 0), slice(0, 0))
        here, there = p._hp_mapping.hp_fragment_address, p._hp_mapping.lp_fragment_address
        inside = slice(here.start, here.start + here.numel)
        return Place(p.shape, flat, inside, slice(there.start, there.start + there.numel))

    @torch.no_grad()
    def whole(self, values: Sequence[Tensor | None], name: str) -> Tensor | None:
        """One parameter of `values`, which is laid out like `flats`: float32, on the device, on every process.

        None where its group has no such value. Every process must call it.
        """
        place = self.places[name]
        value = values[place.flat]
        if value is None:
            return None
        whole = torch.zeros(place.shape.numel(), device=self.ranks.device)
        whole[place.of] = value.flatten()[place.inside].to(whole.device)
        return (self.ranks.sum(whole) if self.split else whole).view(place.shape)

    @torch.no_grad()
    def put(self, values: Sequence[Any], name: str, whole: Tensor) -> None:
        """Writes this process's part of a whole parameter into `values`."""
        place = self.places[name]
        values[place.flat].view(-1)[place.inside] = whole.flatten()[place.of].to(values[place.flat])

    # -------------------------------------------------------------------------------------- the optimizer's state

    def moments(self) -> dict[str, list[Tensor | None]]:
        """The optimizer's tensors by kind (exp_avg, exp_avg_sq, momentum_buffer), each laid out like `flats`."""
        states = [self.optimizer.state.get(flat, {}) for flat in self.flats]
        kinds = {k for state in states for k, v in state.items() if torch.is_tensor(v) and v.dim()}
        return {kind: [state.get(kind) for state in states] for kind in sorted(kinds)}

    @property
    def steps(self) -> int:
        """Updates that AdamW has made; it corrects its moments by their number."""
        return max((int(self.optimizer.state.get(flat, {}).get("step", 0)) for flat in self.flats), default=0)

    def start_moments(self, kinds: dict[str, set[str]], steps: int) -> dict[str, list[Tensor | None]]:
        """Makes the optimizer's state as if it had made `steps` updates, with zeros to fill in; returns `moments()`.

        kinds: kind -> names of the parameters that have it.
        """
        fused = any(group.get("fused") for group in self.optimizer.param_groups)
        for kind, names in kinds.items():
            for flat in {self.places[name].flat for name in names}:
                tensor = self.flats[flat]
                state = self.optimizer.state[tensor]
                state[kind] = torch.zeros_like(tensor)
                if kind == "exp_avg":
                    state["step"] = torch.tensor(float(steps), device=tensor.device if fused else "cpu")
        return self.moments()


def _all_of(p: nn.Parameter, flat: int) -> Place:
    return Place(p.shape, flat, slice(0, p.numel()), slice(0, p.numel()))


class Average:
    """Exponential moving average of the fp32 weights (train.ema), split over the processes as they are."""

    def __init__(self, shards: Shards, decay: float):
        self.decay, self.flats = decay, shards.flats
        self.values = [flat.detach().clone() for flat in self.flats]

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """After so many updates of the weights, the last one included; the decay grows to its value at the start."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        torch._foreach_lerp_(self.values, self.flats, 1 - decay)


class Snapshot:
    """The head as it would be served now, for drafting and saving: a twin of the engine's, without DeepSpeed.

    It takes no memory between uses, shares what the target lends, and in use shares the engine's weights where these
    are whole on each process.
    """

    def __init__(self, model: Answer):
        """To be made before the engine starts."""
        self.fixed: dict[str, Tensor] = {}  # in use: what is not trained, as it is without factors
        self.adapter: dict[str, Tensor] = {}  # in use: the target's factors
        kept: dict[int, Any] = {id(model.head._lent): model.head._lent}
        if model.student:
            kept[id(model.student.outside)] = model.student.outside
        for tensor in (*model.parameters(), *model.buffers()):
            meta = torch.empty_like(tensor, device="meta")
            kept[id(tensor)] = nn.Parameter(meta, False) if isinstance(tensor, nn.Parameter) else meta
        self._twin = copy.deepcopy(model, kept).eval()

    @contextlib.contextmanager
    def of(self, engine: Any, shards: Shards, average: Average | None) -> Iterator[Head]:
        """The head with the present weights, or their average, in the precision of training and without gradients.
        Factors are merged.

        Every process must call it.
        """
        tensors: dict[str, Tensor] = {name: b.detach() for name, b in engine.module.head.named_buffers()}
        for name, p in engine.module.weights().items():
            if average and name in shards.places:
                tensors[name] = shards.whole(average.values, name).to(p.dtype)
            elif not hasattr(p, "ds_id"):
                tensors[name] = p.detach()
            elif name in shards.places:
                tensors[name] = shards.whole(shards.flats, name).to(p.dtype)
            else:
                tensors[name] = _gathered(p)
        self._twin.take(tensors, assign=True)
        self.fixed = {name: tensor for name, tensor in tensors.items() if name not in shards.places}
        self.adapter = {n.removeprefix(f"{TARGET}."): t for n, t in tensors.items() if n.startswith(f"{TARGET}.")}
        try:
            with torch.no_grad():
                if self._twin.factors:
                    self._twin.head.load_state_dict(self._twin.factors.merged(), strict=False, assign=True)
                yield self._twin.head
        finally:
            self._twin.to("meta")
            self.fixed, self.adapter = {}, {}


def _gathered(p: nn.Parameter) -> Tensor:
    """A frozen parameter that ZeRO 3 has split."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([p]):
        return p.detach().clone()
