"""End tokens: what ends an answer, by the files of a model, by names, and by the chat template."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from foretoken.api.runtime.end_tokens import end_token_ids
from foretoken.api.text.tokenizer import Tokenizer

EACH = "{% for m in messages %}"
CALLS = "{% for c in m.tool_calls or [] %}"
ARGUMENTS = "{{ c.function.arguments | tojson }}"
CHATML = EACH + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA = (
    EACH + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}"
    "{% endif %}{{ m.tool_calls[0].function | tojson }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    EACH + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
)
PHI = (
    EACH + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}" + EACH + "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}"
    "{% if m.tool_calls %}[TOOL_CALLS] [" + CALLS + "{% if c.id | length != 9 %}"
    "{{ raise_exception('an id has 9 characters') }}{% endif %}"
    "{{ c.function | tojson }}, {% endfor %}]{% endif %}{{ eos_token }}{% endif %}{% endfor %}"
)
HARMONY = (  # the end of a message, of a call, and of the answer
    EACH + "{% if m.role == 'assistant' %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}{% if m.tool_calls %}<|start|>assistant to=functions.look<|channel|>commentary"
    " json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% endif %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
DEEPSEEK = (
    EACH + "{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}"
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    + CALLS
    + "<｜tool▁call▁begin｜>"
    + ARGUMENTS
    + "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>"
    "{% endif %}{% endfor %}"
)
GLM = (  # no end: the mark of whoever speaks next
    "[gMASK]<sop>" + EACH + "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}" + CALLS + "<tool_call>look\n" + ARGUMENTS + "\n"
    "</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
KIMI = (
    EACH + "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>"
    + CALLS
    + "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    + ARGUMENTS
    + "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
)
COHERE = (
    EACH
    + "<|START_OF_TURN_TOKEN|><|{{ m.role }}|>{% if m.tool_calls %}<|START_ACTION|>"
    + CALLS
    + ARGUMENTS
    + "{% endfor %}<|END_ACTION|>{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
    "{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
)
MUSE = (  # <|eom|> ends a message, and the answer goes on
    EACH + "{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<|start|>assistant to=self<|message|>{{ m.reasoning_content }}"
    "<|eom|>{% endif %}<|start|>assistant to=user<|message|>{{ m.content }}"
    + CALLS
    + "<atem:function_calls>"
    + ARGUMENTS
    + "</atem:function_calls>{% endfor %}<|eot|>{% else %}<|start|>{{ m.role }}<|message|>"
    "{{ m.content }}<|eot|>{% endif %}{% endfor %}"
)
PARTS = (  # content is a list of parts
    EACH + "<|im_start|>{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}"
)
OWN_ENDS = (  # no name that any model has
    EACH + "<|go|>{{ m.role }}\n{% if m.reasoning_content %}<|muse|>{{ m.reasoning_content }}"
    "<|/muse|>{% endif %}{{ m.content }}" + CALLS + "<|do|>" + ARGUMENTS + "<|/do|>{% endfor %}"
    "{% if m.tool_calls %}<|over|>{% else %}<|fin|>{% endif %}\n{% endfor %}"
)
BETWEEN = (
    EACH + "{% if not loop.first %}<|sep|>{% endif %}{{ m.role }}: {{ m.content }}{% endfor %}"
)
PLAIN = EACH + "### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"


def ends(
    template: str,
    *names: str,
    named: Collection[str] = (),
    eos: str = "",
    words: Collection[str] = (),
) -> set[str]:
    """The end tokens of a model with such a template and special tokens.

    ``named``: those of its files. ``words``: added tokens that are no special ones.
    """
    special = [*names, *({*named, eos} - {*names, "", *words})]
    backend = Backend(WordLevel({"?": 0}, unk_token="?"))
    backend.add_special_tokens([AddedToken(name, special=True) for name in special])
    backend.add_tokens([AddedToken(name, special=False) for name in words])
    hf = SimpleNamespace(
        backend_tokenizer=backend,
        chat_template=template or None,
        special_tokens_map={"bos_token": "<s>", **({"eos_token": eos} if eos else {})},
    )
    tokenizer = Tokenizer(hf, max_model_len=64)
    try:
        found = end_token_ids(tokenizer, {backend.token_to_id(name) for name in named})
        return {backend.id_to_token(each) for each in found}
    finally:
        tokenizer.close()


BASE = "<|endoftext|>"
IM = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
CHANNELS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        (CHATML, IM, "<|im_end|>"),
        (LLAMA, HEADERS, "<|eot_id|> <|eom_id|>"),
        (GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
        (PHI, ("<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
        (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"), "</s>"),
        (HARMONY, CHANNELS, "<|return|> <|call|>"),
        (DEEPSEEK, ("<｜User｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
                    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>"),
         "<｜end▁of▁sentence｜>"),
        (GLM, ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"),
         "<|user|> <|observation|>"),
        (KIMI, ("<|im_user|>", "<|im_middle|>", "<|im_end|>", "<|tool_calls_section_begin|>",
                "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
                "<|tool_calls_section_end|>"), "<|im_end|>"),
        (COHERE, ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|START_RESPONSE|>",
                  "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>"),
         "<|END_OF_TURN_TOKEN|>"),
        (MUSE, ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"), "<|eot|>"),
        (PARTS, ("<|im_start|>", "<end_of_utterance>"), "<end_of_utterance>"),
        (OWN_ENDS, ("<|go|>", "<|muse|>", "<|/muse|>", "<|do|>", "<|/do|>", "<|over|>", "<|fin|>"),
         "<|over|> <|fin|>"),
        (BETWEEN, ("<|sep|>",), "<|sep|>"),
        (PLAIN, ("<|extra|>",), ""),
    ],
    ids=["ChatML", "Llama 3", "Gemma", "Phi", "Mistral", "harmony", "DeepSeek", "GLM", "Kimi",
         "Cohere", "Muse", "parts", "unknown names", "marks between", "no marks"],
)  # fmt: skip
def test_what_the_template_writes_behind_an_answer_ends_it_though_the_files_name_another(
    template: str, special: tuple[str, ...], expected: str
) -> None:
    found = ends(template, *special, named=[BASE], eos=BASE)
    assert found == {BASE, *expected.split()}


def test_a_model_without_a_template_ends_as_its_files_say() -> None:
    assert ends("", *IM, BASE, "</s>", named=["</s>"], eos=BASE) == {"</s>"}


def test_the_end_of_a_text_ends_an_answer_as_well_as_the_end_of_a_turn() -> None:
    assert ends(CHATML, *IM, BASE, named=["<|im_end|>"]) == {BASE, "<|im_end|>"}


def test_the_tokenizers_own_end_token_counts() -> None:
    assert ends(PLAIN, "<|stop|>", eos="<|stop|>") == {"<|stop|>"}


def test_a_name_that_is_no_token_of_its_own_is_text() -> None:
    assert ends(CHATML, "<|extra|>") == set()


def test_an_added_token_that_is_not_special_counts_by_its_name_alone() -> None:
    assert ends(CHATML, "<|extra|>", words=["<|im_end|>", "\n"]) == {"<|im_end|>"}
    assert ends(OWN_ENDS, "<|muse|>", words=["<|fin|>"]) == set()


def test_the_end_of_a_channel_ends_no_answer_even_if_the_files_say_so() -> None:
    found = ends(HARMONY, *CHANNELS, named=["<|end|>", "<|return|>"])
    assert found == {"<|return|>", "<|call|>"}
    other = HARMONY.replace("<|return|>", "<|end|>")  # as some write all answers
    assert ends(other, *CHANNELS) == {"<|return|>", "<|call|>"}


def test_what_also_stands_inside_an_answer_ends_none() -> None:
    every = OWN_ENDS.replace("<|over|>", "<|/do|>").replace("<|fin|>", "<|/muse|>")
    special = ("<|go|>", "<|muse|>", "<|/muse|>", "<|do|>", "<|/do|>")
    assert ends(every, *special) == {"<|go|>"}  # the mark of the next turn


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        EACH + "{% if m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{% endfor %}",
        "{{ messages[0].content.no.such.thing }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_refuses_conversations_leaves_names(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretoken.api.text.tokenizer.TEMPLATE_SECONDS", 0.01)
    assert ends(template, *IM, named=[BASE]) == {BASE, "<|im_end|>"}


def test_nothing_is_asked_for_that_is_known_by_its_name() -> None:
    """A part's end in front of it, as Cohere writes it, is no end."""
    assert "<|END_RESPONSE|>" not in ends(COHERE, "<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>")
