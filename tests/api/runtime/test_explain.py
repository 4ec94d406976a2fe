"""Why a prompt missed the cache: causes, differences, and what the clients' own fields say."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from foretoken.api.parsing.reasoning import Thinking
from foretoken.api.runtime.cache_diagnostics import (
    Decode,
    Explainer,
    Explanation,
    anthropic_diagnostics,
    first_difference,
    openai_diagnostics,
)
from foretoken.api.runtime.conversation import prompt_history
from foretoken.api.runtime.conversation.prompt_history import (
    MAX_COMPARED,
    Part,
    PromptLog,
    PromptNote,
    conversation_parts,
    most_similar,
)
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.interface.extras.adapter import adapter_group, adapter_namespace, salt_of
from foretoken.core.interface.request import CacheOptions, Request
from foretoken.core.interface.sampling import SamplingMetadata
from foretoken.radix_cache import Eviction

PAGE = 4
TOOLS = [{"type": "function", "function": {"name": "look"}}]


class Scene:
    """Prompts that came one after the other, a second apart; tokens are the text's characters."""

    def __init__(self, max_bytes: int = 10**6, decode: Decode | None = None) -> None:
        self.decode = decode or (lambda ids: "".join(map(chr, ids)))
        self.log = PromptLog(max_bytes=max_bytes)
        self.now = 0.0

    def say(
        self,
        name: str,
        *messages: str,
        found: bool = False,
        salt: str | None = None,
        loss: Eviction | None = None,
        tools: list[dict[str, object]] | None = None,
        plain: bool = False,
        written: Sequence[str] = (),
        thinking: Thinking | None = None,
        cache_key: str | None = None,
        model: str = "m",
        **options: bool,
    ) -> Explanation:
        """Serve a prompt and explain it; ``found``: the pages of the most similar were cached.

        ``written``: what the template writes of the messages, where it writes something else.
        """
        said = [
            {"role": "user" if index else "system", "content": text}
            for index, text in enumerate(messages)
        ]
        parts = [] if plain else conversation_parts(said, tools or [])
        text = "|".join([repr(tools or ""), *(written or messages)])
        tokens = array("q", [ord(character) for character in text])
        params = SamplingParams(cache_salt=salt_of(salt))
        request = Request(
            request_id=name,
            tokens=tokens,
            sampling=SamplingMetadata(params=params, seed=0, prompt_len=len(tokens)),
            namespace=salt,
            cache=CacheOptions(**options),
        )
        self.now += 1.0
        note = PromptNote(parts=parts, model=model, cache_key=cache_key, thinking=thinking)
        self.log.record(name, request, note, self.now)
        prompt = self.log.find(name)
        if (
            prompt is not None
            and found
            and (other := most_similar(prompt, self.log.earlier(prompt), PAGE))
        ):
            readable = min(prompt.common_len(other), len(tokens) - 1)
            request.usage.cached_tokens = readable // PAGE * PAGE
        request.usage.cache_loss = loss
        request.usage.time_to_first_token = 0.5
        return self.explain(name)

    def explain(self, name: str, previous: str | None = None) -> Explanation:
        explainer = Explainer(self.log, PAGE, self.decode)
        prompt = self.log.find(name)
        assert prompt is not None
        return explainer.explain(prompt, self.log.find(previous) if previous else None)


def test_pages_without_a_state_behind_them_are_told_with_where_the_prompt_went_on() -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is new?")
    found = scene.say("b", "You help.", "What is new?", loss=Eviction("state_not_kept", 0.5))
    assert (found.cause, found.pages_matched, found.resumed_at) == ("state_not_kept", 0, 0)
    prompt = scene.log.find("b")
    assert prompt is not None
    prompt.usage.matched_tokens, prompt.usage.cached_tokens = 3 * PAGE, PAGE
    body = scene.explain("b").body()
    assert (body["pages_matched"], body["resumed_at"]) == (3, PAGE)
    assert scene.explain("a").body()["pages_matched"] is None


