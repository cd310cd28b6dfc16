"""Pushing a head to the Hub: the real client over HTTP, against a small Hub on the loopback interface."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from headtrain import cli, pipeline
from headtrain.config import PushConfig
from headtrain.export import ExportError
from headtrain.export import hub as pushing

FILES = {"README.md", "config.json", "model.safetensors", "report.json", "report.html"}


@pytest.fixture
def push(run, hub, capsys):
    """push(key=value…) -> (exit status, what was printed) of `headtrain push` of the run's head to ann/mine."""

    def call(**given: str) -> tuple[int, str]:
        words = {"head": str(run / "head"), "repo": "ann/mine"} | given
        status = cli.main(["push", *(f"{key}={value}" for key, value in words.items())])
        said = capsys.readouterr()
        return status, said.out + said.err

    return call


# ------------------------------------------------------------------------------------------------ what goes there


def test_the_head_and_nothing_else_of_its_run_goes_into_a_private_repository(push, hub, run):
    hub.log_in()
    status, said = push()
    assert status == 0, said
    assert hub.repos["ann/mine"].private and set(hub.files("ann/mine")) == FILES
    for name in ("config.json", "model.safetensors"):
        assert hub.files("ann/mine")[name] == (run / "head" / name).read_bytes()
    report = json.loads(hub.files("ann/mine")["report.json"])
    assert report == json.loads((run / "report" / "report.json").read_text())
    assert hub.messages("ann/mine")[1:] == ["EAGLE-3 head, tau 2.50 (heldout, K = 5, greedy)"]
    assert "ann/mine made (private), ann may write to it" in said
    assert f"uploaded to {hub.url}/ann/mine, branch main" in said
    assert hub.asked("PUT /lfs") and hub.waits == []


def test_an_adapter_that_the_head_brings_goes_along_and_the_card_says_so(push, hub, run, made):
    made.head(run, type="medusa", unroll=3, taps=[], draft_vocab_size=384)
    (run / "head" / "adapter").mkdir()
    told = {"peft_type": "LORA", "base_model_name_or_path": "/home/ann/models/Target-1B"}
    (run / "head" / "adapter" / "adapter_config.json").write_text(json.dumps(told))
    (run / "head" / "adapter" / "adapter_model.safetensors").write_bytes(b"factors")
    (run / "head" / "adapter" / "README.md").write_text("made on /home/ann")
    hub.log_in()
    assert push()[0] == 0
    files = hub.files("ann/mine")
    assert set(files) == FILES | {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    assert files["adapter/adapter_model.safetensors"] == b"factors"
    assert json.loads(files["adapter/adapter_config.json"])["base_model_name_or_path"] == "lab/Target-1B"
    card = files["README.md"].decode()
    assert "`lab/Target-1B` (commit" in card and "with the low-rank factors in `adapter/` merged into it" in card
    assert "vllm serve TARGET" in card and "headtrain eval head=ann/mine target=lab/Target-1B" in card
    (run / "head" / "adapter" / "adapter_model.safetensors").unlink()
    status, said = push()
    assert status == 2 and "adapter_model.safetensors is missing" in said
    (run / "head" / "adapter" / "adapter_config.json").unlink()
    (run / "head" / "adapter" / "README.md").unlink()
    (run / "head" / "adapter").rmdir()
    assert push()[0] == 0 and set(hub.files("ann/mine")) == FILES


def test_a_dry_run_lists_the_same_files_with_their_sizes_and_sends_nothing(push, hub):
    status, said = push(dry_run="true")
    assert status == 0 and hub.log == [] and hub.repos == {}
    listed = dict(line.split()[:2] for line in said.splitlines() if line.endswith(" B"))
    hub.log_in()
    push()
    assert {name: int(size.replace(",", "")) for name, size in listed.items()} == {
        name: len(data) for name, data in hub.files("ann/mine").items()
    }
    assert "nothing was sent" in said and "(private)" in said


def test_a_second_push_sends_nothing_new_and_makes_no_commit(push, hub, run):
    hub.log_in()
    push()
    hub.log.clear()
    status, said = push()
    assert status == 0 and "ann/mine has it all already" in said
    assert hub.asked("PUT|/commit/") == [] and len(hub.messages("ann/mine")) == 2
    (run / "report" / "report.html").write_text("a better page")
    hub.log.clear()
    push()
    assert hub.files("ann/mine")["report.html"] == b"a better page"
    assert hub.asked("PUT") == [] and len(hub.asked("/commit/")) == 1, "the weights are there already"


def test_the_report_of_an_earlier_head_goes_when_the_new_one_has_none(push, hub, run):
    hub.log_in()
    push()
    by_hand = {"LICENSE": b"put there by hand"}
    hub.repos["ann/mine"].commit("main", "a licence", hub.repos["ann/mine"].at("main")[2] | by_hand)
    weights = run / "head" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"1234")
    assert push()[0] == 0 and set(hub.files("ann/mine")) == FILES - {"report.json", "report.html"} | {"LICENSE"}
    assert "there is no report about these weights" in hub.files("ann/mine")["README.md"].decode()
    assert hub.messages("ann/mine")[-1] == "EAGLE-3 head, not measured"


