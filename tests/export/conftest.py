"""A finished run as a push meets it: a head with its report and config, and all that must never leave the machine."""

from __future__ import annotations

import json
import struct
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

OURS = {  # of an EAGLE-3 head
    "type": "eagle3", "hidden_size": 64, "target_hidden_size": 64, "vocab_size": 384, "draft_vocab_size": 128,
    "taps": [2, 4, 5], "target_layers": 8, "unroll": 5, "norm_before_residual": False,
    "made_for": {"target": {"model": "lab/Target-1B", "commit": 40 * "c"}},
}  # fmt: skip
CONFIG = {
    "description": "a head", "run_dir": "/home/ann/runs/mine", "launch": {"hostfile": "/home/ann/hosts"}, "seed": 0,
    "target": {"model": "lab/Target-1B", "revision": 40 * "c", "adapter": None, "device": "cuda:1"},
    "data": {
        "prompts": [{"source": "/home/ann/secret-client/chats.jsonl"}, {"source": "package:talks/t.json"}],
        "responses": {"backend": "local"},
    },
    "head": {"type": "eagle3", "unroll": 5, "init_from": "/home/ann/runs/old/head"},
    "train": {"lr": 1e-4, "steps": 900},
    "eval": {"k": [5], "suites": ["heldout", "own=/home/ann/own.jsonl"]},
    "logger": "wandb",
}  # fmt: skip


def result(drafter: str = "head", **more: Any) -> dict[str, Any]:
    """A result of an evaluation: 40 steps of 5 drafts, 60 of them accepted."""
    row = {
        "kind": "acceptance", "suite": "heldout", "drafter": drafter, "head": "head" if "head" in drafter else None,
        "k": 5, "tree": "chain", "temperature": 0.0, "rule": "exact", "batch": 16, "dtype": "float32", "prompts": 8,
        "max_new_tokens": 128, "steps": 40, "accepted": 60, "tau": 2.5, "alpha": [0.6, 0.4, 0.25, 0.15, 0.1],
        "speedup": None, "identical_to_plain": True,
    }  # fmt: skip
    return row | more


def make_report(mark: str, results: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    report = {
        "schema_version": 2, "run": "RUN_DIR", "heads": [{"id": "head", "type": "eagle3", "sha256": mark}],
        "target": {"model": "lab/Target-1B"}, "results": results, "warnings": [], "training": {"steps": 900},
        "data": {
            "on_policy": True, "sources": ["chats.jsonl", "package:talks/t.json"], "responses_used": 20000,
            "response_tokens": 5_000_000, "stages": {"prompts": {"left_out": {"too long": 7}}},
        },
        "environment": {"cpu": "Some CPU", "cores": 16, "gpus": ["NVIDIA H200", "NVIDIA H200"]},
        "summary": {"identity": "In all 2 greedy measurements the text equals plain greedy decoding."},
    }  # fmt: skip
    return report | more


@pytest.fixture
def run(tmp_path) -> Path:
    """The run's folder; `head/` is the head, 80 kB of weights."""
    run = tmp_path / "mine"
    for folder in ("head", "report/units", "training/step-00000900/global_step900", "captures", "logs", "responses"):
        (run / folder).mkdir(parents=True)
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [20000], "data_offsets": [0, 80000]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(range(250)) * 320
    (run / "head" / "model.safetensors").write_bytes(weights)
    write_head(run)
    write_report(run, [result(), result("ngram", tau=1.7), result(kind="speed", batch=1, prompts=4, speedup=1.61)])
    (run / "report" / "report.html").write_text("<!doctype html><title>report</title>")
    (run / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    for name in ("training/step-00000900/global_step900/optim_states.pt", "captures/captures-00000.safetensors",
                 "logs/training-0.log", "responses/index.json", "training/log.jsonl", "head/.cache", "head/notes.txt",
                 "report/units/acceptance-1.json", "report/manifest.json"):  # fmt: skip
        (run / name).write_text("of this machine only")
    return run


def write_head(run: Path, **changes: Any) -> None:
    ours = OURS | changes
    (run / "head" / "config.json").write_text(json.dumps({"model_type": "llama", "headtrain": ours}))


def write_report(run: Path, results: list[dict[str, Any]], **more: Any) -> None:
    mark = sha256((run / "head" / "model.safetensors").read_bytes()).hexdigest()
    (run / "report" / "report.json").write_text(json.dumps(make_report(mark, results, **more)))


@pytest.fixture
def made():
    """The functions of this file that change a run: made.head, made.report, made.result."""
    from types import SimpleNamespace

    return SimpleNamespace(head=write_head, report=write_report, result=result, config=CONFIG)


@pytest.fixture(scope="session")
def kinds(tmp_path_factory) -> dict[str, Path]:
    """The folder of a small random head of every type, each in a run folder of its own."""
    from types import SimpleNamespace

    import torch

    from headtrain.config import HEAD_TYPES, HeadSection
    from headtrain.heads.base import head_class, save_head
    from headtrain.heads.vocab import mapping
    from headtrain.target import TargetParts

    V, T, made = 20, 16, {}
    text = SimpleNamespace(
        num_hidden_layers=8, hidden_size=T, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, rms_norm_eps=1e-5, max_position_embeddings=256,
    )  # fmt: skip
    parts = TargetParts(torch.randn(V, T), torch.randn(V, T), torch.ones(T), text, {"rope_theta": 1e4,
                        "rope_type": "default"}, {19})  # fmt: skip
    for kind in HEAD_TYPES:
        more = {"init_from": "scratch", "dialect": "deepseek"} if kind == "mtp" else {}
        size = "full" if kind in ("eagle", "medusa") else 12
        head = head_class(kind).fresh(HeadSection(type=kind, draft_vocab=size, unroll=3, **more), parts)
        head.d2t, head.t2d = mapping(torch.arange(head.config.draft_vocab_size) + (V - 12) * (size == 12), V)
        head.config.made_for = {"target": {"model": "lab/Target-1B", "commit": 40 * "c"}}
        made[kind] = tmp_path_factory.mktemp(kind) / "head"
        save_head(head, made[kind])
    return made
