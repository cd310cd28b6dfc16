"""The kernels give the product and attention; a machine without a compiler, or with one that fails, goes without."""

from __future__ import annotations

import pytest
import torch

from headtrain import native


@pytest.fixture
def kernel():
    found = native.rows_kernel()
    if found is None:
        pytest.skip("no C compiler here")
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs, inputs", [(1, 16), (7, 48), (71, 576), (300, 64), (13, 1536), (5, 784)])
def test_any_number_of_rows_and_outputs_gives_the_product(dtype, outputs, inputs, kernel):
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).to(dtype)
    for rows in (*range(1, 20), 40):
        x = torch.randn(rows, inputs)
        torch.testing.assert_close(
            kernel(x, weight).double(), x.double() @ weight.double().T, atol=1e-4 * inputs**0.5, rtol=1e-5
        )


def test_what_a_row_gives_does_not_hang_on_how_many_rows_there_are(kernel):
    torch.manual_seed(0)
    weight, x = torch.randn(71, 1552), torch.randn(20, 1552)
    alone = torch.cat([kernel(row[None], weight) for row in x])
    for rows in range(2, 21):
        assert torch.equal(kernel(x[:rows], weight), alone[:rows])


def test_rows_that_are_not_contiguous_or_have_more_dimensions_are_read_right(kernel):
    torch.manual_seed(0)
    weight, x = torch.randn(24, 32), torch.randn(2, 6, 32).transpose(0, 1)
    torch.testing.assert_close(kernel(x, weight), x @ weight.T, atol=1e-4, rtol=1e-4)
    assert kernel(x[0, 0], weight).shape == (24,)


def test_several_threads_share_the_outputs(kernel, monkeypatch):
    torch.manual_seed(0)
    weight, x = torch.randn(1000, 32), torch.randn(7, 32)
    alone = kernel(x, weight)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(kernel(x, weight), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("rows, length, heads, key_heads, slots", [
    (1, 1, 1, 1, 1), (1, 1, 9, 3, 33), (5, 1, 4, 4, 16), (3, 2, 6, 1, 47), (2, 5, 4, 2, 200),
])  # fmt: skip
def test_attention_of_few_queries_is_the_textbooks(dtype, size, rows, length, heads, key_heads, slots, kernel):
    attend = native.attention_kernel()
    torch.manual_seed(0)
    q = 3 * torch.randn(rows, length, heads, size)
    k, v = torch.randn(2, rows, key_heads, slots + 7, size).to(dtype)[:, :, :, :slots]  # part of a cache
    seen = torch.rand(rows, length, slots) < 0.6
    seen[..., 0] = True
    wide_k, wide_v = (t.double().repeat_interleave(heads // key_heads, 1) for t in (k, v))
    for mask in (None, torch.where(seen, 0.0, torch.finfo(dtype).min)):
        scores = torch.einsum("blhd,bhsd->bhls", q.double(), wide_k) * 0.2
        if mask is not None:
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
        expected = torch.einsum("bhls,bhsd->blhd", scores.softmax(-1), wide_v)
        torch.testing.assert_close(attend(q, k, v, mask, 0.2).double(), expected, atol=3e-5, rtol=1e-5)
        mixed = v.transpose(1, 2).contiguous().transpose(1, 2)  # keys and values that lie otherwise
        torch.testing.assert_close(attend(q, k, mixed, mask, 0.2).double(), expected, atol=3e-5, rtol=1e-5)


def test_attention_of_a_row_does_not_hang_on_other_rows_or_threads(kernel, monkeypatch):
    attend = native.attention_kernel()
    torch.manual_seed(0)
    q, (k, v) = torch.randn(4, 1, 6, 64), torch.randn(2, 4, 2, 50, 64)
    mask = torch.where(torch.arange(50) < torch.tensor([1, 9, 33, 50])[:, None, None], 0.0, -3e38)
    together = attend(q, k, v, mask, 0.125)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(attend(q, k, v, mask, 0.125), together)
    for n, end in enumerate((1, 9, 33, 50)):
        alone = attend(q[n : n + 1], k[n : n + 1, :, :end], v[n : n + 1, :, :end], None, 0.125)
        assert torch.equal(alone[0], together[n])


@pytest.mark.parametrize("compiler, why", [(None, "needs gcc"), ("/bin/false", "without its own kernels")])
def test_without_a_working_compiler_there_is_no_kernel_and_a_word_in_the_log(
    compiler, why, monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("HEADTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(native.shutil, "which", lambda name: compiler)
    with caplog.at_level("INFO"):
        assert native._library.__wrapped__() is None
    assert why in caplog.text
    assert not list(tmp_path.rglob("*.so"))
