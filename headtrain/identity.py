"""What a stage's result depends on, as fingerprints: config, the target's identity, the data's content, its parents.

A stage whose fingerprint is unchanged is not run again; a changed one never reuses old data. Keys that only say how or
where a run is carried out (launch, threads, logger, checkpoint interval, device) are left out.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headtrain import vocabfile
from headtrain.config import CARRIED_OUT, OF_SERVERS, SCRATCH, DataConfig, PromptSource, RecipeConfig, TargetConfig
from headtrain.data_gen.readers import is_hub_id
from headtrain.eval.suites import parts
from headtrain.files import fingerprint, locate, read_json, sha256_file, write_json
from headtrain.hub_read import HubError, head_folder, hub_errors, not_on_the_hub

STAGES = ("prompts", "responses", "captures", "training", "report", "export")
PARENTS = {
    "prompts": (), "responses": ("prompts",), "captures": ("responses",), "training": ("prompts", "captures"),
    "report": ("training",), "export": ("training",),
}  # fmt: skip
NOT_IN_TRAINING = ("threads", "save_every", "keep", "log_every", "zero_stage", "offload", "checkpointing")
WHOLE_FILE = 16 * 2**20  # larger files of a model folder are sampled
SAMPLES, SAMPLE = 64, 64 * 1024


class IdentityError(ValueError):
    """A target or a data file whose identity cannot be told; the message says what to do."""


def stage_marks(
    config: RecipeConfig, target: Any, sources: list[Any], head: Any = None, draft_model: Any = None
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Stage -> (fingerprint, what it was made from). `target`, `sources`, `draft_model`: identities as returned below.

    head: the identity of the head folder, or of several by id, that is measured instead of a trained one.
    """
    data, tree, start = config.data, asdict(config), config.head.init_from
    of_target = ("dtype", "attn_implementation", "template_kwargs", "trust_remote_code")
    answers = {key: value for key, value in tree["data"]["responses"].items() if key not in OF_SERVERS}
    if data.responses.model:  # who answers counts, not where or how fast
        answers["model"] = data.responses.model
    model = {"identity": target, **{key: tree["target"][key] for key in of_target}}
    prompts = {key: tree["data"][key] for key in ("filter", "held_out", "valid")}
    # Keys that came later count where they are set: what older runs have made stays theirs.
    prompts["prompts"] = [
        {key: value for key, value in place.items() if value is not None or key in ("source", "limit")}
        for place in tree["data"]["prompts"]
    ]
    for key in ("turns", "keep_truncated"):
        if tree["data"][key] != getattr(DataConfig, key):
            prompts[key] = tree["data"][key]
    if config.target.chat_template:
        model["chat_template"] = file_sha256(config.target.chat_template, "target.chat_template")
    if data.responses.backend != "local":  # no target is asked here, only its template
        model.pop("dtype"), model.pop("attn_implementation")
    captures = {"dtype": data.captures.dtype}
    if data.captures.backend != "local":
        engine = {key: value for key, value in tree["data"]["captures"]["engine"].items() if key not in CARRIED_OUT}
        captures |= {"backend": data.captures.backend, "engine": engine}
    if data.captures.mode == "online":
        captures["mode"] = data.captures.mode
    made_from: dict[str, dict[str, Any]] = {
        "prompts": {**prompts, "answers": data.responses.backend == "given", "content": sources},
        "responses": {
            "target": model,
            "responses": answers,
            "max_length": data.max_length,
            "seed": config.seed if data.responses.temperature > 0 else None,
        },
        "captures": {
            **captures,
            "taps": config.head.taps,
            "target": {**model, "dtype": config.target.dtype, "attn_implementation": config.target.attn_implementation},
        },
        "training": {
            "head": {**tree["head"], "init_from": _start_identity(start), **_fixed_vocab(config)},
            "train": {key: value for key, value in tree["train"].items() if key not in NOT_IN_TRAINING},
            "seed": config.seed,
        },
        "report": {
            "eval": tree["eval"], "seed": config.seed, "suite_files": suite_files(config), "draft_model": draft_model,
        },
        "export": tree["export"],
    }
    if head is not None:
        made_from["training"] = {"given_head": head}
    marks: dict[str, tuple[str, dict[str, Any]]] = {}
    for stage in STAGES:
        made_from[stage]["parents"] = {parent: marks[parent][0] for parent in PARENTS[stage]}
        marks[stage] = (fingerprint({"stage": stage, **made_from[stage]}), made_from[stage])
    return marks


def suite_files(config: RecipeConfig) -> dict[str, str]:
    """sha256 of every suite that is a file (`NAME=FILE` too), a digest of every one that is a folder."""
    places = {suite: place for suite in config.eval.suites if (place := parts(suite)[1])}
    paths = {suite: Path(locate(place)).expanduser() for suite, place in places.items()}
    files = {suite: sha256_file(path) for suite, path in paths.items() if path.is_file()}
    return files | {suite: folder_identity(str(path)) for suite, path in paths.items() if path.is_dir()}


def source_identities(config: RecipeConfig, run: Path) -> list[dict[str, Any]]:
    """sha256 of every prompt file, a digest of every folder, the commit of every Hub data set."""
    identities = []
    for source in config.data.prompts:
        path = Path(locate(source.source)).expanduser()
        if path.is_file():
            identities.append({"source": source.source, "sha256": known_sha256(path, run)})
        elif path.is_dir():
            identities.append({"source": source.source, "content": folder_identity(str(path))})
        elif is_hub_id(source.source):
            identities.append(_data_set_identity(source, run))
        else:
            raise IdentityError(f"data.prompts: {source.source}: no such file")
    return identities


