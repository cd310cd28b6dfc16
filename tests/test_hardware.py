"""What the machine can do, told from its own description."""

from __future__ import annotations

import pytest

from headtrain import configload, hardware

MODERN_X86 = "processor : 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n"
OLDER_X86 = "processor : 0\nflags\t\t: fpu avx2 avx512f\nbugs\t\t: bf16\n"
MODERN_ARM = "processor : 0\nFeatures\t: fp asimd bf16 i8mm\n"


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(hardware, "CPU_FACTS", tmp_path / "cpuinfo")
    return (tmp_path / "cpuinfo").write_text


@pytest.mark.parametrize(("facts", "fast"), [(MODERN_X86, True), (OLDER_X86, False), (MODERN_ARM, True), ("", False)])
def test_auto_is_bf16_only_on_a_cpu_with_instructions_for_it(cpu, facts, fast):
    cpu(facts)
    config = configload.load("eagle3_smollm2", ["target.dtype=auto", "train.precision=auto"])
    assert (config.target.dtype, config.train.precision) == (("bfloat16", "bf16") if fast else ("float32", "fp32"))


def test_auto_is_bf16_on_a_gpu_unless_the_run_keeps_to_the_cpu(cpu, monkeypatch):
    cpu(OLDER_X86)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert configload.load("eagle3_smollm2", []).target.dtype == "bfloat16"
    assert configload.load("eagle3_smollm2", ["target.device=cpu"]).target.dtype == "float32"


def test_a_format_that_was_asked_for_stays(cpu):
    cpu(OLDER_X86)
    config = configload.load("eagle3_smollm2", ["target.dtype=bfloat16", "train.precision=bf16"])
    assert (config.target.dtype, config.train.precision) == ("bfloat16", "bf16")


def test_a_system_that_does_not_describe_its_cpu_counts_as_slow(cpu):
    assert not hardware.fast_bf16("cpu")
