"""On an NVIDIA GPU: the target's forward and the head's drafts are those of the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from headtrain import configload, smoke

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
]  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    made = smoke.shrink(configload.load("eagle3_qwen3_8b", ["smoke=true", f"run_dir={run}"]))
    smoke.build_target(made, smoke.target_folder(made))
    return made


def target_on(config, device: str):
    from headtrain.target import Target

    torch.backends.cuda.matmul.allow_tf32 = False
    config.target.device = device
    return Target.load(config.target)


def test_a_forward_gives_the_same_taps_and_logits(config):
    ids = torch.randint(0, 256, (3, 40), generator=torch.Generator().manual_seed(0))
    found = []
    for device in ("cpu", "cuda"):
        target = target_on(config, device)
        states = target.forward(ids.to(device), taps=(2, 4, 5))
        found.append((states.taps_BLAH.cpu(), target.logits(states.last_BLH).cpu()))
    for cpu, cuda in zip(*found, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=1e-4, atol=1e-4 * float(cpu.abs().max()))


def test_the_training_forward_of_a_head_gives_the_same_loss_and_gradients(config):
    from headtrain.heads.base import Batch, new_head
    from headtrain.target import load_parts

    parts = load_parts(config.target)
    counts = torch.arange(len(parts.lm_head))
    generator = torch.Generator().manual_seed(1)
    n, taps, hidden = 64, 3, 64
    batch = Batch(
        ids_N=torch.randint(0, 256, (n,), generator=generator), positions_N=torch.arange(n),
        cu_R1=torch.tensor([0, n], dtype=torch.int32), supervised_N=torch.arange(n) >= 10,
        taps_NAT=torch.randn(n, taps, hidden, generator=generator), last_NT=torch.randn(n, hidden, generator=generator),
        argmax_N=torch.randint(256, 384, (n,), generator=generator), logsumexp_N=torch.full((n,), 9.0),
    )  # fmt: skip
    fresh, found = new_head(config, parts, counts, counts, batch), []
    for device in ("cpu", "cuda"):
        head = copy.deepcopy(fresh).float().to(device)
        output = head(batch.to(device))
        output.loss.backward()
        found.append((output.loss.detach().cpu(), head.fc.weight.grad.cpu()))
    for cpu, cuda in zip(*found, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=1e-3, atol=1e-4 * float(cpu.abs().max()))