def _data_set_identity(source: PromptSource, run: Path) -> dict[str, Any]:
    """The commit of a Hub data set, pinned in the run folder at the first start; `source.revision` is set to it."""
    path, asked = run / "data_sets.json", f"{source.source}@{source.revision or 'main'}"
    pins = read_json(path) if path.is_file() else {}
    if asked not in pins:
        pins[asked] = _commit("dataset", source.source, source.revision or "main", "data.prompts: ")
        run.mkdir(parents=True, exist_ok=True)
        write_json(path, pins)
    source.revision = pins[asked]
    return {"source": source.source, "commit": source.revision}


def file_sha256(place: str, key: str) -> str:
    path = Path(locate(place)).expanduser()
    if not path.is_file():
        raise IdentityError(f"{key}={place}: no such file")
    return sha256_file(path)


def known_sha256(path: Path, run: Path) -> str:
    """sha256 of a file; remembered in the run folder while its size and time stay the same."""
    memory = run / "hashes.json"
    known = read_json(memory) if memory.is_file() else {}
    state = [os.path.getsize(path), path.stat().st_mtime_ns]
    name = str(path.resolve())
    if name not in known or known[name][:2] != state:
        known[name] = [*state, sha256_file(path)]
        run.mkdir(parents=True, exist_ok=True)
        write_json(memory, known)
    return known[name][2]


def target_identity(config: TargetConfig, run: Path, pins: str = "target.json") -> dict[str, Any]:
    """What tells this target from every other: file checksum, folder content, or Hub id and commit.

    A Hub model without a commit is pinned in the run folder at the first start: a later change of its branch does not
    change a run under way. Sets `config.revision` to the commit. pins: the file of the run folder that keeps it.
    An adapter is told apart, and pinned, in the same way.
    """
    found = _model_identity(config, run, pins)
    if config.adapter:
        asked = TargetConfig(model=config.adapter, revision=config.adapter_revision)
        try:
            found["adapter"] = _model_identity(asked, run, "adapter.json")
        except (IdentityError, HubError) as error:
            raise IdentityError(str(error).replace("target.model=", "target.adapter=")) from error
        config.adapter_revision = asked.revision
    return found


def _model_identity(config: TargetConfig, run: Path, pins: str) -> dict[str, Any]:
    if not config.model:
        raise IdentityError("target.model is not set: give a Hub id, a folder, a .gguf file or package:NAME/FILE")
    path = Path(locate(config.model)).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        raise IdentityError(f"target.model={config.model}: a file must be a .gguf; or give a folder or a Hub id")
    if path.is_file():
        return {"model": path.name, "sha256": known_sha256(path, run)}
    if path.is_dir():
        return {"model": path.name, "content": folder_identity(str(path))}
    looks_local = path.suffix in {".gguf", ".safetensors"} or config.model.startswith((".", "/", "~"))
    if looks_local or config.model.count("/") > 1:
        raise IdentityError(f"target.model={config.model}: no such file or folder, and not a Hub id (user/name)")
    pin_path = run / pins
    pin = read_json(pin_path) if pin_path.is_file() else {}
    if (pin.get("model"), pin.get("asked")) != (config.model, config.revision):
        pin = {"model": config.model, "asked": config.revision, "commit": hub_commit(config)}
        run.mkdir(parents=True, exist_ok=True)
        write_json(pin_path, pin)
    config.revision = pin["commit"]
    return {"model": config.model, "commit": pin["commit"]}


def hub_commit(config: TargetConfig) -> str:
    """The commit that a Hub model's revision stands for: from the Hub, else from the local Hub cache."""
    return _commit("model", config.model, config.revision or "main", "target.model=")


def _commit(kind: str, name: str, revision: str, key: str) -> str:
    from huggingface_hub import HfApi, constants, file_download

    if len(revision) == 40 and all(digit in "0123456789abcdef" for digit in revision):
        return revision
    try:
        return HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=20).sha
    except hub_errors() as error:
        folder = file_download.repo_folder_name(repo_id=name, repo_type=kind)
        ref = Path(constants.HF_HUB_CACHE) / folder / "refs" / revision
        if ref.is_file():
            return ref.read_text().strip()
        raise not_on_the_hub(f"{key}{name}", error) from error


def _start_identity(start: str | None) -> str | None:
    return start if start in (None, SCRATCH) else folder_identity(str(head_folder(start, key="head.init_from")))


def _fixed_vocab(config: RecipeConfig) -> dict[str, Any]:
    """A draft vocabulary in a file counts by what is in it."""
    asked = config.head.draft_vocab
    return {"draft_vocab": {"mapping": vocabfile.read(asked).mapping}} if vocabfile.is_file(asked) else {}


def folder_identity(folder: str | None) -> str | None:
    """A digest of a model folder: names, sizes, and content (small files whole, weights by 64 samples of 64 KiB)."""
    if folder is None:
        return None
    digest = hashlib.sha256()
    root = Path(locate(folder)).expanduser()
    if not root.is_dir():
        raise IdentityError(f"{folder}: no such folder")
    for path in sorted(p for p in root.rglob("*") if p.is_file() and not p.name.startswith(".")):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(root)}\0{size}\0".encode())
        with open(path, "rb") as handle:
            if size <= WHOLE_FILE:
                digest.update(handle.read())
                continue
            for n in range(SAMPLES):
                handle.seek(n * (size - SAMPLE) // (SAMPLES - 1))
                digest.update(handle.read(SAMPLE))
    return digest.hexdigest()[:32]
