"""A toy target of 20 tokens as tensors, stores of given token rows, and training runs over them in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headtrain.config import RecipeConfig
from headtrain.data_gen import store
from headtrain.heads.base import HeadConfig, save_head
from headtrain.heads.eagle3 import Eagle3Head
from headtrain.heads.vocab import mapping
from headtrain.target import TargetParts

VOCAB, HIDDEN, TAPS = 20, 16, [1, 2, 3]


class ToyConfig:
    hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim = HIDDEN, 32, 2, 1, 8
    rms_norm_eps, max_position_embeddings, num_hidden_layers = 1e-5, 512, 8


@pytest.fixture(scope="session")
def parts() -> TargetParts:
    g = torch.Generator().manual_seed(0)
    embedding, lm_head = torch.randn(2, VOCAB, HIDDEN, generator=g)
    return TargetParts(
        embedding, lm_head, torch.ones(HIDDEN), ToyConfig, {"rope_theta": 1e4, "rope_type": "default"}, {19}
    )


@pytest.fixture
def recipe() -> RecipeConfig:
    made = RecipeConfig()
    made.head.draft_vocab, made.head.unroll, made.head.taps = 6, 2, TAPS
    made.train.precision, made.train.threads = "fp32", 1
    made.target.device = "cpu"
    made.eval.k = [3]
    return made


@pytest.fixture
def counts():
    """counts({token: number}) -> int64 [20]."""

    def make(of: dict[int, int]) -> torch.Tensor:
        out = torch.zeros(VOCAB, dtype=torch.long)
        for token, number in of.items():
            out[token] = number
        return out

    return make


@pytest.fixture
def make_head(parts):
    """make_head(selected, **config): an EAGLE-3 head with random weights for the toy target."""

    def make(selected: list[int], **options) -> Eagle3Head:
        torch.manual_seed(3)
        sizes = {
            "hidden_size": HIDDEN, "target_hidden_size": HIDDEN, "intermediate_size": 32, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCAB, "draft_vocab_size": len(selected),
            "max_position_embeddings": 512, "taps": TAPS, "target_layers": 8, "unroll": 2,
        }  # fmt: skip
        head = Eagle3Head(HeadConfig(**{**sizes, **options}))
        head.d2t, head.t2d = mapping(torch.tensor(selected), VOCAB)
        head.attach(parts.embedding, parts.lm_head)
        return head

    return make


@pytest.fixture
def save(tmp_path):
    """save(head, name): the head's folder."""

    def write(head, name: str = "parent") -> str:
        save_head(head, tmp_path / name)
        return str(tmp_path / name)

    return write


@pytest.fixture
def make_run(parts):
    """make_run(folder, train, valid): responses and captures of rows (prompt ids, answer ids).

    The target's states are random, but for its choice, which is the answer.
    """

    def make(run: Path, train: list[tuple[list[int], list[int]]], valid=(), taps=TAPS) -> Path:
        g, infos, flat = torch.Generator().manual_seed(1), [], {}
        for n, (prompt, answer) in enumerate([*train, *valid]):
            ids = torch.tensor(prompt + answer, dtype=torch.int32)
            last = torch.randn(len(ids), HIDDEN, generator=g)
            fields = {
                "ids": ids, "supervised": torch.arange(len(ids)) >= len(prompt), "argmax": ids.roll(-1),
                "taps": torch.randn(len(ids), 3, HIDDEN, generator=g) * torch.tensor([0.01, 1.0, 300.0])[:, None],
                "last": last, "logsumexp": (last @ parts.lm_head.T).logsumexp(-1),
            }  # fmt: skip
            fields["taps"] = fields["taps"][:, : len(taps)]
            for name, tensor in fields.items():
                flat.setdefault(name, []).append(tensor)
            split = "train" if n < len(train) else "valid"
            infos.append(
                store.RowInfo(f"{split}-{n:04d}", split, "toy", len(ids), "stop", len(prompt), len(answer))
            )
        tensors = {name: torch.cat(parts_of) for name, parts_of in flat.items()}
        responses = {name: tensors[name] for name in ("ids", "supervised")}
        store.write_unit(run / "responses", "responses", 0, infos, responses, on_policy=True)
        facts = {"norm": "post_norm", "taps": taps, "hidden": HIDDEN, "dtype": "float32"}
        store.write_unit(run / "captures", "captures", 0, infos, tensors, **facts)
        for kind in ("responses", "captures"):
            store.write_index(run / kind, kind, 1)
        return run

    return make


@pytest.fixture
def train(parts, monkeypatch):
    """train(recipe, run): the training stage in this process, as one of one; returns the lines of its log."""
    from headtrain.training import trainer

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")  # so that what the trainer sets is taken back after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(trainer, "load_parts", lambda target: parts)
    monkeypatch.setattr(trainer, "leave", lambda: None)  # the process group serves all tests of this process

    def run_it(recipe: RecipeConfig, run: Path) -> list[dict]:
        trainer.train(recipe, run)
        return [json.loads(line) for line in (run / "training" / "log.jsonl").read_text().splitlines()]

    return run_it
