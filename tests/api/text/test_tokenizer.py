"""Tokenizer: how it reports failures, when it uses its thread, how its decoder is found."""

from __future__ import annotations

import asyncio
import itertools
import threading
import tracemalloc
from types import SimpleNamespace

import pytest
from jinja2 import TemplateError, UndefinedError
from transformers import AutoTokenizer

from foretoken import InvalidRequest, PromptTooLong
from foretoken.api.text.chat_template import BUDGET, INLINE_CHARS, Budget, bounded_text
from foretoken.api.text.detokenizer import BYTE_OF_CHAR, ByteDetokenizer
from foretoken.api.text.tokenizer import JOB_CHARS, Tokenizer

TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture
def own(byte_level_folder):
    """A tokenizer that a test may bend."""
    loaded = Tokenizer.load(byte_level_folder, max_model_len=10**9)
    yield loaded
    loaded.close()


@pytest.fixture
def reference(byte_level_folder):
    """The same one of transformers."""
    return AutoTokenizer.from_pretrained(byte_level_folder)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (TemplateError("roles must alternate"), True),
        (UndefinedError("'dict object' has no attribute 'function'"), True),
        (ValueError("the final message is not in the chat"), True),
        (FileNotFoundError("/srv/secret"), False),
        (TypeError("/srv/secret"), False),
        (UnicodeError("/srv/secret"), False),
    ],
    ids=repr,
)
def test_only_what_a_template_says_on_purpose_is_shown(own, caplog, error, shown):
    def fail(*_):
        raise error

    own._template._render = fail
    with caplog.at_level("DEBUG", "foretoken"), pytest.raises(InvalidRequest) as info:
        asyncio.run(own.encode_chat(TALK, {}))
    assert info.value.param == "messages"
    assert (str(error) in str(info.value)) == shown
    short, whole = (each for each in caplog.records if each.name.endswith("tokenizer"))
    assert short.exc_info is None, "one line, whoever asks how often"
    assert whole.levelname == "DEBUG"
    assert whole.exc_info[1] is error


@pytest.mark.parametrize("field", ["messages", "tools", "chat_template_kwargs"])
def test_what_is_nested_too_deeply_is_named_and_takes_one_line_of_the_log(own, caplog, field):
    def fail(*_):
        raise RecursionError

    own._template._render = fail
    deep = {}
    for _ in range(600):
        deep = {"a": [deep]}
    given = {field: deep}
    talk = [{"role": "user", "content": given.get("messages", "hi")}]
    options = {"extra": given.get("chat_template_kwargs")}
    with pytest.raises(InvalidRequest) as info:
        asyncio.run(own.encode_chat(talk, options, tools=[{"f": given.get("tools")}]))
    assert info.value.param == field
    assert [record.exc_info for record in caplog.records] == [None]


def test_what_a_broken_tokenizer_says_is_logged_and_not_shown(own, caplog):
    def fail(text, **options):
        raise RuntimeError("/srv/secret")

    own._encode = fail
    with pytest.raises(InvalidRequest, match=r"^the prompt cannot be tokenised$"):
        asyncio.run(own.encode("hi"))
    assert str(caplog.records[0].exc_info[1]) == "/srv/secret"


def test_half_a_surrogate_pair_is_named_and_no_failure_of_ours(own, caplog):
    with pytest.raises(InvalidRequest, match=r"^the prompt must be valid Unicode$"):
        asyncio.run(own.encode("a \ud800"))
    assert not caplog.records


@pytest.mark.parametrize("text", ["", "hi", "x" * INLINE_CHARS])
def test_the_loop_turns_between_short_prompts(own, text):
    turns = []

    async def body():
        asyncio.get_running_loop().call_soon(turns.append, 1)
        most = INLINE_CHARS // (len(text) + JOB_CHARS) + 1
        for _ in range(most):
            await own.encode(text)
        assert turns == [1]

    asyncio.run(body())


class Text(str):
    """As the texts of some libraries are."""

    __slots__ = ()


CALL = {"id": "a", "function": {"name": "f", "arguments": {"k": ["x" * INLINE_CHARS]}}}


@pytest.mark.parametrize(
    ("messages", "options", "in_thread"),
    [
        (TALK, {}, False),
        ([{"role": "user", "content": "x" * INLINE_CHARS}], {}, True),
        ([{"role": "user", "content": Text("x" * INLINE_CHARS)}], {}, True),
        ([{"role": "user", "content": ""}] * 1000, {}, True),
        ([{"role": "assistant", "content": "", "tool_calls": [CALL]}], {}, True),
        ([{"role": "user", "content": "", "parts": list(range(INLINE_CHARS))}], {}, True),
        (TALK, {"hint": "x" * INLINE_CHARS}, True),
    ],
    ids=["short", "long", "subclass", "many", "calls", "numbers", "options"],
)
def test_a_conversation_that_is_long_in_any_way_is_rendered_in_the_thread(
    own, messages, options, in_thread
):
    seen = []

    def render(messages, options, budget):
        seen.append(threading.current_thread().name)
        return "x"

    own._template.render = render
    asyncio.run(own.encode_chat(messages, options))
    assert seen[0].startswith("foretoken-tokenizer") == in_thread


