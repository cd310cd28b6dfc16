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

from headtrain.config import SCRATCH, RecipeConfig, TargetConfig
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
    model = {"identity": target, **{key: tree["target"][key] for key in of_target}}
    prompts = {key: tree["data"][key] for key in ("prompts", "filter", "held_out", "valid")}
    if data.responses.backend == "given":  # no target is asked, only its template
        model.pop("dtype"), model.pop("attn_implementation")
    made_from: dict[str, dict[str, Any]] = {
        "prompts": {**prompts, "answers": data.responses.backend == "given", "content": sources},
        "responses": {
            "target": model,
            "responses": tree["data"]["responses"],
            "max_length": data.max_length,
            "seed": config.seed if data.responses.temperature > 0 else None,
        },
        "captures": {
            "dtype": data.captures.dtype,
            "taps": config.head.taps,
            "target": {**model, "dtype": config.target.dtype, "attn_implementation": config.target.attn_implementation},
        },
        "training": {
            "head": {**tree["head"], "init_from": _start_identity(start)},
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
    """sha256 of every prompt file."""
    identities = []
    for source in config.data.prompts:
        path = Path(locate(source.source)).expanduser()
        if path.is_file():
            identities.append({"source": source.source, "sha256": known_sha256(path, run)})
        elif path.is_dir():
            identities.append({"source": source.source, "content": folder_identity(str(path))})
        else:
            raise IdentityError(f"data.prompts: {source.source}: no such file")
    return identities


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
    from huggingface_hub import HfApi, constants, file_download

    revision = config.revision or "main"
    if len(revision) == 40 and all(digit in "0123456789abcdef" for digit in revision):
        return revision
    try:
        return HfApi().model_info(config.model, revision=revision, timeout=20).sha
    except hub_errors() as error:
        folder = file_download.repo_folder_name(repo_id=config.model, repo_type="model")
        ref = Path(constants.HF_HUB_CACHE) / folder / "refs" / revision
        if ref.is_file():
            return ref.read_text().strip()
        raise not_on_the_hub(f"target.model={config.model}", error) from error


def _start_identity(start: str | None) -> str | None:
    return start if start in (None, SCRATCH) else folder_identity(str(head_folder(start, key="head.init_from")))


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
