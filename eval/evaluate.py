"""The evaluation stage: units of work that several processes share. `eval/results.py` merges them into results.

A unit is a few prompts decoded by one drafter (`acceptance`: batched, compared with the plain text), one prompt timed
with plain decoding and all drafters in turn (`speed`: batch 1), or the times of draft and verification alone (`cost`).
Each leaves one whole JSON file under `units/`; a restart does what is missing.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrain.config import HEAD_DRAFTERS, ConfigError, RecipeConfig
from headtrain.eval.suites import EvalPrompt
from headtrain.files import claimed, read_json, write_json

if TYPE_CHECKING:
    from headtrain.eval.decoder.decode import Decoded
    from headtrain.eval.decoder.drafters import Drafter
    from headtrain.heads.base import Head
    from headtrain.target import Target

PLAIN = "none"
UNIT_PROMPTS = 8  # an acceptance unit holds at least so many prompts, in whole batches


@dataclass(frozen=True)
class Run:
    """One drafter at one setting; without arguments plain decoding. `head`: id of the head it uses."""

    drafter: str = PLAIN
    k: int = 0
    tree: str = "chain"
    head: str | None = None


@dataclass
class Unit:
    """`needs`: the unit with the plain text of the same prompts, finished first."""

    name: str
    kind: str
    suite: str
    runs: list[Run]
    temperature: float
    batch: int
    max_new_tokens: int
    prompts: list[EvalPrompt]
    turn: int = 0
    needs: str | None = None


# ------------------------------------------------------------------------------------------------- the plan

def plan_units(
    config: RecipeConfig, prompts: list[EvalPrompt], heads: Sequence[str] = ("head",), positions: float = math.inf
) -> list[Unit]:
    """All units, in the order to do them; the same list for the same arguments.

    prompts: with `ids` filled in. heads: ids. positions: how many the target has, see `positions_of`.
    """
    for prompt in prompts:
        if not prompt.ids:
            raise ValueError(f"prompt {prompt.id} of suite {prompt.suite} has no token ids; tokenise the prompts first")
    suites: dict[str, list[EvalPrompt]] = {}
    for prompt in prompts:
        suites.setdefault(prompt.suite, []).append(prompt)
    runs = {temperature: runs_of(config, heads, temperature) for temperature in config.eval.temperature}
    acceptance = [u for temperature in runs for u in _acceptance_units(config, suites, temperature, runs[temperature])]
    speed = [u for temperature in runs for u in _speed_units(config, suites, temperature, runs[temperature])]
    acceptance.sort(key=lambda unit: unit.needs is not None)  # plain texts first: the others wait for them
    return acceptance + speed + _cost_units(config, acceptance, runs, positions)


def runs_of(config: RecipeConfig, heads: Sequence[str], temperature: float) -> list[Run]:
    """Plain decoding, then every drafter with every K; those with a head for every head and tree as well."""
    runs = [Run()]
    for name in config.eval.drafters:
        uses_head = name in HEAD_DRAFTERS
        for head in heads if uses_head else [None]:
            for tree in config.eval.tree if uses_head else ["chain"]:
                if temperature > 0 or not tree.startswith("iid"):
                    runs += [Run(name, k, tree, head) for k in config.eval.k]
    return runs


def _acceptance_units(config, suites: dict[str, list[EvalPrompt]], temperature: float, runs: list[Run]) -> list[Unit]:
    units = []
    for suite, prompts in suites.items():
        ordered = sorted(prompts, key=lambda prompt: len(prompt.ids))
        for batch in config.eval.batch:
            size = -(-UNIT_PROMPTS // batch) * batch
            for number, at in enumerate(range(0, len(ordered), size)):
                plain = None
                for run in runs:
                    marks = [suite, run.drafter, *filter(None, [run.head, run.tree]), f"k{run.k}"]
                    name = _name("acceptance", *marks, f"t{temperature:g}", f"b{batch}", f"{number:03d}")
                    units.append(Unit(
                        name, "acceptance", suite, [run], temperature, batch, config.eval.max_new_tokens,
                        ordered[at : at + size], needs=plain,
                    ))  # fmt: skip
                    plain = plain or name
    return units


def _speed_units(config, suites: dict[str, list[EvalPrompt]], temperature: float, runs: list[Run]) -> list[Unit]:
    e = config.eval
    named = list(dict.fromkeys(suite.partition("/")[0] for suite in suites))  # tasks count as their suite says
    counts = e.speed_prompts * len(named) if len(e.speed_prompts) == 1 else e.speed_prompts
    if len(counts) != len(named):
        raise ValueError(f"eval.speed_prompts={e.speed_prompts}: one number, or one for each of {len(named)} suites")
    count_of = dict(zip(named, counts, strict=True))
    return [
        Unit(
            _name("speed", suite, f"t{temperature:g}", f"{turn:03d}"), "speed", suite, runs, temperature, 1,
            e.speed_tokens, [prompt], turn,
        )
        for suite, prompts in suites.items()
        for turn, prompt in enumerate(prompts[: count_of[suite.partition("/")[0]]])
    ]  # fmt: skip


def _cost_units(
    config: RecipeConfig, acceptance: list[Unit], runs: dict[float, list[Run]], positions: float
) -> list[Unit]:
    """One unit per head (one in all without a head) on the first prompts that fit: lowest temperature, largest K."""
    lowest = min(runs)
    plain = [unit for unit in acceptance if unit.temperature == lowest and not unit.needs]
    first = next((unit for unit in plain if any(_fits(unit, prompt, positions) for prompt in unit.prompts)), None)
    if not config.eval.cost_batches or first is None:
        return []
    timed = [run for run in runs[lowest] if run.drafter != PLAIN and run.k == max(config.eval.k)]
    heads = list(dict.fromkeys(run.head for run in timed if run.head)) or [None]
    return [
        replace(
            first, name=_name("cost", head or PLAIN), kind="cost", needs=first.name,
            runs=[run for run in timed if run.head == head or (run.head is None and head == heads[0])],
        )
        for head in heads
    ]  # fmt: skip


def positions_of(target: Target) -> float:
    """How many tokens a prompt and its answer may have together."""
    return getattr(target.config, "max_position_embeddings", None) or math.inf


def _fits(unit: Unit, prompt: EvalPrompt, positions: float) -> bool:
    return len(prompt.ids) + unit.max_new_tokens <= positions


def _name(*parts: str) -> str:
    text = "-".join(parts)
    plain = re.sub(r"[^A-Za-z0-9._+-]", "_", text)
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


# ------------------------------------------------------------------------------------------------- the work

def status(folder: str | Path, units: list[Unit]) -> dict[str, int]:
    """How far the units are, for a progress line."""
    return {"done": sum(unit_file(folder, unit.name).is_file() for unit in units), "units": len(units)}


def unit_file(folder: str | Path, name: str) -> Path:
    return Path(folder) / "units" / f"{name}.json"


def work(
    config: RecipeConfig,
    target: Target,
    heads: dict[str, Head],
    units: list[Unit],
    folder: str | Path,
    workers: int = 1,
    tokenise: Callable[[list[dict]], list[int]] | None = None,
    draft_model: Target | None = None,
) -> None:
    """Does units until all are done, sharing them with other processes that call this with the same arguments.

    A unit is claimed by a lock that dies with its process. Returns when every unit has its file, whoever made it.
    heads: by the ids of the plan. workers: how many processes run at once; it is written beside each timing.
    tokenise(messages): ids as serving would send them, needed for prompts with later turns.
    Raises ConfigError, before anything is decoded, for a setting that a head cannot do.
    """
    from headtrain.lean import speed_up
    from headtrain.packed import pack_linears

    for model in filter(None, (target, draft_model)):
        speed_up(model)
    for head in heads.values():
        pack_linears(head.requires_grad_(False))
    (Path(folder) / "units").mkdir(parents=True, exist_ok=True)
    worker = _Worker(config, target, heads, Path(folder), tokenise, draft_model)
    worker.check(units)
    facts = {key: getattr(config.eval, key) for key in ("top_p", "top_k", "min_p", "rule")}
    facts |= {"dtype": str(target.dtype).removeprefix("torch."), "template": template_mark(target)}
    facts |= {"device": target.device.type, "concurrent_workers": workers}
    todo = list(units)
    while todo:
        waiting = []
        for unit in todo:
            if unit_file(folder, unit.name).is_file():
                continue
            if unit.needs and not unit_file(folder, unit.needs).is_file():
                waiting.append(unit)
                continue
            with claimed(Path(folder) / "claims" / f"{unit.name}.lock") as mine:
                if not mine:
                    waiting.append(unit)
                elif not unit_file(folder, unit.name).is_file():
                    rows = worker.rows(unit)
                    write_json(unit_file(folder, unit.name), _header(unit) | facts | {"rows": rows})
        if len(waiting) == len(todo):
            time.sleep(0.2)  # others are at work on what is left
        todo = waiting


def template_mark(target: Target) -> str:
    """Names the chat template: the first 12 hex digits of its sha256, and the arguments it was given."""
    text = str(getattr(target.tokenizer, "chat_template", None))
    given = " ".join(f"{key}={value}" for key, value in sorted(target.template_kwargs.items()))
    return f"{hashlib.sha256(text.encode()).hexdigest()[:12]} {given}".strip()


def _header(unit: Unit) -> dict[str, Any]:
    values = asdict(unit)
    del values["prompts"]
    return values


class _Worker:
    """What the units of one process share."""

    def __init__(self, config, target, heads, folder: Path, tokenise, draft_model):
        self.config, self.target, self.heads, self.folder = config, target, heads, folder
        self.tokenise, self.draft_model = tokenise, draft_model
        self.warm = False

    def check(self, units: list[Unit]) -> None:
        """Builds every drafter once and asks it for each of its depths."""
        for run, temperature in dict.fromkeys((run, unit.temperature) for unit in units for run in unit.runs):
            key = f"tree={run.tree}" if run.head else f"drafters={run.drafter}"
            try:
                drafter = self.drafter(run, temperature)
                key = f"k={run.k}"
                drafter.nodes(run.k)
            except ValueError as error:
                raise ConfigError(f"{f'head {run.head}, ' if run.head else ''}eval.{key}: {error}") from error

    def rows(self, unit: Unit) -> list[dict[str, Any]]:
        if unit.kind == "speed" and not self.warm:  # what a process sets up once is not timed
            self.warm = bool(self.speed(replace(unit, max_new_tokens=4), self.drafters(unit)))
        return getattr(self, unit.kind)(unit, self.drafters(unit))

    def drafters(self, unit: Unit) -> list[Drafter]:
        return [self.drafter(run, unit.temperature) for run in unit.runs]

    def drafter(self, run: Run, temperature: float) -> Drafter:
        """A new one: what a drafter remembers of earlier outputs depends on its unit alone."""
        from headtrain.eval.decoder.drafters import Drafting, make_drafter
        from headtrain.eval.decoder.sampling import Sampling

        e = self.config.eval
        own = {key: getattr(e, key) for key in ("ngram_n", "ngram_m", "ngram_hits") if getattr(e, key) is not None}
        drafting = Drafting(
            tree=run.tree, draft_model=self.draft_model, skip_from=e.skip_from, min_confidence=e.min_confidence,
            plain_below=e.plain_below if e.adaptive else 0.0, **own,
        )  # fmt: skip
        sampling = Sampling(temperature, e.top_p, e.top_k, e.min_p)
        return make_drafter(run.drafter, self.heads.get(run.head), sampling, drafting, self.target)

    def acceptance(self, unit: Unit, drafters: list[Drafter]) -> list[dict[str, Any]]:
        """Rows of all prompts, then of their second turns, and so on: each after the plain answer to the one before."""
        from headtrain.eval.decoder.decode import decode

        (run,), (drafter,) = unit.runs, drafters
        plain, rows, asked = self.plain_ids(unit), [], unit.prompts
        while asked:
            prompts, left_out = self.fitting(unit, asked)
            answers = decode(
                self.target, drafter, [p.ids for p in prompts], k=run.k, batch=unit.batch,
                names=[p.id for p in prompts], **self.options(unit),
            )  # fmt: skip
            made = [self.row(unit, p, run, a, plain.get(p.id)) for p, a in zip(prompts, answers, strict=True)]
            rows += left_out + made
            before = plain or {row["id"]: row["ids"] for row in made}
            asked = [self.next_turn(p, before[p.id]) for p in prompts if p.follow_ups]
        return rows

    def speed(self, unit: Unit, drafters: list[Drafter]) -> list[dict[str, Any]]:
        """First turns only."""
        from headtrain.eval.speed import race

        prompts, rows = self.fitting(unit, unit.prompts)
        runs = list(zip(drafters, (run.k for run in unit.runs), strict=True))
        for prompt in prompts:
            answers = race(self.target, runs, prompt.ids, unit.turn, names=[prompt.id], **self.options(unit))
            for run, answer in zip(unit.runs, answers, strict=True):
                rows.append(self.row(unit, prompt, run, answer, None if run.drafter == PLAIN else answers[0].ids))
        return rows

    def cost(self, unit: Unit, drafters: list[Drafter]) -> list[dict[str, Any]]:
        from headtrain.eval.cost import measure_costs

        plain = self.plain_ids(unit)
        texts = [(prompt.ids, plain[prompt.id]) for prompt in self.fitting(unit, unit.prompts)[0]]
        runs = [
            ({"drafter": run.drafter, "head": run.head, "tree": run.tree}, drafter, run.k)
            for run, drafter in zip(unit.runs, drafters, strict=True)
        ]
        return measure_costs(self.target, runs, texts, self.config.eval.cost_batches)

    def options(self, unit: Unit) -> dict[str, Any]:
        e = self.config.eval
        return {
            "max_new_tokens": unit.max_new_tokens, "temperature": unit.temperature, "top_p": e.top_p, "top_k": e.top_k,
            "min_p": e.min_p, "rule": e.rule, "seed": self.config.seed,
        }  # fmt: skip

    def plain_ids(self, unit: Unit) -> dict[str, list[int]]:
        """The plain answers to a unit's prompts, all turns, by id."""
        if not unit.needs:
            return {}
        return {row["id"]: row["ids"] for row in read_json(unit_file(self.folder, unit.needs))["rows"] if "ids" in row}

    def fitting(self, unit: Unit, prompts: list[EvalPrompt]) -> tuple[list[EvalPrompt], list[dict[str, Any]]]:
        """Prompts the target has positions for, and a row with the reason for each of the others."""
        fits = [p for p in prompts if _fits(unit, p, positions_of(self.target))]
        return fits, [{"id": p.id, "left_out": "longer_than_the_target's_positions"} for p in prompts if p not in fits]

    def next_turn(self, prompt: EvalPrompt, answer: list[int]) -> EvalPrompt:
        """The conversation with its answer and the next question, rendered anew as a chat client would send it."""
        if self.tokenise is None:
            raise ValueError(f"prompt {prompt.id} of suite {prompt.suite} has later turns: work() needs tokenise=")
        text = self.target.tokenizer.decode(answer, skip_special_tokens=True)
        question, *later = prompt.follow_ups
        messages = [*prompt.messages, {"role": "assistant", "content": text}, {"role": "user", "content": question}]
        name, _, turn = prompt.id.partition(" turn ")
        return EvalPrompt(
            f"{name} turn {int(turn or 1) + 1}", prompt.suite, messages, self.tokenise(messages), later
        )

    def row(
        self, unit: Unit, prompt: EvalPrompt, run: Run, answer: Decoded, plain: list[int] | None
    ) -> dict[str, Any]:
        """plain: the text to compare with; no rule but the exact ones keeps it, and sampled texts differ by chance."""
        from headtrain.eval.decoder.decode import compare

        same = None
        if plain is not None and unit.temperature == 0 and self.config.eval.rule != "typical":
            same = compare(self.target, prompt.ids, plain, answer.ids, unit.max_new_tokens)
        return {
            "id": prompt.id, **asdict(run), "prompt_tokens": len(prompt.ids), "tokens": len(answer.ids),
            "finish": answer.finish, "ids": answer.ids, "drafted": [s.drafted for s in answer.steps],
            "accepted": [s.accepted for s in answer.steps], "nodes": [s.nodes for s in answer.steps],
            "draft_s": answer.draft_s, "verify_s": answer.verify_s, "prefill_s": answer.prefill_s,
            "total_s": answer.total_s, "identical": same and same.identical, "near_ties": same.near_ties if same else 0,
            "differences": same.notes if same else [],
        }  # fmt: skip
