"""Conversations whose answers are rendered by their token ids: what stands around them, and what
is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from foretoken.api.build.model_files import BUILTIN
from foretoken.api.parsing.output_format import Syntax
from foretoken.api.runtime.conversation.answer_match import match_answer
from foretoken.api.runtime.conversation.chat_input import ChatInput, Handle
from foretoken.api.runtime.conversation.conversation_tokens import (
    ConversationTokens,
    PromptTokens,
)
from foretoken.api.runtime.conversation.template_facts import PROBES
from foretoken.api.runtime.conversation.token_history import (
    OVERHEAD,
    PrefixDigest,
    TokenHistory,
    message_digest,
)
from foretoken.api.text.tokenizer import Tokenizer
from foretoken.api.types.request_context import owner_of
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.errors import InvalidRequest

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
LINES = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ENDED = "{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}"
OWN = BUILTIN / "target/chat_template.jinja"
STRIPPING = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\\n') }}")
KEEPING = CHATML.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}",
)
CALLING = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}",
)
NEEDING = (  # as some do: a result needs the call that it answers
    "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('no call') }}{% endif %}" + CALLING.removeprefix("{% for m in messages %}")
)
THINKING = (  # thoughts since the last question are kept, those before it dropped
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.reasoning_content and loop.index0 > ns.last -%}"
    "{{ '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}{%- endif -%}"
    "{{ m.content }}{%- for c in m.tool_calls or [] -%}"
    "{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{%- endfor -%}"
    "{{ '<|im_end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
HARMONY = (  # as gpt-oss's: a result is refused without a call, a final answer ends the thoughts
    "{%- set last = namespace(name='') -%}{%- for m in messages -%}"
    "{%- if m.role == 'assistant' and m.tool_calls -%}{%- set later = namespace(final=false) -%}"
    "{%- for o in messages[loop.index:] -%}{%- if o.role == 'assistant' and not o.tool_calls -%}"
    "{%- set later.final = true -%}{%- endif -%}{%- endfor -%}"
    "{%- if m.thinking and not later.final -%}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif -%}"
    "{%- set f = m.tool_calls[0].function -%}{%- set last.name = f.name -%}"
    "{{ '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}"
    "{{ f.arguments | tojson }}{{ '<|call|>' }}"
    "{%- elif m.role == 'assistant' -%}{%- set last.name = '' -%}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'tool' -%}"
    "{%- if not last.name -%}{{ raise_exception('a result without its call') }}{%- endif -%}"
    "{{ '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ m.content + '<|end|>' }}"
    "{%- else -%}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"
)
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
HARMONY_CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":1}'
USER = {"role": "user", "content": "Hello world"}
MORE = {"role": "user", "content": "again, 12 times"}
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>'


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


class Model:
    """A tokenizer, a template, and the history of one server."""

    def __init__(self, folder: Path, template: str = CHATML, *, tools: str = "hermes") -> None:
        self.tokenizer = Tokenizer.load(folder, max_model_len=4096)
        self.tokenizer.use_template(template, {})
        vocab = self.tokenizer.vocab
        self.end = vocab.get("<|im_end|>", vocab.get("</s>", 0))
        self.history = TokenHistory()
        syntax = Syntax.choose(template, vocab, self.tokenizer.special_ids, tool_parser=tools)
        self.renderer = ConversationTokens(
            self.tokenizer,
            syntax,
            vocab_size=len(vocab),
            end_ids=frozenset({self.end}),
            history=self.history,
        )

    async def write(self, chat: ChatInput) -> str:
        return await self.tokenizer.render_chat(
            chat.messages, {"add_generation_prompt": True, **chat.template}
        )

    def render(self, messages: Sequence[Any], *handles: Handle, **template: Any) -> PromptTokens:
        chat = ChatInput(
            messages=messages, params=SamplingParams(), handles=handles, template=template
        )
        return asyncio.run(self.renderer.render(chat, self.write))

    def ids(self, text: str) -> list[int]:
        """Other tokens than the tokenizer's: one for each character or byte."""
        return [each for character in text for each in self.tokenizer.encode_after(character)]

    def remember(self, messages: Sequence[Any], message: Any, ids: Sequence[int]) -> None:
        """Remember an answer to these messages, as a server does."""
        prefix = PrefixDigest().after(self.render(messages).token_ids)
        digest = message_digest(message)
        assert digest is not None
        self.history.put(owner_of(None), None, digest, prefix, ids)


