"""The commands: what each does, the keys it takes, and their help texts. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """What a command does, and the keys it takes besides a recipe's own (name -> comment)."""

    does: str
    recipe: bool  # takes recipe= and every key of the config tree
    own: dict[str, str]
    example: str


COMMANDS = {
    "fit": Command(
        "every stage that is still missing: prompts, responses, captures, head, report, export, push", True, {},
        "headtrain fit recipe=eagle3_llama8b data.prompts=my.jsonl",
    ),
    "generate": Command(
        "prompts, responses and captures only", True,
        {"inspect": "shows that many rows of the finished responses, the supervised spans marked"},
        "headtrain generate recipe=eagle3_llama8b inspect=3",
    ),
    "train": Command(
        "the training stage on finished data (also under your own launcher, with RANK and WORLD_SIZE set)", True, {},
        "headtrain train recipe=eagle3_llama8b train.lr=2e-4",
    ),
    "eval": Command(
        "acceptance and speed of heads, with the built-in decoder", True,
        {
            "head": "a head's folder or Hub id, or several: [A,B] (needed)",
            "target": "the target's place, instead of the recipe's",
            "suites, k, tree, temperature, batch, drafters, …": "the keys of the `eval` section, without `eval.`",
            "offline": "true: acceptance on the captures of run_dir, without the target; takes k, dtype and limit",
        },
        "headtrain eval head=runs/mine/head recipe=eagle3_llama8b suites=[heldout,humaneval] k=[3,5]",
    ),
    "export": Command(
        "a head's folder to the layout of a serving engine", False,
        {
            "head": "the head's folder or Hub id (needed)",
            "format": "the engine or layout: vllm, sglang, trtllm, speculators, eagle, medusa; gguf: llama.cpp; "
            "mtp: the target's checkpoint with a trained MTP module (needed)",
            "out": "folder to write (default: export/FORMAT beside the head's folder)",
            "target": "the target's name in commands; for format=gguf its GGUF file (default: of the head's run)",
            "engine_version": "release of the engine that will serve it (default: the one the check was written for)",
            "dtype": "of the weights: bfloat16 (default), float16 or float32",
        },
        "headtrain export head=runs/mine/head format=vllm",
    ),
    "import": Command(
        "a head that another tool trained, as a head folder of ours", False,
        {
            "head": "its folder or Hub id, user/name@revision (needed)",
            "out": "new folder to write (needed)",
            "target": "the model it drafts for: Hub id, folder or GGUF, where the checkpoint does not name it",
            "format": "auto (default), headtrain, eagle, sglang, vllm, speculators, trtllm, medusa or mtp",
            "taps": "the target layers it reads, [2,18,33], where its layer ids do not say so",
            "engine_version": "the SGLang release that its layer ids were written for",
        },
        "headtrain import head=user/eagle3-head target=me/model out=heads/theirs",
    ),
    "push": Command(
        "a head's folder to the Hub, with a model card", False,
        {
            "head": "the head's folder (needed)",
            "repo": "USER/NAME on the Hub, made where it is missing (needed)",
            "private": "true (default): make it private, and refuse one that is public; false: make it public",
            "dry_run": "true: only list the files and their sizes; nothing is sent",
            "revision": "branch, made where it is missing (default: main)",
            "report": "report.json about this head (default: the one of its run)",
        },
        "headtrain push head=runs/mine/head repo=me/my-head",
    ),
    "vocab": Command(
        "draft vocabularies from finished responses: what sizes cover, and one in a file", True,
        {
            "run_dir": "a run's folder with finished responses, instead of recipe=; or several, counted together: "
            "[A,B]. Then head.draft_vocab is the only other key of the config",
            "sizes": "what to compare: [4096,full] or files (default: 4096, 8192, 16384, 32000 and full)",
            "domains": "only training rows of these sources choose: [A,B], whole names or their last parts",
            "out": "a .json file to write the draft vocabulary of head.draft_vocab to, for head.draft_vocab=FILE",
        },
        "headtrain vocab run_dir=runs/mine head.draft_vocab=16384 out=vocab.json",
    ),
    "plan": Command(
        "GPU memory, disk and time a recipe needs; loads no weights", True, {}, "headtrain plan recipe=eagle3_llama70b"
    ),
    "doctor": Command(
        "checks everything of which a mismatch costs acceptance; exit status 1 when there is a fault", False,
        {
            "head": "the head's folder or Hub id (needed)",
            "target": "the target's place (needed); target.revision, target.adapter, target.template_kwargs, …: as in "
            "a recipe",
            "engine": "whose reading of the folder counts: vllm (default), sglang, tensorrt_llm or llama_cpp",
            "engine_url": "a running vLLM or SGLang server, whose acceptance is looked at too",
            "report": "report.json of the head, or its run's folder (default: of the run the head lies in)",
            "prompts": "a .jsonl file of chats to draft along (default: the run's held-out ones, else headtrain's own)",
            "limit": "how many of them (default 8)",
            "k": "draft tokens a step (default: the report's, else 5)",
            "max_new_tokens": "length of the target's answers (default 48)",
            "probe": "false: without loading the target",
            "json": "true: everything found as one JSON object",
        },
        "headtrain doctor head=runs/mine/export/vllm target=me/my-finetune",
    ),
    "monitor": Command(
        "follows the speculation of running engines, a line per interval", False,
        {
            "engine_url": "a vLLM or SGLang server, or several: [A,B] (needed)",
            "report": "report.json of the head, or its run's folder, to compare with",
            "interval": "seconds between two lines (default 10)",
            "count": "how many intervals (default: until interrupted); exit status 1 when the last one had no answer",
            "log": "a file that gets every interval as a line of JSON",
        },
        "headtrain monitor engine_url=http://localhost:8000 report=runs/mine",
    ),
    "status": Command(
        "how far a run is, while it works and afterwards", False,
        {
            "run_dir": "the run's folder (needed)",
            "watch": "seconds: show it again and again until no process works in it any more",
            "json": "true: as one JSON object",
        },
        "headtrain status run_dir=runs/mine watch=5",
    ),
    "recipes": Command(
        "lists recipes; `recipes show NAME` prints the resolved config", False, {},
        "headtrain recipes show eagle3_llama8b",
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- help

def overview() -> str:
    lines = ["headtrain <command> recipe=<name or path.yaml> [key=value …]", "", "commands:"]
    lines += [f"  {name:<9} {command.does}" for name, command in COMMANDS.items()]
    lines += [
        "",
        "smoke=true with any recipe runs all of it on a tiny random target in about a minute, without a network.",
        "`headtrain COMMAND --help` lists a command's keys.",
    ]
    return "\n".join(lines)


def help_of(name: str) -> str:
    command = COMMANDS[name]
    lines = [f"headtrain {name}: {command.does}", "", f"example: {command.example}"]
    if command.own:
        lines += ["", "keys of its own:"] + [f"  {key}: {comment}" for key, comment in command.own.items()]
    if command.recipe:
        lines += ["", *_config_help()]
    return "\n".join(lines)


def _config_help() -> list[str]:
    """One line per key of the config tree: name, default, comment."""
    from headtrain.configload import keys

    lines = ["recipe=NAME or recipe=FILE.yaml, and any key of the config (key=default, what it means):"]
    section = None
    for key in keys().values():
        first = key.path.split(".")[0] if "." in key.path else "the run"
        if first != section:
            section = first
            lines += ["", f"{section}:"]
        lines.append(f"  {key.path + '=' + _shown(key.default):<44} {key.comment}")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(str, value)) + "]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
