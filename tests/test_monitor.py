"""The monitor and the reading of engines' metrics: a loopback server plays engines that restart, hang and lie."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headtrain import cli
from headtrain.engine_metrics import EngineError, base_url, models, parse, read_engine, readings
from headtrain.expected import Expected, find_report, read_expected
from headtrain.monitor import Monitor, interval, line


def vllm(drafts, positions, generated=None, model="org/model", engine="0", running=2, created=1.7e9):
    """Metrics as vLLM publishes them: counts of drafts, and of accepted tokens by position."""
    labels = f'engine="{engine}",model_name="{model}"'
    counts = {"drafts": drafts, "draft_tokens": drafts * len(positions), "accepted_tokens": sum(positions)}
    rows = ["# HELP vllm:spec_decode_num_drafts_total Drafts.", "# TYPE vllm:spec_decode_num_drafts_total counter"]
    generated = drafts + sum(positions) if generated is None else generated
    for name, count in counts.items():
        rows.append(f"vllm:spec_decode_num_{name}_total{{{labels}}} {float(count)}")
        rows.append(f"vllm:spec_decode_num_{name}_created{{{labels}}} {created}")
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    rows += [f'{name}{{{labels},position="{place}"}} {float(n)}' for place, n in enumerate(positions)]
    rows.append(f"vllm:generation_tokens_total{{{labels}}} {generated}")
    rows += [f"vllm:num_requests_running{{{labels}}} {running}", "process_start_time_seconds 1.7e+09", ""]
    return "\n".join(rows)


def sglang(tau, rate, generated, throughput=500.0, model="org/model", running=1, ranks=("0",), verified=None):
    """Metrics as SGLang publishes them: gauges of the last interval, and counts, one copy per tensor-parallel rank."""
    rows = []
    for rank in ranks:
        labels = f'engine_type="unified",model_name="{model}",pp_rank="0",tp_rank="{rank}"'
        values = {"spec_accept_length": tau, "spec_accept_rate": rate, "gen_throughput": throughput}
        values["num_running_reqs"] = running
        rows += [f"sglang:{name}{{{labels}}} {value}" for name, value in values.items()]
        rows += [f"sglang:spec_verify_calls_total{{{labels}}} {verified}"] if verified is not None else []
    rows.append(f'sglang:generation_tokens_total{{model_name="{model}"}} {generated}')
    return "\n".join([*rows, ""])


class Engine:
    """A server whose /metrics answers one page of `pages` after another; the last one again and again.

    A page is a text, a status, or a number of seconds to hang.
    """

    def __init__(self, pages):
        self.pages, self.asked = list(pages), 0
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                page = engine.page(self.path)
                if isinstance(page, float):
                    time.sleep(page)
                body = page.encode() if isinstance(page, str) else b"no"
                self.send_response(page if isinstance(page, int) else 200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def page(self, path):
        if path == "/v1/models":
            return json.dumps({"object": "list", "data": [{"id": "org/model", "max_model_len": 4096}]})
        if path != "/metrics":
            return 404
        self.asked += 1
        return self.pages[min(self.asked, len(self.pages)) - 1]

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def engine(monkeypatch):
    """engine(*pages) -> Engine"""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    started = []

    def start(*pages):
        started.append(Engine(pages))
        return started[-1]

    yield start
    for one in started:
        one.close()


def watch(engines, polls, expected=None, log=None, timeout=5.0):
    """The lines that a monitor says in so many polls."""
    said = []
    follower = Monitor([one.url for one in engines], expected, timeout=timeout, say=said.append, log=log)
    worked = [follower.poll() for _ in range(polls)]
    return [text.split("  ", 1)[1] for text in said], worked


def between(before, after, expected=None):
    """The interval between two pages of one model, 10 seconds apart."""
    (old,), (new,) = readings(parse(before)), readings(parse(after))
    old.seconds, new.seconds = 0.0, 10.0
    return interval(new, old, expected)


REPORT = {
    "heads": [{"id": "head", "sha256": "aa"}],
    "results": [
        {"suite": "gsm8k", "drafter": "head", "head": "head", "temperature": 0.0, "k": 5, "tree": "chain", "steps": 900,
         "tau": 3.0, "alpha": [0.9, 0.5, 0.3, 0.2, 0.1]},
        {"suite": "heldout", "drafter": "head", "head": "head", "temperature": 0.0, "k": 3, "tree": "chain",
         "steps": 90, "tau": 2.5, "alpha": [0.7, 0.5, 0.3]},
        {"suite": "heldout", "drafter": "head", "head": "head", "temperature": 0.0, "k": 3, "tree": "4x16", "steps": 90,
         "tau": 3.5, "alpha": [0.9, 0.9, 0.7]},
        {"suite": "heldout", "drafter": "ngram", "head": None, "temperature": 0.0, "k": 3, "tree": "chain", "steps": 90,
         "tau": 1.5, "alpha": [0.3, 0.1, 0.1]},
    ],
    "cost": {"series": [
        {"suite": "heldout", "drafter": "head", "head": "head", "temperature": 0.0, "tree": "chain", "predictions": [
            {"k": 3, "batch": 1, "step": 1.4}, {"k": 3, "batch": 8, "step": 2.2}, {"k": 1, "batch": 1, "step": 1.1}]},
    ]},
}  # fmt: skip


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "run" / "report" / "report.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(REPORT))
    return path


# ------------------------------------------------------------------------------------------------- the text format

def test_samples_are_read_with_their_labels_escapes_and_timestamps():
    text = '# a comment\n\nup 1\na:b_total{x="1",y="q\\"\\\\\\n}",} 2.5e3 1700000000\nlow{le="+Inf"} -Inf\nno NaN\n'
    assert [(s.name, s.labels) for s in parse(text)] == [
        ("up", {}), ("a:b_total", {"x": "1", "y": 'q"\\\n}'}), ("low", {"le": "+Inf"}), ("no", {}),
    ]  # fmt: skip
    assert [s.value for s in parse(text)][:3] == [1.0, 2500.0, float("-inf")]


@pytest.mark.parametrize(
    "bad", ["<html>hello</html>", "a", "a b", 'a{x=1} 2', 'a{x="1"y="2"} 3', 'a{x="1} 2', "a 1 2 3", "a 1_0", "1a 2"]
)
def test_what_is_no_sample_is_an_error_that_names_its_line(bad):
    with pytest.raises(ValueError, match="line 2 is no Prometheus sample"):
        parse(f"up 1\n{bad}\n")


@pytest.mark.parametrize("given", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/metrics"])
def test_an_engine_is_named_by_its_host_with_or_without_a_path_of_its_own(given):
    assert base_url(given) == "http://h:1"


@pytest.mark.parametrize("given", ["h:1", "ftp://h", "http://me:secret@h:1", "http://"])
def test_an_address_that_is_none_or_holds_a_password_is_refused(given):
    with pytest.raises(ValueError, match="engine_url="):
        base_url(given)


# ------------------------------------------------------------------------------------------------- intervals

def test_an_interval_of_vllm_is_the_difference_of_its_counters():
    found = between(vllm(100, [80, 40, 20]), vllm(200, [150, 90, 30], generated=560, running=3))
    assert (found.drafts, found.drafted, found.accepted, found.k) == (100, 300, 130, 3)
    assert found.alpha == [0.7, 0.5, 0.1] and found.tau == 2.3 and found.rate == pytest.approx(130 / 300)
    assert found.tokens_per_s == pytest.approx((560 - 240) / 10) and found.running == 3 and not found.restarted


def test_the_replicas_of_a_model_are_added_and_models_are_kept_apart():
    pages = [vllm(100, [50]) + vllm(300, [270], engine="1"), vllm(200, [100]) + vllm(400, [360], engine="1")]
    found = between(*pages)
    assert (found.drafts, found.alpha, found.running) == (200, [0.7], 4)
    both = readings(parse(vllm(1, [1]) + vllm(1, [1], model="other")))
    assert [one.model for one in both] == ["org/model", "other"]


@pytest.mark.parametrize("created", [1.7e9, 1.8e9])
def test_after_a_restart_counters_count_from_zero(created):
    """The second case: the engine was so busy that its new counters have passed the old ones."""
    after = (10, [5, 2]) if created == 1.7e9 else (1000, [500, 200])
    found = between(vllm(100, [80, 40]), vllm(*after, created=created))
    assert found.restarted and found.drafts == after[0]
    assert found.tau == pytest.approx(1 + sum(after[1]) / after[0])


def test_sglangs_gauges_are_read_once_though_every_rank_publishes_them():
    ranks = ("0", "1", "2", "3")
    found = between(
        sglang(2.5, 0.5, 1000, ranks=ranks, verified=400),
        sglang(2.8, 0.6, 9000, throughput=812.5, ranks=ranks, verified=700),
    )
    assert (found.tau, found.rate, found.k, found.tokens_per_s, found.running) == (2.8, 0.6, 3, 812.5, 1)
    assert found.drafts == 300


def test_an_idle_sglang_says_nothing_of_acceptance_though_its_gauges_stay():
    found = between(sglang(2.5, 0.5, 1000), sglang(2.5, 0.5, 1000, running=0))
    assert found.tau is None and "no drafts" in line(found)
    busy = between(sglang(2.5, 0.5, 1000), sglang(2.5, 0.5, 1000, running=1))  # counts tokens when a request ends
    assert busy.tau == 2.5


def test_an_idle_vllm_has_no_drafts():
    found = between(vllm(100, [80]), vllm(100, [80]))
    assert found.tau is None and found.warnings == [] and "no drafts" in line(found)


def test_an_engine_that_does_not_speculate_is_said_so():
    plain = 'vllm:generation_tokens_total{model_name="m"} 5\n'
    assert "does not speculate" in between(plain, plain).warnings[0]


# ------------------------------------------------------------------------------------------------- warnings

def test_below_40_percent_of_draft_tokens_is_warned_about_and_a_few_steps_are_not_judged():
    low = between(vllm(0, [0, 0, 0]), vllm(100, [60, 30, 20]))
    assert low.warnings == ["37% of the draft tokens are accepted, below 40%"]
    assert between(vllm(0, [0, 0, 0]), vllm(100, [60, 40, 30])).warnings == []
    assert between(vllm(0, [0, 0, 0]), vllm(31, [1, 0, 0])).warnings == []


def test_drift_from_the_report_is_shown_and_warned_about():
    expected = Expected([0.8, 0.6, 0.4], "heldout", None)
    found = between(vllm(0, [0, 0, 0]), vllm(100, [70, 55, 15]), expected)  # 1.4 of 1.8 drafts
    assert found.expected_tau == pytest.approx(2.8) and "τ 2.40 instead of 2.80 on heldout" in found.warnings[0]
    said = line(found, expected)
    assert "τ 2.40 (report 2.80, drafts -22%)" in said and "report 0.80 0.60 0.40" in said
    assert between(vllm(0, [0, 0, 0]), vllm(100, [75, 60, 30]), expected).warnings == []


@pytest.mark.parametrize(("running", "pays"), [(1, True), (8, False), (7, False)])
def test_speculation_that_costs_more_than_it_brings_is_warned_about_at_the_batch_that_runs(running, pays):
    predictions = [{"k": 3, "batch": 1, "step": 1.4}, {"k": 3, "batch": 8, "step": 2.3},
                   {"k": 1, "batch": 8, "step": 9.0}]  # fmt: skip
    expected = Expected([0.5, 0.4, 0.4], "heldout", None, predictions)
    found = between(vllm(0, [0, 0, 0]), vllm(100, [50, 40, 35], running=running), expected)
    assert bool(found.warnings) is not pays
    assert pays or "costs more than it brings: a step of K = 3 at batch 8 takes 2.30 plain steps" in found.warnings[0]


# ------------------------------------------------------------------------------------------------- the report

def test_the_report_expects_what_a_greedy_chain_of_the_head_reached_on_held_out_prompts(report):
    expected = read_expected(report)
    assert (expected.alpha, expected.suite, expected.sha256) == ([0.7, 0.5, 0.3], "heldout", "aa")
    assert expected.tau(2) == pytest.approx(2.2) and expected.tau(4) is None
    assert expected.step_cost(3, 6)["step"] == 2.2 and expected.step_cost(5, 1) is None
    assert find_report(str(report.parent.parent)) == find_report(str(report)) == report


def test_a_report_that_is_none_or_about_several_heads_is_refused_by_name(report):
    with pytest.raises(ValueError, match=r"report=nowhere: no such file"):
        find_report("nowhere")
    several = REPORT | {"heads": [{"id": "a", "sha256": "aa"}, {"id": "b", "sha256": "bb"}]}
    report.write_text(json.dumps(several))
    with pytest.raises(ValueError, match=r"several heads \(a, b\)"):
        read_expected(report)
    for content in ('{"results": []}', "[]", json.dumps(REPORT | {"results": REPORT["results"][2:]})):
        report.write_text(content)
        with pytest.raises(ValueError, match=r"report\.json"):
            read_expected(report)


# ------------------------------------------------------------------------------------------------- over HTTP

def test_a_line_per_interval_after_the_sum_since_the_start(engine):
    said, worked = watch([engine(vllm(100, [80, 40]), vllm(200, [150, 90]))], 2)
    assert worked == [True, True]
    assert said[0].startswith("since it started:  org/model (vllm)  τ 2.20  α 0.80 0.40  accepted 60%")
    assert said[1].startswith("org/model (vllm)  τ 2.20  α 0.70 0.50  accepted 60%") and "tokens/s" in said[1]


def test_a_restart_is_said_and_an_engine_that_is_away_is_asked_again(engine):
    said, worked = watch([engine(vllm(100, [80]), 503, vllm(40, [30]))], 3)
    assert worked == [True, False, True]
    assert "answers 503" in said[1] and said[1].endswith("trying again")
    assert said[2] == "the engine was restarted: its counters began anew" and "τ 1.75" in said[3]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (404, "answers 404 Not Found (start SGLang with --enable-metrics)"),
        (401, "answers 401 Unauthorized (it asks for a key)"),
        ("<html>a gateway</html>", "line 1 is no Prometheus sample: '<html>a gateway</html>'"),
        ("", "has metrics of neither vLLM nor SGLang"),
        ("other_total 5\n", "has metrics of neither vLLM nor SGLang"),
        ('vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m"} 5\n', "has no position label"),
        (2.0, "does not answer within 0.3 s"),
    ],
)
def test_an_answer_that_cannot_be_used_is_an_error_in_one_line(engine, page, said):
    one = engine(page)
    with pytest.raises(EngineError) as caught:
        read_engine(one.url, timeout=0.3)
    assert said in str(caught.value) and one.url in str(caught.value) and "\n" not in str(caught.value)


def test_an_engine_that_is_not_there_is_an_error_in_one_line(engine):
    one = engine("")
    one.close()
    with pytest.raises(EngineError, match="cannot be reached"):
        read_engine(one.url, timeout=2)


def test_several_engines_are_told_apart_and_one_that_is_away_does_not_stop_the_others(engine):
    engines = engine(500), engine(vllm(100, [50])), engine(sglang(2.5, 0.5, 1000))
    said, worked = watch(engines, 2)
    assert worked == [False, False] and len(said) == 6
    assert said[0].startswith("error: ") and said[1].startswith(engines[1].url) and "(sglang)" in said[2]


def test_the_models_of_a_server_are_listed(engine):
    assert models(engine("").url + "/v1")[0] == {"id": "org/model", "max_model_len": 4096}


# ------------------------------------------------------------------------------------------------- the command

def test_the_command_counts_its_intervals_compares_with_a_report_and_logs_every_one(engine, report, tmp_path, capsys):
    one, log = engine(vllm(0, [0, 0, 0]), vllm(100, [60, 30, 9]), 500, vllm(300, [150, 80, 30])), tmp_path / "log.jsonl"
    arguments = [f"engine_url={one.url}", f"report={report.parent.parent}", "interval=0.05", f"log={log}"]
    assert cli.main(["monitor", *arguments, "count=3"]) == 0
    said = capsys.readouterr().out
    for words in ("(report 2.50, drafts -34%)", "warning: 33% of the draft tokens", "trying again"):
        assert words in said
    rows = [json.loads(text) for text in log.read_text().splitlines()]
    assert [row.get("drafts") for row in rows] == [0, 100, None, 200] and "500" in rows[2]["error"]
    assert rows[1]["alpha"] == [0.6, 0.3, 0.09] and rows[1]["expected_tau"] == 2.5 and len(rows[1]["warnings"]) == 2
    assert cli.main(["monitor", *arguments, "count=1"]) == 0
    assert len(log.read_text().splitlines()) == 6, "an earlier log is kept"


def test_the_status_is_1_when_the_engine_did_not_answer_at_the_end(engine, capsys):
    one = engine(vllm(1, [1]), 500)
    assert cli.main(["monitor", f"engine_url=[{one.url}]", "interval=0.01", "count=1"]) == 1
    assert "answers 500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "engine_url=… is missing"),
        (["engine_url=localhost:8000"], "an address such as http://localhost:8000"),
        (["engine_url=http://h", "interval=soon"], "interval=soon: a number of seconds"),
        (["engine_url=http://h", "interval=0"], "interval=0: seconds above 0"),
        (["engine_url=http://h", "count=0"], "count=0: a whole number of 1 or more"),
        (["engine_url=http://h", "report=nowhere"], "report=nowhere: no such file"),
        (["engine_url=http://h", "log=nowhere/log"], "there is no folder nowhere"),
        (["engine_url=http://h", "log=/proc"], "log=/proc: cannot be written (Is a directory)"),
        (["engine_url=http://h", "intervall=1"], "did you mean interval?"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(arguments, said, capsys):
    assert cli.main(["monitor", *arguments]) == 2
    assert said in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- the doctor's look

HEALTHY = [90, 70, 50]


@pytest.mark.parametrize(
    ("page", "status", "says"),
    [
        (vllm(100, HEALTHY), "ok", "τ 3.10 (report 3.20, drafts -5%)  α 0.90 0.70 0.50  report 0.90 0.80 0.50"),
        (sglang(3.1, 0.7, 900), "ok", "τ 3.10 (report 3.20"),
        (vllm(100, [50, 20, 10]), "warning", "τ 1.80 instead of 3.20 on heldout"),
        (vllm(1000, [2, 0, 0]), "fault", "τ 1.00 (report 3.20"),
        (vllm(0, [0, 0, 0]), "warning", "no drafts"),
        ('vllm:generation_tokens_total{model_name="m"} 5\n', "fault", "does not speculate"),
        (503, "fault", "answers 503"),
    ],
)
def test_the_doctor_reads_a_running_engine_beside_the_report(engine, page, status, says):
    from headtrain.doctor import live

    (found,) = live(engine(page).url, {"max_position_embeddings": 4096}, Expected([0.9, 0.8, 0.5], "heldout", None))
    assert (found.check, found.status) == ("engine", status) and says in found.says


def test_the_doctor_finds_an_engine_that_serves_longer_texts_than_the_head_knows(engine):
    from headtrain.doctor import live

    found = list(live(engine(vllm(100, HEALTHY)).url, {"max_position_embeddings": 2048}, None))
    assert [one.status for one in found] == ["fault", "ok"] and "4,096 positions, the head has 2,048" in found[0].says
