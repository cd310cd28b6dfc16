"""The model card of a head: what it is for, how it drafts, what it was made from, how it is served, what is unknown.

Every number comes from the head's own files: its config.json, the report about the same weights, the config of its run.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from headtrain.config import BY_DEPTH, KINDS
from headtrain.engines import EXPORT_FORMATS, TESTED_VERSIONS, servable_name, serve_command, sglang_rules_agree
from headtrain.export import ExportError
from headtrain.export.refusals import READ_BY, check_heads, newest
from headtrain.files import locate
from headtrain.privacy import masked

RECIPE = ("target", "data", "head", "train", "eval", "seed")  # the sections that made and measured the head
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM", "llama_cpp": "llama.cpp"}
FORMATS = {engine: format for format, engine in EXPORT_FORMATS.items() if engine}
LICENCE_KEYS = ("license", "license_name", "license_link")


@dataclass
class Facts:
    """What is known of a head.

    config: config.json. report: report.json if it is about these weights, else None. recipe: config.yaml of its run, {}
    where it lies in none. licence: the LICENCE_KEYS of the target's own card, {} if it was not found.
    """

    config: dict[str, Any]
    report: dict[str, Any] | None = None
    head_id: str | None = None  # in the report
    recipe: dict[str, Any] = field(default_factory=dict)
    licence: dict[str, str] = field(default_factory=dict)
    own_adapter: bool = False  # whether its folder has low-rank factors of the target, trained along with it

    @property
    def ours(self) -> dict[str, Any]:
        return self.config["headtrain"]

    @property
    def kind(self) -> str:
        return KINDS.get(self.ours["type"], self.ours["type"])

    @property
    def target(self) -> dict[str, Any]:
        """The target's identity: `model`, with `commit` when that is a Hub id, and the `adapter` merged into it."""
        known = (self.ours.get("made_for") or {}).get("target")
        if known:
            return known
        section = self.recipe.get("target") or {}
        model, adapter = section.get("model"), section.get("adapter")
        found = {"model": model} | ({"commit": section.get("revision")} if servable_name(model) != "TARGET" else {})
        return found | ({"adapter": {"model": adapter}} if adapter else {})

    @property
    def hub_target(self) -> str | None:
        return self.target.get("model") if "commit" in self.target else None

    @property
    def target_name(self) -> str:
        if self.target.get("smoke"):
            return f"a tiny random {self.target['smoke']}"
        return name_of(self.target.get("model") or "an unnamed target").removesuffix(".gguf").rsplit("/", 1)[-1]

    def rows(self, kind: str = "acceptance") -> list[dict[str, Any]]:
        """Results of this head, and of what was measured beside it: `acceptance`, or `speed`."""
        rows = self.report["results"] if self.report else []
        mine = [row for row in rows if row.get("head") in (None, self.head_id) and row["drafter"] != "none"]
        return [row for row in mine if (row.get("kind") == "speed") == (kind == "speed") and known(row.get("tau"))]

    def best(self) -> dict[str, Any] | None:
        """The lossless greedy chain of the head alone with the largest τ."""
        rows = [row for row in self.rows() if row["drafter"] == "head" and row["temperature"] == 0]
        rows = [row for row in rows if row.get("tree") == "chain" and row.get("rule", "exact") != "typical"]
        return max(rows, key=lambda row: row["tau"], default=None)


def known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def card(facts: Facts, repo: str) -> str:
    """README.md of the repository `repo` (user/name): the Hub's metadata, then the text."""
    kind, name = facts.kind, facts.target_name
    article = "An" if kind[0] in "AEIOU" else "A"
    parts = [
        f"---\n{yaml.safe_dump(metadata(facts), sort_keys=False, allow_unicode=True)}---",
        f"# {kind} draft head for {name}",
        f"{article} {kind} draft head for speculative decoding, trained with headtrain: it guesses the next tokens of "
        f"{_target_words(facts)}, which checks them in one pass. It is no language model by itself.",
        *_measured(facts), *_data(facts), *_serving(facts, repo), *_limits(facts), *_recipe(facts), *_licence(facts),
    ]  # fmt: skip
    return masked("\n\n".join(parts) + "\n")


def commit_message(facts: Facts) -> str:
    """`EAGLE-3 head, tau 1.76 (heldout, K = 5, greedy)`."""
    row = facts.best()
    measured = f"tau {row['tau']:.2f} ({row['suite']}, K = {row['k']}, greedy)" if row else "not measured"
    return f"{facts.kind} head, {measured}"


