"""What runs inside a child process of a run: `headtrain stage NAME[,NAME…] run_dir=DIR`.

Here the heavy libraries are imported. A stage reads `run_dir/config.yaml`, does its work, and completes its manifest;
where several processes share one, the last to end completes it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headtrain.checks import check, load_tokenizer, taps_of, target_config
from headtrain.children import NOTE
from headtrain.config import HEAD_DRAFTERS, ConfigError, RecipeConfig, TargetConfig
from headtrain.files import Manifest, locked, read_json, write_json


def run_stages(arguments: list[str], config: RecipeConfig | None = None) -> int:
    """The `stage` command; with `config`, instead of the run's config.yaml, right in the process of a launcher.

    Own keys: run_dir; workers (how many processes share the stage); coming (stages still to do, of `check`); rows (of
    `inspect`).
    """
    from headtrain.configload import load_resolved
    from headtrain.privacy import mask_logs

    mask_logs()
    names, options = arguments[0].split(","), dict(text.split("=", 1) for text in arguments[1:])
    run = Path(options["run_dir"])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Notes())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("httpx", "httpx2", "filelock", "urllib3", "matplotlib", "DeepSpeed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    config = config or load_resolved(run / "config.yaml")
    quiet_libraries()
    for name in names:
        STAGES[name](config, run, options)
    return 0


class Notes(logging.Formatter):
    """headtrain's own warnings begin with NOTE, which the parent shows to the user."""

    def format(self, record: logging.LogRecord) -> str:
        own = record.name.startswith("headtrain") and record.levelno >= logging.WARNING
        return (NOTE if own else "") + record.getMessage()


def quiet_libraries() -> None:
    """Progress bars of libraries do not belong into log files."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


# ------------------------------------------------------------------------------------------------- before the start

def smoke_target(config: RecipeConfig, run: Path, _: dict[str, str]) -> None:
    from headtrain.smoke import build_target

    build_target(config, Path(config.target.model or ""))


# ------------------------------------------------------------------------------------------------- data

def prompts(config: RecipeConfig, run: Path, _: dict[str, str]) -> None:
    from headtrain.data_gen.prompts import gather

    gather(config, run / "prompts")


def responses(config: RecipeConfig, run: Path, _: dict[str, str]) -> None:
    """Answers what is unanswered; given answers need only the tokenizer."""
    from headtrain.data_gen import respond
    from headtrain.target import Target

    folders = [run / name for name in ("prompts", "responses", "captures")]
    text, tokenizer = target_config(config.target), load_tokenizer(config.target)
    taps = taps_of(config, text.num_hidden_layers)
    with locked(run / "responses" / ".lock"):
        first = not (run / "responses" / "plan.json").is_file()
        plan = respond.plan_batches(config, tokenizer, folders[0], folders[1])
        if first:  # too little space is said before the target is loaded
            print(NOTE + respond.estimate_disk(config, text.hidden_size, len(taps), plan, folders[2]), flush=True)
    target: Any = SimpleNamespace(tokenizer=tokenizer, hidden_size=text.hidden_size)
    if config.data.responses.backend == "local":
        target = Target.load(config.target)
    elif config.data.responses.backend == "server":
        from headtrain.data_gen.server import end_ids

        target.vocab_size, target.eos_ids = text.vocab_size, end_ids(config.target, text, tokenizer)
    respond.work(config, target, *folders, taps)
    with locked(run / "responses" / ".lock"):
        whole = respond.status(folders[1])["done_batches"] == len(plan["batches"])
        if whole and not Manifest(folders[1]).data.get("complete"):
            respond.finish(config, folders[1], folders[2])


def captures(config: RecipeConfig, run: Path, _: dict[str, str]) -> None:
    from headtrain.data_gen import capture
    from headtrain.target import Target

    folders = run / "responses", run / "captures"
    if capture.missing(*folders) or config.target.split == "tensor":  # a team does not ask at one and the same time
        if config.data.captures.backend == "local":
            target = Target.load(config.target)
        else:
            from headtrain.data_gen.vllm_states import load_ends

            target = load_ends(config.target)
        capture.work(config, target, *folders, taps_of(config, target.num_layers))
    with locked(run / "captures" / ".lock"):
        if not capture.missing(*folders) and not Manifest(run / "captures").data.get("complete"):
            capture.finish(config, *folders)


def inspect(config: RecipeConfig, run: Path, options: dict[str, str]) -> None:
    """Prints rows of the responses with their supervised spans in brackets."""
    from headtrain.data_gen.store import ResponseStore

    tokenizer, store = load_tokenizer(config.target), ResponseStore(run / "responses")
    for row in store.rows[: int(options["rows"])]:
        data = store.read(row)
        print(f"--- {row.id}  {row.split}  {row.source}  {row.tokens} tokens, ended by {row.finish}")
        print(marked(tokenizer, data.ids.tolist(), data.supervised.tolist()))


def marked(tokenizer: Any, ids: list[int], supervised: list[bool]) -> str:
    """The text of a row, special tokens included, with ⟦ ⟧ around every supervised span."""
    parts, at = [], 0
    while at < len(ids):
        end = at
        while end < len(ids) and supervised[end] == supervised[at]:
            end += 1
        text = tokenizer.decode(ids[at:end], skip_special_tokens=False)
        parts.append(f"⟦{text}⟧" if supervised[at] else text)
        at = end
    return "".join(parts)


# ------------------------------------------------------------------------------------------------- head

def training(config: RecipeConfig, run: Path, _: dict[str, str]) -> None:
    """Every process of the training stage comes here; the first one completes the manifest."""
    from headtrain.training.trainer import train

    score = decoded_tau(config, run) if config.train.decode_prompts else None
    train(config, run, score, lambda: target_states(config, run))
    if os.environ.get("RANK", "0") == "0":
        best = read_json(run / "training" / "best.json")
        Manifest(run / "training").finish({"best_step": best["step"], "simulated_tau": best["tau"]})


def target_states(config: RecipeConfig, run: Path) -> Callable[[list[Any]], list[dict[str, Any]]]:
    """The target of online training: its states over rows of token ids, at the taps of the run's captures."""
    from headtrain.data_gen.online import States

    return States(config, read_json(run / "captures" / "index.json")["taps"])


