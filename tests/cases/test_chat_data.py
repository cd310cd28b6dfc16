"""Chats as people have them, with templates of one token per character: what is kept, rendered and supervised."""

import json

import pytest

from headtrain.config import DataConfig, PromptSource, RecipeConfig, ResponsesConfig
from headtrain.data_gen import chat, prompts, respond

PLAIN = (
    "{%- for m in messages -%}{{- '[' ~ m.role ~ ']\\n' ~ m.content ~ '[end]\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '[assistant]\\n' -}}{%- endif -%}"
)
STRICT = (
    "{%- for m in messages -%}{%- if m.role == 'system' and not loop.first -%}"
    "{{- raise_exception('the system turn must be the first') -}}{%- endif -%}{%- endfor -%}" + PLAIN
)
TOOLS = (
    "{%- if tools -%}{{- '[tools]' ~ (tools | tojson) ~ '[end]\\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{{- '[' ~ m.role ~ ']\\n' ~ (m.content or '') -}}{%- for c in m.tool_calls or [] -%}"
    "{{- '<call>' ~ c.function.name ~ ' ' ~ ARGUMENTS ~ '</call>' -}}{%- endfor -%}{{- '[end]\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '[assistant]\\n' -}}{%- endif -%}"
)
THOUGHTS = (
    "{%- for m in messages -%}{{- '[' ~ m.role ~ ']\\n' -}}{%- if m.NAME -%}{{- '<think>' ~ m.NAME ~ '</think>' -}}"
    "{%- endif -%}{{- m.content ~ '[end]\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '[assistant]\\n' -}}{%- endif -%}"
)
WITH_TEXT = "c.function.arguments if c.function.arguments is string else c.function.arguments | tojson"


