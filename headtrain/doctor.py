"""`headtrain doctor`: everything of which a mismatch between a head, its target and an engine costs acceptance.

Each check says ok, warning or fault, what a mismatch costs, and how to mend it. `examine` finds, `text` and `as_json`
show. The exit status of the command is 1 when there is a fault.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headtrain.config import ConfigError, TargetConfig
from headtrain.doctor_checks import (
    ABOUT,
    ENGINES,
    FAULT,
    OK,
    OTHER_TARGET,
    WARNING,
    Case,
    Finding,
    checks,
    contract_faults,
    fault,
)
from headtrain.engine_metrics import EngineError, models, read_engine
from headtrain.expected import Expected, find_report, read_expected
from headtrain.files import read_json, sha256_file
from headtrain.monitor import LOW, line
from headtrain.monitor import interval as reading_of

SMOKE_PROMPTS = "smoke_prompts.jsonl"


@dataclass
class Settings:
    """What the command is asked for besides head and target."""

    engine: str = "vllm"  # whose contract the folder is held to
    engine_url: str | None = None
    report: str | None = None
    prompts: str | None = None  # a .jsonl file of chats; None: the run's held-out ones, else some of headtrain's own
    limit: int = 8  # prompts
    k: int | None = None  # draft tokens a step; None: the report's, else 5
    max_new_tokens: int = 48
    probe: bool = True  # with the target loaded


def examine(folder: Path, target: TargetConfig, settings: Settings) -> Iterator[Finding]:
    """The findings, as they are made. Raises ConfigError or TargetError where head or target cannot be read at all."""
    config, tensors = _read(folder)
    brought = folder / "adapter"  # of a target that was trained along with the head
    if target.adapter and Path(target.adapter).resolve() == brought.resolve():
        target = replace(target, adapter=None)
    case = _case(folder, config, tensors, target, settings.engine)
    expected, unused = _expected(folder, settings.report)
    yield from checks(case)
    if unused:
        yield Finding("report", WARNING, f"nothing is compared with a report: {unused}",
                      "what to expect of this head is not known",
                      "measure it (headtrain eval head=…), or name its report (report=…)")  # fmt: skip
    if brought.is_dir() and not target.adapter:
        yield Finding("adapter", OK, "the head brings an adapter of its target: serve with it, as the probe does")
        target = replace(target, adapter=str(brought))
    if settings.probe:
        yield from _probe(case, folder, target, settings, expected)
    if settings.engine_url:
        yield from live(settings.engine_url, config, expected)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ConfigError(f"head={folder}: {name} is missing; give the head's folder")
    config = read_json(folder / "config.json", "copy the head again")
    if not isinstance(config, dict) or not isinstance(config.get("headtrain", {}), dict):
        raise ConfigError(f"{folder / 'config.json'}: not the config of a head; copy the head again")
    try:
        return config, load_file(folder / "model.safetensors")
    except SafetensorError as error:
        raise ConfigError(f"{folder / 'model.safetensors'} cannot be read ({error}); copy the head again") from error


def _case(folder: Path, config: dict[str, Any], tensors: dict[str, Any], target: TargetConfig, engine: str) -> Case:
    """The head beside what its target's files say; loads the target's embedding, lm_head and final norm alone."""
    from transformers import PreTrainedConfig

    from headtrain.checks import load_tokenizer
    from headtrain.identity import target_identity
    from headtrain.target import load_parts, model_path

    if engine not in ENGINES:
        raise ConfigError(f"engine={engine}: unknown; known: {', '.join(ENGINES)}")
    with tempfile.TemporaryDirectory() as scratch:  # pins of a run that there is not
        identity = target_identity(target, Path(scratch))
    parts = load_parts(target)
    raw = PreTrainedConfig.get_config_dict(model_path(target), revision=target.revision)[0]
    quantization = raw.get("quantization_config")
    case = Case(config, tensors, parts, target, identity, load_tokenizer(target), quantization, engine=engine)
    case.faults = contract_faults(folder, case)
    return case


def _expected(folder: Path, place: str | None) -> tuple[Expected | None, str | None]:
    """(what the report says, why the one that was found in the head's run says nothing)"""
    if not (found := find_report(place, folder)):
        return None, None
    marks = _marks(folder)
    try:
        expected = read_expected(found, marks)
    except ValueError as error:
        if place:
            raise
        return None, str(error)
    if not place and expected.sha256 not in (None, *marks):
        return None, "that of the run it lies in measured other weights"
    return expected, None


def _marks(folder: Path) -> list[str]:
    """Checksums of the head's weights: the file's, and of an export also that of the file it was made from."""
    from safetensors import safe_open

    file = folder / "model.safetensors"
    with safe_open(file, "pt") as handle:
        source = (handle.metadata() or {}).get("source")
    return [sha256_file(file), *([source] if source else [])]


def _probe(
    case: Case, folder: Path, target: TargetConfig, settings: Settings, expected: Expected | None
) -> Iterator[Finding]:
    from headtrain.data_gen.chat import prompt_ids
    from headtrain.doctor_probe import probe
    from headtrain.eval.suites import load_suite
    from headtrain.target import Target

    hidden = case.config.get("target_hidden_size") or case.config.get("hidden_size")
    own, theirs = (case.config.get("vocab_size"), hidden), tuple(case.parts.lm_head.shape)
    if own != theirs:
        yield fault("drafts", f"not run: the head is for {own[0]} tokens and hidden size {own[1]}, the target has "
                    f"{theirs[0]} and {theirs[1]}", mend=OTHER_TARGET)  # fmt: skip
        return
    loaded = Target.load(target, "float32")
    rows = load_suite(*_suite(folder, settings.prompts), settings.limit)
    prompts = [prompt_ids(case.tokenizer, row.messages, target.template_kwargs) for row in rows]
    k = settings.k or (len(expected.alpha) if expected else 5)
    yield from probe(case, folder, loaded, prompts, k=k, new=settings.max_new_tokens, expected=expected)


def _suite(folder: Path, prompts: str | None) -> tuple[str, Path | None]:
    if prompts:
        return prompts, None
    held_out = folder.resolve().parent / "prompts"
    if (held_out / "prompts.jsonl").is_file():
        return "heldout", held_out
    import headtrain.data_gen

    return str(Path(headtrain.data_gen.__path__[0]) / SMOKE_PROMPTS), None


# ----------------------------------------------------------------------------------------------------- a running engine

def live(url: str, config: dict[str, Any], expected: Expected | None) -> Iterator[Finding]:
    """Acceptance of a running engine since it started, beside the report's; and its longest context."""
    try:
        served, readings = models(url), read_engine(url)
    except EngineError as error:
        yield Finding("engine", FAULT, str(error), "nothing is known of what is served", "check engine_url")
        return
    own = config.get("max_position_embeddings")
    for model in served:
        most = model.get("max_model_len")
        if own and isinstance(most, int) and most > own:
            yield fault("positions", f"the engine serves {model['id']} up to {most:,} positions, the head has {own:,}")
    for reading in readings:
        found = reading_of(reading, None, expected)
        says, numbers = line(found, expected), asdict(found)
        if not reading.speculates:
            yield Finding("engine", FAULT, f"{says}: it does not speculate", "all of the speed-up",
                          "start it with the head (the README of the export has the command)", numbers)  # fmt: skip
        elif found.tau is None:
            yield Finding("engine", WARNING, f"{says} since it started", "", "send requests first", numbers)
        elif found.tau < 1.05 or (found.rate is not None and found.rate < LOW) or found.warnings:
            dead = found.tau < 1.05
            says = "; ".join([says, *found.warnings])
            yield Finding("engine", FAULT if dead else WARNING, says, *ABOUT["acceptance"], numbers)
        else:
            yield Finding("engine", OK, says, numbers=numbers)


# ----------------------------------------------------------------------------------------------------- words

def text(finding: Finding) -> str:
    more = {"costs": finding.costs, "mend": finding.mend}
    lines = [f"{finding.status:<8} {finding.check:<11} {finding.says}"]
    return "\n".join(lines + [f"{'':<20} {name}: {words}" for name, words in more.items() if words])


def summary(findings: list[Finding]) -> str:
    count = {status: sum(found.status == status for found in findings) for status in (FAULT, WARNING, OK)}
    plural = lambda n, word: f"{n} {word}{'' if n == 1 else 's'}"  # noqa: E731
    return f"{plural(count[FAULT], 'fault')}, {plural(count[WARNING], 'warning')}, {count[OK]} ok"


def doctor(head: Path, target: TargetConfig, settings: Settings, as_json: bool = False) -> int:
    """The command; returns its exit status: 1 with a fault, else 0."""
    from headtrain.stages import quiet_libraries

    quiet_libraries()
    findings = []
    for found in examine(head, target, settings):
        findings.append(found)
        if not as_json:
            print(text(found), flush=True)
    if as_json:
        rows = [asdict(found) for found in findings]
        count = {status: sum(found.status == status for found in findings) for status in (OK, WARNING, FAULT)}
        print(json.dumps({"checks": rows, "count": count}, indent=1, ensure_ascii=False))
    else:
        print(f"\n{summary(findings)}")
    return int(any(found.status == FAULT for found in findings))