def test_a_branch_is_made_and_filled_and_main_stays_as_it_is(push, hub):
    hub.log_in()
    for _ in range(2):
        status, said = push(revision="v2/try")
        assert (status == 0 and "branch v2/try" in said) or "has it all already" in said
    assert set(hub.files("ann/mine", "v2/try")) == FILES and hub.files("ann/mine") == {}
    assert len(hub.messages("ann/mine", "v2/try")) == 2


def test_relative_paths_in_the_report_become_names(run, made):
    data = {"sources": ["client/x/chats.jsonl"]}
    made.report(run, [made.result()], data=data, target={"model": "../client/tuned"})
    (run / "report" / "report.html").write_text("<p>../client/tuned on client/x/chats.jsonl")
    files, _ = pushing.gather(run / "head", "ann/mine")
    report = json.loads(files["report.json"])
    assert (report["target"]["model"], report["data"]["sources"]) == ("tuned", ["chats.jsonl"])
    assert files["report.html"] == b"<p>tuned on chats.jsonl"


def test_licence_texts_go_along_the_targets_and_those_beside_the_head(push, hub, run):
    hub.log_in()
    card = "---\nlicense: other\nlicense_name: lab-1\nlicense_link: LICENSE\n---\n# Target\n"
    hub.add_repo("lab/Target-1B", files={"README.md": card.encode(), "LICENSE": b"as is", "NOTICE": b"of lab"})
    hub.repos["lab/Target-1B"].branches["main"].append((40 * "c", "", hub.repos["lab/Target-1B"].at("main")[2]))
    (run / "head" / "NOTICE").write_text("mine")
    status, said = push()
    assert status == 0, said
    files = hub.files("ann/mine")
    assert (files["LICENSE"], files["NOTICE"]) == (b"as is", b"mine") and set(files) == FILES | {"LICENSE", "NOTICE"}
    assert "license: other\nlicense_name: lab-1\nlicense_link: LICENSE\n" in files["README.md"].decode()


def test_a_public_repository_is_made_only_when_asked_for(push, hub):
    hub.log_in()
    assert push(private="false")[0] == 0 and not hub.repos["ann/mine"].private
    status, said = push()
    assert status == 2 and "ann/mine is public, and push.private=true" in said


def test_a_repository_of_an_organisation_and_one_that_is_there_empty_are_filled(push, hub):
    hub.log_in()
    hub.add_repo("lab/mine")
    assert push(repo="lab/mine")[0] == 0 and set(hub.files("lab/mine")) == FILES
    assert hub.asked("/api/repos/create") == []


# ------------------------------------------------------------------------------------------------ what is refused


