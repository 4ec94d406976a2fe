"""The live page in a browser: a real server whose model says what a message has between [[ ]]."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from foretoken.draft.sources.names import DRAFTERS
from support.browser import chromium, needs_browser
from support.plain_http import post
from support.server_process import running, running_front

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = [needs_browser, pytest.mark.slow]
SCRIPTED = str(Path(__file__).parents[1] / "support" / "scripted_server.py")
SERVER = [
    sys.executable, SCRIPTED, "--port", "0", "--kv-tokens", "16384", "--log-level", "error",
    "--root-path", "/llm",
]  # fmt: skip
THINKS = ["--reasoning-parser", "think"]
LONG = "x = 1\n" * 400
PHONE = {"width": 390, "height": 844}
CHAT = "**/v1/chat/completions"
Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(started_by=[*SERVER, *THINKS]) as server:
        yield server.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def open_page(browser: Browser, url: str) -> Iterator[Open]:
    """Opens the page in a browser without memory; it must not have logged an error at the end."""
    errors: list[str] = []
    contexts = []

    def open_at(address: str = url, **options: Any) -> Page:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert [error for error in errors if "the server responded with a status" not in error] == []


def send(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.keyboard.press("Enter")


def answered(page: Page) -> None:
    """Wait until nothing is being answered; what was sent has hidden the button at once."""
    page.locator("#send").wait_for()


def say(page: Page, answer: str) -> None:
    """Have the model answer this."""
    send(page, f"[[{answer}]]")
    answered(page)


def told(page: Page) -> str:
    return page.locator(".answer .content").last.inner_text()


# -- answers --------------------------------------------------------------------------------------


def test_an_answer_streams_has_its_cost_and_the_engine_shows_its_steps(open_page: Open) -> None:
    page = open_page()
    page.locator("#load", has_text="0 requests running").wait_for()
    say(page, "x = 1\n" * 20)
    cost = page.locator(".cost").inner_text()
    tokens, steps = map(int, re.findall(r"(\d+) tokens?\s+in (\d+) steps?", cost)[0])
    assert tokens > 20
    assert "0 of " in cost
    by_drafter = [
        int(each) for each in re.findall(r"(?:the model itself|radix|suffix|lm) (\d+)", cost)
    ]
    assert sum(by_drafter) == tokens
    assert page.locator(".strip").get_attribute("aria-label").startswith(f"{steps} step")  # type: ignore[union-attr]
    page.locator("#tree rect.mine").first.wait_for()
    page.locator(f"#steps[aria-label*='{steps} step']").wait_for()
    assert f"the model itself {by_drafter[-1]}" in page.locator("#steps-names").inner_text()


def test_a_later_turn_tells_how_much_of_the_prompt_was_reused(open_page: Open) -> None:
    page = open_page()
    say(page, "x = 1\n" * 20)
    say(page, "More.")
    found = re.search(r"(\d+) of (\d+) prompt tokens", page.locator(".cost").last.inner_text())
    assert found is not None
    assert 0 < int(found[1]) < int(found[2])
    page.locator("#reused", has_text=f"{found[1]} of {found[2]} tokens reused").wait_for()


def test_an_answer_and_the_cache_tell_why_reuse_of_the_prompt_ended(open_page: Open) -> None:
    page = open_page()
    say(page, "<think>\nThe user wants a greeting, which may be short.\n</think>\nHello to you.")
    assert page.locator(".cost .miss").count() == 0
    say(page, "Goodbye. " * 8)
    told = page.locator(".cost").last.locator(".miss").inner_text()
    reason = "the chat template removed the reasoning of an answer"
    assert re.search(rf"{reason} \(token \d+: \".+\" instead of \"<", told)
    page.locator("#causes", has_text="removed the reasoning").wait_for()


def test_answers_go_back_by_their_token_ids_and_those_that_are_refused_as_text(
    open_page: Open,
) -> None:
    page = open_page()
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda sent: bodies.append(sent.post_data_json) if sent.method == "POST" else None,
    )
    say(page, "One.")
    say(page, "Two.")
    (said,) = [each for each in bodies[-1]["messages"] if each["role"] == "assistant"]
    assert said["content"] == "One."
    assert said["token_ids"]
    page.evaluate("import('./ui/chat.js').then(page => { page.chat.messages[1].ids = [0]; })")
    say(page, "Three.")
    refused, taken = [[each.get("token_ids") for each in body["messages"]] for body in bodies[-2:]]
    assert refused[1] == [0]
    assert taken == [None] * 5
    assert told(page) == "Three."


def test_reasoning_stands_apart_and_its_marks_are_never_seen(open_page: Open) -> None:
    page = open_page()
    say(page, "<think>\nTwo and two.\n</think>\n\nIt is **4**.")
    assert told(page) == "It is 4."
    answer = page.locator(".answer")
    assert "think" not in answer.inner_text()
    assert page.locator(".answer .content strong").inner_text() == "4"
    assert page.locator(".reasoning .md").text_content() == "Two and two."
    assert page.locator(".reasoning").get_attribute("open") is None


def test_markdown_becomes_nodes(open_page: Open) -> None:
    page = open_page()
    say(
        page,
        "# Head\n\nA *line* with `a*b*c` and [a link](https://example.org/a_(b)).\n\n- one\n"
        "- two\n  1. inner\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('*x*')\n```\n"
        "> quoted\n\nThe end",
    )
    content = page.locator(".answer .content")
    assert content.locator("h1").inner_text() == "Head"
    assert content.locator("em").inner_text() == "line"
    assert content.locator("p code").inner_text() == "a*b*c"
    assert content.locator("a").get_attribute("href") == "https://example.org/a_(b)"
    assert content.locator("a").get_attribute("rel") == "noopener noreferrer nofollow"
    assert content.locator("> ul > li").count() == 2
    assert content.locator("ul ol li").inner_text() == "inner"
    assert content.locator("td").all_inner_texts() == ["1", "2"]
    assert content.locator("pre").inner_text() == "print('*x*')"
    assert content.locator(".code header span").inner_text() == "python"
    assert content.locator("blockquote").inner_text() == "quoted"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    content.locator(".code button").click()
    content.locator(".code button", has_text="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "print('*x*')"


FUZZ = r"""async () => {
  const { markdown } = await import("./ui/markdown.js");
  const { painter } = await import("./ui/answer.js");
  const marks = "xz*_`~#>-+|[]!\\\n\n  ", lost = [];
  let state = 7;
  const next = below => (state = state * 48271 % 2147483647) % below;
  for (let round = 0; round < 2000; round += 1) {
    const text = Array.from({ length: 1 + next(60) }, () => marks[next(marks.length)]).join("");
    const box = document.createElement("div");
    box.append(...markdown(text, painter(text, [[next(20), "radix"], [text.length, ""]])));
    const letters = from => from.replace(/[^xz]/g, "");
    if (letters(box.textContent) !== letters(text)) lost.push([text, box.textContent]);
  }
  return lost;
}"""


def test_markdown_of_any_marks_loses_no_letter(open_page: Open) -> None:
    assert open_page().evaluate(FUZZ) == []


def test_nothing_of_an_answer_is_run_or_loaded(open_page: Open, url: str) -> None:
    page = open_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    answer = (
        "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script> "
        "[a](javascript:window.hacked=1) ![b](https://example.org/b.png) "
        '[c](https://example.org/"onmouseover="window.hacked=1) `<b>d</b>`'
    )
    say(page, answer)
    content = page.locator(".answer .content")
    assert content.locator("img, script, b, [onerror], [onmouseover]").count() == 0
    assert content.locator("a[href^=javascript]").count() == 0
    assert "<img src=x onerror='window.hacked=1'><script>" in content.inner_text()
    assert page.evaluate("window.hacked === undefined")
    assert [each for each in asked if not each.startswith(url)] == []


def test_drafted_tokens_are_coloured_named_and_the_colours_can_be_off(open_page: Open) -> None:
    page = open_page()
    say(page, "value = value + 1\n" * 30)
    marked = page.locator(".content mark").count()
    assert marked > 0
    names = page.locator("#legend .names").inner_text()
    titles = {each.get_attribute("title") for each in page.locator(".content mark").all()}
    assert {f"drafted by {name}" for name in re.findall("radix|suffix|ngram|lm", names)} == titles
    look = "mark => [mark.className, getComputedStyle(mark).textDecorationStyle].join()"
    looks = {page.evaluate(look, each) for each in page.locator(".content mark").element_handles()}
    assert len(looks) == len(titles), "a drafter has one colour and one pattern"
    text = told(page)
    page.uncheck("#colours")
    assert page.locator(".content mark").count() == 0
    assert told(page) == text


def test_an_answer_has_a_table_of_its_tokens_by_drafter(open_page: Open) -> None:
    page = open_page()
    say(page, "value = value + 1\n" * 30)
    table = page.locator(".by-drafter table")
    assert table.is_hidden()
    page.locator(".by-drafter summary").click()
    assert table.locator("thead th").all_inner_texts() == [
        "Drafter", "Tokens", "Share", "Description",
    ]  # fmt: skip
    rows = {
        row.locator("th").inner_text(): row.locator("td").all_inner_texts()
        for row in table.locator("tbody tr").all()
    }
    own = rows.pop("the model itself")
    total = int(own[0]) + sum(int(tokens) for tokens, *_ in rows.values())
    assert f"{total} tokens" in page.locator(".cost").inner_text()
    assert {name: about for name, (*_, about) in rows.items()} == {
        name: DRAFTERS[name] for name in rows
    }


def test_nodes_of_closed_blocks_stay_while_an_answer_grows(open_page: Open) -> None:
    page = open_page()
    page.check("input[value=off]", force=True)
    send(page, f"[[First.\n\nSecond.\n\n{LONG}]]")
    page.locator(".content p").nth(2).wait_for()
    first = page.locator(".content p").first.element_handle()
    lines = page.locator(".content br").count()
    page.locator(".content br").nth(lines + 8).wait_for(state="attached")
    assert first.evaluate("node => node.isConnected")
    page.keyboard.press("Escape")
    answered(page)


def test_the_page_works_under_the_path_of_a_proxy(open_page: Open, url: str) -> None:
    page = open_page(f"{url}/llm")
    say(page, "y = 2\n" * 20)
    assert told(page).startswith("y = 2\ny = 2\n")
    page.locator("#tree rect.mine").first.wait_for()


# -- stop, errors, limits -------------------------------------------------------------------------


def test_escape_stops_and_a_stopped_answer_has_a_cost(open_page: Open) -> None:
    page = open_page()
    page.check("input[value=off]", force=True)
    send(page, f"[[{LONG}]]")
    page.locator(".content p").wait_for()
    page.keyboard.press("Escape")
    page.locator(".cost .flag", has_text="stopped").wait_for()
    assert re.search(r"\d+ tokens\s+in \d+ steps", page.locator(".cost").inner_text())
    assert len(told(page)) < len(LONG)
    say(page, "Still here.")
    assert told(page) == "Still here."


def test_an_error_stands_at_the_input_which_gets_its_text_back(open_page: Open) -> None:
    page = open_page()
    say(page, "Hello.")
    text = "too long " * 5000
    send(page, text)
    page.locator("#alert", has_text="too long").wait_for()
    assert page.input_value("#text") == text.strip()
    assert page.locator(".said").count() == 1
    box = page.locator("#alert").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= page.viewport_size["height"]  # type: ignore[index]
    page.fill("#text", "")
    say(page, "Better.")
    assert page.locator("#alert").is_hidden()


def test_an_answer_at_its_limit_says_so_and_empty_fields_are_not_sent(open_page: Open) -> None:
    page = open_page()
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda sent: bodies.append(sent.post_data_json) if sent.post_data else None)
    say(page, "One.")
    page.click("#open-settings")
    assert page.get_attribute("#temperature", "placeholder") == "the model's default (1)"
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "3")
    page.keyboard.press("Escape")
    say(page, "One two three four five six seven.")
    assert page.locator(".cost .flag").inner_text() == "stopped at the token limit"
    assert not {"temperature", "max_tokens", "seed", "speculation", "cache"} & set(bodies[0])
    assert (bodies[1]["temperature"], bodies[1]["max_tokens"]) == (0, 3)
    assert [each["role"] for each in bodies[1]["messages"]] == [
        "system", "user", "assistant", "user",
    ]  # fmt: skip


def scroll_to_top(page: Page) -> None:
    """Turn the wheel until it is over: it scrolls smoothly, and anything may end its way."""
    page.locator("#log").hover()
    for _ in range(20):
        page.mouse.wheel(0, -20000)
        page.locator("#down").wait_for()
        if page.evaluate(RESTS) == 0:
            return
    pytest.fail("the wheel does not reach the top")


RESTS = """async () => {
  const log = document.getElementById("log");
  for (let before = -1; before !== log.scrollTop;) {
    before = log.scrollTop;
    await new Promise(done => setTimeout(done, 100));
  }
  return log.scrollTop;
}"""


def test_a_reader_who_scrolls_up_is_left_alone(open_page: Open) -> None:
    page = open_page()
    page.check("input[value=off]", force=True)
    send(page, f"[[{LONG}]]")
    page.locator(".content br").nth(60).wait_for(state="attached")
    scroll_to_top(page)
    page.keyboard.press("Escape")
    answered(page)
    assert page.evaluate("document.getElementById('log').scrollTop") == 0
    page.click("#down")
    assert page.evaluate("document.getElementById('log').scrollTop") > 0


def test_a_key_is_asked_for_after_a_401_alone(open_page: Open) -> None:
    assert open_page().locator("#key").count() == 0
    with running(["--kv-tokens", "1024", "--api-key", "k"]) as server:
        page = open_page(server.url)
        page.fill("#key", "k")
        page.keyboard.press("Enter")
        page.locator("#model", has_text="foretoken-builtin").wait_for()
        page.locator("#load", has_text="0 requests running").wait_for()
        send(page, "def f():")
        page.locator(".strip").wait_for()
        page.keyboard.press("Escape")
        answered(page)
        page.close()  # before the server, which would break its stream


# -- side by side ---------------------------------------------------------------------------------


def test_side_by_side_compares_both_answers(open_page: Open) -> None:
    page = open_page()
    bodies: list[dict[str, Any]] = []
    page.on("request", lambda sent: bodies.append(sent.post_data_json) if sent.post_data else None)
    page.check("input[value=both]", force=True)
    say(page, "value = value + 1\n" * 30)
    one, two = page.locator(".answer .content").all()
    assert one.inner_text() == two.inner_text() != ""
    verdict = page.locator(".verdict").inner_text()
    assert re.match(r"The same \d+ tokens, ([\d.]+ times (faster|slower)|no faster) with", verdict)
    assert page.locator(".answer h3 span").all_inner_texts()[::2] == [
        "Speculation on", "Speculation off",
    ]  # fmt: skip
    assert page.locator(".answer").nth(1).locator("mark").count() == 0
    assert bodies[0]["seed"] == bodies[1]["seed"]
    assert [each.get("speculation") for each in bodies] == [None, "off"]
    assert [each["cache"] for each in bodies] == [{"read": False, "write": False}] * 2


def altered(line: str) -> str:
    """An event whose text has another letter."""
    if "choices" not in line:
        return line
    chunk = json.loads(line.removeprefix("data: "))
    for choice in chunk["choices"]:
        if "content" in choice["delta"]:
            choice["delta"]["content"] = choice["delta"]["content"].replace("w", "v")
    return "data: " + json.dumps(chunk)


def test_answers_that_differ_are_never_called_the_same(open_page: Open) -> None:
    page = open_page()

    def alter(route: Route) -> None:
        if (route.request.post_data_json or {}).get("speculation") != "off":
            route.continue_()
            return
        answer = route.fetch()
        lines = [altered(line) for line in answer.text().splitlines()]
        route.fulfill(response=answer, body="\n".join([*lines, ""]))

    page.route(CHAT, alter)
    page.check("input[value=both]", force=True)
    say(page, "one two three four")
    assert told(page) == "one tvo three four"
    verdict = page.locator(".verdict.wrong").inner_text()
    assert "The answers differ" in verdict
    assert "same" not in verdict


# -- conversations --------------------------------------------------------------------------------


def test_a_conversation_is_there_after_a_reload_until_it_is_deleted(open_page: Open) -> None:
    page = open_page()
    say(page, "value = value + 1\n" * 30)
    text, marked = told(page), page.locator(".content mark").count()
    page.reload()
    assert told(page) == text
    assert page.locator(".content mark").count() == marked
    assert "tokens per second" in page.locator(".cost").inner_text()
    page.click("#new")
    page.locator(".examples").wait_for()
    page.click("#open-history")
    page.locator("#history button").first.click()
    assert told(page) == text
    page.click("#open-history")
    page.locator("#history button", has_text="Delete").click()
    assert page.locator("#status").inner_text().startswith("Sure? Press again to delete [[value")
    page.locator("#history button", has_text="Sure?").click()
    page.locator("#history p", has_text="No conversations yet").wait_for()
    assert page.locator(".answer").count() == 0
    page.reload()
    page.locator(".examples").wait_for()


def test_a_message_is_edited_and_an_answer_made_again(open_page: Open) -> None:
    page = open_page()
    say(page, "First.")
    say(page, "Second.")
    page.locator(".said button", has_text="Edit").first.click()
    page.locator(".said textarea").fill("[[Changed.]]")
    page.keyboard.press("Enter")
    page.locator(".content", has_text="Changed.").wait_for()
    answered(page)
    assert page.locator(".answer").count() == page.locator(".said").count() == 1
    page.locator("button", has_text="Regenerate").click()
    answered(page)
    assert told(page) == "Changed."
    assert page.locator(".answer").count() == 1


def test_an_edit_that_fails_leaves_the_conversation_as_it_was(open_page: Open) -> None:
    page = open_page()
    say(page, "First.")
    page.locator(".said button", has_text="Edit").click()
    page.locator(".said textarea").fill("too long " * 5000)
    page.keyboard.press("Enter")
    page.locator("#alert").wait_for()
    assert told(page) == "First."
    assert page.input_value("#text").startswith("too long")


# -- keyboard, size, colours ----------------------------------------------------------------------


def test_the_keyboard_is_enough(open_page: Open) -> None:
    page = open_page()
    page.locator("#text:focus").wait_for()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("[[two]]")
    assert page.input_value("#text") == "one\n[[two]]"
    page.keyboard.press("Tab")
    page.locator("#open-settings:focus-visible").wait_for()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.locator("#settings").wait_for()
    page.keyboard.press("Escape")
    assert page.locator("#settings").is_hidden()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.locator("input[value=off]").is_checked()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator(".content", has_text="two").wait_for()


def test_only_the_beginning_and_the_end_of_an_answer_are_read_aloud(open_page: Open) -> None:
    page = open_page()
    say(page, "One two.")
    assert page.locator("#log [aria-live], #log [role=status], #log[aria-live]").count() == 0
    assert re.match(r"The answer is complete: \d+ tokens", page.locator("#status").inner_text())


def test_on_a_phone_nothing_is_wider_than_the_screen(open_page: Open) -> None:
    page = open_page(viewport=PHONE, has_touch=True, is_mobile=True)
    wide = "w" * 300
    page.check("input[value=both]", force=True)
    say(page, f"{wide}\n\n```\n{wide}\n```\n\n| {wide} | b |\n|---|---|\n| 1 | {wide} |")
    fits = "Math.max(document.body.scrollWidth, document.getElementById('log').scrollWidth) <= 390"
    assert page.evaluate(fits)
    assert page.locator("#engine").is_hidden()
    page.click("#open-engine")
    page.locator("#steps path").first.wait_for()
    assert page.evaluate(fits)
    page.keyboard.press("Escape")
    page.locator("#engine").wait_for(state="hidden")
    page.click("#open-settings")
    box = page.locator("#settings").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= PHONE["width"]


CONTRAST = """() => {
  const light = colour => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(each => each / 255)
      .map(each => each <= .04045 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4);
    return .2126 * parts[0] + .7152 * parts[1] + .0722 * parts[2];
  };
  const of = (name, kind) => light(getComputedStyle(document.querySelector(name))[kind]);
  const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  const page = of("body", "backgroundColor"), pane = of("#engine", "backgroundColor");
  const pairs = [[of("#hint", "color"), page], [of("#load", "color"), pane],
    [of(".content", "color"), page], [of(".send", "color"), of(".send", "backgroundColor")]];
  return { page, least: Math.min(...pairs.map(pair => ratio(...pair))) };
}"""


def test_both_colour_schemes_can_be_read(open_page: Open) -> None:
    found = []
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        say(page, "One.")
        found.append(page.evaluate(CONTRAST))
    light, dark = found
    assert light["page"] > 0.8 > 0.1 > dark["page"]
    assert min(light["least"], dark["least"]) >= 4.5


def test_nobody_is_watched_by_a_page_that_is_not_seen(open_page: Open) -> None:
    page = open_page()
    page.locator("#load", has_text="0 requests running").wait_for()
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    change = "document.dispatchEvent(new Event('visibilitychange'))"
    page.evaluate(hide % "true" + change)
    assert page.evaluate("import('./ui/engine.js').then(engine => engine.watching)") is None
    with page.expect_request("**/ui/events"):
        page.evaluate(hide % "false" + change)


def test_what_is_kept_is_json_of_the_conversation_alone(open_page: Open) -> None:
    page = open_page()
    say(page, "One.")
    kept = page.evaluate("({...localStorage})")
    (name,) = [each for each in kept if each.startswith("foretoken.chat.")]
    assert json.loads(kept[name])["messages"][0]["content"] == "[[One.]]"
    assert "key" not in kept


def test_a_front_shows_the_steps_of_each_replica(open_page: Open) -> None:
    flags = ("--kv-tokens", "4096", "--max-model-len", "1024", "--threads", "1")

    def ask(number: int) -> int:
        body = {"prompt": f"{number} words", "max_tokens": 30, "ignore_eos": True}
        return post(server.url, "/v1/completions", body).status

    with running_front(flags, num_replicas=2) as (server, _), ThreadPoolExecutor(4) as pool:
        page = open_page(server.url)
        page.wait_for_selector("#replicas-rows tr:nth-child(2)")
        assert {*pool.map(ask, range(16))} == {200}
        for number in (1, 2):
            page.wait_for_selector(f"#replicas-rows tr:nth-child({number}) svg.steps path")
        page.goto("about:blank")  # before the server ends
