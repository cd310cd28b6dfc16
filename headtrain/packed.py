"""Products with frozen weights on a CPU, fast for the few rows of decoding.

By the kernel of headtrain/native.py where it can be had: no copy of the weight is made. Otherwise in layouts that suit
the number of rows: one row against a tall weight is fastest with the weight transposed, more rows with the weight in
oneDNN's own layout; a CPU without bf16 instructions multiplies more than two bf16 rows fastest by an fp32 copy.
Shapes: I inputs, O outputs; rows are all leading dimensions of x together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtrain.native import MULTIPLE, rows_kernel

MANY_ROWS = 64  # from here on, arithmetic counts more than reading the weight
TYPICAL_ROWS = 16  # oneDNN's layout is chosen for products of about so many rows


class Product:
    """x @ weight.T + bias of a frozen weight, fp32 or bf16, on a CPU: [..., I] -> [..., O] in the weight's dtype.

    Results differ from F.linear's by rounding only; bf16 is summed in fp32. `weight_OI`: the weight, as it is used.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None):
        self.weight_OI, self.bias_O = weight_OI.detach().contiguous(), bias_O

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and x.numel() > MANY_ROWS * x.shape[-1]:
            return F.linear(x, self.weight_OI, self.bias_O)
        y = rows_kernel()(x, self.weight_OI)
        if self.bias_O is not None:
            y += self.bias_O
        return y.to(x.dtype)


class PackedProduct(Product):
    """The same without the kernel. `weight_OI` is transposed in memory where that is faster: put in the place of the
    weight given, it leaves oneDNN's copy as the only further one."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None):
        super().__init__(weight_OI, bias_O)
        if weight_OI.dtype == torch.float32:
            self.few, inner = 1, torch.float32
        elif has_bf16():
            self.few, inner = 0, torch.bfloat16
        else:
            self.few, inner = 2, torch.float32
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight_OI.to(inner), TYPICAL_ROWS)
        self.inner_bias_O = None if bias_O is None else bias_O.to(inner)
        if weight_OI.dtype == torch.float32 and weight_OI.shape[0] >= weight_OI.shape[1]:
            self.weight_OI = self.weight_OI.t().contiguous().t()

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() <= self.few * x.shape[-1]:
            return F.linear(x, self.weight_OI, self.bias_O)
        inner_x = x.to(self.packed.dtype)
        return torch.ops.mkldnn._linear_pointwise(inner_x, self.packed, self.inner_bias_O, "none", [], "").to(x.dtype)


def has_bf16() -> bool:
    """Whether oneDNN multiplies bf16 on this CPU."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def can_pack(weight: Tensor) -> bool:
    """Whether the weight is frozen, on a CPU, and of a dtype that this build of torch packs."""
    return (
        type(weight.data) is Tensor  # some quantised ones are tensors of a kind of their own
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and not weight.requires_grad
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def frozen_product(weight_OI: Tensor, bias_O: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """A Product where the weight can be packed, else F.linear."""
    if not can_pack(weight_OI):
        return partial(F.linear, weight=weight_OI, bias=bias_O)
    by_onednn = weight_OI.shape[1] % MULTIPLE or (weight_OI.dtype == torch.bfloat16 and has_bf16())
    kind = PackedProduct if by_onednn or rows_kernel() is None else Product
    return kind(weight_OI, bias_O)


def pack_linears(model: nn.Module) -> int:
    """Makes every nn.Linear of a frozen CPU model multiply by a Product; returns how many.

    Without the kernel this costs the linear weights' memory once more, twice more in bf16 on a CPU without bf16
    instructions. Layers that are packed already, trainable, on another device or of another dtype stay as they are.
    """
    packed, shared = 0, {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    for layer in model.modules():
        if not isinstance(layer, nn.Linear) or "forward" in vars(layer) or not can_pack(layer.weight):
            continue
        layer.forward = frozen_product(layer.weight, layer.bias)
        packed += 1
        if id(layer.weight) not in shared:  # an embedding's rows are better left whole
            layer.weight.data = layer.forward.weight_OI
    return packed
