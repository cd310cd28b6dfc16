import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from headtrain.config import PromptSource
from headtrain.data_gen import capture, chat, passes, prompts, respond
from headtrain.data_gen.claims import file_name
from headtrain.data_gen.store import CaptureStore, ResponseStore
from headtrain.files import claimed

TAPS = (1, 2, 4)


class Places:
    def __init__(self, root):
        self.prompts, self.responses, self.captures = root / "prompts", root / "responses", root / "captures"
        self.all = (self.prompts, self.responses, self.captures)


@pytest.fixture
def places(recipe, tmp_path):
    places = Places(tmp_path)
    prompts.gather(recipe, places.prompts)
    return places


def run(recipe, target, places):
    """The whole responses stage in this process."""
    done = respond.work(recipe, target, *places.all, TAPS)
    respond.finish(recipe, places.responses, places.captures)
    return done


def ids_of(folder):
    store = ResponseStore(folder)
    return {row.id: (store.read(row).ids.tolist(), row.finish) for row in store.rows}


def in_child(action):
    """Runs `action` in a forked child; returns its process id."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    return child


def test_train_and_valid_prompts_are_answered_and_held_out_ones_are_not(recipe, tiny_target, places):
    run(recipe, tiny_target, places)
    asked = {p.id: p for p in prompts.load(places.prompts) if p.split != "heldout"}
    rows = ResponseStore(places.responses).rows
    assert {row.id for row in rows} == set(asked) and len(rows) == 21
    for row in rows:
        prompt = chat.prompt_ids(tiny_target.tokenizer, asked[row.id].messages)
        ids = ids_of(places.responses)[row.id][0]
        theirs = tiny_target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, pad_token_id=0)
        assert ids == theirs[0].tolist()
        assert (row.split, row.first, row.supervised) == (asked[row.id].split, len(prompt), len(ids) - len(prompt))


def test_both_stores_hold_the_same_rows_and_both_manifests_are_complete(recipe, tiny_target, places):
    run(recipe, tiny_target, places)
    responses, captures = ResponseStore(places.responses), CaptureStore(places.captures)
    assert [r.id for r in responses.rows] == [r.id for r in captures.rows] and responses.on_policy
    for ours, theirs in zip(responses.rows, captures.rows, strict=True):
        assert torch.equal(responses.read(ours).ids, captures.read(theirs).ids)
        marks = captures.read(theirs).supervised
        assert torch.equal(marks, torch.arange(ours.tokens) >= ours.first)
    counts = json.loads((places.responses / "manifest.json").read_text())["counts"]
    assert counts["rows"] == 21 and counts["train"] + counts["valid"] == 21
    assert counts["tokens"] == sum(r.tokens for r in responses.rows)
    assert counts.get("finish_stop", 0) + counts["finish_length"] == 21
    assert counts["truncated"] == counts["finish_length"]
    manifest = json.loads((places.captures / "manifest.json").read_text())
    assert manifest["complete"] and (manifest["norm"], manifest["taps"]) == ("post_norm", list(TAPS))
    assert manifest["counts"]["tokens"] == counts["tokens"]


def test_batches_hold_to_the_budget_whatever_the_order_of_the_file(recipe, tiny_target, places, tmp_path):
    plan = respond.plan_batches(recipe, tiny_target.tokenizer, places.prompts, places.responses)
    assert len(plan["batches"]) > 4
    for batch in plan["batches"]:
        assert len(batch) == 1 or len(batch) * max(tokens + budget for _, tokens, budget in batch) <= 200
    source, other = Path(recipe.data.prompts[0].source), Places(tmp_path / "again")
    lines = source.read_text().split("\n")
    random.Random(1).shuffle(lines)
    source.write_text("\n".join(lines))
    prompts.gather(recipe, other.prompts)
    assert respond.plan_batches(recipe, tiny_target.tokenizer, other.prompts, other.responses) == plan


def test_prompts_without_room_for_an_answer_are_counted(recipe, tiny_target, places):
    recipe.data.max_length = 40
    plan = respond.plan_batches(recipe, tiny_target.tokenizer, places.prompts, places.responses)
    asked = [p for p in prompts.load(places.prompts) if p.split != "heldout"]
    lengths = [len(chat.prompt_ids(tiny_target.tokenizer, p.messages)) for p in asked]
    fitting = [n for n in lengths if n < 40]
    planned = sorted((tokens, budget) for batch in plan["batches"] for _, tokens, budget in batch)
    assert 0 < len(fitting) < len(lengths)
    assert planned == sorted((n, min(20, 40 - n)) for n in fitting)
    assert plan["left_out"] == {"no_supervised_tokens_after_truncation": len(lengths) - len(fitting)}


def test_a_worker_killed_at_any_moment_changes_no_id(recipe, tiny_target, places, tmp_path):
    whole = Places(tmp_path / "whole")
    prompts.gather(recipe, whole.prompts)
    began = time.monotonic()
    run(recipe, tiny_target, whole)
    span = time.monotonic() - began
    expected, moments = ids_of(whole.responses), random.Random(0)
    for _ in range(6):
        child = in_child(lambda: respond.work(recipe, tiny_target, *places.all, TAPS))
        time.sleep(moments.uniform(0.05, 0.4) * span)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for file in places.responses.glob("*.safetensors"):  # a batch with responses has its captures
        assert (places.captures / file.name.replace("responses", "captures")).is_file()
    run(recipe, tiny_target, places)
    assert ids_of(places.responses) == expected
    assert not list(tmp_path.rglob("*.part"))


def test_two_workers_share_the_batches_and_give_the_ids_of_one(recipe, tiny_target, places, tmp_path):
    whole = Places(tmp_path / "whole")
    prompts.gather(recipe, whole.prompts)
    run(recipe, tiny_target, whole)
    respond.plan_batches(recipe, tiny_target.tokenizer, places.prompts, places.responses)
    children = [in_child(lambda: respond.work(recipe, tiny_target, *places.all, TAPS)) for _ in range(2)]
    for child in children:
        os.waitpid(child, 0)
    respond.finish(recipe, places.responses, places.captures)
    assert ids_of(places.responses) == ids_of(whole.responses)
    whole_again = respond.status(places.responses)
    assert whole_again["done_batches"] == whole_again["batches"]
    by_worker = [json.loads(note.read_text())["pid"] for note in (places.responses / "claims").glob("*.json")]
    assert set(by_worker) == set(children)  # both did something
    assert len(by_worker) == len(list(places.responses.glob("*.safetensors")))


def test_a_batch_that_another_process_holds_is_passed_over(recipe, tiny_target, places):
    batches = len(respond.plan_batches(recipe, tiny_target.tokenizer, places.prompts, places.responses)["batches"])
    with claimed(places.responses / "claims" / "2.lock") as mine:
        assert mine and respond.work(recipe, tiny_target, *places.all, TAPS) == batches - 1
    assert respond.work(recipe, tiny_target, *places.all, TAPS) == 1


@pytest.fixture
def mock_answers(monkeypatch, tiny_target):
    """A target that answers odd prompts with `ok[end]`, even ones with `ooo` (cut by length); notes prompts."""
    asked = []
    reply = [*tiny_target.tokenizer.encode("ok", add_special_tokens=False), tiny_target.tokenizer.eos_token_id]

    def answer(target, ids, budgets, taps, dtype, how, on_tokens):
        asked.extend(tuple(row) for row in ids)
        kept = passes.StateBuffers(len(ids), max(map(len, ids)) + 3, target, len(taps), dtype)
        for n, row in enumerate(ids):
            kept.ids_BS[n, : len(row) + 3] = torch.tensor(row + (reply if len(row) % 2 else [reply[0]] * 3))
            kept.lengths_B[n] = len(row) + 3
        on_tokens(3 * len(ids))
        return kept, ["stop" if len(row) % 2 else "length" for row in ids]

    monkeypatch.setattr(passes, "answer", answer)
    return asked


def test_a_restart_asks_only_what_is_missing_and_a_second_one_nothing(  # case 17
    recipe, tiny_target, places, mock_answers, caplog
):
    first = respond.work(recipe, tiny_target, *places.all, TAPS)
    once = list(mock_answers)
    assert len(once) == len(set(once)) == 21
    # what a crash leaves: one batch half-written, and the source file in another order with one new line at its end
    lost = respond.read_json(places.responses / "plan.json")["batches"][1]
    (places.responses / file_name("responses", 1)).rename(
        places.responses / f".{file_name('responses', 1)}.99999.part"
    )
    mock_answers.clear()
    caplog.set_level("INFO")
    assert respond.work(recipe, tiny_target, *places.all, TAPS) == 1 < first
    known = {p.id: p for p in prompts.load(places.prompts)}
    assert [len(ids) for ids in mock_answers] == [tokens for _, tokens, _ in lost]
    assert set(mock_answers) == {
        tuple(chat.prompt_ids(tiny_target.tokenizer, known[i].messages)) for i, *_ in lost
    }
    assert "was left half-written" in caplog.text and not list(places.responses.glob(".*.part"))

    for folder in (places.responses, places.captures):  # a finish that was killed before
        (folder / ".index.json.99999.part").write_text("{")
        (folder / ".manifest.json.99999.part").write_text("{")
    counts = respond.finish(recipe, places.responses, places.captures)
    assert not [*places.responses.rglob("*.part"), *places.captures.rglob("*.part")]
    rows = ResponseStore(places.responses).rows
    assert len({row.id for row in rows}) == len(rows) == 21
    assert all(row.supervised == 3 for row in rows)
    flagged = [row for row in rows if row.finish == "length"]
    assert counts["truncated"] == len(flagged) > 0 and len(flagged) < 21

    mock_answers.clear()
    assert respond.work(recipe, tiny_target, *places.all, TAPS) == 0 and not mock_answers
    assert "nothing to do" in caplog.text


def test_the_status_counts_up_to_the_tokens_that_were_made(recipe, tiny_target, places):
    assert respond.status(places.responses)["batches"] == 0
    plan = respond.plan_batches(recipe, tiny_target.tokenizer, places.prompts, places.responses)
    before = respond.status(places.responses)
    assert (before["done_batches"], before["tokens"], before["estimate"]) == (0, 0, 21 * 20)
    seen = []
    respond.work(recipe, tiny_target, *places.all, TAPS, progress=lambda done, most: seen.append((done, most)))
    respond.finish(recipe, places.responses, places.captures)
    after = respond.status(places.responses)
    assert after["done_batches"] == after["batches"] == len(plan["batches"])
    assert after["tokens"] == sum(row.supervised for row in ResponseStore(places.responses).rows)
    assert len(seen) >= len(plan["batches"]) and all(done <= most for done, most in seen)


def test_sampled_answers_depend_on_the_seed_and_survive_a_change_of_batches(recipe, tiny_target, places, tmp_path):
    def sampled(name, **changes):
        other = Places(tmp_path / name)
        prompts.gather(recipe, other.prompts)
        recipe.data.responses.temperature, recipe.data.responses.top_p = 0.9, 0.95
        for key, value in changes.items():
            setattr(recipe if key == "seed" else recipe.data.responses, key, value)
        run(recipe, tiny_target, other)
        return ids_of(other.responses)

    first = sampled("a")
    assert sampled("b", batch_tokens=100) == first
    assert sampled("c", seed=1) != first


def test_given_answers_become_off_policy_rows_and_are_captured(recipe, tiny_target, tmp_path):
    source = tmp_path / "given.jsonl"
    turn = ("user", "assistant") * 2
    rows = [[f"q{n}?", "a" * (n + 1), "more?", "b" * (2 * n + 1)] for n in range(8)] + [["long?", "c" * 300]]
    chats = [[{"role": r, "content": t} for r, t in zip(turn, texts, strict=False)] for texts in rows]
    source.write_text("\n".join(json.dumps({"messages": messages}) for messages in chats))
    recipe.data.prompts, recipe.data.responses.backend = [PromptSource(str(source))], "given"
    recipe.data.held_out = recipe.data.valid = 0
    places = Places(tmp_path)
    prompts.gather(recipe, places.prompts)
    respond.work(recipe, tiny_target, *places.all, TAPS)
    respond.finish(recipe, places.responses, places.captures)
    assert capture.missing(places.responses, places.captures) > 0 and not (places.captures / "index.json").is_file()
    capture.work(recipe, tiny_target, places.responses, places.captures, TAPS)
    capture.finish(recipe, places.responses, places.captures)
    store = CaptureStore(places.captures)
    texts, cut = set(), "c" * (256 - len("[user]\nlong?\n[assistant]\n") - 1)  # [end] is one token, [user] six
    for row in store.rows:
        read = store.read(row)
        texts.add("".join(tiny_target.tokenizer.convert_ids_to_tokens(read.ids[read.supervised].tolist())))
    assert texts == {f"{a}[end]{b}[end]" for _, a, _, b in rows[:8]} | {cut}
    manifest = json.loads((places.responses / "manifest.json").read_text())
    assert manifest["on_policy"] is False and manifest["counts"]["truncated"] == 1


def test_a_plan_without_prompts_is_an_error_with_the_reasons(recipe, tiny_target, places):
    recipe.data.max_length = 4
    with pytest.raises(respond.ResponseError, match=r"0 prompts left .*: no_supervised_tokens_after_truncation 21"):
        respond.plan_batches(recipe, tiny_target.tokenizer, places.prompts, places.responses)
