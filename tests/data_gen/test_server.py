"""Responses from servers: what is asked and stored, what is refused at the start, failures, kills, resuming."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headtrain.config import ConfigError
from headtrain.configcheck import validate
from headtrain.data_gen import capture, chat, prompts, respond, server
from headtrain.data_gen.client import KEY, Misfit, ServerError
from headtrain.data_gen.store import CaptureStore
from headtrain.files import read_json

TAPS = (1, 2)
LOOPBACK = Path(__file__).with_name("loopback.py")
DIALECTS = ("vllm", "sglang", "tensorrt_llm")


# ------------------------------------------------------------------------------------------------- what is stored

@pytest.mark.parametrize("dialect", DIALECTS)
def test_ids_are_stored_as_the_server_produced_them(run, engines, loopback, dialect):
    (engine,) = engines(dialect)
    engine.fault = lambda ids, n: "slow"
    stage = run(engine)
    manifest = stage.whole()
    expected = stage.expected(loopback)
    assert stage.rows() == expected and {finish for _, finish, _ in expected.values()} == {"stop", "length"}
    assert manifest["complete"] and manifest["on_policy"] and manifest["left_out"] == {}
    assert manifest["counts"]["truncated"] == sum(finish == "length" for _, finish, _ in expected.values())
    (about,) = manifest["servers"]
    assert about["version"] == "9.8.7" and about["model"] == "tiny" and engine.url not in json.dumps(manifest)
    assert Counter(engine.asked).most_common(1)[0][1] == 1  # each prompt once
    assert engine.most == 4


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_sampling_parameter_is_sent_so_that_no_default_of_a_server_counts(
    run, engines, served, dialect, temperature
):
    (engine,) = engines(dialect)
    served.data.responses.temperature, served.data.responses.top_p = temperature, 0.9
    run(engine).work()
    seed = "sampling_seed" if dialect == "sglang" else "seed"
    wanted = {
        "temperature": temperature, "top_p": 0.9, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
        "frequency_penalty": 0, "stop_token_ids": [1], "top_k": -1 if dialect == "sglang" else 0,
    }  # fmt: skip
    for body in engine.bodies:
        rule = body.get("sampling_params", body)
        assert {key: rule.get(key) for key in wanted} == wanted
    seeds = {body.get("sampling_params", body).get(seed) for body in engine.bodies}
    assert len(seeds) == (21 if temperature else 1) and (None in seeds) == (not temperature)


def test_rows_never_exceed_max_length(run, engines, served, loopback):
    served.data.max_length = 40
    stage = run(*engines("vllm"))
    manifest = stage.whole()
    lengths = [len(ids) for ids, *_ in stage.rows().values()]
    assert max(lengths) == 40 and manifest["left_out"]["no_supervised_tokens_after_truncation"] > 0


def test_captures_are_made_of_the_stored_ids_and_tell_how_often_the_target_agrees(run, engines, tiny_target, caplog):
    stage = run(*engines("vllm"))
    stage.whole()
    capture.work(stage.recipe, tiny_target, *stage.folders[1:], TAPS)
    capture.finish(stage.recipe, *stage.folders[1:])
    store = CaptureStore(stage.folders[2])
    assert {row.id: store.read(row).ids.tolist() for row in store.rows} == {k: v[0] for k, v in stage.rows().items()}
    agreed = total = 0
    for ids, _, first in stage.rows().values():
        choices = tiny_target.model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        agreed += sum(choice == token for choice, token in zip(choices[first - 1 : -1], ids[first:], strict=True))
        total += len(ids) - first
    counts = read_json(stage.folders[2] / "manifest.json")["counts"]
    assert 0 < agreed < 0.9 * total and counts["greedy_agreement"] == round(agreed / total, 4)
    assert "of the servers' greedy tokens are the choice of the target" in caplog.text


def test_later_turns_are_asked_after_the_servers_own_answers(run, engines, served, loopback, target, tmp_path):
    source = tmp_path / "turns.jsonl"
    chats = [[("user", f"q{n}"), ("assistant", "x"), ("user", "and?")] for n in range(12)]
    source.write_text("\n".join(
        json.dumps({"messages": [{"role": r, "content": t} for r, t in chat_]}) for chat_ in chats
    ))  # fmt: skip
    served.data.prompts[0].source, served.data.turns, served.data.held_out = str(source), 2, 1
    stage = run(*engines("sglang"))
    manifest = stage.whole()
    begun, second, found = 0, 0, [ids for ids, *_ in stage.rows().values()]
    for prompt in prompts.load(stage.folders[0]):
        if prompt.split == "heldout":
            continue
        begun += 1
        first = chat.prompt_ids(target.tokenizer, prompt.messages)
        new, finish = loopback.answer(first, 20, target.vocab_size, 1)
        if finish == "stop":
            said = {"role": "assistant", "content": target.tokenizer.decode(new[:-1])}
            later = [*prompt.messages, said, {"role": "user", "content": "and?"}]
            ids = chat.prompt_ids(target.tokenizer, later)
            assert ids + loopback.answer(ids, 20, target.vocab_size, 1)[0] in found
            second += 1
    assert begun == 11 and 0 < second < begun
    assert manifest["left_out"] == {"turns_after_an_answer_that_is_cut_off": begun - second}
    (engine,) = engines("sglang")
    later = target.tokenizer.encode("and?", add_special_tokens=False)
    engine.fault = lambda ids, n: "400" if any(ids[i : i + 4] == later for i in range(len(ids))) else None
    again = run(engine, root="again")
    assert again.whole()["left_out"]["turns_server_error_400"] == second and len(again.rows()) == begun
    assert len(found) > begun


# ------------------------------------------------------------------------------------------------- refused at the start

def spoil(**changes):
    def change(engine):
        for key, value in changes.items():
            setattr(engine, key, value)

    return change


def other_tokenizer(engine):
    own = engine.tokenizer
    engine.tokenizer = SimpleNamespace(
        encode=lambda text, **_: [i + (i > 9) for i in own.encode(text, add_special_tokens=False)],
        decode=lambda ids, **_: own.decode([i + 1 for i in ids]),
    )


@pytest.mark.parametrize(
    ("dialect", "change", "why"),
    [
        ("vllm", spoil(names=["other", "more"]), r"not serve tiny; it serves other, more: set data\.responses\.model"),
        ("vllm", other_tokenizer, r"tokenises otherwise .* token \d+ .* is \[\d+\] there and \[\d+\] here"),
        ("tensorrt_llm", other_tokenizer, r"its answer .* is .* by the target's tokenizer"),
        ("vllm", spoil(probe_fault="no ids"), "gives no token ids .* serve the target with vLLM"),
        ("sglang", spoil(probe_fault="no ids"), "gives no token ids"),
        ("some-owner", spoil(), "gives no token ids"),  # an OpenAI-compatible server of another kind
        ("some-owner", spoil(probe_fault="400"), r"answers 400: .*gives no token ids"),  # prompts must be text there
        ("sglang", spoil(probe_fault="restless"), "answers the same greedy question in two ways"),
        ("vllm", spoil(probe_fault="other prompt"), r"read \d+ prompt tokens, not \d+"),
        ("vllm", spoil(probe_fault="beyond"), "no token ids of the target's vocabulary"),
        ("vllm", spoil(longest=255), r"serves rows of 255 tokens; data\.max_length=256 needs more"),
        ("vllm", spoil(key="secret"), rf"answers 401: .*{KEY}"),
    ],
)  # fmt: skip
def test_a_server_that_does_not_fit_is_refused_before_anything_is_asked(run, engines, dialect, change, why):
    good, bad = engines("vllm", dialect)
    change(bad)
    stage = run(good, bad)
    with pytest.raises(Misfit, match=why) as error:
        stage.work()
    assert bad.url in str(error.value) and "\n" not in str(error.value)
    assert not good.asked and not bad.asked


def test_servers_that_cannot_be_reached_are_named_when_there_is_no_other(run, engines):
    one, two = engines("vllm", "vllm")
    one.down, two.probe_fault = True, "500"
    with pytest.raises(ServerError, match=rf"no server .* used: {one.url}.*cannot be reached.*; {two.url}.* 500"):
        run(one, two).work()


@pytest.mark.parametrize(
    ("wanted", "names", "asked"),
    [(None, ["only-one"], "only-one"), ("b", ["a", "b"], "b"), (None, ["x", "tiny"], "tiny")],
)
def test_the_model_is_the_one_asked_for_or_the_targets_name_or_the_only_one(run, engines, served, wanted, names, asked):
    (engine,) = engines("vllm")
    engine.names, served.data.responses.model = names, wanted
    manifest = run(engine).whole()
    assert {body["model"] for body in engine.bodies} == {asked} == {about["model"] for about in manifest["servers"]}


# ------------------------------------------------------------------------------------------------- failures

@pytest.mark.parametrize("fault", ["500", "429", "503", "hang", "cut", "half", "list", "no choices", "slow"])
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_what_fails_twice_is_asked_again_and_the_result_is_the_same(run, engines, served, loopback, fault, dialect):
    served.data.responses.timeout = 0.3 if fault == "hang" else 5.0
    one, two = engines(dialect, dialect)
    unlucky = []

    def fail(ids, n):
        if len(unlucky) < 2 and tuple(ids) not in unlucky[:1]:
            unlucky.append(tuple(ids))
        return fault if tuple(ids) in unlucky and n < 2 else None

    one.fault = two.fault = fail
    stage = run(one, two)
    manifest = stage.whole()
    assert stage.rows() == stage.expected(loopback) and manifest["left_out"] == {}


def test_a_row_that_no_server_answers_is_left_out_for_a_counted_reason(run, engines, served, loopback, caplog):
    faults = ["400", "500", "no ids", "other prompt", "beyond", "no end", "half"]
    reasons = [
        "server_error_400", "server_error_500", "server_gave_no_token_ids", "server_read_other_prompt",
        "server_gave_no_token_ids", "server_gave_no_end_token", "server_answer_unreadable",
    ]  # fmt: skip
    one, two = engines("vllm", "sglang")
    stage = run(one, two)
    expected = stage.expected(loopback)
    ill = dict(zip(sorted(expected), faults, strict=False))
    by_prompt = {tuple(expected[name][0][: expected[name][2]]): fault for name, fault in ill.items()}
    one.fault = two.fault = lambda ids, n: by_prompt.get(tuple(ids))
    manifest = stage.whole()
    assert stage.rows() == {name: row for name, row in expected.items() if name not in ill}
    assert manifest["left_out"] == dict(Counter(reasons)) and manifest["counts"]["rows"] == 14
    assert {Counter(one.asked + two.asked)[ids] for ids in by_prompt} == {5}
    assert sum(one.asked.count(ids) > 0 < two.asked.count(ids) for ids in by_prompt) >= 5  # one may be being checked
    assert caplog.text.count("is left out") == 5  # and the manifest counts them all
    found = respond.status(stage.responses)
    assert found["left_out"] == Counter(reasons) and found["prompts"] == found["of"] == 21
    assert [sum(server[key] for server in found["servers"]["servers"]) for key in ("answered", "failed")] == [14, 35]


def test_the_status_counts_what_is_settled_also_after_another_start(run, engines, served):
    served.data.responses.patience = 0.2
    (engine,) = engines("vllm")

    def fail(ids, n):
        engine.down = len(engine.asked) > 8

    engine.fault = fail
    stage = run(engine)
    with pytest.raises(ServerError, match="no server was ready"):
        stage.work()
    before = respond.status(stage.responses)
    (about,) = before["servers"]["servers"]
    journal = [json.loads(line)["ids"] for line in (stage.responses / "answers.jsonl").read_text().splitlines()]
    assert before["prompts"] == about["answered"] == len(journal) < before["of"] == 21
    assert before["tokens"] == sum(map(len, journal)) < before["expected"] < before["estimate"]
    assert not about["ready"] and "cannot be reached" in about["reason"]
    engine.down, engine.fault = False, lambda ids, n: None
    stage.whole()
    after = respond.status(stage.responses)
    assert after["prompts"] == 21 and after["done_batches"] == after["batches"]
    assert after["tokens"] == after["expected"] == sum(len(ids) - first for ids, _, first in stage.rows().values())


def test_a_batch_without_any_answer_is_captured_as_an_empty_one(run, engines, served, loopback, tiny_target):
    (engine,) = engines("vllm")
    stage = run(engine)
    plan = respond.plan_batches(served, stage.target.tokenizer, *stage.folders[:2])
    lost = {row[0] for row in plan["batches"][2]}
    expected = stage.expected(loopback)
    bad = {tuple(expected[name][0][: expected[name][2]]) for name in lost}
    engine.fault = lambda ids, n: "400" if tuple(ids) in bad else None
    manifest = stage.whole()
    assert manifest["left_out"] == {"server_error_400": len(lost)}
    capture.work(served, tiny_target, *stage.folders[1:], TAPS)
    capture.finish(served, *stage.folders[1:])
    assert len(CaptureStore(stage.folders[2]).rows) == len(expected) - len(lost) == len(stage.rows())


def test_when_no_prompt_at_all_is_answered_the_run_ends_and_asks_again_later(run, engines, loopback, monkeypatch):
    monkeypatch.setattr(server, "ENOUGH", 6)
    (engine,) = engines("vllm")
    engine.fault = lambda ids, n: "400"
    stage = run(engine)
    with pytest.raises(ServerError, match=r"no prompt was answered, 6 failed: server_error_400 6"):
        stage.work()
    assert not list(stage.responses.glob("*.safetensors"))
    monkeypatch.setattr(server, "ENOUGH", 100)
    with pytest.raises(ServerError, match=r"no prompt was answered, 21 failed"):
        stage.work()
    engine.fault = lambda ids, n: None
    assert stage.whole()["left_out"] == {} and stage.rows() == stage.expected(loopback)


def test_a_dead_server_gets_no_rows_and_gets_them_again_when_it_is_back(run, engines, loopback, caplog, monkeypatch):
    monkeypatch.setattr(server, "LONGEST_WAIT", 0.05)
    one, two = engines("vllm", "vllm")
    state = {"back": 0.0}

    def fail(ids, n):
        if len(two.asked) >= 4 and not state["back"]:
            two.down = True
            state["back"] = time.monotonic() + 0.1
        if two.down and time.monotonic() > state["back"]:
            two.down = False
        return "cut" if two.down else None

    two.fault = fail
    one.fault = lambda ids, n: (fail(ids, n), "slow")[1]
    stage = run(one, two)
    stage.recipe.data.responses.concurrency = 2
    manifest = stage.whole()
    assert stage.rows() == stage.expected(loopback) and manifest["left_out"] == {}
    assert "gets no prompts until it is back" in caplog.text and f"{two.url} is back" in caplog.text
    assert len(two.asked) > 4


def test_a_server_that_comes_back_with_another_model_gets_no_rows(run, engines, loopback, caplog):
    one, two = engines("vllm", "vllm")

    def fail(ids, n):
        two.names = ["another", "more"]
        return "500"

    two.fault = fail
    one.fault = lambda ids, n: "slow"
    stage = run(one, two)
    stage.whole()
    assert stage.rows() == stage.expected(loopback) and len(two.asked) <= 4
    assert "does not serve tiny; it serves another, more" in caplog.text


def test_a_run_stops_when_no_server_is_back_in_time_and_goes_on_later(run, engines, served, loopback):
    served.data.responses.patience = 0.4
    (engine,) = engines("sglang")

    def fail(ids, n):
        engine.down = len(engine.asked) > 6
        return "cut" if engine.down else None

    engine.fault = fail
    stage = run(engine)
    with pytest.raises(ServerError, match=r"no server was ready for 0\.4 s: .*the same command goes on"):
        stage.work()
    kept = len((stage.responses / server.JOURNAL).read_text().splitlines())
    assert kept > 2
    engine.down, engine.fault = False, lambda ids, n: None
    before = len(engine.asked)
    stage.whole()
    assert stage.rows() == stage.expected(loopback) and len(engine.asked) - before == 21 - kept


# ------------------------------------------------------------------------------------------------- kills

def lines(path):
    return [json.loads(line)["id"] for line in path.read_bytes().split(b"\n")[:-1]] if path.is_file() else []


def test_a_run_killed_at_any_moment_loses_no_finished_response_and_repeats_none(run, engines, served, loopback):
    (engine,) = engines("vllm")
    engine.fault = lambda ids, n: "slow"
    served.data.responses.concurrency = 2
    stage = run(engine)
    prompt_of = {tuple(row[0][: row[2]]): name for name, row in stage.expected(loopback).items()}
    kills = 0
    for enough in (1, 4, 8, 9, 15):
        child = os.fork()
        if child == 0:
            try:
                stage.work()
            finally:
                os._exit(0)
        until = time.monotonic() + 20
        while len(lines(stage.responses / server.JOURNAL)) < enough and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        time.sleep(0.2)  # the server is done with what it was asked
        finished, before = set(lines(stage.responses / server.JOURNAL)), len(engine.asked)
        engine.marks = [*getattr(engine, "marks", []), (before, finished)]
    stage.whole()
    assert stage.rows() == stage.expected(loopback)
    for before, finished in engine.marks:  # of what was finished nothing was asked again, ever
        assert len(finished) >= 1 and not finished & {prompt_of[ids] for ids in engine.asked[before:]}
    assert len(engine.asked) <= 21 + 2 * kills and len(lines(stage.responses / server.JOURNAL)) == 21


@pytest.mark.parametrize("seed", [0, 1])
def test_servers_killed_at_random_moments_and_started_anew_change_nothing(
    seed, run, target, tiny_folder, loopback, monkeypatch
):
    monkeypatch.setattr(server, "LONGEST_WAIT", 0.1)
    chance, running = random.Random(seed), {}

    def start(port=0):
        end = [str(target.vocab_size), "1", str(tiny_folder)]
        process = subprocess.Popen(
            [sys.executable, str(LOOPBACK), str(port), "vllm", *end], stdout=subprocess.PIPE, text=True
        )
        url = process.stdout.readline().strip()
        running[url] = process
        return SimpleNamespace(url=url)

    try:
        stage = run(start(), start())
        stage.recipe.data.responses.patience, stage.recipe.data.responses.concurrency = 60.0, 1
        journal, killed_at = stage.responses / server.JOURNAL, []
        if (child := os.fork()) == 0:
            try:
                stage.work()
            finally:
                os._exit(0)
        for enough in (1, 4, 8):
            until = time.monotonic() + 60
            while len(lines(journal)) < enough and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.3))
            url = chance.choice(list(running))
            running[url].kill()
            running[url].wait()
            killed_at.append(len(lines(journal)))
            start(int(url.rpartition(":")[2]))
        os.waitpid(child, 0)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    stage.finish()
    assert stage.rows() == stage.expected(loopback) and killed_at[-1] < len(stage.rows())
    assert sorted(lines(journal)) == sorted(stage.rows())  # each once


def test_a_line_that_a_crash_cut_or_damaged_is_asked_for_again(run, engines, loopback, caplog):
    (engine,) = engines("vllm")
    stage = run(engine)
    stage.work()
    for file in stage.responses.glob("*.safetensors"):
        file.unlink()
    journal = stage.responses / server.JOURNAL
    whole = journal.read_bytes().split(b"\n")
    whole[3] = b"\0" * 40
    journal.write_bytes(b"\n".join(whole[:-1])[:-25])
    before = len(engine.asked)
    stage.whole()
    assert len(engine.asked) - before == 2 and stage.rows() == stage.expected(loopback)
    assert caplog.text.count("a damaged line") == 2


@pytest.mark.parametrize("turns", [1, 2])
def test_a_lost_file_of_which_all_answers_are_kept_is_made_again_without_a_server(
    turns, run, engines, served, loopback, monkeypatch
):
    served.data.turns = turns
    (engine,) = engines("vllm")
    stage = run(engine)
    assert not server.all_kept(stage.responses)
    stage.whole()
    expected, files = stage.rows(), sorted(stage.responses.glob("*.safetensors"))
    assert server.all_kept(stage.responses)
    engine.down, served.data.responses.patience = True, 0.2
    monkeypatch.setattr(server, "FIRST_WAIT", 0.05)
    for lost in (files[:1], files):
        for file in lost:
            file.unlink()
        assert server.all_kept(stage.responses)
        stage.whole()
        assert stage.rows() == expected
    files[-1].unlink()
    journal = stage.responses / server.JOURNAL
    last = read_json(stage.responses / "plan.json")["batches"][-1][0][0]
    kept = [line for line in journal.read_bytes().splitlines(True) if json.loads(line)["id"] != last]
    journal.write_bytes(b"".join(kept))
    assert not server.all_kept(stage.responses)
    with pytest.raises(ServerError, match=r"no server of data\.responses\.urls can be used"):
        stage.work()


# ------------------------------------------------------------------------------------------------- keys, secrets

def test_the_key_is_sent_and_shown_nowhere(run, engines, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv(KEY, "opensesame")
    caplog.set_level("DEBUG")
    (engine,) = engines("vllm")
    engine.key = "opensesame"
    stage = run(engine)
    stage.whole()
    assert engine.asked
    engine.key = "changed"
    with pytest.raises(Misfit, match="answers 401") as error:
        server.check(stage.recipe, stage.target.tokenizer, stage.target.vocab_size, {1})
    found = caplog.text + str(error.value) + "".join(
        path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()
    )
    assert "opensesame" not in found


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"urls": []}, r"needs data\.responses\.urls"),
        ({"urls": ["http://me:pass1@host:8000"]}, r"urls=http://\*\*\*@host:8000: not allowed.*without a password"),
        ({"urls": ["http://host/v1?api_key=abcdef"]}, r"api_key=\*\*\* not allowed"),
        ({"urls": ["host:8000"]}, "not allowed"),
        ({"urls": ["http://a:1", "http://a:1"]}, "given twice"),
        ({"concurrency": 0}, "not allowed"),
        ({"timeout": 0.0}, "not allowed"),
        ({"backend": "local"}, r"data\.responses\.urls=.* set data\.responses\.backend=server too"),
        ({"backend": "local", "urls": [], "tries": 9}, r"responses\.tries=9: set data\.responses\.backend=server"),
        ({"backend": "given", "urls": [], "model": "x"}, r"data\.responses\.model=x"),
    ],
)  # fmt: skip
def test_keys_that_do_not_go_together_are_refused(recipe, changes, why):
    rule = recipe.data.responses
    rule.backend, rule.urls = "server", ["http://a:1", "https://b.example/llm/v1"]
    validate(recipe)
    for key, value in changes.items():
        setattr(rule, key, value)
    with pytest.raises(ConfigError, match=why) as error:
        validate(recipe)
    assert "pass1" not in str(error.value) and "abcdef" not in str(error.value)


def test_where_and_how_servers_are_asked_is_no_part_of_the_fingerprint(recipe):
    from headtrain.identity import stage_marks

    def mark(**changes):
        for key, value in changes.items():
            setattr(recipe.data.responses, key, value)
        return stage_marks(recipe, {"model": "tiny"}, [])["responses"]

    local, (first, made) = mark()[0], mark(backend="server", urls=["http://a:1"])
    assert mark(urls=["http://b:2"], concurrency=3, timeout=9.0, tries=2, patience=1.0)[0] == first != local
    assert mark(model="other")[0] != first and "http://a:1" not in json.dumps(made)
    assert set(made["responses"]) == {"backend", "temperature", "top_p", "max_new_tokens", "batch_tokens"}
