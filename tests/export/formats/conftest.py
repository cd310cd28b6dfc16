"""Small heads of every type, as training leaves them, in a run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headtrain.heads.base import head_class, save_head
from headtrain.heads.vocab import mapping

SIZES = dict(  # of a target of 8 blocks
    hidden_size=64, target_hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=200, draft_vocab_size=50, max_position_embeddings=4096, taps=[2, 4, 5], target_layers=8,
    unroll=5,
)  # fmt: skip
OF_TYPE = {
    "eagle": {"draft_vocab_size": 200, "taps": []},
    "eagle3": {},
    "medusa": {"taps": [], "unroll": 3, "draft_vocab_size": 200},
    "peagle": {"layers": 3, "mask_token": 0},
}


def random_head(kind: str, **changes):
    """A head with random weights: no tensor is what a fresh head has."""
    torch.manual_seed(0)
    made = head_class(kind)
    settings = SIZES | OF_TYPE[kind] | {"type": kind} | changes
    head = made(made.Config(**settings))
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape) * 0.05 + (p.dim() == 1))
    c = head.config
    if c.draft_vocab_size < c.vocab_size:
        head.d2t, head.t2d = mapping(torch.randperm(c.vocab_size)[: c.draft_vocab_size].sort().values, c.vocab_size)
    return head.eval()


@pytest.fixture
def make_head(tmp_path):
    """make_head(kind, **settings) -> the head's folder, in a run folder without anything else."""

    def make(kind: str, name: str = "run", **changes) -> Path:
        save_head(random_head(kind, **changes), tmp_path / name / "head")
        return tmp_path / name / "head"

    return make


@pytest.fixture
def spoil():
    """spoil(head_dir, config=…, tensors=…): rewrites the folder after these functions changed its content in place."""

    def change(head_dir: Path, config=None, tensors=None) -> None:
        if config:
            content = json.loads((head_dir / "config.json").read_text())
            config(content)
            (head_dir / "config.json").write_text(json.dumps(content))
        if tensors:
            content = load_file(head_dir / "model.safetensors")
            tensors(content)
            save_file({name: t.contiguous() for name, t in content.items()}, head_dir / "model.safetensors")

    return change
