"""Heads by their place: a folder, or a Hub id, of which just the needed files are fetched."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

from headtrain.files import locate

HEAD_FILES = ["config.json", "model.safetensors"]
MORE_FILES = ["adapter/*"]  # of a head that was trained along with an adapter of its target
_HUB_ID = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w./-]+))?")


class HubError(ValueError):
    """A model or head that is neither on the Hub nor in the local Hub cache; the message says what to do."""


def head_folder(place: str | Path, files: list[str] | None = None, key: str = "head") -> Path:
    """The folder of a head given as a folder, or as a Hub id: `user/name`, `user/name@revision`.

    files: name patterns of what a Hub id is asked for, by default a head of ours; key: whose value `place` is, for the
    message of a HubError. A place that is neither is returned as a path, for the reader to complain about.
    """
    path, hub = Path(locate(str(place))).expanduser(), hub_id(place)
    if path.name in ("", ".."):  # `.` has no name: what lies beside the head is looked for in the folder above
        path = path.resolve()
    if hub is None or path.exists():
        return path
    from huggingface_hub import errors, snapshot_download

    name, revision = hub
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files or HEAD_FILES + MORE_FILES))
    except (*hub_errors(), errors.HFValidationError) as error:
        raise not_on_the_hub(f"{key}={place}", error) from error


def hub_id(place: str | Path) -> tuple[str, str | None] | None:
    """(name, revision or None) where `place` is written like a Hub id, else None."""
    match = _HUB_ID.fullmatch(str(place))
    return (match[1], match[2]) if match else None


def hub_errors() -> tuple[type[Exception], ...]:
    """What the Hub client raises, and its HTTP library when there is no network."""
    from huggingface_hub import errors

    names = [name for name in ("httpx", "httpx2") if importlib.util.find_spec(name)]
    transport = (importlib.import_module(name).HTTPError for name in names)
    return (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, OSError, *transport)


def not_on_the_hub(what: str, error: BaseException) -> HubError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return HubError(
        f"{what}: neither the Hub nor the local Hub cache has it ({reason}); "
        "check the name, the network and `hf auth login`, or give a folder"
    )
