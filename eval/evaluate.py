"""The evaluation stage: units of work that several processes share, and their merger into the report's results.

A unit is a few prompts decoded by one drafter (`acceptance`: batched, compared with the plain text) or one prompt
timed with plain decoding and all drafters in turn (`speed`: batch 1). Each leaves one whole JSON file under `units/`; a
restart does what is missing.
"""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrain.config import RecipeConfig
from headtrain.eval.acceptance import metrics, tau_interval
from headtrain.eval.suites import EvalPrompt
from headtrain.files import claimed, read_json, write_json

if TYPE_CHECKING:
    from headtrain.eval.decoder.decode import Decoded
    from headtrain.heads.base import Head
    from headtrain.target import Target

PLAIN = "none"
UNIT_PROMPTS = 8  # an acceptance unit holds at least so many prompts, in whole batches
TIE_SHARE = 0.001  # near-ties above this share of the steps make a drafter not identical


@dataclass
class Unit:
    """`runs`: (drafter, k). `needs`: the unit with the plain text of the same prompts, finished first."""

    name: str
    kind: str
    suite: str
    runs: list[tuple[str, int]]
    temperature: float
    top_p: float
    top_k: int
    batch: int
    max_new_tokens: int
    prompts: list[EvalPrompt]
    turn: int = 0
    needs: str | None = None


# ------------------------------------------------------------------------------------------------- the plan

def plan_units(config: RecipeConfig, prompts: list[EvalPrompt]) -> list[Unit]:
    """All units, in the order to do them; the same list for the same config and prompts (whose `ids` are filled in)."""
    for prompt in prompts:
        if not prompt.ids:
            raise ValueError(f"prompt {prompt.id} of suite {prompt.suite} has no token ids; tokenise the prompts first")
    suites: dict[str, list[EvalPrompt]] = {}
    for prompt in prompts:
        suites.setdefault(prompt.suite, []).append(prompt)
    acceptance = [u for temperature in config.eval.temperature for u in _acceptance_units(config, suites, temperature)]
    speed = [u for temperature in config.eval.temperature for u in _speed_units(config, suites, temperature)]
    acceptance.sort(key=lambda unit: unit.needs is not None)  # plain texts first: the others wait for them
    return acceptance + speed