@pytest.fixture
def model(byte_level_folder: Path) -> Iterator[Callable[..., Model]]:
    made: list[Model] = []

    def make(template: str = CHATML, folder: Path = byte_level_folder, **options: Any) -> Model:
        made.append(Model(folder, template, **options))
        return made[-1]

    yield make
    for each in made:
        each.tokenizer.close()


def given(index: int, ids: Sequence[int]) -> Handle:
    return Handle(index, ids, f"messages[{index}].token_ids")


def refusal(model: Model, messages: Sequence[Any], *handles: Handle, **template: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        model.render(messages, *handles, **template)
    assert caught.value.param == handles[0].param
    return str(caught.value)


# -- the text around ----------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, TRIMMED, LINES, ENDED, "builtin"])
@pytest.mark.parametrize("vocabulary", ["byte_level", "metaspace", "byte_fallback"])
def test_ids_that_are_the_text_s_own_change_nothing(request, model, vocabulary, template):
    text = OWN.read_text("utf-8") if template == "builtin" else template
    own = model(text, request.getfixturevalue(f"{vocabulary}_folder"))
    talk = [USER, said("Stop here."), MORE, said("return the answer\n\nto it"), USER]
    plain = own.render(talk)
    assert plain.num_spliced == 0
    whole, backend = asyncio.run(own.write(ChatInput(messages=talk, params=SamplingParams()))), (
        own.tokenizer._backend
    )  # fmt: skip
    encoding, handles, at = backend.encode(whole, add_special_tokens=False), [], 0
    for index in (1, 3):
        content = talk[index]["content"]
        at = whole.index(content, at)
        spans = [*enumerate(encoding.offsets)]
        inside = [i for i, (a, b) in spans if at <= a and b <= at + len(content) and a < b]
        ids = encoding.ids[inside[0] : inside[-1] + 1]
        if encoding.offsets[inside[0]][0] == at and own.tokenizer.decode(ids).strip() == content:
            handles.append(given(index, ids))
    spliced = own.render(talk, *handles)
    assert spliced.token_ids == plain.token_ids == encoding.ids
    assert spliced.num_spliced == sum(len(each.token_ids) for each in handles)
    assert handles or vocabulary != "byte_level" or template == ENDED


def test_other_ids_of_the_same_text_stand_in_its_place(model):
    own = model()
    talk, ids = [USER, said("Stop here."), MORE], own.ids("Stop here.")
    plain, spliced = own.render(talk), own.render(talk, given(1, ids))
    assert len(spliced.token_ids) > len(plain.token_ids)
    assert own.tokenizer.decode(spliced.token_ids) == own.tokenizer.decode(plain.token_ids)
    start = own.render([USER]).token_ids
    assert spliced.token_ids[: len(start) + len(ids)] == [*start, *ids]
    assert spliced.num_spliced == len(ids)


def test_a_text_behind_others_gets_no_space_in_front(model, metaspace_folder, byte_fallback_folder):
    for folder in (metaspace_folder, byte_fallback_folder):
        own = model(LINES, folder)
        assert own.tokenizer.encode_after("ab") != own.tokenizer.encode_word("ab")
        together = own.tokenizer.encode_word("ab")
        assert own.tokenizer.decode([*together, *own.tokenizer.encode_after("ab")]) == "abab"


def test_the_token_that_ended_an_answer_may_be_there(model):
    own = model()
    talk, ids = [USER, said("Stop"), MORE], own.ids("Stop")
    assert own.render(talk, given(1, [*ids, own.end])) == own.render(talk, given(1, ids))


def test_white_space_that_a_template_trims_stays_as_it_was_generated(model):
    own = model(TRIMMED)
    ids = own.ids(" Stop\n")
    assert own.render([USER, said(" Stop\n"), MORE], given(1, ids)).num_spliced == len(ids)


def test_no_text_of_a_caller_is_taken_for_a_mark(model):
    own = model()
    talk = [{"role": "user", "content": "\ue0000.1\ue001"}, said("Stop"), MORE]
    spliced = own.render(talk, given(1, own.ids("Stop")))
    assert own.tokenizer.decode(spliced.token_ids) == own.tokenizer.decode(
        own.render(talk).token_ids
    )


# -- thoughts and calls -----------------------------------------------------------------------


def test_a_thought_that_the_template_drops_is_dropped_with_its_tokens(model):
    own = model(STRIPPING)
    message = said("Stop", reasoning_content="hm\n")
    ids = own.ids("<think>\nhm\n</think>\n\nStop")
    spliced = own.render([USER, message, MORE], given(1, ids))
    assert spliced.num_spliced == len("Stop")
    assert "hm" not in own.tokenizer.decode(spliced.token_ids)


def test_a_dropped_thought_that_ends_inside_a_token_is_an_error(model):
    own = model(STRIPPING)
    own.tokenizer._backend.add_tokens([">\n\nSt"])
    tail = own.tokenizer._backend.token_to_id(">\n\nSt")
    own.renderer.vocab_size = tail + 1
    message = said("Stop", reasoning_content="hm\n")
    ids = [*own.ids("<think>\nhm\n</think"), tail, *own.ids("op")]
    assert "does not render" in refusal(own, [USER, message, MORE], given(1, ids))


def test_a_thought_that_the_template_keeps_is_all_there(model):
    own = model(KEEPING)
    message = said("Stop", reasoning_content="hm")
    ids = own.ids("<think>\nhm</think>\n\nStop")
    assert own.render([USER, message, MORE], given(1, ids)).num_spliced == len(ids)


def test_a_thought_that_the_prompt_has_opened_is_opened_again(model):
    own = model(KEEPING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    start = own.render([USER]).token_ids
    ids = own.ids("hm\n</think>\n\nStop")
    spliced = own.render([USER, said("Stop", reasoning_content="hm\n"), MORE], given(1, ids))
    assert spliced.token_ids[: len(start) + len(ids)] == [*start, *ids]


def test_a_call_stands_as_the_model_wrote_it(model):
    own = model(CALLING)
    start, ids = own.render([USER]).token_ids, own.ids(f"Stop {CALLED}")
    talk = [USER, said("Stop", tool_calls=[CALL]), {"role": "tool", "content": "1"}, MORE]
    spliced = own.render(talk, given(1, ids))
    assert spliced.token_ids[: len(start) + len(ids)] == [*start, *ids]
    plain = own.render(talk).token_ids
    assert own.tokenizer.decode(spliced.token_ids) == own.tokenizer.decode(plain).replace(
        'Stop<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', f"Stop {CALLED}"
    )


def test_a_thought_before_a_call_goes_where_the_template_drops_it(model):
    own = model(CALLING + "{# </think> #}")  # by which the model is known to think
    message = said("", reasoning_content="hm", tool_calls=[CALL])
    ids = own.ids(f"<think>hm</think>\n{CALLED}")
    talk = [USER, message, {"role": "tool", "content": "1"}]
    assert own.render(talk, given(1, ids)).num_spliced == len(own.ids(CALLED))


@pytest.mark.parametrize("has_handle", [True, False])
@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        (HARMONY_CALL, {}),
        (ANALYSIS + HARMONY_CALL, {"reasoning_content": "hm"}),
    ],
)
def test_a_call_of_harmony_stands_as_it_was_generated_until_its_thought_is_dropped(
    model, raw, fields, has_handle
):
    own = model(HARMONY, tools="harmony")
    message, ids = said("", tool_calls=[CALL], **fields), own.ids(raw)
    start = own.render([USER]).token_ids
    handles = [given(1, ids)] if has_handle else []
    if not has_handle:
        own.remember([USER], message, ids)
    talk = [USER, message, {"role": "tool", "content": "1"}]
    spliced = own.render(talk, *handles)
    assert spliced.token_ids[: len(start) + len(ids)] == [*start, *ids]
    rest = own.tokenizer.decode(spliced.token_ids[len(start) + len(ids) :])
    result = "<|call|><|start|>functions.add to=assistant<|channel|>commentary<|message|>1<|end|>"
    assert rest == f"{result}<|start|>assistant"
    later = own.render([*talk, said("Stop"), MORE], *handles)
    assert later.num_spliced == len(own.ids(HARMONY_CALL))
    assert later.token_ids[: len(start)] == start
    assert "hm" not in own.tokenizer.decode(later.token_ids)


