"""What runs inside a child process of a run: `headtrain stage NAME[,NAME…] run_dir=DIR`.

Here the heavy libraries are imported. A stage reads `run_dir/config.yaml`, does its work, and completes its manifest;
where several processes share one, the last to end completes it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headtrain.children import NOTE
from headtrain.config import ConfigError, RecipeConfig, TargetConfig
from headtrain.files import Manifest, locked, read_json, write_json


def run_stages(arguments: list[str]) -> int:
    """The `stage` command.

    Own keys: run_dir; workers (how many processes share the stage); coming (stages still to do, of `check`); rows (of
    `inspect`).
    """
    from headtrain.configload import load_resolved

    names, options = arguments[0].split(","), dict(text.split("=", 1) for text in arguments[1:])
    run = Path(options["run_dir"])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Notes())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("httpx", "filelock", "urllib3", "matplotlib", "DeepSpeed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    config = load_resolved(run / "config.yaml")
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
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


# ------------------------------------------------------------------------------------------------- before the start

def smoke_target(config: RecipeConfig, run: Path, _: dict[str, str]) -> None:
    from headtrain.smoke import build_target

    build_target(config, Path(config.target.model or ""))


def check(config: RecipeConfig, run: Path, options: dict[str, str]) -> None:
    """Everything that can be known to fail in the stages to come is looked at now: target, template, taps, suites."""
    from headtrain.data_gen.chat import prompt_ids, require_template

    text, tokenizer = target_config(config.target), load_tokenizer(config.target)
    check_shape(config, text)
    require_template(tokenizer)
    if not prompt_ids(tokenizer, [{"role": "user", "content": "hello"}], config.target.template_kwargs):
        raise ConfigError(f"target.model={config.target.model}: its chat template renders a message to nothing")
    coming = options["coming"].split(",")
    most = getattr(text, "max_position_embeddings", None)
    if "responses" in coming and most and config.data.max_length > most:
        raise ConfigError(f"data.max_length={config.data.max_length}: the target has {most} positions")
    if "training" in coming:
        import torch

        from headtrain.training.optim import check_optimizer

        check_optimizer(config.train, config.target.device != "cpu" and torch.cuda.is_available())
    if "training" in coming or "captures" in coming:
        taps_of(config, text.num_hidden_layers)
    vocab = config.head.draft_vocab
    if "training" in coming and isinstance(vocab, int) and vocab > text.vocab_size:
        raise ConfigError(f"head.draft_vocab={vocab}: the target has {text.vocab_size} tokens")
    if "report" in coming:
        check_suites(config, run)


def check_suites(config: RecipeConfig, run: Path) -> None:
    from headtrain.eval.suites import load_suite

    for suite in config.eval.suites:
        if suite != "heldout" or (run / "prompts" / "prompts.jsonl").is_file():
            load_suite(suite, run / "prompts", config.eval.limit)


def check_shape(config: RecipeConfig, text: Any) -> None:
    """ConfigError where the recipe's target.shape or family disagrees with the model's own config."""
    own = {
        "layers": text.num_hidden_layers, "hidden": text.hidden_size, "heads": text.num_attention_heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        "intermediate": getattr(text, "intermediate_size", None), "vocab": text.vocab_size,
    }  # fmt: skip
    for key, value in vars(config.target.shape).items():
        if value is not None and own[key] is not None and value != own[key]:
            raise ConfigError(f"target.shape.{key}={value}: {config.target.model} has {own[key]}; correct the recipe")


def target_config(target: TargetConfig) -> Any:
    """The text config of the target, without its weights."""
    from transformers import AutoConfig

    from headtrain.target import model_path

    config = AutoConfig.from_pretrained(
        model_path(target), revision=target.revision, trust_remote_code=target.trust_remote_code
    )
    return config.get_text_config()


def load_tokenizer(target: TargetConfig) -> Any:
    from transformers import AutoTokenizer

    from headtrain.target import model_path

    return AutoTokenizer.from_pretrained(
        model_path(target), revision=target.revision, trust_remote_code=target.trust_remote_code
    )


def taps_of(config: RecipeConfig, num_layers: int) -> list[int]:
    from headtrain.engines import check_taps, default_taps

    return check_taps(config.head.taps if config.head.taps is not None else default_taps(num_layers), num_layers)


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
    respond.work(config, target, *folders, taps)
    with locked(run / "responses" / ".lock"):
        whole = respond.status(folders[1])["done_batches"] == len(plan["batches"])
        if whole and not Manifest(folders[1]).data.get("complete"):
            respond.finish(config, folders[1], folders[2])


def captures(config: RecipeConfig, run: Path, _: dict[str, str]) -> None:
    from headtrain.data_gen import capture
    from headtrain.target import Target

    target = Target.load(config.target)
    folders = run / "responses", run / "captures"
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

    train(config, run, decoded_tau(config, run) if config.train.decode_prompts else None)
    if os.environ.get("RANK", "0") == "0":
        best = read_json(run / "training" / "best.json")
        Manifest(run / "training").finish({"best_step": best["step"], "simulated_tau": best["tau"]})


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
    from headtrain.heads.base import load_head
    from headtrain.target import Target

    folder, count = run / "report", int(options["workers"])
    target = Target.load(config.target, config.eval.dtype)
    head = None
    if any("head" in drafter for drafter in config.eval.drafters):
        head = load_head(run / "head", target.embed.weight, target.dtype).to(target.device)
    units = evaluate.plan_units(config, eval_prompts(config, run, target.tokenizer))
    write_json(folder / "plan.json", {"units": len(units)})
    evaluate.work(config, target, head, units, folder, workers=count)
    with locked(folder / ".lock"):
        if not Manifest(folder).data.get("complete"):
            results = evaluate.finish(config, units, folder, head="head")
            build(run, results)
            Manifest(folder).finish({"units": len(units), "results": len(results["results"])}, results["left_out"])


def eval_prompts(config: RecipeConfig, run: Path, tokenizer: Any) -> list[Any]:
    """The prompts of all suites, tokenised as serving would send them."""
    from headtrain.data_gen.chat import prompt_ids
    from headtrain.eval.suites import load_suite

    found = [prompt for name in config.eval.suites for prompt in load_suite(name, run / "prompts", config.eval.limit)]
    for prompt in found:
        prompt.ids = prompt_ids(tokenizer, prompt.messages, config.target.template_kwargs)
    return found


def export(config: RecipeConfig, run: Path, _: dict[str, str]) -> None:
    from headtrain.export import export as export_one

    info = {"model": config.target.model}
    made = run / "report" / "report.json"
    for name in config.export.formats:
        export_one(run / "head", name, run / "export" / name, info, report=made if made.is_file() else None)
    Manifest(run / "export").finish({"formats": len(config.export.formats)})


STAGES: dict[str, Callable[[RecipeConfig, Path, dict[str, str]], None]] = {
    "smoke_target": smoke_target, "check": check, "prompts": prompts, "responses": responses, "captures": captures,
    "inspect": inspect, "training": training, "report": report, "export": export,
}  # fmt: skip