def _acceptance_units(config: RecipeConfig, suites: dict[str, list[EvalPrompt]], temperature: float) -> list[Unit]:
    e, units = config.eval, []
    runs = [(PLAIN, 0)] + [(drafter, k) for drafter in e.drafters for k in e.k]
    for suite, prompts in suites.items():
        ordered = sorted(prompts, key=lambda prompt: len(prompt.ids))
        for batch in e.batch:
            size = -(-UNIT_PROMPTS // batch) * batch
            for number, at in enumerate(range(0, len(ordered), size)):
                plain = None
                for drafter, k in runs:
                    marks = (f"k{k}", f"t{temperature:g}", f"b{batch}", f"{number:03d}")
                    name = _name("acceptance", suite, drafter, *marks)
                    units.append(Unit(
                        name, "acceptance", suite, [(drafter, k)], temperature, e.top_p, e.top_k, batch,
                        e.max_new_tokens, ordered[at : at + size], needs=plain,
                    ))  # fmt: skip
                    plain = plain or name
    return units


def _speed_units(config: RecipeConfig, suites: dict[str, list[EvalPrompt]], temperature: float) -> list[Unit]:
    e = config.eval
    runs = [(PLAIN, 0)] + [(drafter, k) for drafter in e.drafters for k in e.k]
    counts = e.speed_prompts * len(suites) if len(e.speed_prompts) == 1 else e.speed_prompts
    if len(counts) != len(suites):
        raise ValueError(f"eval.speed_prompts={e.speed_prompts}: one number, or one for each of {len(suites)} suites")
    return [
        Unit(
            _name("speed", suite, f"t{temperature:g}", f"{turn:03d}"), "speed", suite, runs, temperature, e.top_p,
            e.top_k, 1, e.speed_tokens, [prompt], turn,
        )
        for (suite, prompts), count in zip(suites.items(), counts, strict=True)
        for turn, prompt in enumerate(prompts[:count])
    ]  # fmt: skip


def _name(*parts: str) -> str:
    text = "-".join(parts)
    plain = re.sub(r"[^A-Za-z0-9._+-]", "_", text)
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


# ------------------------------------------------------------------------------------------------- the work

def status(folder: str | Path, units: list[Unit]) -> dict[str, int]:
    """How far the units are, for a progress line."""
    return {"done": sum(_file(folder, unit.name).is_file() for unit in units), "units": len(units)}


def work(
    config: RecipeConfig, target: Target, head: Head | None, units: list[Unit], folder: str | Path, workers: int = 1
) -> None:
    """Does units until all are done, sharing them with other processes that call this with the same arguments.

    A unit is claimed by a lock that dies with its process. Returns when every unit has its file, whoever made it.
    `workers`: how many processes run at once; it is written beside each timing.
    """
    from headtrain.eval.decoder.drafters import make_drafter
    from headtrain.eval.decoder.sampling import Sampling
    from headtrain.packed import pack_linears

    for model in (target.model, head):
        if model is not None:
            pack_linears(model.requires_grad_(False))
    (Path(folder) / "units").mkdir(parents=True, exist_ok=True)
    facts = {"dtype": str(target.dtype).removeprefix("torch."), "template": template_mark(target)}
    facts |= {"device": target.device.type, "concurrent_workers": workers}
    todo, warm = list(units), False
    while todo:
        waiting = []
        for unit in todo:
            if _file(folder, unit.name).is_file():
                continue
            if unit.needs and not _file(folder, unit.needs).is_file():
                waiting.append(unit)
                continue
            with claimed(Path(folder) / "claims" / f"{unit.name}.lock") as mine:
                if not mine:
                    waiting.append(unit)
                elif not _file(folder, unit.name).is_file():
                    sampling = Sampling(unit.temperature, unit.top_p, unit.top_k)
                    drafters = [(make_drafter(name, head, sampling), k) for name, k in unit.runs]
                    if unit.kind == "speed" and not warm:  # what a process sets up once is not timed
                        warm = bool(_race(config, target, replace(unit, max_new_tokens=4), drafters, Path(folder)))
                    rows = (_race if unit.kind == "speed" else _accept)(config, target, unit, drafters, Path(folder))
                    write_json(_file(folder, unit.name), _header(unit) | facts | {"rows": rows})
        if len(waiting) == len(todo):
            time.sleep(0.2)  # others are at work on what is left
        todo = waiting


def template_mark(target: Target) -> str:
    """Names the chat template: the first 12 hex digits of its sha256, and the arguments it was given."""
    text = str(getattr(target.tokenizer, "chat_template", None))
    given = " ".join(f"{key}={value}" for key, value in sorted(target.template_kwargs.items()))
    return f"{hashlib.sha256(text.encode()).hexdigest()[:12]} {given}".strip()


def _file(folder: str | Path, name: str) -> Path:
    return Path(folder) / "units" / f"{name}.json"


def _header(unit: Unit) -> dict[str, Any]:
    values = asdict(unit)
    del values["prompts"]
    return values


def _fitting(target: Target, unit: Unit) -> tuple[list[EvalPrompt], list[dict[str, Any]]]:
    """Prompts the target has positions for, and a row with the reason for each of the others."""
    most = getattr(target.config, "max_position_embeddings", None) or float("inf")
    fits = [p for p in unit.prompts if len(p.ids) + unit.max_new_tokens <= most]
    return fits, [{"id": p.id, "left_out": "longer_than_the_target's_positions"} for p in unit.prompts if p not in fits]


def _accept(config: RecipeConfig, target: Target, unit: Unit, drafters: list, folder: Path) -> list[dict[str, Any]]:
    from headtrain.eval.decoder.decode import decode

    prompts, rows = _fitting(target, unit)
    (drafter, k), (name, _) = drafters[0], unit.runs[0]
    answers = decode(
        target, drafter, [p.ids for p in prompts], k=k, batch=unit.batch, names=[p.id for p in prompts],
        **_sampling(config, unit),
    )  # fmt: skip
    plain = {}
    if unit.needs and unit.temperature == 0:
        plain = {row["id"]: row["ids"] for row in read_json(_file(folder, unit.needs))["rows"] if "ids" in row}
    made = [_row(target, unit, p, name, k, a, plain.get(p.id)) for p, a in zip(prompts, answers, strict=True)]
    return rows + made


def _race(config: RecipeConfig, target: Target, unit: Unit, drafters: list, folder: Path) -> list[dict[str, Any]]:
    from headtrain.eval.speed import race

    prompts, rows = _fitting(target, unit)
    for prompt in prompts:
        answers = race(target, drafters, prompt.ids, unit.turn, names=[prompt.id], **_sampling(config, unit))
        plain = answers[0].ids if unit.temperature == 0 else None
        for (name, k), answer in zip(unit.runs, answers, strict=True):
            rows.append(_row(target, unit, prompt, name, k, answer, None if name == PLAIN else plain))
    return rows


def _sampling(config: RecipeConfig, unit: Unit) -> dict[str, Any]:
    return {
        "max_new_tokens": unit.max_new_tokens, "temperature": unit.temperature, "top_p": unit.top_p,
        "top_k": unit.top_k, "seed": config.seed,
    }  # fmt: skip


def _row(
    target: Target, unit: Unit, prompt: EvalPrompt, drafter: str, k: int, answer: Decoded, plain: list[int] | None
) -> dict[str, Any]:
    from headtrain.eval.decoder.decode import compare

    same = None if plain is None else compare(target, prompt.ids, plain, answer.ids, unit.max_new_tokens)
    return {
        "id": prompt.id, "drafter": drafter, "k": k, "prompt_tokens": len(prompt.ids), "tokens": len(answer.ids),
        "finish": answer.finish, "ids": answer.ids, "drafted": [s.drafted for s in answer.steps],
        "accepted": [s.accepted for s in answer.steps], "draft_s": answer.draft_s, "verify_s": answer.verify_s,
        "prefill_s": answer.prefill_s, "total_s": answer.total_s,
        "identical": same and same.identical, "near_ties": same.near_ties if same else 0,
        "differences": same.notes if same else [],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------- the results

def finish(config: RecipeConfig, units: list[Unit], folder: str | Path, head: str | None = None) -> dict[str, Any]:
    """{"results", "units", "left_out"}: one result per (kind, suite, drafter, temperature, k, batch).

    `head`: the id of the measured head, for the results of the drafters that use it. ValueError names a missing unit.
    """
    groups: dict[tuple, list[dict[str, Any]]] = {}
    facts: dict[tuple, dict[str, Any]] = {}
    left_out: dict[str, set[str]] = {}
    for unit in units:
        if not _file(folder, unit.name).is_file():
            raise ValueError(f"{_file(folder, unit.name)} is missing: the evaluation is not finished; start it again")
        written = read_json(_file(folder, unit.name))
        for row in written["rows"]:
            if "left_out" in row:
                left_out.setdefault(row["left_out"], set()).add(f"{unit.suite} {row['id']}")
                continue
            key = (unit.kind, unit.suite, unit.temperature, unit.batch, row["drafter"], row["k"])
            groups.setdefault(key, []).append(row)
            facts.setdefault(key, written)
    results = []
    for key, rows in groups.items():
        plain = groups[(*key[:4], PLAIN, 0)]
        results.append(_result(key, rows, plain, facts[key], head))
    return {"results": results, "units": len(units), "left_out": {why: len(ids) for why, ids in left_out.items()}}


def _result(key: tuple, rows: list[dict], plain: list[dict], facts: dict[str, Any], head: str | None) -> dict[str, Any]:
    from headtrain.eval.speed import rates

    kind, suite, temperature, batch, drafter, k = key
    steps = [list(zip(row["drafted"], row["accepted"], strict=True)) for row in rows]
    speed, base = rates(rows), rates(plain)["tokens_per_s"]
    near_ties = sum(row["near_ties"] for row in rows)
    checked = [row["identical"] for row in rows if row["identical"] is not None]
    numbers = metrics(steps, k)
    identical = all(checked) and near_ties <= TIE_SHARE * numbers["steps"] if checked else None
    return {
        "kind": kind, "suite": suite, "head": head if "head" in drafter else None, "drafter": drafter,
        "temperature": temperature, "top_p": facts["top_p"], "top_k": facts["top_k"], "k": k, "tree": "chain",
        "batch": batch, "dtype": facts["dtype"], "template": facts["template"],
        "max_new_tokens": facts["max_new_tokens"], "prompts": len(rows),
        "accepted_per_step": [accepted for row in rows for accepted in row["accepted"]],
        "drafted_per_step": [drafted for row in rows for drafted in row["drafted"]],
        "tokens": sum(row["tokens"] for row in rows), **numbers, "tau_ci": tau_interval(steps), **speed,
        "plain_tokens_per_s": base, "speedup": speed["tokens_per_s"] / base if speed["tokens_per_s"] and base else None,
        "identical_to_plain": identical, "near_ties": near_ties,
        "differences": [f"{row['id']} {note}" for row in rows for note in row["differences"]],
        "device": facts["device"], "concurrent_workers": facts["concurrent_workers"],
        "per_prompt": [
            {"id": row["id"], "prompt_tokens": row["prompt_tokens"], "tokens": row["tokens"], "finish": row["finish"],
             "steps": len(row["drafted"]), "total_s": row["total_s"]}
            for row in rows
        ],
    }  # fmt: skip
