"""A head on the Hub: what is checked before, which files go there, and an upload that goes on where it stopped.

The token is the Hub client's own (`hf auth login`, or HF_TOKEN): it is never read, shown or stored here.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headtrain.config import PushConfig
from headtrain.configload import read_yaml
from headtrain.export import ExportError
from headtrain.export.brought import ADAPTER, adapter_of
from headtrain.export.model_card import Facts, card, commit_message, local_target, name_of, read_licence
from headtrain.files import read_json, sha256_file
from headtrain.hub_read import hub_errors
from headtrain.privacy import mask_logs, masked, public, secrets

LICENCES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")
REPORT = ("report.json", "report.html")
OURS = ("README.md", "config.json", "model.safetensors", *ADAPTER, *REPORT, *LICENCES)
TRIES = 5
PASSING = (408, 429, 500, 502, 503, 504)  # what the Hub answers when it is worth asking again

Content = Path | bytes


# ------------------------------------------------------------------------------------------------ before


def check(asked: PushConfig) -> str:
    """Makes sure that the token may write to the repository, which is made when there is none; says what was found.

    Raises ExportError: no token or a wrong one, no network, no permission, a public repository where a private one is
    asked for, or one that holds something other than a head.
    """
    from huggingface_hub import HfApi

    mask_logs()
    with _explained(asked):
        api = HfApi()
        who = retried(api.whoami)
        role = ((who.get("auth") or {}).get("accessToken") or {}).get("role")
        if role == "read":
            raise ExportError(f"push.repo={asked.repo}: the token of {who['name']} may only read; use another")
        info = _found(api, asked.repo)
        made = info is None
        if made:
            retried(lambda: api.create_repo(asked.repo, private=asked.private, exist_ok=True))
            info = _found(api, asked.repo)
        if info is None:
            raise ExportError(f"push.repo={asked.repo}: the name is taken by a repository that the token cannot see")
        retried(lambda: api.auth_check(asked.repo, write=True))
        if asked.private and info.private is False:
            raise ExportError(
                f"push.repo={asked.repo} is public, and push.private=true: make it private in its settings, or set "
                "push.private=false"
            )
        _only_a_head(api, asked)
    state = "made" if made else "exists"
    return f"push: {asked.repo} {state} ({'private' if info.private else 'public'}), {who['name']} may write to it"


def _found(api: Any, repo: str, revision: str | None = None) -> Any:
    """What the Hub says of a repository, or of its branch; None when it shows none."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        return retried(lambda: api.model_info(repo, revision=revision, timeout=60))
    except (RepositoryNotFoundError, RevisionNotFoundError):
        return None


def _only_a_head(api: Any, asked: PushConfig) -> None:
    """ExportError where the repository holds files that no head has, or the config.json of another model."""
    info = _found(api, asked.repo, asked.revision) or _found(api, asked.repo)
    there = [file.rfilename for file in info.siblings or []]
    strange = sorted(name for name in there if name not in (*OURS, ".gitattributes"))
    if "config.json" in there and not strange:
        with TemporaryDirectory() as folder:
            config = read_json(retried(lambda: api.hf_hub_download(
                asked.repo, "config.json", revision=info.sha, local_dir=folder
            )), "look at it on the Hub")  # fmt: skip
        strange = [] if isinstance(config, dict) and "headtrain" in config else ["config.json of another model"]
    if strange:
        listed = ", ".join(strange[:3]) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
        raise ExportError(
            f"push.repo={asked.repo} holds something other than a head of headtrain's ({listed}), and an upload would "
            "mix the two; name a new repository"
        )


# ------------------------------------------------------------------------------------------------ which files


def gather(head: Path, repo: str, report: Path | None = None, ask: bool = False) -> tuple[dict[str, Content], Facts]:
    """(name in the repository -> file or content, facts of the card) of a head's folder.

    report: report.json about this head; default: the one of the run the head lies in, if it is about these weights.
    ask: look on the Hub for the licence of a target from there; else in the local Hub cache only. ExportError where the
    folder is no head's, or where a file holds a secret or a path of this machine.
    """
    head, made = head.absolute(), report
    report = made or head.parent / "report" / "report.json"
    facts = _facts(head, report, needed=made is not None)
    files = _licence(facts, ask) | {name: head / name for name in LICENCES if (head / name).is_file()}
    config = public(facts.config, head.parent)
    files["config.json"] = head / "config.json" if config == facts.config else _json(config)
    files["model.safetensors"] = head / "model.safetensors"
    files |= adapter_of(head, facts.hub_target)
    facts.own_adapter = ADAPTER[0] in files
    if facts.report:
        files |= _report(facts.report, report, head.parent)
    files["README.md"] = card(facts, repo).encode()
    _refuse_leaks(files, [Path.home(), Path.cwd(), head.parent])
    return {name: files[name] for name in OURS if name in files}, facts