def test_the_first_prompt_was_never_seen() -> None:
    found = Scene().say("a", "You help.", "What is new?")
    assert found.cause == "first_seen"
    assert found.compared_with is None
    assert found.first_difference is None


def test_a_prompt_that_found_every_page_is_a_hit() -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is new?")
    found = scene.say("b", "You help.", "What is new?", found=True)
    assert (found.cause, found.compared_with) == ("hit", "a")
    assert found.reusable_tokens == found.prompt_tokens


def test_a_conversation_that_grew_is_a_hit_though_its_end_is_new() -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is new?")
    found = scene.say("b", "You help.", "What is new?", "Tell me more of it.", found=True)
    assert found.cause == "hit"
    assert found.first_difference is not None
    assert found.first_difference.path == "messages[2].role"
    assert found.first_difference.before is None


def reencoded(decode: Decode, answer: str, text: str, cached: str) -> Explanation:
    """A conversation whose answer came back as this text; ``cached``: what was found of it."""
    scene = Scene(decode=decode)
    scene.say("a", "You help.", "What is new?|")
    scene.log.add_answer("a", [ord(each) for each in answer])
    scene.say("b", "You help.", f"What is new?|{text}|Go on.")
    prompt = scene.log.find("b")
    assert prompt is not None
    prompt.usage.cached_tokens = len(f"''|You help.|What is new?|{cached}") // PAGE * PAGE
    return scene.explain("b")


def small(ids) -> str:
    """Two tokens mean the same letter."""
    return "".join(map(chr, ids)).lower()


def test_an_answer_that_came_back_in_other_tokens_is_named_with_the_first() -> None:
    found = reencoded(small, "No news AT all.", "No news at all.", "No news ")
    assert found.cause == "reencoded"
    before = len("''|You help.|What is new?|No news ")
    assert found.reusable_tokens == before
    assert found.body()["first_token"] == {
        "position": before,
        "before": {"id": ord("A"), "text": "a"},
        "now": {"id": ord("a"), "text": "a"},
    }


@pytest.mark.parametrize("text", ["No news AT all.", "No news of it.", "all."])
def test_an_answer_that_came_back_as_it_was_or_with_another_text_is_not(text) -> None:
    found = reencoded(small, "No news AT all.", text, "")
    assert found.cause != "reencoded"
    assert found.body()["first_token"] is None


THINK = Thinking("<think>", "</think>")


def thought(
    asked: str, answer: str, text: str, *, opened: str = "", marks: Thinking | None = THINK
) -> Explanation:
    """A conversation whose answer, with a thought, came back as this text; all before it is hit.

    ``opened``: the end of the first prompt, which the second has no more.
    """
    scene = Scene()
    scene.say("a", "You help.", asked + opened, thinking=marks)
    scene.log.add_answer("a", [ord(each) for each in answer])
    scene.say("b", "You help.", asked + text, "Go on.", thinking=marks)
    prompt = scene.log.find("b")
    assert prompt is not None
    prompt.usage.cached_tokens = scene.explain("b").reusable_tokens // PAGE * PAGE
    return scene.explain("b")


@pytest.mark.parametrize(
    ("answer", "text", "opened"),
    [
        ("<think>Hm, hm.</think>No news.", "No news.", ""),
        ("<think>Hm, hm.</think><tool_call>f", "<tool_call>f", ""),
        ("\n<think>Hm, hm.</think>\n\nNo news.", "No news.", ""),
        ("Hm, hm.</think>No news.", "No news.", "<think>\n"),
        ("Hm, hm.</think>\nNo news.", "<think>\n\n</think>\nNo news.", "<think>\n"),
    ],
)
def test_a_thought_that_is_not_in_the_prompt_any_more_is_the_cause(answer, text, opened) -> None:
    found = thought("What is new?|", answer, text, opened=opened)
    assert found.cause == "thinking_stripped"
    change = found.first_token
    assert change is not None
    assert change.position == found.reusable_tokens
    assert (change.before, change.now) == (chr(change.before_id), chr(change.now_id))
    assert found.missed_tokens == found.prompt_tokens - found.reusable_tokens > 0


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("<think>Hm, hm.</think>No news.", "<think>Hm, hm.</think>No news."),
        ("<think>Hm, hm.</think>No news.", "<think>Oh, no.</think>No news."),
        ("No news.", "Some news."),
    ],
)
def test_a_thought_that_is_there_or_was_never_had_is_not(answer, text) -> None:
    assert thought("What is new?|", answer, text).cause == "hit"


