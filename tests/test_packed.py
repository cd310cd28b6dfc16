"""Packed linear layers give the plain product, once, and only where they may."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headtrain.packed import pack_linears

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 7, bias=False)).requires_grad_(False)


@pytest.mark.parametrize("shape", [(1, 24), (6, 24), (3, 5, 24)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_packed_layers_give_the_plain_product(shape, dtype, tolerance):
    plain, packed = model().to(dtype), model().to(dtype)
    assert pack_linears(packed) == 2
    x = torch.randn(shape, dtype=dtype)
    assert not torch.equal(packed[0].weight, torch.zeros_like(packed[0].weight))  # still there, for those who read it
    torch.testing.assert_close(packed(x), plain(x), atol=tolerance, rtol=tolerance)


def test_layers_are_packed_once_and_trainable_ones_never():
    frozen = model()
    assert pack_linears(frozen) == 2 and pack_linears(frozen) == 0
    trainable = model().requires_grad_(True)
    assert pack_linears(trainable) == 0
    trainable(torch.randn(2, 24)).sum().backward()
    assert trainable[0].weight.grad is not None