def test_words_before_a_call_of_harmony_are_no_thought(model):
    raw = f"<|channel|>commentary<|message|>Stop<|end|><|start|>assistant{HARMONY_CALL}"
    own = model(
        HARMONY.replace(
            "{%- if m.thinking",
            "{%- if m.content -%}{{ '<|start|>assistant"
            "<|channel|>commentary<|message|>' + m.content + '<|end|>' }}{%- elif m.thinking",
        ),
        tools="harmony",
    )
    start, ids = own.render([USER]).token_ids, own.ids(raw)
    talk = [USER, said("Stop", tool_calls=[CALL]), {"role": "tool", "content": "1"}]
    spliced = own.render(talk, given(1, ids))
    assert spliced.token_ids[: len(start) + len(ids)] == [*start, *ids]


def test_messages_with_calls_of_harmony_and_without_can_be_spliced(model):
    own = model(HARMONY, tools="harmony")
    for messages in PROBES.values():
        assert asyncio.run(own.renderer.can_splice(messages, own.write))


@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_an_agent_that_thinks_finds_its_calls_until_their_thoughts_are_dropped(model, opening):
    """``opening``: the end of the prompt, where the model does not open its thoughts itself."""
    end = "{{ '<|im_start|>assistant\n' }}{%- endif -%}"
    own = model(THINKING.replace(end, end.replace("assistant\n", f"assistant\n{opening}")))
    raw = f"<think>\nhm\n</think>\n\n{CALLED}".removeprefix(opening)
    message, ids = said("", reasoning_content="hm\n", tool_calls=[CALL]), own.ids(raw)
    start = own.render([USER]).token_ids
    own.remember([USER], message, ids)
    talk = [USER, message, {"role": "tool", "content": "1"}]
    assert own.render(talk).token_ids[: len(start) + len(ids)] == [*start, *ids]
    assert own.render(talk, given(1, ids)) == own.render(talk)
    later = own.render([*talk, MORE], given(1, ids))
    assert later.num_spliced == len(own.ids(CALLED))
    assert "hm" not in own.tokenizer.decode(later.token_ids)


