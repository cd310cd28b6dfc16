"""No token, password or signed link is printed, logged, stored or uploaded by a push, however it ends."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from headtrain import cli
from headtrain.privacy import mask_logs, masked

PASSWORD = "correct-horse-battery-staple"


@pytest.fixture
def everything(hub, run, tmp_path, monkeypatch, capfd):
    """everything(…) -> all that a push with these keys printed and logged, with every logger at DEBUG."""
    from huggingface_hub import constants

    said, before = io.StringIO(), logging.getLogRecordFactory()
    handler = logging.StreamHandler(said)
    monkeypatch.setattr(constants, "HF_DEBUG", True)
    monkeypatch.chdir(tmp_path)
    names = [None, "huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3"]
    loggers = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    for logger, _ in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)

    def call(**given: str) -> str:
        words = {"head": str(run / "head"), "repo": "ann/mine"} | given
        cli.main(["push", *(f"{key}={value}" for key, value in words.items())])
        printed = capfd.readouterr()
        return printed.out + printed.err + said.getvalue()

    yield call
    for logger, level in loggers:
        logger.removeHandler(handler)
        logger.setLevel(level)
    logging.setLogRecordFactory(before)


def stored(*folders) -> bytes:
    return b"".join(path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file())


FAULTS = [
    (), ("GET /api/whoami", 401), ("POST .*/create", 403), ("POST .*/preupload", 403), ("PUT /lfs", 500),
    ("PUT /lfs", 403), ("PUT /lfs", "cut"), ("POST .*/commit", 503), ("POST .*/commit", "lost"), ("HEAD", "cut"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_no_secret_is_to_be_found_anywhere_after_a_push(fault, everything, hub, tmp_path, monkeypatch):
    token, signature = hub.log_in(), "5ca1ab1e5ca1ab1e5ca1ab1e"
    monkeypatch.setenv("WANDB_API_KEY", PASSWORD)
    if fault:
        hub.fail(*fault)
    said = everything()
    assert "huggingface" in said or "Request" in said, "the libraries do log"
    for secret in (token, signature, PASSWORD):
        assert secret not in said, said[max(0, said.index(secret) - 300) :][:400]
        sent = b"".join([*hub.bodies, *hub.blobs.values()])
        assert secret.encode() not in stored(tmp_path) + sent


@pytest.mark.parametrize("given", [
    {"repo": "https://ann:TOKEN@hub.example/ann/mine"}, {"repo": "TOKEN"}, {"revision": "x TOKEN"},
    {"private": "TOKEN"}, {"report": "https://hub.example/r.json?token=TOKEN"}, {"token": "TOKEN"}, {"TOKEN": "x"},
    {"head": "/TOKEN/head"},
], ids=lambda given: next(iter(given)))  # fmt: skip
def test_a_token_in_the_wrong_place_is_not_repeated(given, everything, hub):
    for token in (hub.log_in(), "hf_" + 30 * "Zz"):  # this process's, and one that is not
        swapped = {key.replace("TOKEN", token): value.replace("TOKEN", token) for key, value in given.items()}
        said = everything(**swapped)
        assert "error: " in said and token not in said and hub.log == []


@pytest.mark.parametrize("spoiled", ["\x01", "\tx", "é", " ", "\n"], ids=ascii)
def test_a_token_that_is_no_header_is_not_shown_by_the_http_library(spoiled, everything, hub, monkeypatch):
    token = hub.log_in()
    monkeypatch.setenv("HF_TOKEN", token + spoiled + "tail")
    said = everything()
    assert token not in said and "Traceback" not in said and ("error: " in said or "uploaded to" in said)


def test_a_token_of_the_users_login_is_masked_too(everything, hub, monkeypatch):
    from huggingface_hub import constants

    token = hub.log_in().replace("hf_", "own-")
    hub.users[token] = hub.users.pop("hf_" + token.removeprefix("own-"))
    monkeypatch.delenv("HF_TOKEN")
    place = Path(constants.HF_TOKEN_PATH)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(token)
    assert "uploaded to" in everything()
    assert token not in masked(f"a {token} b")


def test_a_traceback_of_a_library_is_masked(hub, monkeypatch, capsys):
    token = hub.log_in()

    def broken(_):
        raise RuntimeError(f"Illegal header value b'Bearer {token}'")

    monkeypatch.setattr(cli, "_push", broken)
    assert cli.main(["push"]) == 1
    said = capsys.readouterr().err
    assert "RuntimeError" in said and "Bearer ***" in said and token not in said


@pytest.mark.parametrize(("text", "shown"), [
    ("https://me:pa55word@hub.example/x", "https://***@hub.example/x"),
    ("PUT https://s3.example/a?X-Amz-Signature=ab12&x=1", "PUT https://s3.example/a?X-Amz-Signature=***&x=1"),
    ("curl -H 'authorization: Bearer abc.def'", "curl -H 'authorization: Bearer ***'"),
    ("hf_abcdefghijklmnopqrstuvwx", "hf_***"), ("sk-abcdefghijklmnopqrst", "sk-***"),
    ("eyJhbGciOiJIUzI1.eyJzdWIiOiIx.SflKxwRJSMeK", "***"),
    *((text, text) for text in ("hf_hub_download_of_a_file", "me@example.org", "3 tokens/s", "a?b=c&token_count=3")),
])  # fmt: skip
def test_what_is_masked_and_what_is_not(text, shown):
    assert masked(text) == shown


def test_short_values_of_such_variables_are_switches_and_stay(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "true")
    monkeypatch.setenv("OTHER_API_KEY", PASSWORD)
    assert masked(f"true {PASSWORD}") == "true ***"


def test_log_records_are_masked_with_their_arguments_and_broken_ones_do_not_stop_the_program(monkeypatch):
    before, said = logging.getLogRecordFactory(), io.StringIO()
    monkeypatch.setenv("SOME_TOKEN", PASSWORD)
    logger, handler = logging.getLogger("test.masks"), logging.StreamHandler(said)
    logger.addHandler(handler)
    try:
        mask_logs()
        mask_logs()
        logger.warning("sent %s", PASSWORD)
        logger.warning("%d of them", "no number")
    finally:
        logging.setLogRecordFactory(before)
        logger.removeHandler(handler)
    assert said.getvalue() == "sent ***\n%d of them\n"


def test_a_child_process_of_a_run_masks_what_its_libraries_log(hub, tmp_path):
    token = hub.log_in()
    script = (
        "import logging, sys; from headtrain import stages, configload\n"
        "configload.load_resolved = lambda _: None\n"
        "stages.STAGES['prompts'] = lambda *_: logging.getLogger('lib').warning('token %s', sys.argv[1])\n"
        "stages.run_stages(['prompts', 'run_dir=.'])"
    )
    done = subprocess.run([sys.executable, "-c", script, token], env=hub.environment, text=True, capture_output=True,
                          check=False, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0 and "token ***" in done.stderr and token not in done.stderr + done.stdout