def test_marks_are_those_of_the_model_alone() -> None:
    found = thought("What is new?|", "<think>Hm, hm.</think>No news.", "No news.", marks=None)
    assert found.cause == "hit"


def test_thoughts_of_earlier_answers_that_a_new_question_drops_are_the_cause() -> None:
    scene = Scene()
    asked = "x" * 40 + "|<think>Hm.</think><call>|result " + "y" * 60
    scene.say("a", "You help.", asked, thinking=THINK)
    scene.say("b", "You help.", asked.replace("<think>Hm.</think>", ""), found=True, thinking=THINK)
    found = scene.explain("b")
    assert found.cause == "thinking_stripped"
    assert found.reusable_tokens == len(repr("") + "|You help.|" + "x" * 40 + "|<")


def test_a_text_that_the_template_writes_anew_is_a_change_that_is_shown_in_the_tokens() -> None:
    """The messages are equal: a date of the template's own, say."""
    scene = Scene()
    talk = ["You help.", "What is new?" + "x" * 60]
    scene.say("a", *talk)
    scene.say("b", *talk, "Go on.", written=["You hope.", *talk[1:], "Go on."], found=True)
    found = scene.explain("b")
    assert found.cause == "changed"
    assert found.first_difference is not None
    assert (found.first_difference.path, found.first_token and found.first_token.now) == (
        "prompt",
        "o",
    )


def test_other_salts_of_the_caller_are_found_for_the_count() -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is new?", salt="s")
    for name, talk, expected in (("b", "What is new?", True), ("c", "Another.", False)):
        scene.say(name, "You help." if expected else "You do.", talk, salt="t")
        prompt = scene.log.find(name)
        assert prompt is not None
        assert scene.log.has_in_other_salt(prompt, 3 * PAGE) is expected


def test_salts_of_another_caller_are_not_found_for_the_count(monkeypatch) -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is new?", salt="s")
    monkeypatch.setattr(prompt_history, "caller", lambda: b"another")
    scene.say("b", "You help.", "What is new?", salt="t")
    prompt = scene.log.find("b")
    assert prompt is not None
    assert not scene.log.has_in_other_salt(prompt, PAGE)
    scene.log.flush()
    assert not scene.log._by_caller


def test_only_the_last_prompts_are_compared_of_the_salt_and_of_the_caller() -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is new?", salt="s")
    scene.say("first", "You do.", "Another.", salt="t")
    for number in range(MAX_COMPARED - 2):
        scene.say(f"{number}", "You do.", "Another.", salt="t")
    for name, is_found in (("b", True), ("c", False)):
        scene.say(name, "You help.", "What is new?", salt="t")
        prompt = scene.log.find(name)
        assert prompt is not None
        assert scene.log.has_in_other_salt(prompt, PAGE) is is_found
    scene.say("last", "You do.", "Another.", salt="t")
    for name, names in (("c", ["b", "first"]), ("last", ["c", "0"])):
        prompt = scene.log.find(name)
        assert prompt is not None
        found = [each.response_id for each in scene.log.earlier(prompt)]
        assert [found[0], found[-1]] == names
        assert len(found) <= MAX_COMPARED


