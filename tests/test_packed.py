"""Products with packed weights give the plain product, once, and only where they may."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from headtrain import packed
from headtrain.packed import Product, frozen_product, pack_linears

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=["by the kernel", "by oneDNN"], autouse=True)
def way(request, monkeypatch):
    if request.param == "by oneDNN":
        monkeypatch.setattr(packed, "rows_kernel", lambda: None)
    elif packed.rows_kernel() is None:
        pytest.skip("no C compiler here")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 7, bias=False)).requires_grad_(False)


@pytest.mark.parametrize("shape", [(32,), (1, 32), (2, 32), (6, 32), (3, 5, 32), (70, 32)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_packed_layers_give_the_plain_product(shape, dtype):
    plain, ours = model().to(dtype), model().to(dtype)
    assert pack_linears(ours) == 2
    x = torch.randn(shape, dtype=dtype)
    for ours_after, plain_after in ((ours[:1], plain[:1]), (ours, plain)):
        y = ours_after(x)
        torch.testing.assert_close(y, plain_after(x), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for mine, theirs in ((ours[0], plain[0]), (ours[2], plain[2])):  # still there, for those who read them
        assert torch.equal(mine.weight, theirs.weight)


@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_a_cpu_without_bf16_instructions_multiplies_bf16_too_and_rounds_once(rows, monkeypatch):
    reorder = torch.ops.mkldnn._reorder_linear_weight

    def refuse(weight, *more):
        assert weight.dtype == torch.float32, "bf16 path needs the cpu support avx512bw"
        return reorder(weight, *more)

    monkeypatch.setattr(packed, "has_bf16", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    torch.manual_seed(0)
    weight, bias, x = torch.randn(40, 32).bfloat16(), torch.randn(40).bfloat16(), torch.randn(rows, 32).bfloat16()
    product = frozen_product(weight, bias)
    assert isinstance(product, Product)
    exact = F.linear(x.double(), weight.double(), bias.double())
    off = (product(x).double() - exact).abs() / exact.abs()
    assert product(x).dtype == torch.bfloat16 and float(off.max()) <= 2**-8  # half a unit in the last place


def test_layers_are_packed_once_and_trainable_ones_or_other_dtypes_never():
    frozen = model()
    assert pack_linears(frozen) == 2 and pack_linears(frozen) == 0
    assert pack_linears(model().half()) == 0
    trainable = model().requires_grad_(True)
    assert pack_linears(trainable) == 0
    trainable(torch.randn(2, 32)).sum().backward()
    assert trainable[0].weight.grad is not None


def test_the_weight_that_is_used_takes_the_place_of_the_layers_own_and_an_embeddings_rows_stay_whole():
    both = nn.ModuleDict({"embed": nn.Embedding(40, 32), "own": nn.Linear(32, 40), "head": nn.Linear(32, 40)})
    both["head"].weight = both["embed"].weight
    both.requires_grad_(False)
    assert pack_linears(both) == 2
    assert both["own"].weight.data_ptr() == both["own"].forward.weight_OI.data_ptr()
    assert both["embed"].weight.is_contiguous() and both["head"].weight is both["embed"].weight
