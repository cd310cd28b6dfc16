"""Whole runs through the command line, on tiny random targets."""

from __future__ import annotations

import json
import shutil
import time

import pytest

from headtrain import checks, configload, evaluation, pipeline, stages
from headtrain.files import Manifest, claimed, read_json


def fit(headtrain, run, *more):
    done = headtrain("fit", f"run_dir={run}", "smoke=true", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def times(run) -> dict:
    """When each file of a run was last written."""
    return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


def check_run(run, config) -> None:
    """What every finished run must have."""
    from headtrain.data_gen.store import CaptureStore, ResponseStore
    from headtrain.heads.base import load_head

    formats = config["export"]["formats"]
    for stage in ("prompts", "responses", "captures", "training", "report", *["export"][: len(formats)]):
        assert Manifest(run / stage).data["complete"], stage
    responses, captures = ResponseStore(run / "responses"), CaptureStore(run / "captures")
    assert {row.id for row in responses.rows} == {row.id for row in captures.rows}
    report = read_json(run / "report" / "report.json")
    assert {row["drafter"] for row in report["results"]} >= {"head", "ngram", "head+ngram"}
    assert all(row["identical_to_plain"] for row in report["results"] if row["drafter"] != "none")
    assert (run / "report" / "report.html").stat().st_size > 5000
    head = load_head(run / "head")
    assert head.config.taps == captures.taps and head.config.unroll == config["head"]["unroll"]
    for name in formats:
        assert load_head(run / "export" / name).config == head.config


# One of each head type, one with experts, one that trains the target along; the others have other sizes and families.
SMALL = [name for name in configload.recipe_names() if name.endswith("_smollm2")]
WHOLE = [*SMALL, "eagle3_qwen3_30b_a3b", "medusa2_llama8b"]


@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_path_of_a_recipe_runs_here(name, headtrain, tmp_path):
    run = tmp_path / "run"
    done = fit(headtrain, run, f"recipe={name}")
    config = configload.read_yaml(run / "config.yaml")
    states = 1 + len(read_json(run / "head" / "config.json")["headtrain"]["taps"])
    assert f"note: captures need {128 * states} B per token" in done.stdout
    check_run(run, config)
    assert config["target"]["family"] == configload.load(name, []).target.family
    assert "head" in done.stdout and str(run / "report" / "report.html") in done.stdout
    if name != "eagle3_smollm2":
        return
    before = times(run)
    began = time.monotonic()
    again = fit(headtrain, run, f"recipe={name}")
    assert time.monotonic() - began < 5
    assert times(run) == before
    assert again.stdout.strip() and again.stdout in done.stdout, "only the result is printed"
    status = headtrain("status", f"run_dir={run}").stdout
    assert status.count("complete: ") == 6

    shard = next((run / "captures").glob("captures-*.safetensors"))
    gone = [shard, run / "head" / "model.safetensors", run / "report" / "report.json"]
    for path in gone:
        path.unlink()
    said = fit(headtrain, run, f"recipe={name}").stdout
    assert all(f"{path.name} is gone; making it again" in said for path in gone)
    check_run(run, config)


@pytest.mark.parametrize("name", [name for name in configload.recipe_names() if name not in WHOLE])
def test_every_other_recipe_captures_trains_two_steps_and_exports_here(name, tmp_path, monkeypatch):
    from headtrain.heads.base import load_head
    from headtrain.training import trainer

    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(key, "")  # so that what the trainer sets is taken back after the test
        monkeypatch.delenv(key)
    monkeypatch.setattr(trainer, "leave", lambda: None)  # the process group serves all tests of this process
    run = tmp_path / "run"
    asked = configload.load(name, [f"run_dir={run}", "smoke=true"])
    job = pipeline.Job(pipeline.prepared(asked))
    config = job.config
    config.train.steps = 2
    wanted = ["prompts", "responses", "captures", "training", *["export"][: len(config.export.formats)]]
    for stage in wanted:
        job.open(stage)
    for stage in ["smoke_target", "check", *wanted]:
        stages.STAGES[stage](config, run, {"coming": ",".join(wanted)})
    assert all(job.complete(stage) for stage in wanted)
    assert config.target.family == asked.target.family
    head = load_head(run / "head")
    assert head.config.type == asked.head.type
    assert [load_head(run / "export" / form).config for form in config.export.formats] == [head.config] * len(
        config.export.formats
    )


def test_heads_are_evaluated_in_a_run_folder_of_their_own_and_on_the_captures_of_the_run(headtrain, tmp_path):
    run = tmp_path / "run"
    fit(headtrain, run, "recipe=eagle3_llama8b", "eval.drafters=ngram", "eval.speed_prompts=0", "eval.limit=2")
    target = configload.read_yaml(run / "config.yaml")["target"]["model"]
    suite, talks = tmp_path / "own.jsonl", tmp_path / "talks.jsonl"
    suite.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one", "two", "three")))
    talks.write_text(json.dumps({"question_id": 1, "category": "stem", "turns": ["four", "five"]}))
    shutil.copytree(run / "head", tmp_path / "other")
    done = headtrain("eval", f"head=[{run / 'head'},{tmp_path / 'other'}]", f"target={target}", "k=[1,2]",
                     f"suites=[{suite},spec_bench={talks}]", "drafters=[head,ngram,draft_model]", "tree=[chain,2x4]",
                     f"draft_model={target}", "speed_prompts=1", "speed_tokens=4", "max_new_tokens=8", "cost_batches=1",
                     "launch.workers=2")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (tmp_path / "runs").iterdir()
    report = read_json(made / "report" / "report.json")
    assert [head["id"] for head in report["heads"]] == ["other", "run"]
    rows = [row for row in report["results"] if row["kind"] == "acceptance" and row["drafter"] != "none"]
    of_heads = {(row["suite"], row["head"], row["k"], row["tree"]) for row in rows if row["drafter"] == "head"}
    assert of_heads == {(suite, head, k, tree) for suite in ("own", "spec_bench/mt_bench") for head in ("run", "other")
                        for k in (1, 2) for tree in ("chain", "2x4")}  # fmt: skip
    assert {row["prompts"] for row in rows if row["suite"] == "spec_bench/mt_bench"} == {2}, "both turns"
    perfect = [row for row in rows if row["drafter"] == "draft_model"]
    # Of itself, only drafts behind an answer's end are not accepted.
    assert len(perfect) == 4 and all(row["accepted"] > 0 for row in perfect)
    assert all(row["drafted"] - row["accepted"] <= row["k"] * row["prompts"] for row in perfect)
    assert all(row["identical_to_plain"] for row in rows)
    assert configload.read_yaml(run / "config.yaml")["eval"]["drafters"] == ["ngram"], "the head's run is left alone"
    refused = headtrain("eval", f"head={made / 'heads/run'}", f"target={target}", f"suites={suite}", f"run_dir={run}")
    assert refused.returncode == 2 and "give the evaluation another folder" in refused.stderr

    done = headtrain("eval", f"head={run / 'head'}", "offline=true", f"run_dir={run}", "k=[1,3]", "limit=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agreement with stored text" in done.stdout and "the states are stored in bfloat16" in done.stdout
    results = read_json(run / "offline" / "offline.json")["results"]
    assert {(row["split"], row["k"], row["prompts"]) for row in results} >= {("valid", 1, 3), ("train", 3, 3)}


def test_an_evaluation_folder_holds_the_heads_that_are_asked_for_and_no_others(tmp_path):
    heads = {name: tmp_path / name for name in "abc"}
    for name, place in heads.items():
        place.mkdir()
        (place / "config.json").write_text(name)
    run = tmp_path / "run"
    run.mkdir()
    for wanted in ("ab", "bc", "bc", "a", "b", "ca"):
        chosen = {name: heads[name] for name in wanted} if len(wanted) > 1 else {"head": heads[wanted]}
        evaluation._bring_heads(chosen, run)
        found = {path.parent.name: path.read_text() for path in run.rglob("config.json")}
        assert found == ({name: name for name in wanted} if len(wanted) > 1 else {"head": wanted})
        assert stages.head_folders(run).keys() == chosen.keys()


def test_heads_are_called_by_their_folder_or_their_run_and_never_alike(tmp_path):
    places = ["x/head", "y/head", "z", "w/x", "v/x"]
    for place in places:
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text("{}")
    assert list(evaluation.named_heads([str(tmp_path / place) for place in places])) == ["x", "y", "z", "x~2", "x~3"]
    assert list(evaluation.named_heads([str(tmp_path / "z")])) == ["head"]


def test_a_head_on_the_hub_is_fetched_at_its_revision(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **more: asked.append((a, more)) or tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert evaluation.found_head("me/head@v1") == tmp_path
    files = ["config.json", "model.safetensors", "adapter/*"]
    assert asked == [(("me/head",), {"revision": "v1", "allow_patterns": files})]


def test_a_run_folder_that_cannot_be_made_is_one_line(headtrain, tmp_path):
    (tmp_path / "file").write_text("x")
    done = headtrain("fit", "recipe=eagle3_llama8b", "smoke=true", f"run_dir={tmp_path / 'file'}")
    assert done.returncode == 2 and "Traceback" not in done.stderr and f"run_dir={tmp_path / 'file'}" in done.stderr


def test_changed_settings_redo_what_depends_on_them_and_keep_the_old(headtrain, tmp_path, environment):
    run, few = tmp_path / "run", ("recipe=eagle3_qwen3_8b", "inspect=1")
    done = headtrain("generate", f"run_dir={run}", "smoke=true", *few)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "⟦" in done.stdout and "responses: rows 24" in done.stdout
    responses = {path.name: path.read_bytes() for path in (run / "responses").glob("*.safetensors")}
    done = headtrain("generate", f"run_dir={run}", "smoke=true", *few, "head.taps=[1,3]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name: path.read_bytes() for path in (run / "responses").glob("*.safetensors")} == responses
    assert read_json(run / "captures" / "index.json")["taps"] == [2, 4]
    assert len(list(run.glob("captures.old-*"))) == 1
    missing = headtrain("train", f"run_dir={run}", "smoke=true", "recipe=eagle3_qwen3_8b")
    assert missing.returncode == 2 and "captures is missing, unfinished, damaged, or of other" in missing.stderr
    launched = environment | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                              "MASTER_PORT": "29611"}  # fmt: skip
    arguments = ["train", f"run_dir={run}", "smoke=true", "recipe=eagle3_qwen3_8b", "head.taps=[1,3]"]
    done = headtrain(*arguments, "--local_rank=0", env=launched)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Manifest(run / "training").data["complete"] and (run / "head" / "model.safetensors").is_file()
    assert "nothing to do" in headtrain(*arguments, env=launched).stdout


def test_a_finished_head_and_its_exports_come_back_with_its_settings_even_when_those_in_between_made_none(
    tmp_path, capsys
):
    job = pipeline.Job.__new__(pipeline.Job)
    job.run = tmp_path

    def opened(settings: str) -> bool:
        job.marks = {"training": (settings * 32, {"settings": settings})}
        return job.open("training")

    assert not opened("a")
    (tmp_path / "head").mkdir()
    (tmp_path / "export" / "vllm").mkdir(parents=True)  # by `headtrain export`
    exported = tmp_path / "export" / "vllm" / "config.json"
    for name in ("training/best.json", "head/config.json", "head/model.safetensors", "export/vllm/config.json"):
        (tmp_path / name).write_text("made by a")
    Manifest(tmp_path / "training").finish({})
    assert opened("a")
    assert not opened("b") and not (tmp_path / "head").exists() and not exported.exists()
    assert opened("a") and (tmp_path / "head" / "config.json").read_text() == "made by a"
    assert exported.read_text() == "made by a"
    assert "is gone" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["fit", "train"])
def test_two_runs_do_not_share_a_run_folder(command, headtrain, tmp_path, environment):
    (tmp_path / "run").mkdir()
    with claimed(tmp_path / "run" / ".lock") as mine:
        assert mine
        launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} if command == "train" else {}
        call = [command, "recipe=eagle3_llama8b", "smoke=true", f"run_dir={tmp_path / 'run'}"]
        done = headtrain(*call, env=environment | launched)
    assert done.returncode == 2 and "another headtrain process works in it" in done.stderr


def test_training_without_an_end_is_refused_before_anything_starts(recipe, tmp_path, headtrain):
    from headtrain.smoke import build_target, shrink

    config = configload.load(str(recipe), [f"run_dir={tmp_path / 'run'}", "smoke=true"])
    build_target(shrink(config), tmp_path / "model")
    done = headtrain("fit", f"recipe={recipe}", "train.steps=null", f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 2 and "train.epochs, train.steps and train.seconds are all empty" in done.stderr


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("target.shape.layers=9", "target.shape.layers=9"),
        ("eval.suites=[heldout,nowhere.jsonl]", "nowhere.jsonl: no such file"),
        ("data.max_length=100000", "the target has 512 positions"),
        ("head.taps=[7,8]", "tap"),
        ("train.precision=fp16", "train.precision=fp16 needs a GPU"),
    ],
)
def test_what_must_fail_later_fails_before_the_first_heavy_stage(override, said, recipe, tmp_path):
    from headtrain.smoke import build_target, shrink

    config = configload.load(str(recipe), [f"run_dir={tmp_path / 'run'}", "smoke=true", "data.max_length=256"])
    build_target(shrink(config), tmp_path / "model")
    wanted = [f"run_dir={tmp_path / 'run'}", f"target.model={tmp_path / 'model'}", "data.max_length=256",
              "target.device=cpu"]  # fmt: skip
    coming = {"coming": "responses,captures,training,report"}
    checks.check(configload.load(str(recipe), wanted), tmp_path / "run", coming)
    wanted = [text for text in wanted if text.split("=")[0] != override.split("=")[0]]
    if override.startswith("head.taps"):
        override = "head.taps=[7,8,9]"
        wanted.append("target.shape.layers=null")
    with pytest.raises(ValueError, match=said):
        checks.check(configload.load(str(recipe), [*wanted, override]), tmp_path / "run", coming)


def test_marked_text_shows_the_supervised_spans():
    from headtrain.stages import marked

    class Letters:
        def decode(self, ids, skip_special_tokens):
            return "".join(chr(n) for n in ids)

    ids = [ord(letter) for letter in "abcdef"]
    assert marked(Letters(), ids, [False, True, True, False, False, True]) == "a⟦bc⟧de⟦f⟧"