def test_a_byte_level_decoder_alone_in_a_sequence_is_byte_level():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    vocab = dict(BYTE_OF_CHAR)
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    loaded = Tokenizer(SimpleNamespace(backend_tokenizer=backend), max_model_len=99)
    detokenizer = loaded.detokenizer()
    assert isinstance(detokenizer, ByteDetokenizer)
    text = "👩‍👩‍👧 東京 é"
    assert "".join(map(detokenizer.decode, text.encode())) == text
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert not Tokenizer(SimpleNamespace(backend_tokenizer=backend), max_model_len=9).is_byte_level


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TALKS = [
    [{"role": "user", "content": "Grüße <&> 'you'"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": [1, None]}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ],
]
EVERYTHING = """{%- set ns = namespace(n=0) -%}{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
[{{ loop.index }}/{{ ns.n }} {{ m.role }}] {{ (m.content or "") | tojson }}
{{ m.reasoning_content }}
    {% generation %}{% set inner = 1 %}{{ m.thinking }}{% endgeneration %}{{ inner }}
    {%- for call in m.tool_calls %}{{ call | tojson(indent=2) }}{% endfor %}
{% endfor %}
{%- macro say(x) %}<{{ x }}>{% endmacro %}{{ say(dict(a=1)) }}
{%- if tools is not none %}{{ tools | tojson(sort_keys=True) }}{% endif %}
{% if add_generation_prompt %}go{% endif %}"""
CONTINUED = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.content is string %}{{ m.contentTRIM }}"
    "{% else %}{% for p in m.content %}{{ p.textTRIM }}{% endfor %}{% endif %}<end>{% endfor %}"
)

# -- templates are programs ----------------------------------------------------------------------

NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize("body", ["", "{{ messages[0].content }}"], ids=["silent", "endless text"])
@pytest.mark.parametrize("text", ["hi", "hi" * INLINE_CHARS], ids=["short", "long"])
def test_a_template_that_never_ends_fails_its_request_and_stalls_nobody(
    own, monkeypatch, body, text
):
    monkeypatch.setattr("foretoken.api.text.tokenizer.TEMPLATE_SECONDS", 0.2)
    loop = NESTED.replace("BODY", body)
    own._template._hf.chat_template = "{% if messages[0].role == 'x' %}" + loop + "{% endif %}fine"

    async def chat(role):
        return await own.encode_chat([{"role": role, "content": text}], {})

    async def both():
        evil = asyncio.create_task(chat("x"))
        await asyncio.sleep(0)
        turns = 0
        while not evil.done():  # the loop turns all the while
            await asyncio.sleep(0.001)
            turns += 1
        assert turns > 5
        with pytest.raises(InvalidRequest, match="the chat template took longer than") as info:
            await evil
        assert info.value.param == "messages"
        assert await chat("user") == own.encode_word("fine")

    asyncio.run(asyncio.wait_for(both(), 20))


def test_a_template_that_writes_far_too_much_is_a_prompt_that_is_too_long(own):
    own.max_model_len = 1000
    own._template._hf.chat_template = "{{ 'x' * 9999999 }}"
    with pytest.raises(PromptTooLong):
        asyncio.run(own.encode_chat(TALK, {}))


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'x' * 10 ** 8 }}",
        "{{ 7 * messages[0].content }}" * 200,
        "{% set x = [0] * 10 ** 7 %}",
        "{% set x = 9 ** (9 ** 6) %}",
        "{% set n = namespace(x='x' * 9) %}"
        + "{% for i in range(20) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% macro m() %}{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}"
        "{% endmacro %}{% set x = m() %}",
    ],
    ids=["text", "content", "list", "number", "doubled", "macro"],
)
def test_what_a_template_builds_is_bounded_by_what_may_fit(own, caplog, text):
    own.max_model_len = 50
    own._template._hf.chat_template = text
    with pytest.raises(PromptTooLong):
        asyncio.run(own.encode_chat(TALK, {}))
    assert not [each for each in caplog.records if each.name.startswith("foretoken")]
    own._template._hf.chat_template = "{{ 'fi' + 'ne' * 1 }}{{ 2 ** 3 * 2 }}{{ [1] + [2] }}"
    assert asyncio.run(own.encode_chat(TALK, {})) == own.encode_word("fine16[1, 2]")