def test_pages_that_were_lost_before_it_are_the_cause() -> None:
    found = reencoded(small, "No news AT all.", "No news at all.", "")
    assert found.cause == "evicted"


def test_answers_count_in_the_bytes_of_the_log() -> None:
    scene = Scene(max_bytes=20_000)
    scene.say("a", "You help.", "What is new?")
    scene.log.add_answer("a", [1] * 1000)
    assert scene.log.find("a") is not None
    scene.log.add_answer("a", [1] * 10_000)
    scene.log.add_answer("none", [1])
    assert scene.log.find("a") is None


def test_a_prompt_is_not_compared_with_one_that_came_after_it() -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is new?")
    scene.say("b", "You help.", "What is new?")
    found = scene.explain("a")
    assert (found.cause, found.compared_with) == ("first_seen", None)


def test_a_changed_message_is_named_with_the_text_around_the_change() -> None:
    scene = Scene()
    long = "word " * 40
    scene.say("a", "You help.", long + "on Monday " + long, "Go.")
    found = scene.say("b", "You help.", long + "on Friday " + long, "Go.", found=True)
    assert found.cause == "changed"
    change = found.first_difference
    assert change is not None
    assert change.path == "messages[1].content"
    assert change.before is not None
    assert change.now is not None
    assert "Monday" in change.before
    assert "Friday" in change.now
    assert max(len(change.before), len(change.now)) <= 60
    assert found.reusable_tokens == len("''|You help.|" + long + "on ")


def test_changed_tools_and_a_changed_system_text_are_told_apart() -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is new?", tools=TOOLS)
    other = [{"type": "function", "function": {"name": "listen"}}]
    tools = scene.say("b", "You help.", "What is new?", tools=other, found=True)
    assert tools.first_difference is not None
    assert (tools.cause, tools.first_difference.path) == ("tools_changed", "tools")
    assert tools.rule is None
    system = scene.say("c", "You helped.", "What is new?", tools=other, found=True)
    assert system.first_difference is not None
    assert system.first_difference.path == "messages[0].content"
    assert system.first_difference.kind == "system"


@pytest.mark.parametrize(
    ("before", "now", "cause", "rule"),
    [
        ("Turn 7 of many.", "Turn 8 of many.", "volatile_line", None),
        ("x-anthropic-billing-header: cch=a1;\nBe good.",
         "x-anthropic-billing-header: cch=b2;\nBe good.", "volatile_line", "billing-header"),
        ("Current time: 2026-11-21 13:34", "Current time: 2026-11-21 13:35",
         "volatile_line", "time-of-day"),
        ("Today is Monday.", "Today is Friday.", "changed", None),
        ("Turn 7 of many.", "Turn 8 of few.", "changed", None),
    ],
)  # fmt: skip
def test_a_line_that_changes_by_itself_has_a_cause_of_its_own(
    before: str, now: str, cause: str, rule: str | None
) -> None:
    scene = Scene()
    scene.say("a", before, "What is new?")
    found = scene.say("b", now, "What is new?", "And what is old?", found=True)
    assert (found.cause, found.rule) == (cause, rule)
    assert found.body()["rule"] == rule


def test_a_number_that_a_user_changes_is_a_change() -> None:
    scene = Scene()
    scene.say("a", "You help with it.", "Count from 7 to 10.", "Go on with it.")
    found = scene.say("b", "You help with it.", "Count from 8 to 10.", "Go on.", found=True)
    assert (found.cause, found.rule) == ("changed", None)


def test_tools_in_another_order_are_named() -> None:
    scene = Scene()
    two = [*TOOLS, {"type": "function", "function": {"name": "listen"}}]
    scene.say("a", "You help.", "What is new?", tools=two)
    found = scene.say("b", "You help.", "What is new?", tools=two[::-1], found=True)
    assert (found.cause, found.rule) == ("tools_changed", "tool-order")


def test_tools_that_are_left_out_are_named() -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is new?", tools=TOOLS)
    found = scene.say("b", "You help.", "What is new?", found=True)
    assert (found.cause, found.rule) == ("tools_changed", None)


