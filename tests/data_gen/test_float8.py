"""Captures in 8 bits: what is lost is bounded, what is not finite is noticed, and the rest is as with bfloat16."""

import pytest
import torch

from headtrain.data_gen import float8, store
from headtrain.data_gen.store import CaptureStore, RowInfo, StoreError

FACTS = {"norm": "post_norm", "taps": [1, 2], "dtype": "float8", "hidden": 64, "vocab": 50}


def write(folder, taps, last, logsumexp=None):
    count = len(taps)
    tensors = {
        "ids": torch.arange(count, dtype=torch.int32), "supervised": torch.ones(count, dtype=torch.bool), "taps": taps,
        "last": last, "argmax": torch.arange(count, dtype=torch.int32) * 7,
        "logsumexp": torch.linspace(1, 9, count) if logsumexp is None else logsumexp,
    }  # fmt: skip
    store.write_unit(folder, "captures", 0, [RowInfo("r", "train", "s", count, "stop", 0, count)], tensors, **FACTS)
    store.write_index(folder, "captures", 1)
    return tensors


def states(*shape, seed=0):
    """Of widths from 1e-3 to 100, one value of each vector thirty times as large as the others."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator)
    values *= torch.logspace(-3, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    values[..., 5] *= 30
    return values


def test_every_code_is_decoded_as_torch_does():
    codes = torch.arange(256, dtype=torch.uint8).view(float8.DTYPE)
    finite = codes.float().isfinite()
    got = float8.decode(codes[None], torch.ones(1, 1))[0]
    assert int(finite.sum()) == 254 and torch.equal(got[finite].float(), codes[finite].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_is_off_by_a_sixteenth_at_most_or_by_a_millionth_of_the_largest(dtype):
    values = states(40, 3, 64).to(dtype)
    codes, scale = float8.encode(values)
    assert codes.dtype == float8.DTYPE and codes.shape == values.shape and scale.shape == (40, 3, 1)
    values, got = values.float(), float8.decode(codes, scale).float()
    allowed = values.abs() * (2**-4 + 2**-8) + values.abs().amax(-1, keepdim=True) * 2**-10 / 448
    assert bool(((got - values).abs() <= allowed).all())
    assert bool((got.abs().amax(-1) > 0).all())


def test_a_store_gives_back_bfloat16_states_and_exact_choices(tmp_path):
    taps, last = states(40, 2, 64).bfloat16(), states(40, 64, seed=1).bfloat16()
    last[-1] = 0
    given = write(tmp_path, taps, last)
    opened = CaptureStore(tmp_path, max_length=30)
    read = opened.read(opened.rows[0])
    assert (opened.dtype, read.taps.dtype, read.last.dtype) == ("float8", torch.bfloat16, torch.bfloat16)
    for name in ("ids", "supervised", "argmax", "logsumexp"):
        assert torch.equal(getattr(read, name), given[name][:30])
    for name in ("taps", "last"):
        error = (getattr(read, name).float() - given[name][:30].float()).norm() / given[name][:30].float().norm()
        assert 0.001 < float(error) < 0.04
    whole = CaptureStore(tmp_path)
    assert not bool(whole.read(whole.rows[0]).last[-1].any())


def test_the_file_is_half_as_large_as_in_bfloat16(tmp_path):
    taps, last = states(400, 2, 64), states(400, 64)
    write(tmp_path, taps, last)
    size = (tmp_path / "captures-00000.safetensors").stat().st_size
    assert 0 < size - 400 * (3 * (64 + 4) + 4 + 1 + 4 + 4) < 2000


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["taps", "last", "logsumexp"])
def test_a_value_that_is_not_finite_is_not_hidden_by_eight_bits(name, bad, tmp_path):
    given = {"taps": states(10, 2, 64), "last": states(10, 64), "logsumexp": torch.zeros(10)}
    given[name].view(-1)[33 if name != "logsumexp" else 3] = bad
    write(tmp_path, **given)
    opened = CaptureStore(tmp_path)
    with pytest.raises(StoreError, match=rf"captures-00000\.safetensors has values in `{name}` of row r that are not"):
        opened.read(opened.rows[0])


def test_sums_that_overflow_are_no_alarm():
    assert store.finite(torch.full((4096,), 3e38)) and store.finite(torch.full((4096,), 6e4, dtype=torch.float16))
    assert not store.finite(torch.tensor([1.0, float("-inf"), float("inf")]))