def _report(content: dict[str, Any], place: Path, run: Path) -> dict[str, Content]:
    """report.json and the page beside it, with names in the place of paths, relative ones too."""
    paths = [content["target"].get("model"), *((content.get("data") or {}).get("sources") or [])]
    names = {path.encode(): name_of(path).encode() for path in paths if path and name_of(path) != path}
    files, page = {"report.json": _json(public(content, run))}, place.with_name("report.html")
    if page.is_file():
        files["report.html"] = page.read_bytes()
    for path, name in names.items():
        files = {file: data.replace(path, name) for file, data in files.items()}
    return dict(files)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _facts(head: Path, report: Path, needed: bool) -> Facts:
    for name in ("config.json", "model.safetensors"):
        if not (head / name).is_file():
            raise ExportError(f"{head} is not a head's folder: {name} is missing")
    config = read_json(head / "config.json", "copy the head again")
    if not isinstance(config, dict) or not isinstance(config.get("headtrain"), dict):
        raise ExportError(f"{head / 'config.json'} has no `headtrain` section, so this is no head of headtrain's")
    settings = head.parent / "config.yaml"
    trained = settings.is_file() and (head.parent / "training").is_dir()  # else an evaluation's, which did not make it
    facts = Facts(config, recipe=read_yaml(settings) if trained else {})
    if not report.is_file():
        if needed:
            raise ExportError(f"report={report}: no such file")
        return facts
    content, mark = read_json(report), sha256_file(head / "model.safetensors")
    facts.head_id = next((entry["id"] for entry in content["heads"] if entry.get("sha256") == mark), None)
    if facts.head_id is not None:
        facts.report = content
    elif needed:
        raise ExportError(f"report={report} is about other weights than {head / 'model.safetensors'}")
    return facts


def _licence(facts: Facts, ask: bool) -> dict[str, Content]:
    """The licence's files of the target, where they are to be had; what its own card says goes into the facts."""
    place = local_target(facts.recipe) if not facts.hub_target else None
    if place and not place.is_dir():
        facts.licence = read_licence(place)
        return {}
    names = ("README.md", *LICENCES)
    found = {name: place / name for name in names if (place / name).is_file()} if place else {}
    if facts.hub_target:
        found = _of_hub_target(facts.hub_target, facts.target["commit"], names, ask)
    if readme := found.pop("README.md", None):
        facts.licence = read_licence(readme.parent)
    return dict(found)