REFUSED = {
    "no token": (None, {}, "there is no Hub token; run `hf auth login`, or set HF_TOKEN"),
    "a wrong token": ("unknown", {}, "the Hub does not accept the token; run `hf auth login --force`, or correct HF_T"),
    "a token that reads": ("read", {}, "the token of ann may only read"),
    "a name of someone else's": ("write", {"repo": "eve/mine"}, "the token may not write there"),
    "a repository of someone else's": ("write", {"repo": "eve/open"}, "the token may not write there"),
    "a hidden one": ("write", {"repo": "eve/hidden"}, "the token may not write there"),
    "another model": ("write", {"repo": "ann/model"}, "(model-00001.safetensors, tokenizer.json), and an upload"),
    "another model's config": ("write", {"repo": "ann/bare"}, "(config.json of another model)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_pushed_is_refused_in_one_line_before_anything_is_sent(name, push, hub, monkeypatch):
    role, given, reason = REFUSED[name]
    if role:
        hub.log_in(role)
    if role == "unknown":
        monkeypatch.setenv("HF_TOKEN", "hf_" + 34 * "x")
    hub.add_repo("eve/open", private=False)
    hub.add_repo("eve/hidden")
    hub.add_repo("ann/model", files={"model-00001.safetensors": b"1", "tokenizer.json": b"{}", "config.json": b"{}"})
    hub.add_repo("ann/bare", files={"config.json": b'{"model_type": "llama"}'})
    before = {repo: hub.messages(repo) for repo in hub.repos}
    status, said = push(**given)
    assert status == 2 and said.count("\n") == 1 and reason in said
    assert said.startswith(f"error: push.repo={given.get('repo', 'ann/mine')}")
    assert {repo: hub.messages(repo) for repo in hub.repos} == before
    assert len(hub.asked("^(GET|POST)")) <= 6 and hub.waits == [], "nothing of this is tried again"


def test_without_a_network_the_reason_is_said_and_a_dry_run_works(push, hub, monkeypatch):
    from huggingface_hub import constants

    hub.log_in()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in push()[1] and push(dry_run="true")[0] == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.close()
    status, said = push()
    assert status == 2 and "the Hub cannot be reached" in said and len(hub.waits) == pushing.TRIES - 1


NO_HEAD = {
    "no weights": (lambda run: (run / "head" / "model.safetensors").unlink(), {}, "model.safetensors is missing"),
    "no config": (lambda run: (run / "head" / "config.json").unlink(), {}, "config.json is missing"),
    "an engine's config": (
        lambda run: (run / "head" / "config.json").write_text("{}"), {}, "has no `headtrain` section"
    ),
    "a report that is not there": (lambda run: None, {"report": "nowhere.json"}, "report=nowhere.json: no such file"),
    "a report about others": (
        lambda run: (run / "head" / "model.safetensors").write_bytes(b"others"), {"report": "report/report.json"},
        "is about other weights",
    ),
    "a link in the place of a name": (
        lambda run: None, {"repo": "https://hub.example/ann/mine"}, "allowed: USER/NAME on the Hub"
    ),
    "a commit for a branch": (lambda run: None, {"revision": 40 * "0"}, "allowed: the name of a branch"),
    "a key that is none": (lambda run: None, {"privat": "true"}, "did you mean private?"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_HEAD)
def test_a_folder_that_is_no_head_and_keys_that_mean_nothing_are_refused_before_the_hub_is_asked(
    name, push, hub, run, monkeypatch
):
    spoil, given, reason = NO_HEAD[name]
    monkeypatch.chdir(run)
    spoil(run)
    hub.log_in()
    status, said = push(**given)
    assert status == 2 and reason in said and hub.log == []


# ------------------------------------------------------------------------------------------------ faults on the way


@pytest.mark.parametrize("pattern", ["GET /api/whoami", "POST /api/repos/create", "GET .*/auth-check/write",
                                     "POST .*/preupload/", "POST .*/objects/batch", "PUT /lfs", "POST .*/commit/",
                                     "POST /api/validate-yaml"])  # fmt: skip
@pytest.mark.parametrize("fault", [500, 503, 429, "cut", "lost"])
def test_a_fault_that_passes_is_waited_for_and_the_upload_is_whole(pattern, fault, push, hub, run):
    hub.log_in()
    hub.fail(pattern, fault, times=2)
    status, said = push()
    assert status == 0, said
    assert set(hub.files("ann/mine")) == FILES and hub.waits
    assert hub.files("ann/mine")["model.safetensors"] == (run / "head" / "model.safetensors").read_bytes()
    assert len(hub.messages("ann/mine")) == 2, "one commit, also when its answer was lost"
    assert len(hub.asked(pattern)) <= 8 and len(hub.asked("PUT /lfs")) <= 3


@pytest.mark.parametrize(("pattern", "status", "most", "reason"), [
    ("POST .*/preupload/", 403, 1, "may not write there"), ("PUT /lfs", 403, 1, "may not write there"),
    ("POST .*/commit/", 403, 1, "may not write there"), ("POST .*/commit/", 401, 1, "does not accept the token"),
    ("GET /api/whoami", 500, pushing.TRIES, "cannot do it now"), ("PUT /lfs", 500, 6, "cannot do it now"),
    ("POST .*/preupload/", 503, 6, "cannot do it now"), ("POST .*/objects/batch", 500, 6, "cannot do it now"),
    ("PUT /lfs", "cut", 6, "cannot be reached"), ("POST .*/commit/", 503, pushing.TRIES, "cannot do it now"),
])  # fmt: skip
def test_a_fault_that_stays_ends_with_a_clear_error_after_few_tries_and_the_next_push_goes_on(
    pattern, status, most, reason, push, hub, run
):
    hub.log_in()
    hub.fail(pattern, status, message="Your storage patterns tripped our internal systems!")
    code, said = push()
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said
    line = lines[0]
    assert code == 2 and reason in line and "Traceback" not in said
    assert ("storage patterns" in line) == isinstance(status, int)
    assert len(hub.asked(pattern)) == most and hub.files("ann/mine") == {} if "ann/mine" in hub.repos else True
    assert (run / "head" / "model.safetensors").is_file()
    hub.faults.clear()
    hub.log.clear()
    assert push()[0] == 0 and set(hub.files("ann/mine")) == FILES
    assert len(hub.asked("PUT /lfs")) == ("commit" not in pattern), "what has arrived is not sent again"


def test_a_hub_without_the_newer_storage_protocol_is_named_with_the_remedy(push, hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.log_in()
    status, said = push()
    assert status == 2 and "HF_HUB_DISABLE_XET=1" in said


# ------------------------------------------------------------------------------------------------ there and back


def test_a_pushed_head_of_every_kind_comes_back_bit_equal(hub, kinds, tmp_path):
    import torch
    from huggingface_hub import snapshot_download

    from headtrain.heads.base import load_head

    hub.log_in()
    for kind, folder in kinds.items():
        pushing.push(folder, PushConfig(repo=f"ann/{kind}"))
        place = snapshot_download(f"ann/{kind}", cache_dir=tmp_path / "cache")
        ours, theirs = load_head(folder), load_head(place)
        assert theirs.config == ours.config and type(theirs) is type(ours)
        tensors = theirs.state_dict()
        assert tensors.keys() == ours.state_dict().keys()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in ours.state_dict().items())


# ------------------------------------------------------------------------------------------------ at the end of fit


def test_fit_asks_the_hub_before_any_stage_runs(hub, run, tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}\n' * 3)
    words = ["fit", "recipe=eagle3_llama8b", f"run_dir={tmp_path / 'new'}", f"target.model={tmp_path / 'target'}",
             f"data.prompts={tmp_path / 'prompts.jsonl'}", "push.repo=eve/mine"]  # fmt: skip
    (tmp_path / "target").mkdir()
    hub.log_in()
    done = subprocess.run([sys.executable, "-m", "headtrain", *words], env=hub.environment, text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert done.stderr.startswith("error: push.repo=eve/mine: the token may not write there")
    assert not [path for path in (tmp_path / "new").iterdir() if path.is_dir()], "no stage was begun"


@pytest.mark.parametrize("finished", [True, False])
def test_fit_uploads_the_head_when_all_stages_are_there(finished, hub, run, monkeypatch, capsys):
    from headtrain.configload import load_overrides

    done = []
    monkeypatch.setattr(pipeline.identity, "stage_marks", lambda *_: dict.fromkeys(pipeline.identity.STAGES, ("", {})))
    monkeypatch.setattr(pipeline.Job, "complete", lambda *_: finished or bool(done))
    monkeypatch.setattr(pipeline.Job, "run_missing", lambda *_: done.append(hub.asked("auth-check/write")))
    monkeypatch.setattr(pipeline, "result", lambda _: "the table")
    monkeypatch.setattr(pipeline.identity, "target_identity", lambda *_: {})
    config = load_overrides(["push.repo=ann/mine"])
    config.run_dir = str(run)
    hub.log_in()
    pipeline.fit(config)
    said = capsys.readouterr().out
    assert set(hub.files("ann/mine")) == FILES and said.index("the table") < said.index("uploaded to")
    assert bool(done[0]) is not finished, "asked before the stages when there are any to run"


def test_a_smoke_run_only_lists_what_it_would_upload(hub):
    from headtrain.configload import load

    small = pipeline.prepared(load("eagle3_llama8b", ["smoke=true", "push.repo=ann/mine"]))
    assert small.push.dry_run and not pipeline.prepared(load("eagle3_llama8b", ["smoke=true"])).push.dry_run


def test_push_keys_without_a_repository_are_refused(capsys):
    for words in ("push.private=false", "push.dry_run=true", "push.revision=x"):
        assert cli.main(["fit", "recipe=eagle3_llama8b", words]) == 2
        assert "nothing is uploaded without push.repo" in capsys.readouterr().err


def test_a_file_with_a_secret_or_a_local_path_stops_the_upload(run, hub, monkeypatch, push):
    hub.log_in()
    page = run / "report" / "report.html"
    for words, reason in ((f"<p>{run}/captures", "has the local path"), ("<p>s3cr3t-of-wandb-x", "has a token")):
        monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-of-wandb-x")
        page.write_text(words)
        status, said = push()
        assert status == 2 and f"report.html {reason}" in said and hub.log == [] and "s3cr3t" not in said
    with pytest.raises(ExportError, match="has the local path"):
        page.write_text(f"<p>{run}/x")
        pushing.gather(run / "head", "a/b")