def test_the_most_similar_prompt_is_chosen_and_of_equals_the_latest() -> None:
    scene = Scene()
    scene.say("far", "You help.", "What is old?")
    scene.say("near", "You help.", "What is new here?")
    scene.say("nearest", "You help.", "What is new there?")
    scene.say("other", "You sing.", "What is new there, then?")
    found = scene.say("b", "You help.", "What is new to me?")
    assert found.compared_with == "nearest"


def test_a_line_that_is_new_in_every_request_is_found_at_the_very_beginning() -> None:
    scene = Scene()
    rules = "Be kind and be brief. " * 10
    scene.say("a", "x1 " + rules, "Hello.", plain=False, tools=None)
    scene.log.find("a").tokens = b"\1\0\0\0" * 50  # nothing at all in common at the beginning
    found = scene.say("b", "x2 " + rules, "Hello.")
    assert (found.cause, found.compared_with, found.reusable_tokens) == (
        "volatile_line",
        "a",
        0,
    )
    assert found.first_difference is not None
    assert found.first_difference.path == "messages[0].content"


def test_evicted_and_flushed_are_told_with_the_time_since() -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is new?")
    loss = Eviction("evicted", 1.5)
    found = scene.say("b", "You help.", "What is new?", loss=loss)
    assert (found.cause, found.seconds_ago) == ("evicted", 0.5)
    found = scene.say("c", "You help.", "What is new?", loss=Eviction("flushed", 1.0))
    assert (found.cause, found.seconds_ago) == ("flushed", 2.0)


def test_a_page_that_is_gone_for_longer_than_the_log_reaches_was_evicted_at_some_time() -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is new?")
    found = scene.say("b", "You help.", "What is new?")
    assert (found.cause, found.seconds_ago) == ("evicted", None)


def test_a_prompt_that_was_not_written_or_not_yet_is_no_eviction() -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is new?", write=False)
    assert scene.say("b", "You help.", "What is new?").cause == "first_seen"  # of others' secrets
    assert scene.explain("b", "a").cause == "not_written"
    scene = Scene()
    scene.say("a", "You help.", "What is new?")
    prompt = scene.log.find("a")
    assert prompt is not None
    prompt.usage.time_to_first_token = 5.0  # still computed when the next came
    assert scene.say("b", "You help.", "What is new?").cause == "not_written"


def test_a_prompt_for_no_tokens_is_written_when_it_ends() -> None:
    for seconds, cause in ((0.5, "evicted"), (5.0, "not_written")):
        scene = Scene()
        scene.say("a", "You help.", "What is new?")
        usage = scene.log.find("a").usage
        usage.time_to_first_token, usage.total_time, usage.cache_write_tokens = 0.0, seconds, PAGE
        assert scene.say("b", "You help.", "What is new?").cause == cause


def test_who_does_not_read_is_told_so() -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is new?")
    assert scene.say("b", "You help.", "What is new?", read=False).cause == "not_read"


def test_less_than_a_page_is_too_short() -> None:
    assert Scene().say("a", "").cause == "too_short"


def test_nothing_is_told_of_prompts_with_another_salt() -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is new?", salt="x")
    found = scene.say("b", "You help.", "What is new?", salt="y")
    assert (found.cause, found.compared_with) == ("first_seen", None)
    named = scene.explain("b", "a")
    assert named.cause == "other_salt"
    assert (named.first_difference, named.reusable_tokens, named.compared_tokens) == (None, 0, 0)


