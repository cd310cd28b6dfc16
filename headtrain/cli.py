"""The command line: parses, calls, prints.

    headtrain <command> recipe=<name or path.yaml> [key=value …]

Nothing heavy is imported before a command needs it. Exit status: 0 done, 2 a mistake of the user's (one line says
which), 1 anything else (with `doctor`: a fault was found), 130 interrupted.
"""

from __future__ import annotations

import dis
import errno
import math
import sys
import traceback
from pathlib import Path

from headtrain.commands import COMMANDS, help_of, overview
from headtrain.files import FULL, DiskFull


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    argv = [text for text in argv if not text.startswith("--local_rank")]  # what launchers add
    try:
        return _dispatch(argv)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except Exception as error:
        from headtrain.privacy import masked

        users = is_users(error)
        if getattr(error, "errno", None) in FULL and not isinstance(error, DiskFull):
            error = DiskFull(error.errno, "", getattr(error, "filename", None) or "a file")
        print(masked(f"error: {error}" if users else traceback.format_exc().rstrip()), file=sys.stderr)
        return 2 if users else 1


def is_users(error: BaseException) -> bool:
    """True for a ValueError or OSError that a `raise` of headtrain's own made, with a message for the user.

    One from a library, or from a built-in that headtrain called, is a bug and keeps its traceback; but no code is to
    blame for a full disk or a name that no file system takes.
    """
    if isinstance(error, OSError) and error.errno in (*FULL, errno.ENAMETOOLONG):
        return True
    if not isinstance(error, (ValueError, OSError)) or error.__traceback__ is None:
        return False
    place = error.__traceback__
    while place.tb_next:
        place = place.tb_next
    ours = str(place.tb_frame.f_globals.get("__name__", "")).split(".")[0] == "headtrain"
    return ours and place.tb_frame.f_code.co_code[place.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in {"-h", "--help", "help"}:
        print(overview())
        return 0
    if argv[0] == "--version":
        from headtrain import __version__

        print(f"headtrain {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name == "stage":  # a child process of a run
        from headtrain.stages import run_stages

        return run_stages(rest)
    if name not in COMMANDS:
        from headtrain.config import ConfigError
        from headtrain.configload import nearest

        raise ConfigError(f"{name}: unknown command{nearest(name, COMMANDS)} (`headtrain --help` lists them)")
    if {"-h", "--help"} & set(rest):
        print(help_of(name))
        return 0
    return globals()[f"_{name}"](rest)


# ------------------------------------------------------------------------------------------------- commands

def _recipe(arguments: list[str], own: tuple[str, ...] = ()):
    """(config, own keys given) of `recipe=… key=value …` arguments."""
    from headtrain.config import ConfigError
    from headtrain.configload import load, recipe_names

    given, arguments = _own(arguments, ("recipe", *own))
    if "recipe" not in given:
        raise ConfigError(f"recipe=NAME or recipe=FILE.yaml is missing; shipped recipes: {', '.join(recipe_names())}")
    return load(given.pop("recipe"), arguments), given


def _own(arguments: list[str], keys: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """The `key=value` arguments with these keys, and the others."""
    from headtrain.config import ConfigError

    given, others = {}, []
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals or key not in keys:
            others.append(text)
        elif key in given:
            raise ConfigError(f"{key} is given twice")
        else:
            given[key] = value
    return given, others


def _flat(name: str, arguments: list[str], needed: tuple[str, ...]) -> dict[str, str]:
    """The `key=value` arguments of a command without a recipe."""
    from headtrain.config import ConfigError
    from headtrain.configload import nearest

    own, given = COMMANDS[name].own, {}
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{text}: arguments are written key=value")
        if key not in own:
            raise ConfigError(f"unknown key {key}{nearest(key, own)}; `headtrain {name}` takes: {', '.join(own)}")
        given[key] = value
    for key in needed:
        if not given.get(key):
            raise ConfigError(f"{key}=… is missing: {own[key]}")
    return given


def _fit(arguments: list[str]) -> int:
    from headtrain import pipeline

    config, _ = _recipe(arguments)
    pipeline.fit(config)
    return 0


def _generate(arguments: list[str]) -> int:
    from headtrain import pipeline
    from headtrain.config import ConfigError

    config, given = _recipe(arguments, ("inspect",))
    rows = given.get("inspect", "0")
    if not rows.isdecimal():
        raise ConfigError(f"inspect={rows}: a number of rows is needed")
    pipeline.generate(config, inspect=int(rows))
    return 0


def _train(arguments: list[str]) -> int:
    from headtrain import pipeline

    config, _ = _recipe(arguments)
    pipeline.train(config)
    return 0


def _eval(arguments: list[str]) -> int:
    from headtrain import evaluation
    from headtrain.config import ConfigError, RecipeConfig
    from headtrain.configload import load, load_overrides

    short = {field: f"eval.{field}" for field in vars(RecipeConfig().eval)} | {"target": "target.model"}
    given, arguments = _own(arguments, ("head", "offline", "recipe", "run_dir"))
    arguments = [
        f"{short[key]}={value}" if equals and key in short else text
        for text, (key, equals, value) in ((text, text.partition("=")) for text in arguments)
    ]
    heads = _items(given.get("head", ""))
    if not all(heads):
        raise ConfigError("head=DIR is missing: the folder of the head to measure, or its Hub id; several: head=[A,B]")
    if given.get("offline", "false") not in ("true", "false"):
        raise ConfigError(f"offline={given['offline']}: true or false is needed")
    if given.get("offline") == "true":
        return _eval_offline(heads, given, arguments)
    config = load(given["recipe"], arguments) if "recipe" in given else load_overrides(arguments)
    config.run_dir = given.get("run_dir")
    evaluation.evaluate(config, heads)
    return 0


def _eval_offline(heads: list[str], given: dict[str, str], arguments: list[str]) -> int:
    """What the captures do not fix can be set: the numbers of drafts, the decoder's dtype, the rows of each split."""
    from headtrain import evaluation
    from headtrain.config import ConfigError
    from headtrain.configload import load_overrides

    keys = [text.partition("=")[0].removeprefix("eval.") for text in arguments] + ["recipe"] * ("recipe" in given)
    if others := [key for key in keys if key not in ("k", "dtype", "limit")]:
        raise ConfigError(f"{others[0]}: not used with offline=true, which takes head, run_dir, k, dtype and limit")
    if not given.get("run_dir"):
        raise ConfigError("run_dir=… is missing: the run whose captures are read (offline=true)")
    asked = load_overrides(arguments).eval
    evaluation.evaluate_offline(heads, Path(given["run_dir"]), {key: getattr(asked, key) for key in keys})
    return 0


def _export(arguments: list[str]) -> int:
    from headtrain import pipeline

    given = _flat("export", arguments, ("head", "format"))
    head, format, out = Path(given.pop("head")), given.pop("format"), given.pop("out", None)
    print(pipeline.export_head(head, format, out, **given))
    return 0


def _push(arguments: list[str]) -> int:
    from headtrain import pipeline
    from headtrain.configload import load_overrides

    given = _flat("push", arguments, ("head", "repo"))
    head, report = Path(given.pop("head")), given.pop("report", None)
    asked = load_overrides([f"push.{key}={value}" for key, value in given.items()]).push
    print(pipeline.push_head(head, asked, Path(report) if report else None))
    return 0


def _doctor(arguments: list[str]) -> int:
    from headtrain.config import ConfigError
    from headtrain.configload import load_overrides

    of_target = [text for text in arguments if text.startswith(("target=", "target."))]
    own = [text for text in arguments if text not in of_target]
    given = _flat("doctor", own, ("head",))
    if not any(text.startswith("target=") for text in of_target):
        raise ConfigError("target=… is missing: the target's place, as in target.model")
    config = load_overrides([text.replace("target=", "target.model=", 1) if text.startswith("target=") else text
                             for text in of_target])  # fmt: skip
    numbers = {key: _whole(given, key) for key in ("limit", "k", "max_new_tokens") if key in given}
    texts = {key: given[key] for key in ("engine", "engine_url", "report", "prompts") if given.get(key)}
    probe, as_json = (_flag(given, key, default) for key, default in (("probe", True), ("json", False)))
    from headtrain.doctor import Settings, doctor
    from headtrain.evaluation import found_head

    settings = Settings(**texts, **numbers, probe=probe)
    return doctor(found_head(given["head"]), config.target, settings, as_json)


def _monitor(arguments: list[str]) -> int:
    from headtrain.expected import find_report
    from headtrain.monitor import monitor

    given = _flat("monitor", arguments, ("engine_url",))
    urls = _items(given["engine_url"])
    return monitor(
        urls, interval=_seconds({"interval": "10"} | given, "interval"),
        count=_whole(given, "count") if "count" in given else None,
        report=find_report(given["report"]) if given.get("report") else None,
        log=Path(given["log"]) if given.get("log") else None,
    )  # fmt: skip


def _whole(given: dict[str, str], key: str) -> int:
    from headtrain.config import ConfigError

    if not given[key].isdecimal() or int(given[key]) < 1:
        raise ConfigError(f"{key}={given[key]}: a whole number of 1 or more is needed")
    return int(given[key])


def _seconds(given: dict[str, str], key: str) -> float:
    from headtrain.config import ConfigError

    try:
        return float(given[key])
    except ValueError as error:
        raise ConfigError(f"{key}={given[key]}: a number of seconds is needed") from error


def _flag(given: dict[str, str], key: str, default: bool) -> bool:
    from headtrain.config import ConfigError

    value = given.get(key, str(default).lower())
    if value not in ("true", "false"):
        raise ConfigError(f"{key}={value}: true or false is needed")
    return value == "true"


def _import(arguments: list[str]) -> int:
    from headtrain.config import ConfigError
    from headtrain.importing import import_head

    given = _flat("import", arguments, ("head", "out"))
    if (taps := given.pop("taps", None)) is not None:
        given["taps"] = [int(n) if n.strip().isdecimal() else n for n in taps.strip("[]").split(",")]
        if not all(isinstance(n, int) for n in given["taps"]):
            raise ConfigError(f"taps={taps}: numbers of layers are needed, as in taps=[2,18,33]")
    made = import_head(given.pop("head"), **given)
    print(f"{made.folder}: {made.type} head, from the format {made.format}")
    print("\n".join(f"- {line}" for line in made.said))
    return 0


def _vocab(arguments: list[str]) -> int:
    from headtrain.config import ConfigError
    from headtrain.configload import load
    from headtrain.pipeline import Job, prepared

    given, others = _own(arguments, ("recipe", *COMMANDS["vocab"].own))
    if "recipe" in given:
        own = [f"run_dir={given['run_dir']}"] if "run_dir" in given else []
        config = prepared(load(given["recipe"], [*others, *own]))
        Job(config).need(("prompts", "responses"))
        runs = [Path(config.run_dir)]
    elif "run_dir" not in given:
        raise ConfigError("recipe=… or run_dir=… is missing: the run, or runs, whose finished responses are counted")
    else:
        if other := next((text for text in others if not text.startswith("head.draft_vocab=")), None):
            raise ConfigError(f"{other}: not used with run_dir=…; of the config's keys only head.draft_vocab is")
        runs = [Path(place) for place in _items(given["run_dir"])]
        if missing := next((run for run in runs if not (run / "config.yaml").is_file()), None):
            raise ConfigError(f"run_dir={missing}: no run folder (no config.yaml)")
        config = load(str(runs[0] / "config.yaml"), others)
    from headtrain import vocab

    sizes, domains = (_items(given[key]) if given.get(key) else [] for key in ("sizes", "domains"))
    print(vocab.vocab(config, runs, sizes, given.get("out"), domains))
    return 0


def _items(text: str) -> list[str]:
    """The items of `[A,B]`, or the only one."""
    return [item.strip() for item in text[1:-1].split(",")] if text.startswith("[") else [text]


def _plan(arguments: list[str]) -> int:
    from headtrain import plan

    config, _ = _recipe(arguments)
    print(plan.text(config))
    return 0


def _status(arguments: list[str]) -> int:
    from headtrain import status
    from headtrain.config import ConfigError

    given = _flat("status", arguments, ("run_dir",))
    every = _seconds(given, "watch") if "watch" in given else None
    if every is not None and not 0 < every < math.inf:
        raise ConfigError(f"watch={given['watch']}: a number of seconds above 0 is needed")
    status.show(Path(given["run_dir"]), every, _flag(given, "json", False))
    return 0


def _recipes(arguments: list[str]) -> int:
    from headtrain.config import ConfigError
    from headtrain.configload import find_recipe, load, read_yaml, recipe_names, to_yaml

    if not arguments:
        for name in recipe_names():
            print(f"{name:<20} {read_yaml(find_recipe(name)).get('description', '')}")
        return 0
    if arguments[0] != "show" or len(arguments) < 2:
        raise ConfigError("usage: headtrain recipes, or headtrain recipes show NAME [key=value …]")
    print(to_yaml(load(arguments[1].removeprefix("recipe="), arguments[2:])), end="")
    return 0
