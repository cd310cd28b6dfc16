"""The Triton kernels of depth attention, without a GPU: interpreted, and compiled for several GPUs. Both in children,
so that no other test sees an interpreting Triton."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest
import torch

from headtrain.heads.layers import Segment, depth_attention

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# positions, segments (document, first, stop), share of rows kept, J, G, D, diagonals, dtype
CASES = {
    "one document": (70, [(0, 0, 70)], 1.0, 2, 1, 16, 0, torch.float32),
    "documents and gaps": (90, [(0, 3, 20), (0, 29, 40), (40, 41, 80), (80, 89, 90)], 1.0, 2, 3, 32, 6, torch.float32),
    "dropped rows": (100, [(0, 5, 33), (33, 33, 37), (37, 60, 98)], 0.5, 1, 4, 16, 3, torch.float32),
    "a document without rows": (64, [(0, 2, 5), (40, 50, 64)], 1.0, 1, 1, 16, 0, torch.float32),
    "padded head size": (40, [(0, 1, 40)], 1.0, 1, 2, 24, 2, torch.float32),
    "wide head": (40, [(0, 0, 9), (9, 12, 40)], 1.0, 1, 2, 256, 1, torch.float32),
    "float16": (150, [(0, 3, 60), (60, 61, 149)], 1.0, 2, 2, 32, 2, torch.float16),  # the interpreter has no bfloat16
}  # fmt: skip

INTERPRETED = """
import sys, torch
from headtrain.heads.triton_attention import depth_attention_triton

def run(q, k, v, diagonals, slot, document, scale, grad):
    leaves = [x.requires_grad_() for x in (q, k, v, *[x for pair in diagonals for x in pair])]
    joint = torch.cat([k, v], 1).split(k.shape[1], 1)  # rows further apart than they are long
    inner = q.transpose(1, 2).contiguous().transpose(1, 2)  # the layout of a projection
    out = depth_attention_triton(inner, *joint, diagonals, slot, document, scale)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

torch.save({name: run(*case) for name, case in torch.load(sys.argv[1]).items()}, sys.argv[2])
"""

# Triton believes in a GPU that it need not have: kernels are compiled and checked for size, then not run.
COMPILED = """
import json, sys, torch, triton
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from headtrain.heads.triton_attention import depth_attention_triton

capability, shared, dtype, d = int(sys.argv[1]), int(sys.argv[2]) * 1024, getattr(torch, sys.argv[3]), int(sys.argv[4])
launched = []
triton.runtime.driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", capability, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    utils=SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": shared},
        load_binary=lambda name, kernel, shared, device: (1, 1, 0, 0, 1024),
    ),
    launcher_cls=lambda source, metadata: lambda *grid: launched.append([metadata.name, metadata.shared, *grid[:3]]),
))
for rows in (200, 100):
    x = lambda *shape: torch.randn(*shape, d, dtype=dtype).requires_grad_()
    pair = [(x(rows, 2), x(rows, 2))]
    of_row = torch.arange(rows), torch.zeros(rows)
    depth_attention_triton(x(rows, 4, 2), x(rows, 2), x(rows, 2), pair, *of_row, 0.1).sum().backward()
