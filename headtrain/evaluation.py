"""The `eval` command: heads brought into a run folder and measured there, or on the captures of a run.

Like the pipeline it imports no torch: child processes do the work.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headtrain import children, identity
from headtrain.children import Child, Progress
from headtrain.config import ConfigError, RecipeConfig
from headtrain.files import Manifest, fingerprint, read_json, write_json
from headtrain.hub_read import head_folder
from headtrain.pipeline import opened, result


def evaluate(config: RecipeConfig, places: list[str]) -> None:
    """Acceptance and speed of head folders. Works in a run folder of its own, which holds copies of the heads."""
    heads = named_heads(places)
    if config.run_dir is None:
        marks = [identity.folder_identity(str(head)) for head in heads.values()]
        mark = fingerprint([asdict(config.eval), config.target.model, *marks])[:8]
        config.run_dir = str(Path("runs") / f"eval-{'-'.join(_name_of(head) for head in heads.values())[:80]}-{mark}")
    if (Path(config.run_dir) / "training").is_dir():
        raise ConfigError(f"run_dir={config.run_dir}: a run with a head of its own; give the evaluation another folder")
    with opened(config, heads) as job:
        _bring_heads(heads, job.run)
        job.run_missing(["prompts", "report"] if job.asks_prompts else ["report"])
    print(result(job.run))


def evaluate_offline(places: list[str], run: Path, settings: dict[str, Any]) -> None:
    """Acceptance of heads on a run's captures, without the target. settings: k, dtype, limit; the run's when None."""
    from headtrain.eval.offline import table

    if not (run / "config.yaml").is_file():
        raise ConfigError(f"run_dir={run}: no run folder (no config.yaml); offline=true reads a run's captures")
    if not Manifest(run / "captures").data.get("complete"):
        raise ConfigError(f"{run / 'captures'} is missing or unfinished; `headtrain generate` makes it")
    heads = {name: str(head.absolute()) for name, head in named_heads(places).items()}
    (run / "offline").mkdir(exist_ok=True)
    write_json(run / "offline" / "settings.json", {"heads": heads, **settings})
    argv = children.python("stage", "offline", f"run_dir={run}")
    children.run([Child(argv, run / "logs" / "offline.log")], "offline acceptance", Progress)
    print(table(read_json(run / "offline" / "offline.json")))
    if Manifest(run / "captures").data.get("made_from", {}).get("mode") == "online":
        print("(data.captures.mode=online: only validation rows, and those a fresh head is fitted to, are captured)")
    print(f"\nevery step: {run / 'offline' / 'offline.json'}")


# ------------------------------------------------------------------------------------------------- the heads

def found_head(place: str) -> Path:
    """The folder of a head given as a folder or a Hub id. ConfigError when there is none."""
    path = head_folder(place)
    if not (path / "config.json").is_file():
        raise ConfigError(f"head={place}: not a head's folder (no config.json), and no head on the Hub")
    return path


def named_heads(places: list[str]) -> dict[str, Path]:
    """Folders by id: `head` for a single one, else the folder's name, or the run's where the folder is called head."""
    folders = [found_head(place) for place in places]
    if len(folders) == 1:
        return {"head": folders[0]}
    named: dict[str, Path] = {}
    for folder in folders:
        name = _name_of(folder)
        twins = sum(other == name or other.startswith(f"{name}~") for other in named)
        named[f"{name}~{twins + 1}" if twins else name] = folder
    return named


def _name_of(head: Path) -> str:
    return head.resolve().parent.name if head.name == "head" else head.name


def _bring_heads(heads: dict[str, Path], run: Path) -> None:
    """Copies at run/head, or at run/heads/<id> for several; heads of an earlier evaluation are taken away."""
    several, one = run / "heads", run / "head"
    wanted = {"head": one} if list(heads) == ["head"] else {name: several / name for name in heads}
    for old in [one, several, *(several.iterdir() if several.is_dir() else [])]:
        if old not in (*wanted.values(), *(place.parent for place in wanted.values())):
            shutil.rmtree(old, ignore_errors=True)
    for name, place in wanted.items():
        place.parent.mkdir(exist_ok=True)
        _bring_head(heads[name], place)


def _bring_head(head: Path, place: Path) -> None:
    """A whole copy of the head folder at `place`; another head that lies there is replaced."""
    if place.is_dir() and identity.folder_identity(str(place)) == identity.folder_identity(str(head)):
        return
    part = place.with_name(".head.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(head, part)
    shutil.rmtree(place, ignore_errors=True)
    part.rename(place)
