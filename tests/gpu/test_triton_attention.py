"""On an NVIDIA GPU: the Triton kernel of depth attention against the plain blocks: equality, memory, time."""

from __future__ import annotations

import pytest
import torch

from headtrain.heads import layers

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
]  # fmt: skip

# document, first, stop; of 1,000 positions
SPANS = [layers.Segment(*span) for span in [(0, 5, 200), (0, 230, 231), (300, 300, 640), (700, 701, 999)]]


def problem(segments, n, groups, heads, d, diagonals, dtype):
    """Leaves q, k, v and diagonals, the gradient of the output, and the row vectors (document, slot)."""
    generator = torch.Generator("cuda").manual_seed(n + d)
    m = sum(s.stop - s.first for s in segments)
    new = lambda *shape: torch.randn(*shape, d, device="cuda", generator=generator).to(dtype)  # noqa: E731
    leaves = [new(m, groups, heads), new(n, heads), new(n, heads), *[new(m, heads) for _ in range(2 * diagonals)]]
    return [x.requires_grad_() for x in leaves], new(m, groups, heads), layers._per_row(segments, torch.device("cuda"))


def kernel(leaves, rows):
    from headtrain.heads.triton_attention import depth_attention_triton

    (q, k, v, *rest), (document, slot) = leaves, rows
    return depth_attention_triton(
        q, k, v, list(zip(rest[0::2], rest[1::2], strict=True)), slot, document, q.shape[-1] ** -0.5
    )


def plain(leaves, segments):
    return layers._DepthAttention.apply(segments, leaves[0].shape[-1] ** -0.5, *leaves)


@pytest.mark.parametrize(
    "dtype, groups, heads, d, diagonals",
    [
        (torch.float32, 3, 2, 64, 6), (torch.float32, 1, 2, 256, 1), (torch.float16, 4, 2, 64, 3),
        (torch.bfloat16, 4, 2, 128, 6), (torch.bfloat16, 1, 1, 80, 0), (torch.bfloat16, 2, 1, 256, 2),
    ],
)  # fmt: skip
def test_the_kernel_gives_the_output_and_the_gradients_of_the_plain_blocks_twice(dtype, groups, heads, d, diagonals):
    leaves, grad, rows = problem(SPANS, 1000, groups, heads, d, diagonals, dtype)
    exact = [x.detach().float().requires_grad_() for x in leaves]
    expected = plain(exact, SPANS)
    expected = [expected, *torch.autograd.grad(expected, exact, grad.float())]
    runs = []
    for _ in range(2):
        out = kernel(leaves, rows)
        runs.append([out, *torch.autograd.grad(out, leaves, grad)])
    close = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for once, again, right in zip(*runs, expected, strict=True):
        assert torch.equal(once, again)
        torch.testing.assert_close(once.float(), right, rtol=close, atol=close * float(right.detach().abs().max()))


def test_memory_grows_linearly_with_the_length_and_time_is_reported(capsys):
    def measured(call, leaves, grad, layout):
        """(milliseconds, bytes above the inputs) of forward and backward, the best of four."""
        best = float("inf")
        for _ in range(4):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.autograd.grad(call(leaves, layout), leaves, grad)
            stop.record()
            torch.cuda.synchronize()
            best = min(best, start.elapsed_time(stop))
        return best, torch.cuda.max_memory_allocated() - before

    used, lines = {}, []
    for n in (2048, 4096, 8192, 32768):
        segments = [layers.Segment(0, 0, n)]
        leaves, grad, rows = problem(segments, n, 4, 8, 128, 6, torch.bfloat16)
        ms, used[n] = measured(kernel, leaves, grad, rows)
        line = f"{n} tokens, 32 query heads, 8 key heads, 6 diagonals, bf16: kernel {ms:.2f} ms, {used[n] >> 20} MiB"
        if n < 8192:
            plain_ms, plain_used = measured(plain, leaves, grad, segments)
            line += f"; plain {plain_ms:.2f} ms ({plain_ms / ms:.1f} x), {plain_used >> 20} MiB"
        lines.append(line)
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert used[32768] < 4.2 * used[8192] and used[8192] < 4.2 * used[2048]