print(json.dumps(launched))
"""


def child(code: str, *arguments, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def inputs(name: str):
    """(q, k, v, diagonals, slot_M, document_M, scale, gradient of the output) and the segments of a case."""
    n, spans, kept, j, g, d, diagonals, dtype = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    slot = torch.cat([torch.arange(first, stop) for _, first, stop in spans])
    document = torch.cat([torch.full((stop - first,), document) for document, first, stop in spans])
    keep = torch.rand(len(slot), generator=generator) < kept
    slot, document, m = slot[keep], document[keep], int(keep.sum())
    new = lambda *shape: torch.randn(*shape, d, generator=generator).to(dtype)  # noqa: E731
    pairs = [(new(m, j), new(m, j)) for _ in range(diagonals)]
    case = new(m, g, j), new(n, j), new(n, j), pairs, slot, document, d**-0.5, new(m, g, j)
    return case, [Segment(*span) for span in spans] if kept == 1 else None


def dense(q, k, v, diagonals, slot, document, scale, grad):
    """Output and gradients of softmax over all keys, those not seen masked; float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v, *[x for pair in diagonals for x in pair])]
    q, k, v, *rest = leaves
    key = torch.arange(len(k))
    seen = (key <= slot[:, None]) & (key >= document[:, None])
    scores = torch.einsum("mgjd,njd->mgjn", q, k).masked_fill(~seen[:, None, None], -math.inf)
    own = [torch.einsum("mgjd,mjd->mgj", q, x)[..., None] for x in rest[0::2]]
    p = (torch.cat([scores, *own], -1) * scale).softmax(-1)
    out = torch.einsum("mgjn,njd->mgjd", p[..., : len(k)], v)
    out = out + sum(p[..., len(k) + i, None] * x[:, None] for i, x in enumerate(rest[1::2]))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("triton")
    torch.save({name: inputs(name)[0] for name in CASES}, folder / "in.pt")
    child(INTERPRETED, folder / "in.pt", folder / "out.pt", TRITON_INTERPRET="1")
    return torch.load(folder / "out.pt")


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_dense_attention(interpreted, name):
    case, _ = inputs(name)
    close = 1e-5 if case[0].dtype == torch.float32 else 2e-3
    for found, expected in zip(interpreted[name], dense(*case), strict=True):
        assert found.dtype == case[0].dtype
        torch.testing.assert_close(found.double(), expected, rtol=close, atol=close * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["documents and gaps", "one document"])
def test_output_is_that_of_the_attention_used_on_a_cpu(interpreted, name):
    (q, k, v, diagonals, _, _, scale, _), segments = inputs(name)
    expected = depth_attention(q, k, v, diagonals, segments, scale)
    torch.testing.assert_close(interpreted[name][0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "capability, shared, dtype, head_dim",
    [
        (86, 99, "bfloat16", 128),  # too small for the first choice of tiles
        *[pytest.param(*case, marks=pytest.mark.slow) for case in [
            (80, 163, "float16", 64), (86, 99, "float32", 128), (86, 99, "float32", 256), (86, 99, "bfloat16", 256),
            (90, 227, "bfloat16", 128), (100, 227, "bfloat16", 128), (120, 99, "bfloat16", 128),
        ]],
    ],
)  # fmt: skip
def test_the_kernels_compile_and_fit_a_gpu(tmp_path, capability, shared, dtype, head_dim):
    launched = json.loads(child(COMPILED, capability, shared, dtype, head_dim, TRITON_CACHE_DIR=str(tmp_path)))
    kernels = ["_forward", "_backward_rows", "_backward_keys", "_backward_diagonals"]
    assert [name for name, *_ in launched] == 2 * kernels
    assert all(used <= shared * 1024 for _, used, *_ in launched)
    heads = {"_forward": 8, "_backward_rows": 8, "_backward_keys": 2, "_backward_diagonals": 2}
    assert all(heads[name] == x and y >= 1 and z == 1 for name, _, x, y, z in launched)


def test_a_head_size_above_256_is_refused_and_no_rows_are_no_work():
    from headtrain.heads.triton_attention import depth_attention_triton

    x = torch.zeros(3, 1, 1, 272)
    with pytest.raises(ValueError, match="up to 256, not 272"):
        depth_attention_triton(x, x[:, 0], x[:, 0], [], torch.arange(3), torch.zeros(3), 1.0)
    nothing = torch.empty(0, 1, 1, 16)
    keys = torch.zeros(3, 1, 16)
    assert depth_attention_triton(nothing, keys, keys, [], torch.arange(0), torch.arange(0), 1.0).shape == (0, 1, 1, 16)
