"""Acceptance of heads trained with different settings at equal core-seconds, on the demo's model and data.

    headtrain generate recipe=eagle3_smollm2
    python benchmarks/acceptance.py run_dir=runs/eagle3_smollm2 seconds=600 only=[default,plain] seeds=[0,1,2]

Every head is trained in a process of its own with one thread; its budget is that process's CPU time, validation
included. Kept is the checkpoint with the best simulated τ on the validation rows; it is measured once, in fp32, on the
target's greedy answers to the held-out prompts and to 40 HumanEval prompts: τ = 1 + accepted drafts per step, five
drafts per step, steps that end with the answer included. Besides the names in VARIANTS, `only` takes changes of the
default written out: train.noise=0.3+head.unroll=5. Another recipe's run (headtrain generate recipe=medusa_smollm2)
gives another type of head. Results are added to benchmarks/results/acceptance.jsonl;
`python benchmarks/acceptance.py table` prints them as a table and writes it beside.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "acceptance.jsonl"
TITLE = "Acceptance at equal core-seconds"
K, NEW_TOKENS, HUMANEVAL = 5, 128, 40

PLAIN = [
    "head.start=random", "head.unroll=7", "head.norm_output=false", "head.norm_before_residual=false",
    "head.freeze_lm_head=false", "train.decay=0.8", "train.clip=0.5", "train.lr=1e-3",
]  # fmt: skip
VARIANTS: dict[str, list[str]] = {
    "default": ["seed=0"],  # the run's recipe as it stands
    "plain": PLAIN,  # the EAGLE-3 recipe; lm_head and final norm start from the target's
}


def main(arguments: list[str]) -> None:
    if arguments == ["table"]:
        text = table([json.loads(line) for line in RESULTS.read_text().splitlines()])
        RESULTS.with_suffix(".md").write_text(f"# {TITLE}\n\n{text}\n")
        print(text)
        return
    options = {"seconds": "600", "only": ",".join(VARIANTS), "seeds": "0"} | dict(a.split("=", 1) for a in arguments)
    run = Path(options["run_dir"]).absolute()
    if not (run / "captures" / "index.json").is_file():
        raise SystemExit(f"run_dir={run}: no finished captures; run headtrain generate recipe=eagle3_smollm2 run_dir=…")
    if "variant" in options:
        train_one(run, options["variant"], int(options["seeds"]), float(options["seconds"]), options["overrides"])
        return
    answers(run)
    for seed in options["seeds"].strip("[]").split(","):
        for name in options["only"].strip("[]").split(","):
            overrides = json.dumps(VARIANTS.get(name) or name.split("+"))
            command = [sys.executable, __file__, f"run_dir={run}", f"variant={name}", f"seeds={seed}"]
            subprocess.run([*command, f"seconds={options['seconds']}", f"overrides={overrides}"], check=True)


def answers(run: Path) -> Path:
    """run/acceptance/answers.pt: fp32 greedy answers of the target to both suites, with what a head reads of them."""
    import torch

    path = run / "acceptance" / "answers.pt"
    if path.is_file():
        return path
    from headtrain.checks import taps_of
    from headtrain.configload import load_resolved
    from headtrain.data_gen import chat, passes
    from headtrain.eval.suites import load_suite
    from headtrain.packed import pack_linears
    from headtrain.target import Target

    config = load_resolved(run / "config.yaml")
    target = Target.load(config.target, "float32")
    pack_linears(target.model)
    taps, found = tuple(taps_of(config, target.num_layers)), {}
    for name, limit in (("heldout", None), ("humaneval", HUMANEVAL)):
        prompts = load_suite(name, run / "prompts", limit)
        ids = [chat.prompt_ids(target.tokenizer, p.messages, config.target.template_kwargs) for p in prompts]
        budgets, greedy = [NEW_TOKENS] * len(ids), passes.Sampling(0.0, 1.0)
        kept, _ = passes.answer(target, ids, budgets, taps, torch.float32, greedy)
        tensors = kept.flat() | {"lengths": kept.lengths_B}
        real = zip(tensors["lengths"].tolist(), ids, strict=True)
        tensors["supervised"] = torch.cat([torch.arange(length) >= len(prompt) for length, prompt in real])
        found[name] = tensors
    path.parent.mkdir(exist_ok=True)
    torch.save(found, path)
    return path


def train_one(run: Path, name: str, seed: int, seconds: float, overrides: str) -> None:
    """Trains one head with the product's own training stage, measures it, and adds a line to RESULTS."""
    import torch
    from omegaconf import OmegaConf

    from headtrain.configload import load_resolved
    from headtrain.heads.base import load_head
    from headtrain.target import load_parts
    from headtrain.training import trainer

    torch.set_num_threads(1)
    place = run / "acceptance" / f"{name}-{seconds:g}-{seed}"
    place.mkdir(parents=True)
    for part in ("prompts", "responses", "captures"):
        (place / part).symlink_to(run / part)
    changes = [*json.loads(overrides), f"train.seconds={seconds}", "train.save_every=1000000", f"seed={seed}"]
    config = OmegaConf.merge(OmegaConf.load(run / "config.yaml"), OmegaConf.from_dotlist(changes))
    OmegaConf.save(config, place / "config.yaml")
    config = load_resolved(place / "config.yaml")
    trainer.Clock = cpu_clock(trainer.Clock)
    began = time.process_time(), time.monotonic()
    trainer.train(config, place)
    spent, wall = time.process_time() - began[0], time.monotonic() - began[1]
    parts = load_parts(config.target)
    head = load_head(place / "head", parts.embedding.float(), lm_head=parts.lm_head.float())
    log = [json.loads(line) for line in (place / "training" / "log.jsonl").read_text().splitlines()]
    last = [line for line in log if "tokens" in line][-1]
    best = json.loads((place / "training" / "best.json").read_text())
    kind = config.head.type
    result = {
        "name": name if kind == "eagle3" else f"{kind}_smollm2, {name}",
        "seed": seed, "seconds": seconds, "cpu_s": round(spent), "wall_s": round(wall),
        "steps": last["step"], "epoch": last["epoch"], "best_step": best["step"], "valid_tau": best["tau"],
        **{suite: measure(head, tensors) for suite, tensors in torch.load(answers(run)).items()},
    }  # fmt: skip
    RESULTS.parent.mkdir(exist_ok=True)
    with open(RESULTS, "a") as handle:
        handle.write(json.dumps(result) + "\n")
    print(json.dumps(result), flush=True)