def states(config: RecipeConfig, run: Path, options: dict[str, str]) -> None:
    """The process beside a training process that holds the target (launch.target=apart)."""
    from headtrain.training.apart import serve

    if config.target.device.startswith("cuda"):
        config.target.device = "cuda"  # the only one that is seen here
    serve(int(options["socket"]), lambda: target_states(config, run))


def decoded_tau(config: RecipeConfig, run: Path) -> Callable[[Any], float]:
    """score(head): τ of greedy decoding with the target, loaded at the first call, on validation prompts."""
    from headtrain.data_gen.store import ResponseStore

    store, e = ResponseStore(run / "responses", config.data.max_length), config.eval
    rows = sorted((row for row in store.rows if row.split == "valid"), key=lambda row: row.id)
    answers = [store.read(row) for row in rows[: config.train.decode_prompts]]
    found = [answer.ids[: int(answer.supervised.int().argmax())].tolist() for answer in answers]
    prompts = [prompt for prompt in found if prompt]
    target: list[Any] = []

    def score(head: Any) -> float:
        from headtrain.eval.decoder.decode import decode
        from headtrain.eval.decoder.drafters.head import HeadDrafter
        from headtrain.eval.decoder.sampling import Sampling
        from headtrain.target import Target

        if not target:
            target.append(Target.load(config.target, e.dtype))
        drafter, most = HeadDrafter(head, Sampling()), getattr(target[0].config, "max_position_embeddings", None)
        new = min(e.max_new_tokens, most - max(map(len, prompts))) if most else e.max_new_tokens
        answered = decode(target[0], drafter, prompts, k=max(e.k), max_new_tokens=new, batch=max(e.batch))
        steps = [step.accepted for row in answered for step in row.steps]
        return 1 + sum(steps) / max(len(steps), 1)

    return score


def report(config: RecipeConfig, run: Path, options: dict[str, str]) -> None:
    """Decodes the suites with every drafter; whoever ends last builds the report."""
    from headtrain.eval import evaluate
    from headtrain.eval.report import build
    from headtrain.eval.results import finish
    from headtrain.target import Target

    folder, count, e = run / "report", int(options["workers"]), config.eval
    target = Target.load(served_target(config, run), e.dtype)
    heads = measured_heads(config, run, target)
    small = Target.load(draft_target(config, run), e.dtype) if e.draft_model else None
    prompts, tokenise = eval_prompts(config, run, target.tokenizer)
    units = evaluate.plan_units(config, prompts, list(heads), evaluate.positions_of(target))
    write_json(folder / "plan.json", {"units": len(units)})
    evaluate.work(config, target, heads, units, folder, count, tokenise, small)
    with locked(folder / ".lock"):
        if not Manifest(folder).data.get("complete"):
            places = [{"id": name, "path": str(place.relative_to(run))} for name, place in head_folders(run).items()]
            results = finish(units, folder, places)
            build(run, results)
            Manifest(folder).finish({"units": len(units), "results": len(results["results"])}, results["left_out"])


def served_target(config: RecipeConfig, run: Path) -> TargetConfig:
    """The target as it is measured: with the adapter that a head brings which was trained along with it (head.medusa2).

    ConfigError where target.adapter is set besides, or other heads are measured on the same target.
    """
    folders = head_folders(run)
    brought = {name: place / "adapter" for name, place in folders.items() if (place / "adapter").is_dir()}
    if not brought:
        return replace(config.target, split="layers")
    name, adapter = next(iter(brought.items()))
    if len(folders) > 1:
        raise ConfigError(f"head {name}: made for a target with its own adapter, unlike the others; evaluate it alone")
    if config.target.adapter:
        raise ConfigError(f"target.adapter={config.target.adapter}: the head brings an adapter; leave it out")
    return replace(config.target, adapter=str(adapter))


