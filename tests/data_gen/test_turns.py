"""Chats of several turns, asked after the target's own answers: one row where ids continue, else rows of their own."""

import json

import pytest
import torch

from headtrain.config import PromptSource
from headtrain.data_gen import capture, passes, prompts, respond, turns
from headtrain.data_gen.store import CaptureStore, ResponseStore

TAPS = (1, 2, 4)
FORGETFUL = (
    "{%- for m in messages -%}{%- if m.role != 'assistant' or loop.last -%}{{- '[' ~ m.role ~ ']\\n' ~ m.content -}}"
    "{{- '[end]\\n' -}}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- '[assistant]\\n' -}}{%- endif -%}"
)


@pytest.fixture(autouse=True)
def spelling(tiny_target):
    """The toy tokenizer decodes its characters without spaces between them."""
    from tokenizers import decoders

    inner = tiny_target.tokenizer.backend_tokenizer
    before, inner.decoder = inner.decoder, decoders.Fuse()
    yield
    inner.decoder = before


@pytest.fixture
def asked(recipe, tmp_path):
    """asked(rows, **data) -> the folders of a run over chats of up to three turns, prompts gathered."""

    def make(chats, **data):
        path = tmp_path / "chats.jsonl"
        rows = [[{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(c)] for c in chats]
        path.write_text("\n".join(json.dumps({"messages": messages}) for messages in rows))
        recipe.data.prompts, recipe.data.held_out, recipe.data.valid = [PromptSource(str(path))], 0, 0
        recipe.data.turns = 3
        for key, value in data.items():
            setattr(recipe.data, key, value)
        folders = [tmp_path / name for name in ("prompts", "responses", "captures")]
        prompts.gather(recipe, folders[0])
        return folders

    return make


def answered(recipe, target, folders):
    respond.work(recipe, target, *folders, TAPS)
    respond.finish(recipe, *folders[1:])
    return ResponseStore(folders[1]), CaptureStore(folders[2])


@pytest.fixture
def replies(monkeypatch, tiny_target):
    """A target that answers by a function of the prompt's text; real states of whatever it says."""

    def say(reply):
        tokenizer = tiny_target.tokenizer

        def answer(target, ids, budgets, taps, dtype, how, on_tokens):
            said = [reply("".join(tokenizer.convert_ids_to_tokens(row))) for row in ids]
            rows = [row + tokenizer.encode(text, add_special_tokens=False) for row, text in zip(ids, said, strict=True)]
            kept = passes.StateBuffers(len(ids), max(map(len, rows)), target, len(taps), dtype)
            for n, row in enumerate(rows):
                kept.ids_BS[n, : len(row)], kept.lengths_B[n] = torch.tensor(row), len(row)
            return kept, ["stop" if text.endswith("[end]") else "length" for text in said]

        monkeypatch.setattr(passes, "answer", answer)

    return say


def text_of(target, ids):
    return "".join(target.tokenizer.convert_ids_to_tokens(ids.tolist()))


def test_each_turn_is_asked_after_the_targets_own_answers_and_the_chat_is_one_row(recipe, tiny_target, asked, replies):
    folders = asked([["a?", "old", "b?", "older", "c?"], ["d?"]])
    replies(lambda prompt: f"own {prompt.count('[user]')}[end]")
    store, _ = answered(recipe, tiny_target, folders)
    texts = {text_of(tiny_target, store.read(row).ids): row for row in store.rows}
    whole = "".join(f"[user]\n{q}?[end]\n[assistant]\nown {n}[end]\n" for n, q in enumerate("abc", 1))[:-1]
    assert set(texts) == {whole, "[user]\nd?[end]\n[assistant]\nown 1[end]"}
    row = texts[whole]
    marks = store.read(row).supervised
    assert text_of(tiny_target, store.read(row).ids[marks]) == "own 1[end]own 2[end]own 3[end]"
    assert (row.supervised, row.first, row.finish) == (int(marks.sum()), int(marks.int().argmax()), "stop")


def test_a_template_that_forgets_gives_a_row_per_turn(recipe, tiny_target, asked, replies, monkeypatch):
    monkeypatch.setattr(tiny_target.tokenizer, "chat_template", FORGETFUL)
    folders = asked([["a?", "old", "b?"]])
    replies(lambda prompt: f"to {prompt[-20:-18]}[end]")
    store, captures = answered(recipe, tiny_target, folders)
    (prompt,) = prompts.load(folders[0])
    assert [row.id for row in store.rows] == [f"{prompt.id}.0", f"{prompt.id}.1"] == [row.id for row in captures.rows]
    for row, question in zip(store.rows, ("a?", "a?[end]\n[user]\nb?"), strict=True):
        read = store.read(row)
        assert text_of(tiny_target, read.ids[~read.supervised]) == f"[user]\n{question}[end]\n[assistant]\n"


@pytest.mark.parametrize(
    ("reply", "max_length", "reason", "number"),
    [
        ("cut off", 256, "turns_after_an_answer_that_is_cut_off", 2),
        ("odd[end]ness[end]", 256, "turns_after_an_answer_that_is_no_text", 2),
        ("own[end]", 60, "turns_beyond_data.max_length", 1),
    ],
)
def test_turns_that_cannot_be_asked_are_counted(
    recipe, tiny_target, asked, replies, reply, max_length, reason, number
):
    folders = asked([["a?", "old", "b?", "old", "c?"]], max_length=max_length)
    replies(lambda prompt: reply)
    store, _ = answered(recipe, tiny_target, folders)
    assert len(store.rows) == 1
    assert json.loads((folders[1] / "manifest.json").read_text())["left_out"] == {reason: number}


def test_a_thought_in_an_answer_goes_back_as_the_tokenizers_own_parser_reads_it(tiny_target):
    class Parsing:
        response_template = "given"

        @staticmethod
        def parse_response(ids, prefix):
            return {"role": "assistant", "thinking": f"{len(prefix)} before", "content": f"{len(ids)} long"}

    message = turns.answer_message(Parsing(), [1, 2], [3, 4, 5], {5})
    assert message == {"role": "assistant", "content": "3 long", "reasoning_content": "2 before"}


def test_the_states_of_a_chat_of_turns_are_those_of_reading_it_at_once(recipe, tiny_target, asked):
    """Whatever the tiny target says: ids and captures agree, and every span is its own greedy choice."""
    folders = asked([[f"{word}?", "old", "more?", "old", "and?"] for word in ("one", "two", "three")])
    recipe.data.responses.max_new_tokens = 12
    captures = answered(recipe, tiny_target, folders)[1]
    assert capture.missing(*folders[1:]) == 0
    for row in captures.rows:
        read = captures.read(row)
        theirs = tiny_target.model(read.ids[None].long(), output_hidden_states=True)
        assert torch.allclose(read.taps[:-1, 0], theirs.hidden_states[1][0, :-1], atol=1e-4)
        where = read.supervised.nonzero()[:, 0]
        for choices in (theirs.logits[0].argmax(-1).int(), read.argmax):
            assert torch.equal(choices[where - 1], read.ids[where])


def test_the_first_turn_alone_is_asked_unless_more_are_wanted(recipe, asked):
    folders = asked([["a?", "old", "b?"]], turns=1)
    assert [p.follow_ups for p in prompts.load(folders[0])] == [[]]
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    assert "user_turns_not_asked" not in manifest["counts"]


def test_a_tools_result_ends_what_can_be_asked(recipe, tmp_path):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c?"},
        {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "4"},
        {"role": "user", "content": "d?"},
    ]  # fmt: skip
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    recipe.data.prompts, recipe.data.turns = [PromptSource(str(path))], 9
    found = prompts.Selection(recipe.data)
    assert [p.follow_ups for p in found] == [["c?"]] and found.counts["user_turns_not_asked"] == 1


def test_more_turns_change_the_id_of_chats_that_have_them_alone():
    ask = [{"role": "user", "content": "a?"}]
    assert prompts.content_id(ask) == prompts.content_id(ask, []) != prompts.content_id(ask, ["b?"])