def cpu_clock(base: type) -> type:
    """The training clock, reading this process's CPU time."""

    class CpuClock(base):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self._cpu = time.process_time()

        @property
        def elapsed(self) -> float:
            return self._before + time.process_time() - self._cpu

    return CpuClock


def measure(head: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """τ and α of greedy chain decoding with K drafts, by simulation (equal to decoding: the answers are greedy)."""
    import torch

    from headtrain.heads.base import Batch
    from headtrain.heads.simulate import accepted_chain, summarize

    accepted, start = [], 0
    for length in tensors["lengths"].tolist():
        part = {f"{key}_{suffix}": tensors[key][start : start + length] for key, suffix in _SHAPES.items()}
        part["ids_N"], part["argmax_N"] = part["ids_N"].long(), part["argmax_N"].long()
        cu = torch.tensor([0, length], dtype=torch.int32)
        batch = Batch(positions_N=torch.arange(length), cu_R1=cu, **part)
        drafts = head.draft_all(batch, K)
        accepted += accepted_chain(drafts, batch.argmax_N, batch.supervised_N, cu, K)
        start += length
    found = summarize(accepted, K)
    return {"tau": round(found.tau, 4), "alpha": [round(a, 3) for a in found.alpha]}


_SHAPES = {"ids": "N", "supervised": "N", "taps": "NAT", "last": "NT", "argmax": "N", "logsumexp": "N"}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: one line per setting and budget; with several seeds the mean and the lowest and highest."""
    groups: dict[tuple, list[dict]] = {}
    for result in results:
        groups.setdefault((result["seconds"], result["name"]), []).append(result)
    lines = ["| core-seconds | settings | seeds | τ held-out | τ HumanEval | valid τ | steps | epochs |"]
    lines.append("|" + "---|" * 8)
    for (seconds, name), group in sorted(groups.items()):
        cells = [_spread([value(result) for result in group]) for value in (
            lambda r: r["heldout"]["tau"], lambda r: r["humaneval"]["tau"], lambda r: r["valid_tau"])]  # fmt: skip
        epochs = sum(result["epoch"] for result in group) / len(group)
        steps = [result["steps"] for result in group if "steps" in result]  # older results do not say
        steps = f"{sum(steps) / len(steps):,.0f}" if steps else ""
        lines.append(f"| {seconds:g} | {name} | {len(group)} | {' | '.join(cells)} | {steps} | {epochs:.0f} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ({min(values):.3f} … {max(values):.3f})"


if __name__ == "__main__":
    main(sys.argv[1:])
