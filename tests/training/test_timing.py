"""The parts of a step's time, and the share of a device's peak."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from headtrain.heads.base import HeadConfig
from headtrain.training.timing import Collectives, Stopwatch, model_flops, peak_flops

TINY = HeadConfig(
    hidden_size=2, target_hidden_size=2, intermediate_size=3, num_attention_heads=2, num_key_value_heads=1, head_dim=1,
    vocab_size=9, draft_vocab_size=5, taps=[1, 2, 3], unroll=2,
)  # fmt: skip


def test_the_operations_of_a_worked_example():
    """Multiply-adds: fc 10·6·2; q, k, v 10·2·4 + 15·2·4; attention 2·2·(6·4 + 5·5); the rest of the layer 11·(4 + 18);
    lm_head 7·2·5; each three times, and the teacher 6·2·5 once."""
    assert model_flops(TINY, 10, 6, 4, [6, 5], [4, 3]) == 2 * (3 * (120 + 200 + 196 + 242 + 70) + 60)
    assert model_flops(HeadConfig(type="other"), 10, 6, 4, [6, 5], [4, 3]) is None


def test_the_operations_are_those_that_torch_counts_in_the_heads_own_layers():
    from torch.utils.flop_counter import FlopCounterMode

    from headtrain.heads.base import Batch
    from headtrain.heads.eagle3 import Eagle3Head

    config = HeadConfig(
        hidden_size=64, target_hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=300, draft_vocab_size=300, taps=[1, 2, 3], unroll=3,
    )  # fmt: skip
    head, n, answered = Eagle3Head(config), 40, 30
    head.attach(torch.randn(300, 64), torch.randn(300, 64))
    batch = Batch(
        ids_N=torch.randint(300, (n,)), positions_N=torch.arange(n), cu_R1=torch.tensor([0, n], dtype=torch.int32),
        supervised_N=torch.arange(n) >= n - answered, taps_NAT=torch.randn(n, 3, 64), last_NT=torch.randn(n, 64),
        argmax_N=torch.randint(300, (n,)), logsumexp_N=torch.zeros(n),
    )  # fmt: skip
    with FlopCounterMode(display=False) as counted:
        output = head(batch)
        output.loss.backward()
    slots = output.reach_D.tolist()
    seen = float((batch.positions_N + 1)[batch.supervised_N].float().mean())
    # besides matrix products of the head, torch counts lm_head's with the teacher's distribution once per position
    assert model_flops(config, n, answered, seen, slots, slots) == pytest.approx(counted.get_total_flops(), rel=0.15)


def test_a_device_that_is_not_known_has_no_peak(monkeypatch):
    cuda = torch.device("cuda")
    for name, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L40", 181e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device, name=name: name)
        assert peak_flops(cuda, "bf16") == peak and peak_flops(cuda, "fp32") is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Some GPU of tomorrow")
    assert peak_flops(cuda, "bf16") is None and peak_flops(torch.device("cpu"), "bf16") is None


def test_time_in_collectives_is_taken_out_of_the_part_they_happen_in(monkeypatch):
    from deepspeed.comm import comm

    now = [0.0]

    def all_reduce(seconds):
        now[0] += seconds
        return SimpleNamespace(wait=lambda: now.__setitem__(0, now[0] + 1.0))

    monkeypatch.setattr(comm, "cdb", SimpleNamespace(all_reduce=all_reduce))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    collectives = Collectives(torch.device("cpu"))
    watch = Stopwatch(torch.device("cpu"), collectives)
    for _ in range(2):
        watch.exact = False  # on a CPU all steps are measured
        watch.mark(None)
        now[0] += 3.0
        watch.mark("forward")
        comm.cdb.all_reduce(2.0)
        now[0] += 5.0
        watch.mark("backward")
        watch.end_step()
    found = watch.read()
    assert found == {"data": 0, "forward": 3.0, "backward": 5.0, "optimizer": 0, "communication": 3.0}
    collectives.release()
    assert comm.cdb.all_reduce is all_reduce
