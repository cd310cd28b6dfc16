"""Which stages a run needs, in which folders, and the child processes that do them.

The parent imports no torch: it compares fingerprints, starts children (`headtrain stage …`), shows their progress, and
prints the result. Every stage goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headtrain import children, identity
from headtrain.children import Child, Progress
from headtrain.config import ConfigError, PushConfig, RecipeConfig, TargetConfig
from headtrain.data_gen import sums
from headtrain.files import Manifest, claimed, read_json, write_text
from headtrain.hardware import gpu_ids
from headtrain.status import progress_of, told
from headtrain.training import launch

DATA = ("prompts", "responses", "captures")
STORES = DATA[1:]
RESULT = "report/report.json"
KEPT = {  # what a complete stage must still have, beside the files its index lists
    "prompts": ("prompts.jsonl",), "responses": ("plan.json", "index.json"), "captures": ("index.json",),
    "training": ("best.json", "../head/config.json", "../head/model.safetensors"),
    "report": ("report.json", "report.html"),
}  # fmt: skip
LIGHT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # the environment of stages that need no device


# ------------------------------------------------------------------------------------------------- commands

def fit(config: RecipeConfig) -> None:
    """Every stage that is missing, then the result, then the head's upload if there is to be one.

    A finished run only prints its result, and uploads what the Hub lacks.
    """
    from headtrain.export import hub
    from headtrain.export.refusals import check_plan

    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("fit starts its own processes; under a launcher run headtrain generate, then headtrain train")
    check_plan(config.head.type, config.export.formats, config.export.engine_version, config.target.model, config.head)
    stages = [stage for stage in identity.STAGES if stage != "export" or config.export.formats]
    with opened(config) as job:
        asked = job.config.push
        if asked.repo and not asked.dry_run and not all(map(job.complete, stages)):
            print(hub.check(asked))  # now, not when hours have passed
        job.run_missing(stages)
    print(result(job.run))
    if asked.repo:
        print(hub.push(job.run / "head", asked))


def generate(config: RecipeConfig, inspect: int = 0) -> None:
    """Prompts, responses and captures; `inspect` rows are shown with their spans.

    Inside a launcher's process (RANK, or srun's names) it works right here, with the others.
    """
    from headtrain import launched
    from headtrain.training.launch import from_slurm

    os.environ |= from_slurm(os.environ, config.launch.master_port)
    if "RANK" in os.environ:
        run = launched.generate(config)
        if run is None:
            return
    else:
        with opened(config) as job:
            job.run_missing(DATA)
            run = job.run
    for stage in DATA:
        print(f"{stage}: {told(Manifest(run / stage).data)}", flush=True)
    if inspect:
        log = run / "logs" / "inspect.log"
        log.unlink(missing_ok=True)
        argv = children.python("stage", "inspect", f"run_dir={run}", f"rows={inspect}")
        children.run([Child(argv, log)], "inspect", Progress)
        text = log.read_text(encoding="utf-8")
        text = text[text.index("---") :] if "---" in text else "no rows"
        if sys.stdout.isatty():
            text = text.replace("⟦", "\033[32m⟦").replace("⟧", "⟧\033[0m")
        print(text)


def train(config: RecipeConfig) -> None:
    """The training stage on finished data; inside a launcher's process (RANK, or srun's names) it trains right here."""
    os.environ |= launch.from_slurm(os.environ, config.launch.master_port)
    if "RANK" in os.environ:
        return _train_as_rank(config)
    with opened(config) as job:
        job.need(DATA)
        job.run_missing(["training"])
    best = job.run / "training" / "best.json"
    print(f"head: {job.run / 'head'}" + (f"; best: {json.dumps(read_json(best))}" if best.is_file() else ""))


def _train_as_rank(config: RecipeConfig) -> None:
    first = int(os.environ["RANK"]) == 0
    with opened(config) if first else contextlib.nullcontext(Job(prepared(config))) as job:
        _train_here(job, first)


def _train_here(job: Job, first: bool) -> None:
    from headtrain import stages

    job.need(DATA)
    if first:
        job.write_config()
        if job.open("training"):
            print(f"{job.run / 'training'} is complete; nothing to do")
            return
    deadline = time.monotonic() + 60
    while Manifest(job.run / "training").data.get("fingerprint") != job.marks["training"][0]:
        if time.monotonic() > deadline:
            raise ConfigError(f"{job.run / 'training'}: rank 0 has not opened it; is run_dir on a shared file system?")
        time.sleep(0.5)
    if not Manifest(job.run / "training").data.get("complete"):
        stages.training(job.config, job.run, {})


def export_head(head: Path, name: str, out: str | None, target: str | None = None, **options: str) -> str:
    """Exports a head, given as a folder or Hub id, right here; returns what was written where.

    options: of `headtrain.export.export`.
    """
    from headtrain.export import export, known_target
    from headtrain.hub_read import head_folder, hub_id

    if not out and hub_id(head) and not head.exists():
        raise ConfigError(f"head={head} is no folder here: say where to write what comes from the Hub with out=")
    head = head_folder(head)
    if not out and head.resolve().parent.name.startswith("step-"):
        raise ConfigError(f"head={head} lies in a checkpoint, which training deletes later: say where with out=")
    folder = Path(out) if out else head.parent / "export" / name
    info = known_target(head) | ({"model": target, "adapter": False} if target else {})  # served as it is
    return f"{name}: {export(head, name, folder, info, **options)}"


def push_head(head: Path, asked: PushConfig, report: Path | None = None) -> str:
    """Uploads a head's folder to the Hub; returns what was uploaded where."""
    from headtrain.export import hub

    return hub.push(head, asked, report)


