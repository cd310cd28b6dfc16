"""Answering prompts with captures on a CPU, beside a plain loop of transformers; and how fast captures reach training.

`make bench-generate` (ARGS=--quick: one batch, one turn, short answers; --run=DIR: a run whose training is watched).
One process per dtype, one thread, holds both; they answer the same batches in turn. Results go to
benchmarks/results/generate.json and .md after every part.

The plain loop: `model.generate` over the batch, left-padded, greedy; then one forward over prompts and answers with
`output_hidden_states`, of which it keeps in memory what our files hold. Ours is the responses stage as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import loading
from benchmarks.decode import goal, machine
from benchmarks.measure import QUIET, ROOT, run, timed
from benchmarks.train_step import table

RECIPE, BATCHES = "eagle3_smollm2", (0, -1)  # which batches of the recipe's plan: its longest and shortest prompts
GOAL = 2.0
NEAR_TIE = 1e-4  # gap of the best two logits, as a share of the largest magnitude
SAME_STATES = 0.01  # of a state's length, in fp32: captures are rounded to bf16


# ---------------------------------------------------------------------------------------------------- contenders


class Plain:
    """transformers alone: answers, then the states of prompts and answers."""

    def __init__(self, target: Any, path: str, taps: tuple[int, ...], dtype: Any):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype).eval()
        self.ends, self.taps, self.dtype = sorted(target.eos_ids), taps, dtype

    def __call__(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """As `StateBuffers.flat`, and `rows`: the ids of each."""
        import torch

        with torch.inference_mode():
            rows = self._answer(prompts, new)
            lengths_B = torch.tensor([len(row) for row in rows])
            ids_BS = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
            real_BS = torch.arange(ids_BS.shape[1]) < lengths_B[:, None]
            out = self.model.model(ids_BS, attention_mask=real_BS.long(), output_hidden_states=True, use_cache=False)
            last_NH = out.last_hidden_state[real_BS]
            parts = []
            for part in last_NH.split(1024):
                logits = self.model.lm_head(part).float()
                parts.append((logits.argmax(-1).int(), logits.logsumexp(-1)))
            found = {
                "ids": ids_BS[real_BS].int(), "last": last_NH.to(self.dtype),
                "taps": torch.stack([out.hidden_states[k][real_BS] for k in self.taps], 1).to(self.dtype),
                "argmax": torch.cat([part[0] for part in parts]), "logsumexp": torch.cat([part[1] for part in parts]),
            }  # fmt: skip
            for name in ("taps", "last", "argmax", "logsumexp"):
                found[name][lengths_B.cumsum(0) - 1] = 0
        return found | {"rows": rows}

    def _answer(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        import torch

        longest, pad = max(map(len, prompts)), self.ends[0]
        ids_BL = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts])
        real_BL = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        out = self.model.generate(
            ids_BL, attention_mask=real_BL, max_new_tokens=new, do_sample=False, eos_token_id=self.ends,
            pad_token_id=pad,
        )  # fmt: skip
        rows = []
        for prompt, row in zip(prompts, out[:, longest:].tolist(), strict=True):
            end = next((n + 1 for n, token in enumerate(row) if token in self.ends), len(row))
            rows.append(prompt + row[:end])
        return rows

    def near_tie(self, ids: list[int]) -> bool:
        """Whether the best two tokens after these ids are as good as the same."""
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([ids])).logits[0, -1].float()
        best, second = logits.topk(2).values
        return bool(best - second < NEAR_TIE * logits.abs().max())


def ours(config: Any, target: Any, taps: tuple[int, ...], prompts: Path, batch: list, place: Path) -> None:
    """The responses stage over a plan of one batch; its files lie in place/responses and place/captures."""
    from headtrain.data_gen import respond
    from headtrain.files import write_json

    (place / "responses").mkdir(parents=True, exist_ok=True)
    write_json(place / "responses" / "plan.json", {"backend": "local", "batches": [batch], "left_out": {}})
    respond.work(config, target, prompts, place / "responses", place / "captures", taps)


def read(place: Path) -> dict[str, Any]:
    """What `ours` has written, in the form of `Plain`."""
    from safetensors.torch import load_file

    found = load_file(place / "captures" / "captures-00000.safetensors")
    offsets, ids = found["offsets"].tolist(), found["ids"].tolist()
    return found | {"rows": [ids[a:b] for a, b in pairwise(offsets)]}


# ---------------------------------------------------------------------------------------------------- measuring


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """What one process measures: {batches: [{rows, new, same, ties, plain: times, ours: times, …}]}.

    request: recipe, overrides, dtype, batches, rounds.
    """
    import logging

    import torch

    from headtrain.checks import taps_of
    from headtrain.configload import load
    from headtrain.data_gen import chat, prompts, respond
    from headtrain.lean import speed_up
    from headtrain.stages import quiet_libraries
    from headtrain.target import Target, model_path

    logging.disable(logging.WARNING)
    quiet_libraries()
    config = load(request["recipe"], request["overrides"])
    target = Target.load(config.target, request["dtype"])
    taps, new = tuple(taps_of(config, target.num_layers)), config.data.responses.max_new_tokens
    plain = Plain(target, model_path(config.target), taps, getattr(torch, config.data.captures.dtype))
    speed_up(target)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        prompts.gather(config, place / "prompts")
        plan = respond.plan_batches(config, target.tokenizer, place / "prompts", place / "plan")
        known = {prompt.id: prompt for prompt in prompts.load(place / "prompts")}
        for at in request["batches"]:
            batch = plan["batches"][at]
            ids = [chat.prompt_ids(target.tokenizer, known[row[0]].messages, config.target.template_kwargs)
                   for row in batch]  # fmt: skip
            each = {"rows": len(batch), "prompt_tokens": sum(map(len, ids)), "plain": [], "ours": []}
            plain(ids[:1], 2)
            for turn in range(request["rounds"]):
                theirs, spent = timed(lambda ids=ids: plain(ids, new))
                each["plain"].append(spent | {"new": new_tokens(theirs, ids)})
                where = place / f"{at}-{turn}"
                _, spent = timed(lambda b=batch, w=where: ours(config, target, taps, place / "prompts", b, w))
                mine = read(where)
                each["ours"].append(spent | {"new": new_tokens(mine, ids)})
            found.append(each | compared(plain, ids, theirs, mine))
    return {"batches": found, "lean": target.lean is not None}


def new_tokens(found: dict[str, Any], prompts: list[list[int]]) -> int:
    return len(found["ids"]) - sum(map(len, prompts))


def compared(plain: Plain, prompts: list, theirs: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    """How many answers are the same, how many others part at a near-tie, and the largest difference of their states.

    taps, last: of a position, as a share of the length of the vector; logsumexp: absolute; argmax: positions that
    differ, as a share.
    """
    same, ties, at, other = [], 0, 0, 0
    for prompt, a, b in zip(prompts, theirs["rows"], mine["rows"], strict=True):
        if a == b:
            same.append((at, other, len(a)))
        else:
            first = next(n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            assert first >= len(prompt)
            ties += plain.near_tie(a[:first])
        at, other = at + len(a), other + len(b)
    found: dict[str, Any] = {"same": len(same), "ties": ties}
    for name in ("taps", "last", "logsumexp", "argmax"):
        worst = [0.0]
        for start, begin, length in same:
            x, y = theirs[name][start : start + length - 1], mine[name][begin : begin + length - 1]
            if name == "argmax":
                worst.append(float((x != y).float().mean()))
            elif name == "logsumexp":
                worst.append(float((x - y).abs().max()))
            else:
                gap = (x.float() - y.float()).norm(dim=-1) / x.float().norm(dim=-1)
                worst.append(float(gap.max()))
        found[name] = max(worst)
    return found


def check(dtype: str, found: dict[str, Any]) -> None:
    """RuntimeError where fp32 answers differ without a near-tie, or states by more than rounding."""
    for each in found["batches"] if dtype == "float32" else ():
        if each["same"] + each["ties"] < each["rows"]:
            raise RuntimeError(f"{each['rows'] - each['same'] - each['ties']} answers differ without a near-tie")
        if each["same"] and max(each["taps"], each["last"]) > SAME_STATES:
            raise RuntimeError(f"captures differ: taps by {each['taps']:.2g}, last by {each['last']:.2g}")


# ---------------------------------------------------------------------------------------------------- tables


def rates(batches: list[dict[str, Any]], who: str) -> dict[str, float]:
    """New tokens per core-second and per second, from the best turn of every batch."""
    tokens = sum(each[who][-1]["new"] for each in batches)
    return {key: tokens / sum(min(t[key] for t in each[who]) for each in batches) for key in ("core_s", "wall_s")}


def cells(batches: list[dict[str, Any]]) -> list[list[str]]:
    """A row per batch, then one of all."""
    found = []
    for name, those in [*((f"{b['rows']} rows", [b]) for b in batches), ("all", batches)]:
        plain, mine = rates(those, "plain"), rates(those, "ours")
        ratio, rows = mine["core_s"] / plain["core_s"], sum(b["rows"] for b in those)
        found.append([
            name, f"{sum(b['prompt_tokens'] for b in those):,}", f"{sum(b['ours'][-1]['new'] for b in those):,}",
            f"{plain['core_s']:.0f}", f"{plain['wall_s']:.0f}", f"{mine['core_s']:.0f}", f"{mine['wall_s']:.0f}",
            f"**{ratio:.2f}×**", f"{sum(b['same'] for b in those)} of {rows}", f"{max(b['taps'] for b in those):.1e}",
            f"{max(b['last'] for b in those):.1e}", goal(ratio, GOAL, True) if name == "all" else "",
        ])  # fmt: skip
    return found


def markdown(result: dict[str, Any]) -> str:
    about = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    text = [
        "# Responses and captures on a CPU\n",
        f"SmolLM2-135M-Instruct, greedy, ShareGPT prompts, at most {about['new']} new tokens; {versions}; "
        f"{about['cpu']}, one thread. Rates are new tokens per core-second and per second, of the best of "
        f"{about['rounds']} turns of every batch. [How it is measured](../../docs/benchmarks.md).\n",
    ]
    for dtype, found in result["dtypes"].items():
        idle = "The machine was otherwise idle" if found["others"] <= QUIET else "**The machine was not idle**"
        text += [
            f"## {dtype}\n",
            f"{idle}; anything else kept at most {found['others']:.2f} cores busy.\n",
            table(
                ["batch", "prompt tokens", "new tokens", "plain, per core-s", "per s", "ours, per core-s", "per s",
                 "speed-up", "same answers", "taps differ by", "last by", "goal"],
                cells(found["batches"]),
            ),
        ]  # fmt: skip
    if "loading" in result:
        text += ["## From the captures to the training step\n", *loading.text(result["loading"])]
    return "\n".join(text)


def write(out: Path, result: dict[str, Any]) -> None:
    (out / "generate.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "generate.md").write_text(markdown(result))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="one batch, one turn, written to runs/bench-quick")
    options.add_argument("--rounds", type=int, default=2, help="turns of both")
    options.add_argument("--new", type=int, default=160, help="new tokens of an answer, at most")
    options.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options.add_argument("--run", type=Path, help="a finished run, whose training is watched for waits")
    options.add_argument("--out", type=Path, help="folder of generate.json and generate.md")
    given = options.parse_args()
    rounds, new, batches = (1, 48, BATCHES[:1]) if given.quick else (given.rounds, given.new, BATCHES)
    out = given.out or ROOT / ("runs/bench-quick" if given.quick else "benchmarks/results")
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": machine(rounds, new, "torch", "transformers"), "dtypes": {}}
    request = {"recipe": RECIPE, "overrides": [f"data.responses.max_new_tokens={new}"], "batches": batches,
               "rounds": rounds}  # fmt: skip
    for dtype in given.dtypes:
        print(f"{dtype} …", flush=True)
        result["dtypes"][dtype] = run({"generate": request | {"dtype": dtype}})
        write(out, result)
    print("loading …", flush=True)
    watched = {"run": str(given.run.absolute()) if given.run else None, "steps": 20 if given.quick else 200}
    result["loading"] = run({"loading": loading.STORE | watched})
    write(out, result)
    print("\n" + markdown(result))
    for dtype, found in result["dtypes"].items():
        check(dtype, found)


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(str(error))