def metadata(facts: Facts) -> dict[str, Any]:
    """The card's YAML as the Hub reads it; a key without a known value is left out."""
    bases = [base for base in (facts.hub_target, _hub_adapter(facts)) if base]
    tags = ["speculative-decoding", "draft-head", facts.ours["type"]]
    head = {"base_model": bases[0] if len(bases) == 1 else bases} if bases else {}
    return {"library_name": "headtrain", **head, **facts.licence, "tags": tags}


def _hub_adapter(facts: Facts) -> str | None:
    adapter = facts.target.get("adapter") or {}
    return adapter.get("model") if "commit" in adapter else None


def _target_words(facts: Facts) -> str:
    hub, adapter = facts.hub_target, facts.target.get("adapter")
    words = f"`{hub}`" if hub else facts.target_name
    words += f" (commit {facts.target['commit']})" if hub and facts.target["commit"] else ""
    words += " with the low-rank factors in `adapter/` merged into it" * facts.own_adapter
    return words + (f" with the adapter {name_of(adapter['model'])} merged into it" if adapter else "")


# ------------------------------------------------------------------------------------------------ measured


def _measured(facts: Facts) -> list[str]:
    rows = facts.rows()
    if not rows:
        return ["## Acceptance", "Not measured: there is no report about these weights."]
    timed = {_key(row): row for row in facts.rows("speed")}
    table = ["| suite | drafter | draft | decoding | prompts | steps | τ | α₁ … α_K | speed-up |", "|---" * 9 + "|"]
    for row in rows:
        speed = timed.get(_key(row))
        cells = [
            name_of(row["suite"]), row["drafter"], _draft_words(row), _decoding_words(row), row.get("prompts", "–"),
            row["steps"], f"{row['tau']:.2f}", " ".join(_share(alpha) for alpha in row.get("alpha") or []) or "–",
            f"{speed['speedup']:.2f}×" if speed and known(speed.get("speedup")) else "–",
        ]  # fmt: skip
        table.append("| " + " | ".join(map(str, cells)) + " |")
    text = (
        "τ = 1 + accepted draft tokens / steps, over all steps of all prompts: tokens per target forward; plain "
        "decoding has 1.00. α_k = share of the steps in which draft position k was accepted. "
        "`ngram` and its kin copy from the text so far and cost nothing. Measured with headtrain's own decoder, "
        f"{_conditions(rows)}."
    )
    out = ["## Acceptance", "\n".join(table), text]
    if timed:
        first = next(iter(timed.values()))
        out.append(
            f"Speed-up = tokens per second over plain decoding, on {_machine(facts.report)}, at batch "
            f"{first.get('batch')}, {first.get('prompts')} prompts of a suite; it holds for this machine only."
        )
    summary = facts.report.get("summary") or {}
    return out + ([summary["identity"]] if summary.get("identity") else [])


def _key(row: dict[str, Any]) -> tuple:
    return tuple(row.get(key) for key in ("suite", "drafter", "head", "k", "tree", "temperature", "rule"))


def _share(alpha: Any) -> str:
    return f"{alpha:.2f}" if known(alpha) else "–"


def _draft_words(row: dict[str, Any]) -> str:
    tree = row.get("tree") or "chain"
    return f"K = {row['k']}, chain" if tree == "chain" else f"depth {row['k']}, tree {tree}"


def _decoding_words(row: dict[str, Any]) -> str:
    words = ["greedy"]
    if row["temperature"]:
        off = {"top_p": 1, "top_k": 0, "min_p": 0}
        cuts = [f"{key} {row[key]:g}" for key, value in off.items() if row.get(key) not in (None, value)]
        words = [f"T = {row['temperature']:g}", *cuts]
    rules = {"typical": "typical acceptance (changes the output)", "block": "block verification"}
    return ", ".join([*words, *(rules[rule] for rule in [row.get("rule")] if rule in rules)])


def _conditions(rows: list[dict[str, Any]]) -> str:
    """The settings that all rows share, or their values."""

    def values(key: str) -> str:
        found = sorted({row[key] for row in rows if row.get(key) is not None})
        return " or ".join(map(str, found)) or "unknown"

    return (
        f"with the target in {values('dtype')}, its chat template, at most {values('max_new_tokens')} new tokens per "
        f"prompt and {values('batch')} requests at a time"
    )