def test_the_same_salt_with_another_adapter_is_no_other_salt() -> None:
    scene = Scene()
    sql, legal = (adapter_group(name, 1, b"") for name in ("sql", "legal"))
    scene.say("a", "You help.", "What is new?", salt=adapter_namespace(sql, "x"), model="sql")
    own = adapter_namespace(legal, "x")
    found = scene.say("b", "You help.", "What is new?", salt=own, model="legal")
    assert (found.cause, found.compared_with) == ("first_seen", None)
    named = scene.explain("b", "a")
    assert (named.cause, named.model_changed, named.reusable_tokens) == ("first_seen", True, 0)
    prompt = scene.log.find("b")
    assert prompt is not None
    assert not scene.log.has_in_other_salt(prompt, PAGE)
    scene.say("c", "You help.", "What is new?", salt=adapter_namespace(legal, "y"), model="legal")
    other = scene.log.find("c")
    assert other is not None
    assert scene.log.has_in_other_salt(other, PAGE)
    assert scene.explain("c", "b").cause == "other_salt"


def test_a_named_response_is_compared_even_when_others_are_nearer() -> None:
    scene = Scene()
    scene.say("a", "You help.", "What is old?")
    scene.say("b", "You help.", "What is new?")
    scene.say("c", "You help.", "What is now?", found=True)
    found = scene.explain("c", "a")
    assert (found.compared_with, found.cause) == ("a", "changed")


def test_token_ids_without_texts_are_shown_decoded() -> None:
    scene = Scene()
    scene.say("a", "one two three four", plain=True)
    found = scene.say("b", "one two drei four", plain=True, found=True)
    assert found.first_difference is not None
    assert found.first_difference.path == "prompt"
    assert "three" in (found.first_difference.before or "")
    assert "drei" in (found.first_difference.now or "")


def test_a_changed_model_or_key_is_told() -> None:
    scene = Scene()
    scene.say("a", "You help.", cache_key="k")
    found = scene.say("b", "You help.", cache_key="l", model="n", found=True)
    assert (found.model_changed, found.cache_key_changed) == (True, True)


def test_the_oldest_prompts_are_forgotten_first_and_memory_is_bounded() -> None:
    scene = Scene(max_bytes=20_000)
    for index in range(100):
        scene.say(f"{index}", "You help." * 50, "hm")
    assert 1 < len(scene.log) < 20
    assert scene.log.find("0") is None
    assert scene.log.find("99") is not None


def test_a_flush_forgets_prompts_by_salt_and_by_prefix() -> None:
    scene = Scene()
    scene.say("a", "one two", plain=True)
    scene.say("b", "one three", plain=True)
    scene.say("c", "one two", plain=True, salt="x")
    front = array("q", map(ord, "''|one tw"))
    scene.log.flush_prefix(front, None)
    assert [name for name in "abc" if scene.log.find(name)] == ["b", "c"]
    scene.log.flush("x")
    assert [name for name in "abc" if scene.log.find(name)] == ["b"]
    scene.log.flush()
    assert len(scene.log) == 0
    assert scene.say("d", "one two", plain=True).compared_with is None


def test_a_prompt_larger_than_the_memory_is_forgotten_at_once() -> None:
    log = PromptLog(max_bytes=10)
    tokens = array("q", range(100))
    sampling = SamplingMetadata(params=SamplingParams(), seed=0, prompt_len=100)
    request = Request(request_id="a", tokens=tokens, sampling=sampling)
    log.record("a", request, PromptNote(), 0.0)
    assert len(log) == 0
    tokens.append(1)  # nothing holds on to the array of a live request


def test_a_part_that_is_gone_is_a_difference_too() -> None:
    one, two = Part("a", "x", "messages"), Part("b", "y", "messages")
    assert first_difference([one, two], [one, two]) is None
    found = first_difference([one, two], [one])
    assert found is not None
    assert (found.path, found.before, found.now) == ("b", "y", None)


def test_the_systems_own_field_is_not_counted_among_the_messages() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    paths = [part.path for part in conversation_parts(messages, num_system=1)]
    assert paths == ["system.role", "system.content", "messages[0].role", "messages[0].content"]


def explanation(cause: str, **fields: object) -> Explanation:
    return Explanation(cause=cause, prompt_tokens=100, cached_tokens=16, **fields)