def head_folders(run: Path) -> dict[str, Path]:
    """The heads that a run measures: its own, or those an evaluation brought."""
    several = sorted((run / "heads").iterdir()) if (run / "heads").is_dir() else []
    return {place.name: place for place in several} or {"head": run / "head"}


def measured_heads(config: RecipeConfig, run: Path, target: Any) -> dict[str, Any]:
    """The heads by id, on the target's device, when a drafter uses any. ConfigError for one of another target."""
    from headtrain.heads.base import load_head

    if not set(config.eval.drafters) & set(HEAD_DRAFTERS):
        return {}
    heads, lent = {}, target.lent()
    for name, place in head_folders(run).items():
        heads[name] = head = load_head(place, lent[0], target.dtype, lent[1]).to(target.device)
        c = head.config
        if (c.vocab_size, c.target_hidden_size, c.target_layers) != (
            target.vocab_size, target.hidden_size, target.num_layers
        ):  # fmt: skip
            raise ConfigError(
                f"head {name}: made for a target of {c.target_layers} layers, hidden size {c.target_hidden_size} and "
                f"{c.vocab_size} tokens; {config.target.model} has {target.num_layers}, {target.hidden_size} and "
                f"{target.vocab_size}"
            )
    return heads


def draft_target(config: RecipeConfig, run: Path) -> TargetConfig:
    """The draft model as it is loaded: at the commit that was pinned, with the target's device and attention."""
    pin = run / "draft_model.json"
    revision = read_json(pin)["commit"] if pin.is_file() else None
    alone = {"gpus": 1, "split": "layers", "gpu_memory": None, "cpu_memory": None}
    return replace(config.target, model=config.eval.draft_model, revision=revision, adapter=None, **alone)


def eval_prompts(
    config: RecipeConfig, run: Path, tokenizer: Any
) -> tuple[list[Any], Callable[[list[dict]], list[int]]]:
    """(prompts of all suites, how messages are tokenised as serving would send them).

    The prompts are kept beside the report: a suite that changes on the Hub does not change an evaluation under way.
    """
    from headtrain.data_gen.chat import prompt_ids
    from headtrain.eval.suites import EvalPrompt, load_suite

    def tokenise(messages: list[dict]) -> list[int]:
        return prompt_ids(tokenizer, messages, config.target.template_kwargs)

    kept = run / "report" / "prompts.json"
    with locked(run / "report" / ".lock"):
        if not kept.is_file():
            limit, suites = config.eval.limit, config.eval.suites
            found = [prompt for name in suites for prompt in load_suite(name, run / "prompts", limit)]
            write_json(kept, [asdict(prompt) | {"ids": prompt.ids or tokenise(prompt.messages)} for prompt in found])
    return [EvalPrompt(**row) for row in read_json(kept)], tokenise


def offline(config: RecipeConfig, run: Path, _: dict[str, str]) -> None:
    """Acceptance of heads on the run's captures, as offline/settings.json asks."""
    import torch

    from headtrain.data_gen.store import CaptureStore
    from headtrain.eval.offline import measure
    from headtrain.heads.base import load_head
    from headtrain.target import load_parts

    asked = read_json(run / "offline" / "settings.json")
    dtype, e = asked.get("dtype", config.eval.dtype), config.eval
    parts = load_parts(config.target)
    embedding, lm_head = (x.to(getattr(torch, dtype)) for x in (parts.embedding, parts.lm_head))
    device = "cuda" if config.target.device != "cpu" and torch.cuda.is_available() else "cpu"
    store, results = CaptureStore(run / "captures"), []
    for name, place in asked["heads"].items():
        head = load_head(place, embedding, embedding.dtype, lm_head).to(device)
        results += measure(name, head, store, run, asked.get("k", e.k), dtype, asked.get("limit"))
    write_json(run / "offline" / "offline.json", {"results": results})


def export(config: RecipeConfig, run: Path, _: dict[str, str]) -> None:
    from headtrain.export import export as export_one
    from headtrain.export.refusals import versions

    info = {"model": config.target.model, "adapter": config.target.adapter, "family": config.target.family}
    release = versions(config.export.engine_version, config.export.formats)
    made = run / "report" / "report.json"
    for name in config.export.formats:
        export_one(
            run / "head", name, run / "export" / name, info, report=made if made.is_file() else None,
            engine_version=release.get(name),
        )  # fmt: skip
    Manifest(run / "export").finish({"formats": len(config.export.formats)})


STAGES: dict[str, Callable[[RecipeConfig, Path, dict[str, str]], None]] = {
    "smoke_target": smoke_target, "check": check, "prompts": prompts, "responses": responses, "captures": captures,
    "inspect": inspect, "training": training, "states": states, "report": report, "offline": offline,
    "export": export,
}  # fmt: skip
