import pytest

from headtrain.data_gen import chat
from headtrain.data_gen.prompts import Reject

ASSISTANT_TAGGED = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{- '[assistant]\\n' -}}{% generation %}"
    "{{- m.content ~ '[end]' -}}{% endgeneration %}{{- '\\n' -}}{%- else -%}"
    "{{- '[' ~ m.role ~ ']\\n' ~ m.content ~ '[end]\\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '[assistant]\\n' -}}{%- endif -%}"
)
THOUGHTLESS = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{{- '[' ~ m.role ~ ']\\n' -}}"
    "{%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in m.content -%}"
    "{{- m.content.split('</think>')[-1].lstrip('\\n') -}}{%- else -%}{{- m.content -}}{%- endif -%}"
    "{{- '[end]\\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- '[assistant]\\n' -}}{%- endif -%}"
)
STRICT = "{%- if messages|length > 1 -%}{{- raise_exception('one turn only') -}}{%- endif -%}{{- 'x' -}}"


def turns(*texts):
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def text_of(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def spans_of(tokenizer, row):
    return [text_of(tokenizer, row.ids[start:end]) for start, end in row.spans]


def words(prefix, count):
    return " ".join(f"{prefix}{n}" for n in range(count))


def test_the_terminator_is_supervised_and_the_newline_after_it_is_not(char_tokenizer):  # case 01
    tokenizer = char_tokenizer()
    (row,) = chat.rows(tokenizer, turns("What is a fjord?", "A long narrow sea inlet."))
    assert text_of(tokenizer, row.ids) == "[user]\nWhat is a fjord?[end]\n[assistant]\nA long narrow sea inlet.[end]"
    assert spans_of(tokenizer, row) == ["A long narrow sea inlet.[end]"]


@pytest.mark.parametrize("template", [None, ASSISTANT_TAGGED])
def test_generation_tags_do_not_change_the_spans(char_tokenizer, template):  # case 11
    tokenizer = char_tokenizer(template) if template else char_tokenizer()
    (row,) = chat.rows(tokenizer, turns("alpha prompt.", "beta answer."))
    assert spans_of(tokenizer, row) == ["beta answer.[end]"]
    assert 0 < sum(row.supervised()) < len(row.ids)


def test_a_template_that_only_appends_gives_one_row_with_a_span_per_answer(char_tokenizer):
    tokenizer = char_tokenizer()
    messages = turns("a?", "b", "c?", "d")
    (row,) = chat.rows(tokenizer, messages)
    assert spans_of(tokenizer, row) == ["b[end]", "d[end]"]
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert row.ids == whole[:-1]  # all but the newline at the end


def test_a_template_that_drops_old_thoughts_gives_one_row_per_answer(char_tokenizer):  # case 12
    tokenizer = char_tokenizer(THOUGHTLESS)
    answers = ("<think>\nadd\n</think>\n\n4", "<think>\n4*3\n</think>\n\n12")
    rows = chat.rows(tokenizer, turns("2+2?", answers[0], "times 3?", answers[1]))
    assert [spans_of(tokenizer, row) for row in rows] == [
        ["<think>\nadd\n</think>\n\n4[end]"], ["<think>\n4*3\n</think>\n\n12[end]"],
    ]  # fmt: skip
    second = rows[1]
    assert text_of(tokenizer, second.ids[: second.spans[0][0]]) == (
        "[user]\n2+2?[end]\n[assistant]\n4[end]\n[user]\ntimes 3?[end]\n[assistant]\n"
    )


def test_a_template_whose_answer_does_not_continue_its_prompt_is_rejected(char_tokenizer):  # case 12
    tokenizer = char_tokenizer("{{- messages|length ~ messages[-1].content -}}")
    with pytest.raises(Reject, match=r"^template_not_prefix_stable$"):
        chat.rows(tokenizer, turns("a?", "b"))


def test_a_template_s_own_error_is_the_reason(char_tokenizer):  # case 04
    tokenizer = char_tokenizer(STRICT)
    with pytest.raises(Reject, match=r"^template_error: one turn only$"):
        chat.rows(tokenizer, turns("a?", "b"))


def test_rows_are_cut_first_and_only_then_checked_for_supervised_tokens(word_tokenizer):  # case 09
    tokenizer = word_tokenizer()
    cuts = [
        chat.cut(chat.rows(tokenizer, turns(question, answer))[0], 40)
        for question, answer in ((words("w", 60), "short answer"), (words("w", 2), words("a", 60)), ("w0", "a0"))
    ]
    assert cuts[0] is None
    long, short = cuts[1:]
    assert len(long.ids) == len(long.supervised()) == 40 and long.truncated
    assert long.supervised() == [False] * 5 + [True] * 35
    assert tokenizer.convert_ids_to_tokens(long.ids[:5]) == ["[user]", "w0", "w1", "[end]", "[assistant]"]
    assert tokenizer.convert_tokens_to_ids("[end]") not in long.ids[5:]
    assert tokenizer.convert_ids_to_tokens(short.ids) == ["[user]", "w0", "[end]", "[assistant]", "a0", "[end]"]
    assert not short.truncated


def test_there_is_one_bos_whether_the_template_prints_it_or_only_the_tokenizer_adds_it(char_tokenizer):  # case 15
    from tokenizers.processors import TemplateProcessing

    plain = char_tokenizer().chat_template
    for template, count in (("{{- bos_token -}}" + plain, 1), (plain, 0)):
        tokenizer = char_tokenizer(template, bos="<s>")
        bos = tokenizer.bos_token_id
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
        assert tokenizer("Hi")["input_ids"][0] == bos  # this tokenizer does add one
        prompt = chat.prompt_ids(tokenizer, turns("Hi"))
        (row,) = chat.rows(tokenizer, turns("Hi", "Hello."))
        for ids in (prompt, row.ids):
            assert ids.count(bos) == count and (not count or ids[0] == bos)
        assert row.ids[: len(prompt)] == prompt and row.spans[0][0] == len(prompt)
        theirs = tokenizer.apply_chat_template(turns("Hi"), add_generation_prompt=True, return_dict=False)
        assert prompt == theirs


def test_the_end_token_ends_the_span_whatever_the_template_prints_after_it(char_tokenizer):
    body = "{%- for m in messages -%}{{- m.content ~ ('</s> |' if m.role == 'assistant' else '>') -}}{%- endfor -%}"
    tokenizer = char_tokenizer(body, eos="</s>")
    (row,) = chat.rows(tokenizer, turns("a?", "b\n", "c?", "d"))
    assert spans_of(tokenizer, row) == ["b\n</s>", "d</s>"]


def test_spaces_of_the_answer_stay_where_no_terminator_follows(char_tokenizer):
    body = "{%- for m in messages -%}{{- m.role ~ ': ' ~ m.content ~ '\\n' -}}{%- endfor -%}"
    tokenizer = char_tokenizer(body + "{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}")
    (row,) = chat.rows(tokenizer, turns("a?", "b \n"))
    assert spans_of(tokenizer, row) == ["b \n"]


def test_a_missing_template_is_an_error_that_says_where_to_put_one(char_tokenizer):  # case 10
    tokenizer = char_tokenizer()
    tokenizer.chat_template, tokenizer.name_or_path = None, "models/base"
    with pytest.raises(chat.TemplateError, match=r"models/base: neither `chat_template`.*chat_template\.jinja"):
        chat.prompt_ids(tokenizer, turns("Hi"))


def test_template_kwargs_reach_the_template(char_tokenizer):
    tokenizer = char_tokenizer("{{- messages[0].content ~ mood -}}")
    assert text_of(tokenizer, chat.prompt_ids(tokenizer, turns("Hi"), {"mood": "!"})) == "Hi!"


def test_a_set_that_is_supervised_nowhere_or_everywhere_is_an_error():  # case 11
    assert chat.check_coverage(3, 12) == 0.25
    for supervised in (0, 12):
        with pytest.raises(chat.CoverageError, match=f"{supervised} of 12 tokens are supervised"):
            chat.check_coverage(supervised, 12)
