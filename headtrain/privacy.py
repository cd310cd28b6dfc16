"""What may leave this machine: secrets are masked in whatever is printed, local paths cut in whatever is published."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|(API|ACCESS|SECRET|PRIVATE)_?KEY)$", re.IGNORECASE)  # of variables
_SHORTEST = 12  # characters of a secret; shorter values of such variables are switches
_MASKS = (
    (re.compile(r"\b(hf_|sk-|ghp_)[A-Za-z0-9]{16,}"), r"\1***"),
    (re.compile(r"eyJ[\w-]{10,}\.[\w-]+\.[\w-]+"), "***"),  # a JSON web token
    (re.compile(r"(?<=Bearer )[^\s'\"]+"), "***"),
    (re.compile(r"(?<=://)[^/\s@]+(?=@)"), "***"),  # user:password of a URL
    (re.compile(r"(?i)([?&](?:x-amz-[\w-]+|signature|sig|token|api[_-]?key|key-pair-id|policy)=)[^&\s'\"]+"), r"\1***"),
)
_ABSOLUTE = re.compile(r"(?<![\w.:/-])(?:~|/[\w.+@-]+)(?:/[\w.+@-]+)+")  # /a/b or ~/a, not the / of a/b or tokens/s


def secrets() -> set[str]:
    """What must not be shown: the tokens, keys and passwords of the environment, and the saved Hub token."""
    found = {value.strip() for name, value in os.environ.items() if _SECRET.search(name)}
    if hub := sys.modules.get("huggingface_hub.constants"):  # else nothing has read the saved token
        with contextlib.suppress(OSError):  # nobody is logged in
            found.add(Path(hub.HF_TOKEN_PATH).read_text(encoding="utf-8").strip())
    return {value for value in found if len(value) >= _SHORTEST}


def masked(text: str) -> str:
    """The text with *** for every secret: known ones, what looks like a token, signatures and passwords in URLs."""
    for value in sorted(secrets(), key=len, reverse=True):
        text = text.replace(value, "***")
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return text


def mask_logs() -> None:
    """From now on no record that a library of this process logs has a secret in it, at any level."""
    make = logging.getLogRecordFactory()
    if getattr(make, "masks", False):
        return

    def record(*args: Any, **more: Any) -> logging.LogRecord:
        made = make(*args, **more)
        try:
            text = made.getMessage()
        except (TypeError, ValueError):  # the library's message does not fit its arguments
            text = str(made.msg)
        made.msg, made.args = masked(text), None
        return made

    record.masks = True
    logging.setLogRecordFactory(record)


def public(value: Any, run: Path) -> Any:
    """A copy fit for publishing: absolute paths relative to the run or cut to their last part, secrets masked."""
    if isinstance(value, dict):
        return {key: public(item, run) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [public(item, run) for item in value]
    return _public_text(value, run) if isinstance(value, str) else value


def _public_text(text: str, run: Path) -> str:
    text = masked(text.replace(f"{run.absolute()}{os.sep}", ""))
    return _ABSOLUTE.sub(lambda found: found[0].rsplit("/", 1)[-1], text)
