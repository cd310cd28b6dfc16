"""Servers that misbehave in every way: nothing wrong is stored, reasons are counted, errors are one line."""

import json
import time
from collections import Counter

import pytest

from headtrain.data_gen import server
from headtrain.data_gen.client import Misfit, ServerError

END = 1


def say(change):
    """A fault that changes the answer's ids, finish reason and the rest: change(ids, choice, found) -> new ids."""

    def fault(handler, found):
        choice = found.get("choices", [found])[0]
        name = "token_ids" if "choices" in found else "output_ids"
        choice[name] = change(list(choice[name]), choice, found)
        handler._say(found)

    return fault


def finish(choice, found, why, **more):
    """The finish reason in the dialect's own place."""
    choice |= {"finish_reason": why} | ({"stop_reason": more["matched"]} if more else {})
    if "meta_info" in found:
        found["meta_info"]["finish_reason"] = {"type": why} | more


def raw(text, status=200, **headers):
    return lambda handler, found: handler._say(text.encode() if isinstance(text, str) else text, status, **headers)


def trickle(handler, found):
    """A byte now and then, without an end."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(60):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def http_1_0(handler, found):
    """No length: the answer ends where the connection does."""
    handler.protocol_version = "HTTP/1.0"
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(json.dumps(found).encode())
    handler.close_connection = True


def without_finish(handler, found):
    choice = found.get("choices", [found["meta_info"]] if "meta_info" in found else [])[0]
    del choice["finish_reason"]
    handler._say(found)


def unfinished(ids, choice, found):
    finish(choice, found, "stop", matched=END)
    return [*[END + 1] * 20]


def ended(why, ids):
    """An answer of these ids that ended for this reason."""
    return say(lambda _, choice, found: (finish(choice, found, why), ids)[1])


FAULTS = {
    "ids that are texts": (say(lambda ids, *_: [str(i) for i in ids]), "server_gave_no_token_ids"),
    "an id below 0": (say(lambda ids, *_: [-1, *ids]), "server_gave_no_token_ids"),
    "true for an id": (say(lambda ids, *_: [True, *ids]), "server_gave_no_token_ids"),
    "a number for ids": (say(lambda *_: 7), "server_gave_no_token_ids"),
    "no ids at all": (ended("stop", []), "server_gave_no_end_token"),
    "nothing, by length": (ended("length", []), "server_gave_no_end_token"),
    "an end token named beyond the budget": (say(unfinished), "server_gave_no_end_token"),
    "more than was asked for": (ended("length", [END + 1] * 50), "server_gave_too_many_tokens"),
    "stopped by its operator": (ended("abort", [END + 1]), "server_gave_no_end_token"),
    "no finish reason": (without_finish, "server_answer_unreadable"),
    "an error that says 200": (raw('{"error": {"message": "out of memory"}}'), "server_answer_unreadable"),
    "nested without end": (raw('{"a":' * 100_000), "server_answer_unreadable"),
    "no UTF-8": (raw(b'{"choices": "\xff\xfe"}'), "server_answer_unreadable"),
    "a page of HTML": (raw("<html>sign in</html>"), "server_answer_unreadable"),
    "elsewhere": (raw("", 307, Location="http://127.0.0.1:9/v1"), "server_redirects"),
    "a trickle": (trickle, "server_timeout"),
    "a gateway": (raw("Bad\x1b[2J\ngateway", 502), "server_error_502"),
}  # fmt: skip


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_what_is_wrong_is_never_stored_and_counted_by_its_reason(
    run, engines, served, loopback, caplog, monkeypatch, dialect
):
    monkeypatch.setattr(server, "LONGEST_WAIT", 0.05)
    served.data.responses.tries, served.data.responses.timeout = 2, 1.5
    one, two = engines(dialect, dialect)
    stage = run(one, two)
    expected = stage.expected(loopback)
    ill = dict(zip(sorted(expected), FAULTS.values(), strict=False))
    by_prompt = {tuple(expected[name][0][: expected[name][2]]): fault for name, (fault, _) in ill.items()}
    one.fault = two.fault = lambda ids, n: by_prompt.get(tuple(ids))
    manifest = stage.whole()
    assert len(ill) == len(FAULTS) < len(expected)
    assert stage.rows() == {name: row for name, row in expected.items() if name not in ill}
    assert manifest["left_out"] == dict(Counter(reason for _, reason in ill.values()))
    kept = [json.loads(line)["id"] for line in (stage.responses / server.JOURNAL).read_text().splitlines()]
    assert sorted(kept) == sorted(stage.rows())
    for record in caplog.records:
        assert "\n" not in record.getMessage() and "\x1b" not in record.getMessage()


@pytest.mark.parametrize(
    "harmless",
    [
        http_1_0, say(lambda ids, *_: [*ids, ids[-1], ids[-1]] if ids[-1] == END else ids),  # its end token again
        say(lambda ids, *_: [*ids, 5, 6, 7] if ids[-1] == END else ids),  # it goes on behind its end
    ],
)  # fmt: skip
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_what_changes_nothing_is_taken(run, engines, loopback, harmless, dialect):
    (engine,) = engines(dialect)
    engine.fault = lambda ids, n: harmless
    stage = run(engine)
    assert stage.whole()["left_out"] == {} and stage.rows() == stage.expected(loopback)


def test_an_end_token_that_is_named_but_not_among_the_ids_is_added_once(run, engines, loopback):
    def drop(ids, choice, found):
        if ids[-1] != END:
            return ids
        finish(choice, found, "stop", matched=END)
        return ids[:-1]

    engine, other = engines("vllm", "sglang")
    engine.fault = other.fault = lambda ids, n: say(drop)
    stage = run(engine, other)
    stage.whole()
    assert stage.rows() == stage.expected(loopback)


@pytest.mark.parametrize("status", [429, 503])
def test_a_storm_of_busy_answers_is_waited_out_and_costs_no_row(run, engines, served, loopback, monkeypatch, status):
    monkeypatch.setattr(server, "LONGEST_WAIT", 0.02)
    served.data.responses.tries = 2
    (engine,) = engines("vllm")
    engine.fault = lambda ids, n: raw("busy", status, Retry_After="0") if n < 4 else None
    stage = run(engine)
    assert stage.whole()["left_out"] == {} and stage.rows() == stage.expected(loopback)


def test_a_busy_answer_long_after_another_failure_does_not_end_the_run(run, engines, served, loopback, monkeypatch):
    """The patience with busy servers counts from the last failure of another kind."""
    served.data.responses.patience, served.data.responses.timeout = 2.0, 2.2
    (engine,) = engines("vllm")
    once = []

    def fail(ids, n):
        once[:] = once or [ids]
        return (["hang", "429"][n] if n < 2 else None) if ids == once[0] else None

    engine.fault = fail
    stage = run(engine)
    assert stage.whole()["left_out"] == {} and stage.rows() == stage.expected(loopback)


def no_ids(engine):
    engine.probe_fault = "no ids"
    return "no ids"


def shorter(engine):
    engine.longest = 100
    return "400"


def other_weights(engine):
    own = type(engine).generate

    def generate(body):
        found = own(engine, body)
        ids = found["choices"][0]["token_ids"]
        ids[0] = engine.vocab - 1 if ids[0] != engine.vocab - 1 else engine.vocab - 2
        return found

    engine.generate = generate
    return "500"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (no_ids, "gives no token ids"), (shorter, "serves rows of 100 tokens"),
        (other_weights, "answers the check's question otherwise than earlier in this run: other weights"),
    ],
)  # fmt: skip
def test_a_server_that_changed_in_the_middle_of_a_run_answers_no_more_rows(
    run, engines, served, loopback, monkeypatch, change, why
):
    """Also where it only refuses every row from then on: those rows wait for a server that fits."""
    monkeypatch.setattr(server, "SUSPECT", 3)
    served.data.responses.patience, served.data.responses.concurrency = 1.5, 1
    (engine,) = engines("vllm")
    engine.fault = lambda ids, n: change(engine) if len(engine.asked) > 6 else None
    stage = run(engine)
    with pytest.raises(ServerError, match=f"no server was ready for 1.5 s: .*{why}") as error:
        stage.work()
    assert "\n" not in str(error.value) and len(engine.asked) <= 6 + 3
    for line in (stage.responses / server.JOURNAL).read_text().splitlines():
        row = json.loads(line)
        ids, _, first = stage.expected(loopback)[row["id"]]
        assert row["ids"] == ids[first:]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (raw('{"data": 7}'), "serves nothing"), (raw("{}"), "serves nothing"), (raw("[" * 100_000), "no JSON"),
        (raw('{"data": [{"id": "x", "root": []}, 3, {"id": 4}, {"id": "y"}]}'), "not serve tiny; it serves x, y"),
        (raw("", 301, Location="https://elsewhere"), "sends elsewhere .*give the server's own"),
    ],
)  # fmt: skip
def test_a_list_of_models_of_any_shape_is_a_misfit_in_one_line(run, engines, monkeypatch, answer, why):
    (engine,) = engines("vllm")
    monkeypatch.setattr(engine.http.RequestHandlerClass, "do_GET", lambda handler: answer(handler, None))
    with pytest.raises((Misfit, ServerError), match=why) as error:
        run(engine).work()
    assert "\n" not in str(error.value) and engine.url in str(error.value)


def test_a_text_that_is_none_is_a_misfit_where_the_text_is_compared(run, engines):
    (engine,) = engines("tensorrt_llm")
    engine.text = lambda ids: 7
    with pytest.raises(Misfit, match="its answer '' is"):
        run(engine).work()
