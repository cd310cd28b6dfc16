"""chat.py on templates of thirteen styles (texts of our own): generated chats, and what the target produced in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from headtrain.config import RecipeConfig
from headtrain.data_gen import chat
from headtrain.data_gen import turns as data_turns
from headtrain.data_gen.prompts import Prompt


def plain(stop: str, before: str = "") -> Callable[[dict], str]:
    return lambda m: before + m["content"] + stop


def trimmed(stop: str, before: str = "") -> Callable[[dict], str]:
    return lambda m: before + m["content"].strip() + stop


def qwen3(message: dict) -> str:
    thought = message.get("reasoning_content")
    own = message["content"].lstrip("\n")
    return (f"<think>\n{thought.strip(chr(10))}\n</think>\n\n{own}" if thought else own) + "<|im_end|>"


def channels(message: dict) -> str:
    thought = message.get("reasoning_content")
    before = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    return f"{before}<|channel|>final<|message|>{message['content']}<|return|>"


@dataclass
class Style:
    """`answer(message)`: what the target generates for it. `appends`: history is never rewritten."""

    template: str
    specials: list[str]
    answer: Callable[[dict], str]
    eos: str
    bos: str | None = None
    appends: bool = True
    thinks: bool = False
    system: bool = True
    kwargs: dict = field(default_factory=dict)


def turns(start: str, end: str, assistant: str = "assistant", first: str = "", last: str = "", text: str = "m.content"):
    """A template whose turns differ in nothing but the role: start (with ROLE in it), text, end."""
    name = f"('{assistant}' if m.role == 'assistant' else m.role)"
    opening = "'" + start.replace("ROLE", f"' ~ {name} ~ '") + "'"
    answer = start.replace("ROLE", assistant)
    return (
        f"{{{{- '{first}' -}}}}{{%- for m in messages -%}}{{{{- {opening} ~ ({text}) ~ '{end}' -}}}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{- '{answer}' -}}}}{{%- else -%}}{{{{- '{last}' -}}}}{{%- endif -%}}"
    )


LLAMA2 = r"""
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- '<<SYS>>' ~ m.content ~ '<</SYS>>' -}}
{%- elif m.role == 'user' -%}{{- '<s>[INST] ' ~ (m.content | trim) ~ ' [/INST]' -}}
{%- else -%}{{- ' ' ~ (m.content | trim) ~ ' </s>' -}}{%- endif -%}
{%- endfor -%}"""

GEMMA = r"""{{- '<bos>' -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- raise_exception('no system role here') -}}{%- endif -%}
{{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' -}}
{{- (m.content | trim) ~ '<end_of_turn>\n' -}}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}"""

MISTRAL = r"""{{- '<s>' -}}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- '[SYSTEM_PROMPT]' ~ m.content ~ '[/SYSTEM_PROMPT]' -}}
{%- elif m.role == 'user' -%}
{%- if tools and m == users[-1] -%}{{- '[AVAILABLE_TOOLS]' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{{- '[INST]' ~ m.content ~ '[/INST]' -}}
{%- elif m.role == 'tool' -%}{{- '[TOOL_RESULTS]' ~ m.content ~ '[/TOOL_RESULTS]' -}}
{%- elif m.tool_calls is defined and m.tool_calls -%}
{{- '[TOOL_CALLS][' -}}{%- for c in m.tool_calls -%}
{{- ({'name': c.function.name, 'arguments': c.function.arguments}) | tojson -}}
{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}{{- ']</s>' -}}
{%- else -%}{{- m.content ~ '</s>' -}}{%- endif -%}
{%- endfor -%}"""

QWEN3 = r"""
{%- set ns = namespace(question=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.question = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}{{- '<|im_start|>system\nTools: ' ~ (tools | tojson) ~ '<|im_end|>\n' -}}{%- endif -%}
{%- for m in messages -%}
{%- set ns.text = m.content -%}{%- set ns.thought = m.reasoning_content or '' -%}
{%- if m.role == 'assistant' and not ns.thought and '</think>' in ns.text -%}
{%- set ns.thought = ns.text.split('</think>')[0].split('<think>')[-1] -%}
{%- set ns.text = ns.text.split('</think>')[-1] -%}
{%- endif -%}
{{- '<|im_start|>' ~ m.role ~ '\n' -}}
{%- if m.role == 'assistant' and loop.index0 > ns.question and (loop.last or ns.thought) -%}
{{- '<think>\n' ~ ns.thought.strip('\n') ~ '\n</think>\n\n' ~ ns.text.lstrip('\n') -}}
{%- else -%}{{- ns.text.lstrip('\n') if m.role == 'assistant' else ns.text -}}{%- endif -%}
{%- for c in m.tool_calls or [] -%}
{{- '\n' if (loop.first and m.content) or not loop.first -}}
{{- '<tool_call>\n{"name": "' ~ c.function.name ~ '", "arguments": ' -}}
{{- (c.function.arguments if c.function.arguments is string else c.function.arguments | tojson) ~ '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""

CHANNELS = r"""
{%- for m in messages -%}
{%- if m.role != 'assistant' -%}{{- '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' -}}
{%- elif m.tool_calls -%}
{%- if m.thinking -%}{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' -}}{%- endif -%}
{%- set c = m.tool_calls[0].function -%}
{{- '<|start|>assistant to=' ~ c.name ~ '<|channel|>commentary<|message|>' ~ (c.arguments | tojson) ~ '<|call|>' -}}
{%- elif loop.last and not add_generation_prompt -%}
{%- if m.thinking -%}{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' -}}{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|return|>' -}}
{%- else -%}{{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|end|>' -}}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""

DEEPSEEK = r"""{{- '<|bos|>' -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- m.content -}}
{%- elif m.role == 'user' -%}{{- '<|User|>' ~ m.content -}}
{%- else -%}{{- '<|Assistant|></think>' ~ m.content ~ '<|eos|>' -}}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|Assistant|></think>' -}}{%- endif -%}"""

THINKER = r"""
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<bot>' -}}
{%- if loop.last and not add_generation_prompt -%}
{{- '<think>\n' ~ (m.reasoning_content or '') ~ '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content ~ '<eot>' -}}
{%- else -%}{{- '<' ~ m.role ~ '>' ~ m.content ~ '<eot>' -}}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<bot><think>\n' -}}{%- endif -%}"""


def opened_thought(message: dict) -> str:
    thought = message.get("reasoning_content")
    return (f"{thought}\n</think>\n\n" if thought else "") + message["content"] + "<eot>"


IM = ["<|im_start|>", "<|im_end|>"]
STYLES = {
    "chatml": Style(turns("<|im_start|>ROLE\\n", "<|im_end|>\\n"), IM, plain("<|im_end|>"), "<|im_end|>"),
    "llama-2": Style(LLAMA2, ["<s>", "</s>"], trimmed(" </s>", " "), "</s>", "<s>", system=False),
    "llama-3": Style(
        turns("<|start_header|>ROLE<|end_header|>\\n\\n", "<|eot|>", first="<|begin|>", text="m.content | trim"),
        ["<|begin|>", "<|end_of_text|>", "<|start_header|>", "<|end_header|>", "<|eot|>"], trimmed("<|eot|>"),
        "<|end_of_text|>", "<|begin|>",
    ),
    "gemma": Style(
        GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], trimmed("<end_of_turn>"), "<eos>", "<bos>",
        system=False,
    ),
    "mistral": Style(MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"], plain("</s>"), "</s>", "<s>"),
    "qwen3": Style(QWEN3, IM, qwen3, "<|im_end|>", appends=False, thinks=True),
    "qwen3, thinking off": Style(QWEN3, IM, qwen3, "<|im_end|>", appends=False, kwargs={"enable_thinking": False}),
    "deepseek": Style(
        DEEPSEEK, ["<|bos|>", "<|eos|>", "<|User|>", "<|Assistant|>"], plain("<|eos|>"), "<|eos|>", "<|bos|>",
    ),
    "phi": Style(
        turns("<|ROLE|>\\n", "<|end|>\\n", last="<|endoftext|>"),
        ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"], plain("<|end|>"), "<|endoftext|>",
    ),
    "gpt-oss": Style(
        CHANNELS, ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"], channels,
        "<|return|>", appends=False, thinks=True,
    ),
    "thought opened by the prompt": Style(THINKER, ["<eot>"], opened_thought, "<eot>", appends=False, thinks=True),
    "zephyr": Style(turns("<|ROLE|>\\n", "</s>\\n"), ["</s>"], plain("</s>"), "</s>"),
    "vicuna": Style(  # its prompt ends with a space, which a token of the answer may take in when it is history
        turns("ROLE: ", "</s>", assistant="ASSISTANT"), ["</s>"], plain("</s>"), "</s>", appends=False,
    ),
    "no special token": Style(turns("### ROLE\\n", "\\n### end\\n"), [], plain("\n### end"), "<never>"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer_of():
    """A byte-level BPE tokenizer with merges, one per style."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    corpus = ["user assistant system\n\n the answer to a question is that </think> ] > ### end\n"] * 8
    made: dict[str, PreTrainedTokenizerFast] = {}

    def make(name: str) -> PreTrainedTokenizerFast:
        if name not in made:
            style, inner = STYLES[name], Tokenizer(models.BPE())
            by_word = pre_tokenizers.Split(Regex(r" ?\p{L}+| ?[^\s\p{L}]+|\s*[\r\n]+|\s+"), "isolated")
            by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            inner.pre_tokenizer = pre_tokenizers.Sequence([by_word, by_byte])
            inner.decoder = decoders.ByteLevel()
            alphabet = pre_tokenizers.ByteLevel.alphabet()
            inner.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
            inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in style.specials])
            own = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=style.eos, bos_token=style.bos)
            own.chat_template = style.template
            made[name] = own
        return made[name]

    return make


WORDS = [*"abe n\n\t<>[]|/{}\"'\\éß中🙂\u2028#", "think", " end", "</think>", "<think>", "system", "### end", "None"]
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=10).map("".join).filter(lambda text: bool(text.strip()))
THOUGHT = TEXT.map(lambda text: text.strip())
EXCHANGE = st.tuples(TEXT, TEXT, st.none() | THOUGHT, st.sampled_from([1, 1, 1, 0]))


def messages_of(style: Style, system: str | None, exchanges: list[tuple]) -> list[dict]:
    messages = [{"role": "system", "content": system}] if system is not None and style.system else []
    for question, answer, thought, weight in exchanges:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        messages[-1] |= {"reasoning_content": thought} if thought and style.thinks else {}
        messages[-1] |= {} if weight else {"weight": 0}
    return messages


def pieces(tokenizer, row):
    """(text before a span, text of the span) for each span of a row."""
    ends = [0, *(end for _, end in row.spans)]
    return [
        (tokenizer.decode(row.ids[before:start]), tokenizer.decode(row.ids[start:end]))
        for before, (start, end) in zip(ends, row.spans, strict=False)
    ]


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=40, deadline=None)
@given(
    system=st.none() | st.sampled_from(["", " "]) | TEXT, exchanges=st.lists(EXCHANGE, min_size=1, max_size=4),
    odd=st.none() | st.integers(0, 7),
)  # fmt: skip
@example(system=None, exchanges=[("a", "b</think>c", None, 1), ("d", "<think>e</think>f", None, 1)], odd=None)
def test_what_is_supervised_is_what_the_target_generates_and_before_it_stands_what_serving_sends(
    tokenizer_of, name, system, exchanges, odd
):
    """Also where a user writes special tokens: they are read as such, as serving reads them."""
    style, tokenizer = STYLES[name], tokenizer_of(name)
    if odd is not None and style.specials:
        special = style.specials[odd % len(style.specials)]
        exchanges = [(f"x{special}{question}{special}", *more) for question, *more in exchanges]
    messages = messages_of(style, system, exchanges)
    answers = [(j, m) for j, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight") != 0]
    if not answers:
        with pytest.raises(chat.Reject, match="nothing_supervised"):
            chat.rows(tokenizer, messages, style.kwargs)
        return
    assume(name[:5] != "qwen3" or not any("</think>" in m["content"] for m in messages))
    rows = chat.rows(tokenizer, messages, style.kwargs)
    assert [text for row in rows for _, text in pieces(tokenizer, row)] == [style.answer(m) for _, m in answers]
    befores = [tokenizer.decode(row.ids[:start]) for row in rows for start, _ in row.spans]
    for before, (j, message) in zip(befores, answers, strict=True):
        sent = chat.render(tokenizer, messages[:j], True, style.kwargs)
        assert before.startswith(sent)
        made_up = "".join(before[len(sent) :].split())
        assert made_up in ("", "<think></think>", "</think>") and not (made_up and "reasoning_content" in message)
    if style.appends and not any(m["content"][:1].isspace() for m in messages):  # spaces merge with what is before
        assert len(rows) == 1
    for row in rows:
        assert sum(row.supervised()) == sum(end - start for start, end in row.spans) < len(row.ids)


@pytest.mark.parametrize("name", [name for name in STYLES if STYLES[name].specials])
def test_an_answer_with_an_end_token_in_it_is_left_out_and_one_with_another_special_token_is_not(tokenizer_of, name):
    """The target would have stopped at the first; the second is its text like any other."""
    style, tokenizer = STYLES[name], tokenizer_of(name)
    for special in style.specials:
        messages = messages_of(style, None, [("a?", f"one{special}two", None, 1)])
        ends = style.answer(messages[-1]).endswith(special) or special == style.eos
        if ends:
            with pytest.raises(chat.Reject, match=r"^end_token_in_answer$"):
                chat.rows(tokenizer, messages, style.kwargs)
        else:
            (row,) = chat.rows(tokenizer, messages, style.kwargs)
            ((_, text),) = pieces(tokenizer, row)
            assert text == style.answer(messages[-1])
        messages[-1]["weight"] = 0  # as context it stays: the row is about the next answer
        later = [*messages, {"role": "user", "content": "b?"}, {"role": "assistant", "content": "three"}]
        assert [text for row in chat.rows(tokenizer, later, style.kwargs) for _, text in pieces(tokenizer, row)] == [
            style.answer(later[-1])
        ]


@pytest.mark.parametrize("name", [name for name in STYLES if STYLES[name].appends])
def test_a_row_of_an_append_only_template_is_the_whole_rendering_up_to_the_last_terminator(tokenizer_of, name):
    style, tokenizer = STYLES[name], tokenizer_of(name)
    messages = messages_of(style, "Be brief.", [("a?", "one", None, 1), ("b?", "two", None, 1)])
    (row,) = chat.rows(tokenizer, messages)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    text = tokenizer.decode(row.ids)
    assert whole.startswith(text) and len(row.spans) == 2
    assert whole[len(text) :].strip() in ("", "<|endoftext|>")


@pytest.mark.parametrize("name", [name for name in STYLES if STYLES[name].specials])
@settings(max_examples=15, deadline=None)
@given(texts=st.lists(st.tuples(TEXT.map(str.strip), TEXT), min_size=2, max_size=4))
def test_a_chat_of_turns_is_asked_as_serving_asks_it_and_keeps_every_id_that_was_produced(tokenizer_of, name, texts):
    style, tokenizer, config = STYLES[name], tokenizer_of(name), RecipeConfig()
    config.target.template_kwargs = style.kwargs
    spoken = [tokenizer.encode(style.answer({"content": text}), add_special_tokens=False) for _, text in texts]
    target = SimpleNamespace(tokenizer=tokenizer, eos_ids={spoken[0][-1]})
    messages = [{"role": "user", "content": texts[0][0]}]
    prompt = Prompt("p", "train", "s", 0, list(messages), follow_ups=[question for question, _ in texts[1:]])
    talk, asked = data_turns.begin(tokenizer, prompt, style.kwargs), []
    for n, ids in enumerate(spoken):
        asked.append(talk.ids)
        assert talk.ids == tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **style.kwargs
        )
        talk.add(ids, False, {})
        more = data_turns.go_on(talk, target, ids, False, config)
        if name == "gpt-oss":  # its channels are special tokens, which only its own parser takes apart
            assert not more and talk.left_out == "turns_after_an_answer_that_is_no_text" and talk.later
            break
        assert more == (n + 1 < len(spoken)) and not talk.left_out
        if more:
            said = tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": texts[n + 1][0]}]
    spans = [(row.ids[:start], row.ids[start:end]) for row in talk.rows for start, end in row.spans]
    assert spans == list(zip(asked, spoken, strict=False))


CALL = {"id": "c1", "type": "function", "function": {"name": "get_temp", "arguments": '{"city":"Oslo"}'}}
TOOLS = [{"type": "function", "function": {"name": "get_temp", "parameters": {"type": "object"}}}]
RESULT = {"role": "tool", "content": '{"temp":4}', "tool_call_id": "c1", "name": "get_temp"}
LOOP = [
    {"role": "user", "content": "How warm is Oslo?", "tools": TOOLS},
    {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT,
    {"role": "assistant", "content": "4 degrees."},
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "call", "final"),
    [
        ("mistral", '[TOOL_CALLS][{"name": "get_temp", "arguments": {"city": "Oslo"}}]</s>', "4 degrees.</s>"),
        (
            "qwen3", '<tool_call>\n{"name": "get_temp", "arguments": {"city":"Oslo"}}\n</tool_call><|im_end|>',
            "4 degrees.<|im_end|>",
        ),
        (
            "gpt-oss", ' to=get_temp<|channel|>commentary<|message|>{"city": "Oslo"}<|call|>',
            "<|channel|>final<|message|>4 degrees.<|return|>",
        ),
    ],
)  # fmt: skip
def test_a_tool_call_and_the_answer_after_its_result_are_supervised_and_the_result_is_not(
    tokenizer_of, name, call, final
):
    tokenizer = tokenizer_of(name)
    rows = chat.rows(tokenizer, LOOP)
    assert [text for row in rows for _, text in pieces(tokenizer, row)] == [call, final]
    texts = "".join(before for row in rows for before, _ in pieces(tokenizer, row))
    assert '{"temp":4}' in texts and "How warm" in texts


@pytest.mark.parametrize("thought", ["warm?", None])
@pytest.mark.parametrize("said", ["", "One moment."])
def test_a_thought_and_a_text_before_a_tool_call_are_supervised_with_it(tokenizer_of, thought, said):
    tokenizer = tokenizer_of("qwen3")
    message = {"role": "assistant", "content": said, "tool_calls": [CALL]}
    message |= {"reasoning_content": thought} if thought else {}
    (row,) = chat.rows(tokenizer, [LOOP[0], message])
    ((before, text),) = pieces(tokenizer, row)
    call = '<tool_call>\n{"name": "get_temp", "arguments": {"city":"Oslo"}}\n</tool_call><|im_end|>'
    spoken = f"{said}\n{call}" if said else call
    assert text == (f"<think>\n{thought}\n</think>\n\n{spoken}" if thought else spoken)
    assert before.endswith("assistant\n" if thought else "<think>\n\n</think>\n\n")


def test_an_answer_that_was_cut_off_is_supervised_without_a_terminator(tokenizer_of):
    for name, style in STYLES.items():
        tokenizer = tokenizer_of(name)
        answer = {"role": "assistant", "content": "half an", "finish_reason": "length"}
        messages = [{"role": "user", "content": "a?"}, answer]
        (row,) = chat.rows(tokenizer, messages, style.kwargs)
        ((_, text),) = pieces(tokenizer, row)
        assert row.truncated and text.endswith("half an") and style.answer(answer).startswith(text)
