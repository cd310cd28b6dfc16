"""The kernel for few rows gives the product; a machine without a compiler, or with one that fails, goes without."""

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


@pytest.mark.parametrize("compiler, why", [(None, "needs gcc"), ("/bin/false", "without its own kernel")])
def test_without_a_working_compiler_there_is_no_kernel_and_a_word_in_the_log(
    compiler, why, monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("HEADTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(native.shutil, "which", lambda name: compiler)
    with caplog.at_level("INFO"):
        assert native.rows_kernel.__wrapped__() is None
    assert why in caplog.text
    assert not list(tmp_path.rglob("*.so"))