def _machine(report: dict[str, Any]) -> str:
    found = report.get("environment") or {}
    if gpus := found.get("gpus"):
        return ", ".join(f"{gpus.count(gpu)} × {gpu}" for gpu in dict.fromkeys(gpus))
    cores = found.get("cores", "some")
    return f"{cores} CPU core{'s' * (cores != 1)} ({found.get('cpu', 'unknown')})"


# ------------------------------------------------------------------------------------------------ data, recipe


def _data(facts: Facts) -> list[str]:
    section = facts.recipe.get("data") or {}
    report = facts.report or {}
    trained = (report.get("training") or {}).get("steps") is not None  # else the report is an evaluation's alone
    data = (report.get("data") or {}) if trained else {}
    sources = data.get("sources") or [item.get("source") for item in section.get("prompts") or []]
    backend = (section.get("responses") or {}).get("backend", "local")
    on_policy = data.get("on_policy", backend != "given") if sources else None
    if not sources:
        return ["## Data", "Unknown: neither the run that trained the head nor its report is beside it."]
    whose = "the target's own answers (on-policy)" if on_policy else "the answers that the data came with (off-policy)"
    lines = [f"- prompts from: {', '.join(name_of(source) for source in sources)}", f"- responses: {whose}"]
    if known(data.get("responses_used")):
        tokens = f", {data['response_tokens']:,} tokens" if known(data.get("response_tokens")) else ""
        lines.append(f"- trained on {data['responses_used']:,} responses{tokens}")
    for stage, facts_of in (data.get("stages") or {}).items():
        if reasons := facts_of.get("left_out"):
            lines.append(f"- left out of {stage}: " + ", ".join(f"{why} {n:,}" for why, n in reasons.items()))
    return ["## Data", "\n".join(lines)]


def _recipe(facts: Facts) -> list[str]:
    kept = {key: cleaned(facts.recipe[key]) for key in RECIPE if key in facts.recipe}
    if not kept:
        return []
    text = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
    return ["## Recipe", f"<details><summary>every setting</summary>\n\n```yaml\n{text}```\n\n</details>"]


def cleaned(value: Any) -> Any:
    """A config without places of one machine: files and folders by their last part; Hub ids and packages stay."""
    if isinstance(value, dict):
        return {key: cleaned(item) for key, item in value.items() if key not in ("device", "urls")}
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    return name_of(value) if isinstance(value, str) else value


def name_of(place: str) -> str:
    """What to call a place: a Hub id or `package:` location as it is, a file or folder by its last part."""
    name, equals, file = place.partition("=")  # a suite may be NAME=FILE
    if equals:
        return f"{name}={name_of(file)}"
    if place.startswith("package:") or servable_name(place) == place:
        return place
    return place.rstrip("/").rsplit("/", 1)[-1]


# ------------------------------------------------------------------------------------------------ serving, limits


def _serving(facts: Facts, repo: str) -> list[str]:
    """A launch command for every engine that takes this head, else why it does not."""
    adapter, kind, out = facts.own_adapter or facts.target.get("adapter"), facts.ours["type"], ["## Serving"]
    target = facts.hub_target if facts.hub_target and not adapter else "TARGET"
    if target == "TARGET":
        out.append("TARGET: the place of the target" + ", its adapter merged" * bool(adapter) + ".")
    if kind == "mtp":
        out.append(
            "Engines load the module inside the target's checkpoint. In the run that trained it, `headtrain export "
            "format=mtp` writes that checkpoint; FOLDER is its place."
        )
    refused = []
    for engine, name in ENGINES.items():
        release, why = newest(kind, FORMATS[engine]), _refusal(kind, FORMATS[engine])
        for key, formats in READ_BY.items():
            if facts.ours.get(key) and FORMATS[engine] not in formats:
                release, why = None, f"it does not read {key}, which this head has"
        taps = facts.ours.get("taps") or []
        if engine == "llama_cpp" and release and (len(taps) != 3 or taps[-1] == facts.ours.get("target_layers")):
            release, why = None, f"it reads three taps, none after the last block; this head has {taps}"
        if kind == "medusa" and release and facts.ours["draft_vocab_size"] != facts.ours["vocab_size"]:
            release, why = None, "it starts with no Medusa head that has a reduced draft vocabulary, as this one has"
        if release:
            note = f" ({why})" if why else ""
            out.append(f"{name} {release}{note}:\n\n```\n{_commands(facts, engine, target, repo)}\n```")
        else:
            refused.append(f"- {name}: {why}")
    out += ["\n".join(refused)] * bool(refused)
    plain = facts.hub_target or "TARGET" if facts.own_adapter else target  # the head brings its adapter along
    measure = f"headtrain eval head={repo} target={plain} suites=[my.jsonl]"
    return [*out, f"Measure it again, on your machine and prompts:\n\n```\n{measure}\n```"]