def _of_hub_target(target: str, commit: str | None, names: tuple[str, ...], ask: bool) -> dict[str, Path]:
    """Those of a target's files that it has, and that the Hub or its local cache gives."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if not ask:
        cached = {name: try_to_load_from_cache(target, name, revision=commit) for name in names}
        return {name: Path(place) for name, place in cached.items() if isinstance(place, str)}
    api = HfApi()
    try:
        there = {file.rfilename for file in api.model_info(target, revision=commit, timeout=60).siblings or []}
        wanted = [name for name in names if name in there]
        return {name: Path(api.hf_hub_download(target, name, revision=commit)) for name in wanted}
    except (*hub_errors(), ValueError) as error:
        print(f"note: the licence of {target} cannot be read on the Hub ({_status(error)[0] or type(error).__name__})")
        return {}


def _refuse_leaks(files: dict[str, Content], roots: list[Path]) -> None:
    """ExportError naming the file that holds a secret, or a path of this machine."""
    places = [rf"(?<![\w.:/-]){re.escape(str(root))}(?=/)".encode() for root in roots if len(root.parts) > 1]
    for name, content in files.items():
        if name.endswith(".safetensors"):
            continue
        data = content if isinstance(content, bytes) else content.read_bytes()
        if any(secret.encode() in data for secret in secrets()):
            raise ExportError(f"{name} has a token or password of this environment in it; nothing was uploaded")
        if found := next(filter(None, (re.search(place, data) for place in places)), None):
            raise ExportError(f"{name} has the local path {found[0].decode()}/… in it; nothing was uploaded")


# ------------------------------------------------------------------------------------------------ the upload


def push(head: Path, asked: PushConfig, report: Path | None = None) -> str:
    """Uploads a head's files in one commit, or with push.dry_run only lists them; returns what to tell the user.

    Files that the repository has already are not sent again; an earlier head's report and adapter go where this one has
    none.
    """
    mask_logs()
    branch = asked.revision or "main"
    files, facts = gather(head, asked.repo, report)  # what is wrong here is said before the Hub is asked anything
    if asked.dry_run:
        kind = "private" if asked.private else "public"
        return f"would upload to {asked.repo} ({kind}), branch {branch}:\n{_listed(files)}\nnothing was sent (dry run)"
    print(check(asked), flush=True)
    files, facts = gather(head, asked.repo, report, ask=True)
    with _explained(asked):
        place, new = _upload(files, asked, commit_message(facts))
    return masked(f"uploaded to {place}, branch {branch}:\n{_listed(files)}" if new else f"{place} has it all already")


def _listed(files: dict[str, Content]) -> str:
    return "\n".join(f"  {name:<18} {_size(content):>14,} B" for name, content in files.items())


def _size(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _upload(files: dict[str, Content], asked: PushConfig, message: str) -> tuple[str, bool]:
    """(the repository's address, whether anything was new)."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, repo, branch = HfApi(), asked.repo, asked.revision or "main"
    if asked.revision:
        retried(lambda: api.create_branch(repo, branch=branch, exist_ok=True))
    before = retried(lambda: api.model_info(repo, revision=branch))
    there = {file.rfilename for file in before.siblings or []}
    old = [name for name in (*REPORT, *ADAPTER) if name in there and name not in files]  # of an earlier head

    def once() -> Any:
        # Anew in each try: a commit whose answer was lost is seen to be there, and not made twice.
        added = [CommitOperationAdd(name, content) for name, content in files.items()]
        _patient(lambda: api.preupload_lfs_files(repo, added, revision=branch, free_memory=False))
        gone = [CommitOperationDelete(name) for name in old]
        return api.create_commit(repo, [*added, *gone], commit_message=message, revision=branch)

    return f"{api.endpoint}/{repo}", retried(once).oid != before.sha


class _GaveUpError(RuntimeError):
    """A step that has been tried often enough by the Hub client itself."""


def _patient(call: Callable[[], Any]) -> None:
    """A call whose requests the Hub client repeats itself, six times each: its failure is final."""
    try:
        call()
    except (*hub_errors(), RuntimeError) as error:
        print(file=sys.stderr)  # ends the line of a progress bar
        raise _GaveUpError(str(error)) from error


def retried(call: Callable[[], Any]) -> Any:
    """The result of a call, tried TRIES times while the Hub is busy or the connection breaks. Other errors: at once."""
    for wait in (*(2**n for n in range(TRIES - 1)), None):
        try:
            return call()
        except (*hub_errors(), json.JSONDecodeError) as error:
            if wait is None or not _passes(error):
                raise
        time.sleep(wait)


def _passes(error: BaseException) -> bool:
    """Whether another try may end better."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, json.JSONDecodeError):  # the page of a busy gateway, where the client expects JSON
        return True
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in PASSING
    broken = ("TimeoutException", "NetworkError", "RemoteProtocolError")  # of the HTTP library, httpx or httpx2
    return not isinstance(error, OfflineModeIsEnabled) and any(kind.__name__ in broken for kind in type(error).__mro__)


@contextlib.contextmanager
def _explained(asked: PushConfig) -> Iterator[None]:
    """What the Hub client raises, as one line that says what to do."""
    try:
        yield
    except ExportError:
        raise
    except (*hub_errors(), RuntimeError, ValueError) as error:
        raise ExportError(f"push.repo={asked.repo}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    if isinstance(error, LocalTokenNotFoundError):
        return "there is no Hub token; run `hf auth login`, or set HF_TOKEN"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or set push.dry_run=true"
    status, said = _status(error)
    if status == 404 and "/xet-" in said:
        return "this Hub lacks the storage that hf_xet uploads to; set HF_HUB_DISABLE_XET=1"
    words = {
        None: "the Hub cannot be reached, or the upload broke off; the same command goes on from there",
        401: "the Hub does not accept the token; run `hf auth login --force`, or correct HF_TOKEN",
        403: "the token may not write there; use one with write permission, or name a repository of yours",
        404: "there is no such repository, or the token cannot see it",
    }
    found = words.get(status, "the Hub cannot do it now; the same command goes on from there")
    return f"{found} ({': '.join([f'status {status}'] * bool(status) + [said] * bool(said))})"


def _status(error: BaseException) -> tuple[int | None, str]:
    """(HTTP status, the server's message) of an error or of what caused it; None: there was no answer."""
    from huggingface_hub.errors import HfHubHTTPError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    if cause is not None:
        return cause.response.status_code, next(iter((cause.server_message or "").splitlines()), "")
    said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    found = re.search(r"HTTP status \w+ error \((\d{3})", said)  # of hf_xet, which has no types for them
    return int(found[1]) if found else None, said