def result(run: Path) -> str:
    """The table of the run's report."""
    from headtrain.eval.report import table

    report = read_json(run / RESULT)
    try:
        return table(report, run)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{run / RESULT} is no report ({error}); delete it to have it made again") from error


# ------------------------------------------------------------------------------------------------- a run

def prepared(config: RecipeConfig) -> RecipeConfig:
    """The config that the stages get: shrunk for a smoke run."""
    if not config.smoke:
        return config
    from headtrain.smoke import shrink

    return shrink(config)


@contextlib.contextmanager
def opened(config: RecipeConfig, heads: dict[str, Path] | None = None, patience: float = 0.0) -> Iterator[Job]:
    """A Job whose run folder no other headtrain process works in, after `patience` seconds at most."""
    run = Path(config.run_dir or "")
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir={run}: no folder can be made there ({error.strerror}); give another") from error
    deadline = time.monotonic() + patience
    with contextlib.ExitStack() as held:
        while not held.enter_context(claimed(run / ".lock")):
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"run_dir={run}: another headtrain process works in it; wait, or give another run_dir"
                )
            time.sleep(0.2)
        yield Job(prepared(config), heads)


class Job:
    """One run: its config, folder, and the fingerprint of every stage."""

    def __init__(self, config: RecipeConfig, heads: dict[str, Path] | None = None):
        """heads: those of an evaluation, by id; None when the run trains its own."""
        self.config, self.run = config, Path(config.run_dir or "")
        if config.smoke:
            target = {"smoke": config.target.family, "shape": asdict(config.target.shape), "seed": config.seed}
        else:
            target = identity.target_identity(config.target, self.run)
        self.asks_prompts = heads is None or "heldout" in config.eval.suites
        sources = identity.source_identities(config, self.run) if self.asks_prompts else []
        given = heads and {name: identity.folder_identity(str(head)) for name, head in heads.items()}
        self.marks = identity.stage_marks(config, target, sources, given, self._draft_model())

    def _draft_model(self) -> dict[str, Any] | None:
        """The identity of eval.draft_model; a Hub model is pinned as the target is."""
        place = self.config.eval.draft_model
        if not place:
            return None
        if self.config.smoke:
            return {"smoke": "the target itself"}
        try:
            return identity.target_identity(TargetConfig(model=place), self.run, "draft_model.json")
        except ValueError as error:
            raise ConfigError(str(error).replace("target.model=", "eval.draft_model=")) from error

    def complete(self, stage: str) -> bool:
        data = Manifest(self.run / stage).data
        mine = bool(data.get("complete")) and data.get("fingerprint") == self.marks[stage][0]
        return mine and not self.lost(stage)

    def lost(self, stage: str) -> list[Path]:
        """Files that a complete stage must have and that are gone, or an index that is damaged."""
        wanted = [self.run / stage / name for name in KEPT.get(stage, ())]
        index = self.run / stage / "index.json"
        if stage in STORES and index.is_file():
            if sums.index_damage(index.parent, Manifest(index.parent).data):
                return [index]
            wanted += [index.parent / entry["file"] for entry in read_json(index)["files"]]
        return [path for path in wanted if not path.is_file()]

    def need(self, wanted: tuple[str, ...]) -> None:
        for stage in wanted:
            if not self.complete(stage):
                raise ConfigError(
                    f"{self.run / stage} is missing, unfinished, damaged, or of other settings; `headtrain generate` "
                    "makes it"
                )

    def mend(self) -> None:
        """Removes what is damaged of the stores, and says so: the stages make exactly that again.

        With responses that are answered again go the captures of the same batch.
        """
        mine = [stage for stage in STORES if Manifest(self.run / stage).data.get("fingerprint") == self.marks[stage][0]]
        found = {stage: sums.damaged(self.run / stage, stage, Manifest(self.run / stage).data, print) for stage in mine}
        for name in found.get("responses", {}):
            captured = name.replace("responses-", "captures-")
            if captured != name and "captures" in found and (self.run / "captures" / captured).is_file():
                found["captures"].setdefault(captured, "is of responses that are made again")
        for stage, names in reversed(found.items()):
            for name, why in names.items():
                print(f"{stage}: {name} {why}; making it again")
                (self.run / stage / name).unlink(missing_ok=True)
            if names:
                (self.run / stage / "index.json").unlink(missing_ok=True)
                Manifest(self.run / stage).reopen()

    def open(self, stage: str) -> bool:
        """Prepares the stage's folder; True when it is complete. A head and its exports move with their training."""
        folder = self.run / stage
        before, mark = Manifest(folder).data.get("fingerprint"), self.marks[stage][0]
        was_there = folder.is_dir() and any(folder.iterdir())
        manifest = Manifest(folder)
        done = manifest.open(*self.marks[stage])
        if was_there and before != mark:
            why = "made with other settings" if before else "without a manifest"
            print(f"{stage}: {why}; the old folder is kept beside it")
            if stage == "training":
                self._swap_heads(before or "unmarked", mark)
        if done and (lost := self.lost(stage)):
            print(f"{stage}: {', '.join(path.name for path in lost)} is gone; making it again")
            manifest.reopen()
            done = False
        return done

    def _swap_heads(self, before: str, mark: str) -> None:
        for name in ("head", "export"):  # exports, by `headtrain export` too, are of the head beside them
            mine = self.run / name
            aside, kept = (mine.with_name(f"{name}.old-{of[:12]}") for of in (before, mark))
            if mine.is_dir():
                shutil.rmtree(aside, ignore_errors=True)
                mine.rename(aside)
            if kept.is_dir():
                kept.rename(mine)

    def write_config(self) -> None:
        from headtrain.configload import to_yaml

        write_text(self.run / "config.yaml", to_yaml(self.config))

    def run_missing(self, wanted: list[str] | tuple[str, ...]) -> None:
        """Runs the wanted stages that are not complete, in order. Damaged data count as missing."""
        if set(STORES) & set(wanted):
            self.mend()
        missing = [stage for stage in wanted if not self.complete(stage)]
        if missing:
            self.begin(missing)
            self._run(missing)

    def begin(self, missing: list[str]) -> None:
        """Looks for what these stages cannot do without, and writes the run's config."""
        if self.config.smoke:
            print("smoke=true: a tiny random target, our own prompts, and small data, training and evaluation settings")
        if "training" in missing and not any(vars(self.config.train)[key] for key in ("epochs", "steps", "seconds")):
            raise ConfigError("train.epochs, train.steps and train.seconds are all empty: set one of them")
        if "training" in missing:
            launch.command(self.config, [], self._gpus())  # devices that are not there are missed now
        if "prompts" in missing and not self.config.data.prompts:
            raise ConfigError("data.prompts is empty: name at least one source, e.g. data.prompts=my.jsonl")
        self.write_config()

    def _run(self, missing: list[str]) -> None:
        for stages, environments in self.groups(missing):
            todo = [stage for stage in stages if stage not in identity.STAGES or not self.open(stage)]
            if todo == ["training"]:
                self._train()
            elif todo:
                self.start(todo, environments, missing)
            for stage in todo:
                if stage in identity.STAGES and not self.complete(stage):
                    raise ConfigError(f"{self.run / stage} did not become complete; logs are in {self.run / 'logs'}")

    def groups(self, missing: list[str]) -> list[tuple[list[str], list[dict[str, str]]]]:
        """(stages one after another in a process, environment of each such process), in the order to run them."""
        many = children.workers(self.config)
        evaluating = children.workers(self.config, teams=False)
        answering = many if self.config.data.responses.backend == "local" else many[:1]
        by_vllm = self.config.data.captures.backend == "vllm"
        capturing = children.engines(self.config) if by_vllm and "captures" in missing else many
        unbuilt = self.config.smoke and not Path(self.config.target.model or "", "config.json").is_file()
        first = ["smoke_target"] if unbuilt else []
        groups = [
            ([*first, "check", "prompts"], [LIGHT]), (["responses"], answering), (["captures"], capturing),
            (["training"], []), (["report"], evaluating), (["export"], [LIGHT]),
        ]  # fmt: skip
        if len(many) == 1 and not by_vllm:  # one process loads its libraries once
            groups = [
                ([*first, "check", *DATA], many), (["training"], []), (["report", "export"], many)
            ]  # fmt: skip
        wanted = {*missing, "smoke_target", "check"}
        kept = [([stage for stage in stages if stage in wanted], environments) for stages, environments in groups]
        return [group for group in kept if group[0]]

    def start(self, stages: list[str], environments: list[dict[str, str]], missing: list[str]) -> None:
        """Runs the stages one after another in each of the given processes."""
        if "responses" in stages and "captures" not in stages:
            self.open("captures")  # they are written along
        options = [f"run_dir={self.run}", f"workers={len(environments)}", f"coming={','.join(missing)}"]
        argv = children.python("stage", ",".join(stages), *options)
        logs = [self.run / "logs" / f"{stages[-1]}-{n}.log" for n in range(len(environments))]
        each = [Child(argv, log, env) for log, env in zip(logs, environments, strict=True)]
        label = ", ".join(stage.replace("_", " ") for stage in stages)
        children.run(each, label + (f" ({len(each)} processes)" if len(each) > 1 else ""), self._poll(stages))

    def _poll(self, stages: list[str]) -> Callable[[], Progress]:
        """The progress of the first of these stages that is not complete."""
        looks = {stage: progress_of(self.run, stage) for stage in stages if stage in identity.STAGES}

        def now() -> Progress:
            current = next((stage for stage in looks if not self.complete(stage)), None)
            return looks[current]() if current else Progress()

        return now

    def _train(self) -> None:
        """One process, or DeepSpeed's launcher, which starts the others."""
        argv, env = launch.command(self.config, ["stage", "training", f"run_dir={self.run}"], self._gpus())
        log = self.run / "logs" / "training-0.log"
        children.run([Child(argv, log, env)], "training", progress_of(self.run, "training"))

    def _gpus(self) -> list[str]:
        return [] if self.config.target.device == "cpu" else gpu_ids()