def changed(kind: str, cause: str = "changed") -> Explanation:
    parts = [[Part("p", text, kind)] for text in ("old", "new")]
    return explanation(
        cause,
        compared_tokens=80,
        reusable_tokens=20,
        first_difference=first_difference(*parts),
    )


@pytest.mark.parametrize(
    ("kind", "openai", "anthropic"),
    [
        ("tools", "tools_changed", "tools_changed"),
        ("system", "input_changed", "system_changed"),
        ("messages", "input_changed", "messages_changed"),
        ("format", "text_format_changed", "messages_changed"),
    ],
)
def test_changes_in_the_words_of_both_apis(kind: str, openai: str, anthropic: str) -> None:
    body = openai_diagnostics(changed(kind))
    del body["explanation"]
    assert body == {
        "type": "cache_miss",
        "reason": openai,
        "cache_missed_tokens": 80,
        "comparison_reusable_tokens": 20,
    }
    assert anthropic_diagnostics(changed(kind)) == {
        "cache_miss_reason": {"type": anthropic, "cache_missed_input_tokens": 64}
    }


def test_the_finer_causes_are_changes_in_the_words_of_both_apis() -> None:
    for kind, cause in (("tools", "tools_changed"), ("system", "volatile_line")):
        found = changed(kind, cause)
        assert openai_diagnostics(found)["reason"] == openai_diagnostics(changed(kind))["reason"]
        assert anthropic_diagnostics(found) == anthropic_diagnostics(changed(kind))


def test_an_option_of_the_template_that_changed_is_told_where_no_part_differs() -> None:
    options = {"options_changed": frozenset({"reasoning_effort"})}
    found = explanation("changed", compared_tokens=80, reusable_tokens=20, **options)
    assert openai_diagnostics(found)["reason"] == "reasoning_effort_changed"
    assert anthropic_diagnostics(found) == {"cache_miss_reason": {"type": "unavailable"}}
    both = replace(changed("messages"), **options)
    assert openai_diagnostics(both)["reason"] == "input_changed"
    assert anthropic_diagnostics(both)["cache_miss_reason"]["type"] == "messages_changed"


def test_messages_that_are_gone_are_a_compaction() -> None:
    shorter = replace(changed("messages"), is_shorter=True)
    assert openai_diagnostics(shorter)["reason"] == "context_compacted"
    assert openai_diagnostics(replace(changed("tools"), is_shorter=True))["reason"] == (
        "tools_changed"
    )


def test_another_key_explains_pages_that_no_session_kept() -> None:
    assert openai_diagnostics(explanation("evicted", cache_key_changed=True))["reason"] == (
        "prompt_cache_key_changed"
    )
    assert openai_diagnostics(explanation("flushed", cache_key_changed=True))["type"] == (
        "unavailable"
    )


def test_hits_and_the_unknown_in_the_words_of_both_apis() -> None:
    assert openai_diagnostics(explanation("hit"))["type"] == "cache_hit"
    assert anthropic_diagnostics(explanation("hit")) is None
    assert openai_diagnostics(None) == {"type": "comparison_response_not_found"}
    assert anthropic_diagnostics(None) == {
        "cache_miss_reason": {"type": "previous_message_not_found"}
    }
    for cause in ("evicted", "flushed", "other_salt", "not_read"):
        assert openai_diagnostics(explanation(cause))["type"] == "unavailable"
        assert anthropic_diagnostics(explanation(cause)) == {
            "cache_miss_reason": {"type": "unavailable"}
        }


def test_a_changed_model_is_the_first_reason() -> None:
    found = explanation("changed", model_changed=True, compared_tokens=50)
    assert openai_diagnostics(found)["reason"] == "model_changed"
    reason = anthropic_diagnostics(found)
    assert reason == {
        "cache_miss_reason": {"type": "model_changed", "cache_missed_input_tokens": 34}
    }
