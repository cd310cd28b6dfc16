"""Products with frozen weights on a CPU, in the layouts that suit the number of rows.

torch's default product is slow for the few rows of decoding. One row against a tall weight is fastest with the weight
transposed; more rows with the weight in oneDNN's own layout, re-ordered once, ahead. A CPU without bf16 instructions
multiplies more than two bf16 rows fastest by an fp32 copy of the weight.
Shapes: I inputs, O outputs; rows are all leading dimensions of x together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TYPICAL_ROWS = 16  # oneDNN's layout is chosen for products of about so many rows


class Product:
    """x @ weight.T + bias of a frozen weight, fp32 or bf16, on a CPU: [..., I] -> [..., O] in the weight's dtype.

    Results differ from F.linear's by rounding only. `weight_OI` is the weight given, transposed in memory where that
    is faster: put in the place of the one given, it leaves oneDNN's copy as the only further one.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None):
        self.weight_OI, self.bias_O = weight_OI.detach(), bias_O
        if weight_OI.dtype == torch.float32:
            self.few, inner = 1, torch.float32
            if weight_OI.shape[0] >= weight_OI.shape[1]:
                self.weight_OI = self.weight_OI.t().contiguous().t()
        elif has_bf16():
            self.few, inner = 0, torch.bfloat16
        else:
            self.few, inner = 2, torch.float32
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().to(inner).contiguous(), TYPICAL_ROWS)
        self.inner_bias_O = None if bias_O is None else bias_O.to(inner)

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() <= self.few * x.shape[-1]:
            return F.linear(x, self.weight_OI, self.bias_O)
        inner_x = x.to(self.packed.dtype)
        return torch.ops.mkldnn._linear_pointwise(inner_x, self.packed, self.inner_bias_O, "none", [], "").to(x.dtype)


def has_bf16() -> bool:
    """Whether oneDNN multiplies bf16 on this CPU."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def can_pack(weight: Tensor) -> bool:
    """Whether the weight is frozen, on a CPU, and of a dtype that this build of torch packs."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and not weight.requires_grad
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def frozen_product(weight_OI: Tensor, bias_O: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """A Product where the weight can be packed, else F.linear."""
    if can_pack(weight_OI):
        return Product(weight_OI, bias_O)
    return partial(F.linear, weight=weight_OI, bias=bias_O)


def pack_linears(model: nn.Module) -> int:
    """Makes every nn.Linear of a frozen CPU model multiply by a Product; returns how many.

    Costs the linear weights' memory once more, twice more in bf16 on a CPU without bf16 instructions. Layers that are
    packed already, trainable, on another device or of another dtype stay as they are.
    """
    packed, shared = 0, {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    for layer in model.modules():
        if not isinstance(layer, nn.Linear) or "forward" in vars(layer) or not can_pack(layer.weight):
            continue
        layer.forward = Product(layer.weight, layer.bias)
        packed += 1
        if id(layer.weight) not in shared:  # an embedding's rows are better left whole
            layer.weight.data = layer.forward.weight_OI
    return packed