@pytest.fixture
def tokenizer():
    """Makes a tokenizer with one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(template=PLAIN, **more):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        inner = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
        found = PreTrainedTokenizerFast(tokenizer_object=inner, **more)
        found.chat_template = template
        return found

    return make


@pytest.fixture
def prepared(tmp_path, tokenizer):
    """prepared(rows, template, **data) -> (supervised texts by row id, Selection, rows left out of the responses)."""

    def prepare(rows, template=PLAIN, kwargs=None, words=None, **data):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        given = ResponsesConfig(backend="given")
        config = RecipeConfig(data=DataConfig(prompts=[PromptSource(str(path))], responses=given, **data))
        config.target.template_kwargs = kwargs or {}
        found, words, texts, left = prompts.Selection(config.data), tokenizer(template, **words or {}), {}, {}
        for prompt in sorted(found, key=lambda prompt: prompt.row):
            made, reasons = respond.given_rows(config, words, prompt)
            left.update(reasons)
            texts[prompt.row] = [words.decode(row.ids[a:b]) for row in made for a, b in row.spans]
        return texts, found, {reason: number for reason, number in left.items() if number}

    return prepare


def turns(*texts, **last):
    made = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": [*made[:-1], {**made[-1], **last}]}


CALL = {"id": "c1", "type": "function", "function": {"name": "get_temp", "arguments": '{"city":"Oslo"}'}}
OFFERED = [{"type": "function", "function": {"name": "get_temp", "parameters": {"type": "object"}}}]
RESULT = {"role": "tool", "tool_call_id": "c1", "content": '{"temp":4}'}
ASKED = {"role": "user", "content": "How warm is Oslo?"}
ANSWER = {"role": "assistant", "content": "It is 4 degrees in Oslo."}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
OPENAI = {"tools": OFFERED, "messages": [ASKED, CALLING, RESULT, ANSWER]}
OLDER = {"functions": [OFFERED[0]["function"]], "messages": [
    ASKED, {"role": "assistant", "content": None, "function_call": CALL["function"]},
    {"role": "function", "name": "get_temp", "content": '{"temp":4}'}, ANSWER]}  # fmt: skip
SHAREGPT = {"tools": json.dumps(OFFERED), "conversations": [
    {"from": "human", "value": ASKED["content"]}, {"from": "function_call", "value": json.dumps(CALL["function"])},
    {"from": "observation", "value": '{"temp":4}'}, {"from": "gpt", "value": ANSWER["content"]}]}  # fmt: skip


@pytest.mark.parametrize("row", [OPENAI, OLDER, SHAREGPT])
@pytest.mark.parametrize(
    ("arguments", "printed"),
    [(WITH_TEXT, '{"city":"Oslo"}'), ("c.function.arguments | tojson", '{"city": "Oslo"}'),
     ("c.function.arguments.items() | list | tojson", '[["city", "Oslo"]]')],
)  # fmt: skip
def test_tools_calls_and_results_reach_the_template_and_what_the_target_said_is_supervised(
    prepared, tokenizer, row, arguments, printed
):
    template = TOOLS.replace("ARGUMENTS", f"({arguments})")
    texts, found, left = prepared([row], template)
    assert texts == {0: [f"<call>get_temp {printed}</call>[end]", "It is 4 degrees in Oslo.[end]"]} and not left
    (prompt,) = found
    whole = chat.render(tokenizer(template), prompt.messages, False)
    assert whole.startswith("[tools]" + json.dumps(OFFERED)) and '[tool]\n{"temp":4}[end]' in whole


def test_a_call_that_the_template_prints_nowhere_leaves_its_chat_out(prepared):
    texts, _, left = prepared([OPENAI, turns("a?", "b")])
    assert texts == {0: [], 1: ["b[end]"]} and left == {"tool_call_not_rendered": 1}


def test_an_offer_of_tools_is_part_of_what_a_prompt_is(prepared):
    _, found, _ = prepared([OPENAI, {**OPENAI, "tools": None}, OPENAI], TOOLS.replace("ARGUMENTS", f"({WITH_TEXT})"))
    assert found.counts["prompts"] == 2 and found.left_out == {"duplicate": 1}


MIDWAY = {"messages": [
    *turns("Hi", "Hello.")["messages"], {"role": "system", "content": "Shop closes in 5 minutes."},
    *turns("Are you open?", "For five more minutes.")["messages"]]}  # fmt: skip


def test_a_system_turn_midway_stays_where_it_is_or_its_row_goes_with_the_template_s_own_words(prepared):
    texts, _, left = prepared([MIDWAY, turns("Bye", "Goodbye.")])
    assert texts == {0: ["Hello.[end]", "For five more minutes.[end]"], 1: ["Goodbye.[end]"]} and not left
    texts, _, left = prepared([MIDWAY, turns("Bye", "Goodbye.")], STRICT)
    assert texts == {0: [], 1: ["Goodbye.[end]"]} and left == {"template_error: the system turn must be the first": 1}


def test_no_system_turn_is_added(prepared, tokenizer):
    _, found, _ = prepared([turns("Bye", "Goodbye.")])
    (prompt,) = found
    assert chat.render(tokenizer(), prompt.messages[:1], True) == "[user]\nBye[end]\n[assistant]\n"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("reads", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_reaches_the_template_under_the_name_that_it_reads(prepared, field, reads):
    row = turns("3+4?", "7", **{field: "short sum"})
    parts = turns("3+4?", [{"type": "thinking", "thinking": "short sum"}, {"type": "text", "text": "7"}])
    texts, found, left = prepared([row, parts], THOUGHTS.replace("NAME", reads))
    assert texts == {0: ["<think>short sum</think>7[end]"]} and found.left_out == {"duplicate": 1} and not left


def test_a_thought_that_the_template_prints_nowhere_is_not_lost_in_silence(prepared):
    texts, _, left = prepared([turns("3+4?", "7", reasoning_content="short sum"), turns("a?", "b")])
    assert texts == {0: [], 1: ["b[end]"]} and left == {"reasoning_not_rendered": 1}


def test_an_answer_in_the_thought_s_field_and_a_truncated_one_are_left_out(prepared):
    lost = turns("3+4?", None, reasoning_content="the answer is 7")
    cut = turns("5+4?", "Let me think about this for a") | {"finish_reason": "length"}
    whole = turns("6+4?", "10") | {"finish_reason": "stop"}
    seen = []
    texts, found, _ = prepared([lost, cut, whole])
    assert texts == {2: ["10[end]"]} and found.left_out == {"assistant_content_null": 1, "truncated": 1}
    prompts.Selection(found.data, lambda **facts: seen.append(facts))
    assert "token ids" in seen[0]["detail"]
    texts, found, _ = prepared([lost, cut, whole], keep_truncated=True)
    assert texts == {1: ["Let me think about this for a"], 2: ["10[end]"]}


def test_weights_of_messages_say_which_answers_are_learned(prepared):
    chats = [turns("a?", "one", "b?", "two"), turns("c?", "three", "d?", "four"), turns("e?", "five", weight=2)]
    chats[0]["messages"][1]["weight"] = 0
    chats[1]["messages"][3]["loss"] = False
    texts, found, _ = prepared([*chats, turns("f?", "six", train=0), turns("g?", "seven", weight=1.0)])
    assert texts == {0: ["two[end]"], 1: ["three[end]"], 3: [], 4: ["seven[end]"]}
    assert found.left_out == {"weight_is_not_0_or_1": 1}


def test_fields_that_nobody_here_knows_reach_the_template(prepared):
    template = PLAIN.replace("m.content", "(m.mood or '') ~ m.content")
    texts, _, _ = prepared([turns("a?", "b", mood="gladly: ")], template)
    assert texts == {0: ["gladly: b[end]"]}


IDS = {"prompt_token_ids": [1, 5, 6], "completion_token_ids": [33, 34, 2], "text": "another", "finish_reason": "stop"}


def test_given_token_ids_are_the_row_as_they_are(tmp_path, tokenizer):
    rows = [IDS, {"prompt_ids": [1, 5, 90], "completion_ids": [40, 91, 41, 2]},
            {**IDS, "completion_token_ids": [], "error": "timeout"}, {**IDS, "completion_token_ids": ["a"]},
            {**IDS, "finish_reason": "length"}, {**IDS, "completion_token_ids": [999]}, IDS,
            turns("a?", "b")]  # fmt: skip
    path = tmp_path / "ids.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    given = ResponsesConfig(backend="given")
    data = DataConfig(prompts=[PromptSource(str(path))], responses=given, held_out=0, valid=0)
    config = RecipeConfig(data=data)
    config.data.prompts = [PromptSource(str(path))]
    prompts.gather(config, tmp_path / "prompts")
    manifest = json.loads((tmp_path / "prompts" / "manifest.json").read_text())
    assert manifest["left_out"] == {
        "no_completion_tokens": 1, "token_ids_are_not_numbers": 1, "truncated": 1, "duplicate": 1,
    }  # fmt: skip
    made = {p.row: respond.given_rows(config, tokenizer(), p) for p in prompts.load(tmp_path / "prompts")}
    assert [(row.ids, row.spans) for n in (0, 1) for row in made[n][0]] == [
        ([1, 5, 6, 33, 34, 2], [(3, 6)]), ([1, 5, 90, 40, 91, 41, 2], [(3, 7)]),
    ]  # fmt: skip
    assert made[5] == ([], {"token_id_beyond_the_vocabulary": 1}) and made[7][0]
    plan = respond.plan_batches(config, tokenizer(), tmp_path / "prompts", tmp_path / "responses")
    assert plan["retokenised"] == 1 and sum(map(len, plan["batches"])) == 3
    assert not manifest["on_policy"]


def test_one_limit_of_length_holds_for_text_and_for_token_ids(tmp_path, tokenizer):
    ids = {"prompt_token_ids": [3] * 30, "completion_token_ids": [4] * 20}
    long = {"prompt_token_ids": [3] * 40, "completion_token_ids": [4]}
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps(ids) + "\n" + json.dumps(long))
    data = DataConfig(prompts=[PromptSource(str(path))], responses=ResponsesConfig(backend="given"), max_length=40)
    config = RecipeConfig(data=data)
    made = {p.row: respond.given_rows(config, tokenizer(), p) for p in prompts.Selection(data)}
    ((row,), _), (none, why) = made[0], made[1]
    assert (len(row.ids), row.spans, row.truncated) == (40, [(30, 40)], True)
    assert not none and why == {"no_supervised_tokens_after_truncation": 1}


@pytest.mark.parametrize("prints", [0, 1, 2])
def test_one_begin_token_or_none_and_two_are_an_error(tokenizer, prints):
    words = tokenizer("{{- bos_token -}}" * prints + PLAIN, bos_token="<s>")
    if prints == 2:
        with pytest.raises(chat.TemplateError, match="double_bos"):
            chat.check_template(words)
        return
    chat.check_template(words)
    ids = chat.prompt_ids(words, [ASKED])
    assert ids.count(words.bos_token_id) == prints
    assert ids == words.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=False)


def test_a_row_that_makes_two_begin_tokens_or_a_template_fail_costs_that_row_alone(prepared):
    """A begin token in a system text stands behind the one that the template prints; others trip the template."""
    template = (
        "{%- macro down(n) -%}{{- 1 // n if n < 2 else down(n - 1) -}}{%- endmacro -%}{{- bos_token -}}"
        "{%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- endif -%}"
        "{%- for m in messages -%}{%- if m.depth is defined -%}{{- down(m.depth) -}}{%- endif -%}{%- endfor -%}"
    )
    chats = [turns("a?", "b"), turns("c?", "d"), turns("e?", "f", depth=0), turns("g?", "h", depth=900)]
    chats[1]["messages"].insert(0, {"role": "system", "content": "<s>You are kind."})
    texts, _, left = prepared(chats, template + PLAIN, words={"bos_token": "<s>"})
    assert texts == {0: ["b[end]"], 1: [], 2: [], 3: []}
    assert left.pop("double_bos") == 1 and sum(left.values()) == 2
    assert all(reason.startswith("template_error: ") for reason in left)


def test_a_template_that_fails_for_one_question_or_prints_nothing_ends_the_run_before_anything_else(tokenizer):
    for template, words in (("{{- raise_exception('never') -}}", "never"), ("{{- '' -}}", "to nothing")):
        with pytest.raises(chat.TemplateError, match=words):
            chat.check_template(tokenizer(template))


def test_a_template_beside_the_weights_or_in_a_file_of_its_own_gives_the_same_ids(tmp_path, tokenizer):
    from headtrain.checks import load_tokenizer
    from headtrain.config import TargetConfig

    bare, beside, file = tmp_path / "bare", tmp_path / "beside", tmp_path / "served.jinja"
    for folder in (bare, beside):
        words = tokenizer(None)
        words.save_pretrained(folder)
        (folder / "config.json").write_text('{"model_type": "llama"}')
    file.write_text(PLAIN)
    (beside / "chat_template.jinja").write_text(PLAIN)
    with pytest.raises(chat.TemplateError, match=r"bare: neither .*chat_template\.jinja.*target\.chat_template"):
        chat.check_template(load_tokenizer(TargetConfig(model=str(bare))))
    named = load_tokenizer(TargetConfig(model=str(bare), chat_template=str(file)))
    found = load_tokenizer(TargetConfig(model=str(beside)))
    assert chat.prompt_ids(named, [ASKED]) == chat.prompt_ids(found, [ASKED])