def _refusal(kind: str, format: str) -> str:
    """Why the tested release of an engine takes no heads of this type; empty if it does."""
    try:
        check_heads(kind, format)
    except ExportError as error:
        return str(error).partition(": ")[2]
    return ""


def _commands(facts: Facts, engine: str, target: str, repo: str) -> str:
    ours, row = facts.ours, facts.best()
    k = ours["unroll"] if ours["type"] in BY_DEPTH else row["k"] if row else min(3, ours["unroll"])
    taps, layers = ours.get("taps") or None, ours.get("target_layers")
    if ours["type"] == "mtp":
        return serve_command(engine, "FOLDER", None, k, head_type="mtp")
    fixed: dict[str, Any] = {"head_type": ours["type"], "taps": taps, "layers": layers}
    made = f"hf download {repo} --local-dir head\nheadtrain export head=head out=served format="
    if engine == "llama_cpp":
        return f"{made}gguf target=TARGET.gguf  # with that file's tokenizer; served/README.md says how to serve it"
    if engine != "sglang" or (taps and layers and sglang_rules_agree(taps, layers)):
        return serve_command(engine, target, repo, k, **fixed)
    release = f" engine_version={TESTED_VERSIONS[engine]}" * bool(taps)
    return f"{made}sglang{release}\n{serve_command(engine, target, 'served', k, **fixed)}"


def _limits(facts: Facts) -> list[str]:
    rows, timed, lines = facts.rows(), facts.rows("speed"), []
    if rows:
        suites = ", ".join(dict.fromkeys(name_of(row["suite"]) for row in rows))
        lines.append(f"Measured on {suites} only; other texts, languages and longer contexts are not.")
        if all(row["temperature"] == 0 for row in rows):
            lines.append("Greedy decoding only; how it drafts when sampling was not measured.")
        lines.append("Nothing was measured in a serving engine.")
    else:
        lines.append("Neither acceptance nor speed was measured.")
    if rows and not timed:
        lines.append("Speed was not measured.")
    if (facts.report or {}).get("data", {}).get("on_policy") is False:
        lines.append("Trained on answers that are not the target's own, which costs acceptance.")
    if any(row.get("identical_to_plain") is False for row in rows + timed):
        lines.append("Speculative text differed from plain greedy text in this evaluation; see report.json.")
    c = facts.ours
    if 0 < c["draft_vocab_size"] < c["vocab_size"]:
        lines.append(f"It drafts {c['draft_vocab_size']:,} of the target's {c['vocab_size']:,} tokens, and no other.")
    lines.append("It fits this target only: another fine-tune of it accepts less, another tokenizer nothing.")
    return ["## Limits", "\n".join(f"- {line}" for line in lines)]


def _licence(facts: Facts) -> list[str]:
    name = facts.licence.get("license_name") or facts.licence.get("license")
    link = facts.licence.get("license_link")
    if not name:
        return ["## Licence", "The target's licence applies; it was not found beside the target."]
    return ["## Licence", f"The target's licence applies: {name}" + (f" ({link})" if link else "") + "."]


# ------------------------------------------------------------------------------------------------ the target's licence


def read_licence(place: Path) -> dict[str, str]:
    """The LICENCE_KEYS that a target's folder (its README.md) or .gguf file states; {} where it states none."""
    if place.suffix == ".gguf" and place.is_file() and importlib.util.find_spec("gguf"):
        from gguf import GGUFReader

        entry = GGUFReader(place).fields.get("general.license")
        return {"license": str(entry.contents())} if entry else {}
    readme = place / "README.md"
    if not readme.is_file():
        return {}
    begin, found, rest = readme.read_text(encoding="utf-8", errors="replace").partition("---\n")
    if begin.strip() or not found:
        return {}
    try:
        head = yaml.safe_load(rest.partition("\n---")[0]) or {}
    except yaml.YAMLError:
        return {}  # someone else's card; the text then says that no licence was found
    return {key: str(head[key]) for key in LICENCE_KEYS if isinstance(head, dict) and head.get(key)}


def local_target(recipe: dict[str, Any]) -> Path | None:
    """The target's folder or file where it lies on this machine."""
    model = (recipe.get("target") or {}).get("model")
    place = Path(locate(model)).expanduser() if model else None
    return place if place and place.exists() else None