def test_what_a_template_writes_beyond_its_bound_is_counted_and_not_kept(own):
    own.max_model_len = 50
    own._template._hf.chat_template = "{% for i in range(99999) %}" + "x" * 100 + "{% endfor %}"
    with pytest.raises(PromptTooLong) as info:
        asyncio.run(own.encode_chat(TALK, {}))
    per_token = own._most_chars_per_token
    assert f"{-(-9_999_900 // per_token)} tokens > 49 maximum" in str(info.value)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "byte_fallback"])
def test_a_marked_text_is_encoded_as_the_whole_but_for_special_tokens_in_its_parts(kind, request):
    own = Tokenizer.load(request.getfixturevalue(f"{kind}_folder"), max_model_len=1000)
    special = own.decode([max(own.special_ids)], skip_special_tokens=False)
    frame = "the quick {} fox" + special + "over{}"
    for first, second in (("brown", " the lazy dog"), (f"a{special}b", special)):
        marked = frame.format("\ue000A", "\ue000B")
        ids = asyncio.run(own.encode_marked(marked, {"\ue000A": first, "\ue000B": second}))
        assert ids.count(max(own.special_ids)) == 1 or kind == "metaspace", "Unigram knows no other"
        whole = asyncio.run(own.encode(frame.format(first, second), add_special_tokens=False))
        assert (ids == whole) == (not own.names_special(first + second))
    own.close()


def test_a_text_may_fill_the_context_where_nothing_is_generated_behind_it(own):
    own.max_model_len = 3
    most = 3 * own._most_chars_per_token
    assert asyncio.run(own.encode("x" * most, generates=False))
    for generates, limit in ((False, 3), (True, 2)):
        with pytest.raises(PromptTooLong) as info:
            asyncio.run(own.encode("x" * (most + 1), param="inputs[1]", generates=generates))
        assert (info.value.limit, info.value.param) == (limit, "inputs[1]")


def test_a_template_that_writes_nothing_for_ever_takes_no_memory():
    token = BUDGET.set(Budget(10, 1000))
    tracemalloc.start()
    try:
        assert bounded_text(itertools.repeat("", 100_000)) == ""
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()
        BUDGET.reset(token)


def test_a_template_that_nobody_waits_for_ends(own):
    own._template._hf.chat_template = "{% if messages[0].content %}" + NESTED + "{% endif %}"
    own._template._hf.chat_template += "fine"
    begun, render = threading.Event(), own._template.render
    own._template.render = lambda *given: begun.set() or render(*given)
    long = "x" * 2 * INLINE_CHARS

    async def body():
        gone = asyncio.create_task(own.encode_chat([{"role": "user", "content": long}], {}))
        await asyncio.to_thread(begun.wait, 10)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        behind = own.encode_chat([{"role": "user", "content": "", "more": long}], {})
        assert await behind == own.encode_word("fine")

    asyncio.run(asyncio.wait_for(body(), 4))  # less than a template may take


@pytest.mark.parametrize(
    "options", [{}, {"add_generation_prompt": False}, {"tools": TOOLS}], ids=str
)
@pytest.mark.parametrize("talk", TALKS, ids=range(len(TALKS)))
def test_a_conversation_is_written_as_transformers_writes_it(own, reference, talk, options):
    template = own._template
    budget = Budget(10**6, 1000)
    for text in (template.text, EVERYTHING):
        template._hf.chat_template = text
        theirs = {"add_generation_prompt": True, **options, "tokenize": False}
        expected = reference.apply_chat_template(talk, chat_template=text, **theirs)
        assert template.render(talk, options, budget) == expected


@pytest.mark.parametrize("words", ["so far", " so far ", [{"type": "text", "text": "so far "}]])
@pytest.mark.parametrize("trimmed", ["", " | trim"])
def test_a_final_message_is_continued_as_transformers_does(own, reference, words, trimmed):
    template = own._template
    reference.chat_template = template._hf.chat_template = CONTINUED.replace("TRIM", trimmed)
    talk = [*TALKS[0], {"role": "assistant", "content": words}]
    options = {"continue_final_message": True}  # add_generation_prompt is false then
    expected = reference.apply_chat_template(talk, tokenize=False, **options)
    assert template.render(talk, options, Budget(10**6, 1000)) == expected
    for wrong in ({**options, "add_generation_prompt": True}, {"continue_final_message": "no"}):
        with pytest.raises(ValueError, match="continue_final_message"):
            template.render(talk, wrong, Budget(10**6, 1000))


def test_a_template_cannot_reach_beyond_its_sandbox(own):
    for text in (
        "{{ messages.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.mro() }}",
    ):
        own._template._hf.chat_template = text + "{{ range(10 ** 9) | length }}"
        with pytest.raises(InvalidRequest, match="the chat template"):
            asyncio.run(own.encode_chat(TALK, {}))