def test_a_space_that_an_answer_begins_with_is_there_once(model):
    own = model(LINES.replace("{{ m.role }}:", "{{ m.role }}: "))
    start, ids = own.render([USER]).token_ids, own.ids(" Stop")
    talk = [USER, said(" Stop"), MORE]
    expected = [*start, *ids]
    assert own.render(talk, given(1, ids)).token_ids[: len(expected)] == expected
    own.remember([USER], said(" Stop"), ids)
    assert own.render(talk).token_ids[: len(expected)] == expected


def test_a_template_that_needs_the_calls_takes_no_ids(model):
    own = model(NEEDING)
    message = said("", tool_calls=[CALL])
    talk = [USER, message, {"role": "tool", "content": "1"}, said("Stop"), MORE]
    assert "does not render" in refusal(own, talk, given(1, own.ids(CALLED)))
    own.remember([USER], message, own.ids(CALLED))
    own.remember(talk[:3], talk[3], own.ids("Stop"))
    assert own.render(talk).num_spliced == len("Stop"), "the other answer is found all the same"


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("stop", {}),
        ("Stop ", {}),
        ("Stop", {"reasoning_content": "hm"}),
        ("Stop", {"tool_calls": [CALL]}),
        ("", {}),
    ],
)
def test_ids_that_say_something_else_are_refused(model, text, fields):
    own = model(CALLING)
    message = refusal(own, [USER, said(text, **fields), MORE], given(1, own.ids("Stop")))
    assert message.startswith("messages[1].token_ids do not decode to the content")


def test_a_call_with_other_arguments_is_refused(model):
    own = model(CALLING)
    other = {"function": {"name": "add", "arguments": {"a": 2}}}
    talk = [USER, said("", tool_calls=[other]), MORE]
    assert "do not decode" in refusal(own, talk, given(1, own.ids(CALLED)))


def test_ids_beyond_the_vocabulary_and_control_tokens_are_refused(model):
    own = model()
    talk = [USER, said("Stop"), MORE]
    for wrong in ([10**6], [-1], [10**30], ["a"], [True]):
        refusal(own, talk, given(1, [*own.ids("Stop"), *wrong]))
    for control in (own.end, own.tokenizer.vocab["<|im_start|>"]):
        refusal(own, talk, given(1, [control, *own.ids("Stop")]))


def test_a_template_that_leaves_answers_out_takes_no_ids(model):
    own = model("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    talk = [USER, said("Stop"), MORE]
    assert "does not render" in refusal(own, talk, given(1, own.ids("Stop")))
    assert own.render(talk, Handle(1, own.ids("Stop"))).num_spliced == 0, "of a store: left out"


def test_a_template_that_changes_the_text_takes_no_ids(model):
    own = model(CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"))
    assert "does not render" in refusal(own, [USER, said("Stop"), MORE], given(1, own.ids("Stop")))


def test_a_message_that_goes_on_has_no_ids(model):
    own = model()
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert "continued" in refusal(own, [USER, said("Stop")], given(1, own.ids("Stop")), **options)


# -- answers that are found by their text --------------------------------------------------------


def test_an_answer_is_found_again_in_its_place_alone(model):
    own = model()
    ids = own.ids("Stop")
    own.remember([USER], said("Stop"), ids)
    assert own.render([USER, said("Stop"), MORE]).num_spliced == len(ids)
    assert own.render([USER, said("stop"), MORE]).num_spliced == 0
    assert own.render([MORE, said("Stop"), MORE]).num_spliced == 0
    assert own.render([USER, said("Stop"), USER, said("Stop")]).num_spliced == len(ids)


def test_turns_that_follow_each_other_are_all_found(model):
    own, talk = model(), [USER]
    for turn in range(4):
        message = said(f"Stop {turn}")
        own.remember(talk, message, own.ids(message["content"]))
        talk = [*talk, message, MORE]
        assert own.render(talk).num_spliced == (turn + 1) * len("Stop 0")


def test_an_answer_that_is_used_is_kept_before_others(model):
    own = model()
    own.history = own.renderer._history = TokenHistory(max_bytes=2 * OVERHEAD + 100)
    for text in ("Stop", "return"):
        own.remember([USER], said(text), own.ids(text))
    assert own.render([USER, said("Stop"), MORE]).num_spliced
    own.remember([USER], said("again"), own.ids("again"))
    assert own.render([USER, said("Stop"), MORE]).num_spliced
    assert not own.render([USER, said("return"), MORE]).num_spliced


def test_an_answer_that_was_changed_ends_what_is_found(model):
    own = model()
    talk = [USER, said("Stop"), MORE, said("return")]
    own.remember(talk[:1], talk[1], own.ids("Stop"))
    own.remember(talk[:3], talk[3], own.ids("return"))
    assert own.render([*talk, USER]).num_spliced == len("Stopreturn")
    assert own.render([USER, said("Stop it"), *talk[2:], USER]).num_spliced == 0


def test_a_call_is_found_with_its_arguments_in_another_order(model):
    own = model(CALLING)
    raw = '<tool_call>\n{"name": "add", "arguments": {"b": "x", "a": 1}}\n</tool_call>'
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}
    own.remember([USER], said("", tool_calls=[call]), own.ids(raw))
    other = {"function": {"name": "add", "arguments": '{"b":"x","a":1}'}}
    talk = [USER, said("", tool_calls=[other]), {"role": "tool", "content": "1"}]
    assert own.render(talk).num_spliced == len(raw)


@pytest.mark.parametrize(
    ("written", "raw", "expected"),
    [
        ("ab", "ab", (0, "")),
        ("ab", " ab\n", (0, "")),
        ("ab", "<think>\nx</think>\n\nab", (19, "")),
        ("<think>\nx\n</think>\n\nab", "x</think>ab", (0, "<think>\n")),
        ("<think>\nx\n</think>\n\nab", "\nx</think>ab", (0, "<think>")),
        ("", "<think>x</think>", (16, "")),
        ("AB", "ab", None),
        ("abc", "ab", None),
    ],
)
def test_what_a_template_wrote_stands_for_what_was_generated(written, raw, expected):
    found = match_answer(written, raw, {}, None)
    assert (found and (found.start, found.opening)) == expected
