"""``foretoken chat``: its commands, Ctrl-C, and a server as its partner."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foretoken.api.cli.commands import main
from foretoken.api.cli.terminal import chat
from foretoken.api.cli.terminal.remote import ServerModel
from foretoken.api.cli.terminal.terminal import PLAIN, LocalModel, Style
from foretoken.api.types.sampling_params import SamplingDefaults, SamplingParams
from foretoken.core.errors import ForetokenError, InvalidRequest


class Partner:
    """Repeats the last message, and remembers how it was asked."""

    name = "parrot"
    sampling = {"top_p": 0.9, "top_k": 0}

    def __init__(self) -> None:
        self.asked: list[tuple[list[dict[str, str]], SamplingParams]] = []
        self.hangs = False

    async def answer(self, messages, params, texts) -> None:
        self.asked.append((messages, params))
        text = messages[-1]["content"]
        if text == "too long":
            raise InvalidRequest("prompt is too long", param="prompt")
        texts.append(text)
        print(text)
        if self.hangs:
            self.conversation._interrupt()
            await asyncio.Event().wait()
        texts.append("!")


def hold(
    monkeypatch: pytest.MonkeyPatch,
    lines: Sequence[str],
    partner: Partner | None = None,
    *,
    is_terminal: bool = True,
    system: str | None = None,
) -> Partner:
    """A conversation whose lines come from a list."""
    rest = iter(lines)

    async def read(_prompt: str) -> str | None:
        return next(rest, None)

    partner = partner or Partner()
    monkeypatch.setattr(chat, "_read_line", read)
    monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"isatty": lambda self: is_terminal})())
    conversation = partner.conversation = chat.Conversation(  # type: ignore[attr-defined]
        partner, SamplingParams(), system
    )
    asyncio.run(conversation.hold())
    return partner


@pytest.fixture(autouse=True)
def _own_history(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))


def contents(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages]


def test_turns_are_remembered_and_empty_lines_are_none(monkeypatch) -> None:
    partner = hold(monkeypatch, ["a", "  ", "b"], system="be brief")
    assert [contents(messages) for messages, _ in partner.asked] == [
        ["be brief", "a"], ["be brief", "a", "a!", "b"],
    ]  # fmt: skip


def test_the_system_message_can_be_changed_and_removed(monkeypatch) -> None:
    partner = hold(monkeypatch, ["a", "/system x y", "b", "/system", "c"], system="old")
    assert [contents(messages)[0] for messages, _ in partner.asked] == ["old", "x y", "a"]


def test_clear_begins_anew_and_keeps_the_system_message(monkeypatch) -> None:
    partner = hold(monkeypatch, ["a", "/clear", "b"], system="s")
    assert contents(partner.asked[1][0]) == ["s", "b"]


def test_set_changes_the_next_answers_and_refuses_what_is_wrong(monkeypatch, capsys) -> None:
    lines = ["/set temperature 0.5", '/set stop ["x", "y"]', "/set top_p 7", "/set heat 1", "a"]
    partner = hold(monkeypatch, lines)
    params = partner.asked[0][1]
    assert (params.temperature, params.stop, params.top_p) == (0.5, ("x", "y"), 1.0)
    written = capsys.readouterr().err
    assert "top_p must be from 0 to 1" in written
    assert "heat is not one of" in written


def test_set_alone_lists_what_holds(monkeypatch, capsys) -> None:
    hold(monkeypatch, ["/set temperature 0.25", "/set"])
    listed = capsys.readouterr().out
    assert "temperature 0.25\n" in listed
    assert "top_p (the model's default: 0.9)\n" in listed
    assert "top_k (the model's default: 0)\n" in listed
    assert "min_p (the model's default)\n" in listed


def test_set_with_a_name_alone_shows_its_value(monkeypatch, capsys) -> None:
    hold(monkeypatch, ["/set max_tokens 7", "/set max_tokens", "/set top_p"])
    listed = capsys.readouterr().out.splitlines()[1:]
    assert listed == ["max_tokens 7", "max_tokens 7", "top_p (the model's default: 0.9)"]


def test_commands_tell_that_they_are_done(monkeypatch, capsys) -> None:
    hold(monkeypatch, ["/system x", "/system", "/clear"], system="old")
    assert capsys.readouterr().out.splitlines()[1:] == [
        "(the system message is set)", "(the system message is removed)", "(a new conversation)",
    ]  # fmt: skip


def test_ctrl_c_at_the_prompt_shows_it_again_with_what_was_typed(monkeypatch, capsys) -> None:
    partner, lines = Partner(), iter(['"""a', "b" + '"""'])

    async def read(prompt: str) -> str | None:
        partner.conversation._interrupt()
        return next(lines, None)

    monkeypatch.setattr(chat, "_read_line", read)
    monkeypatch.setattr(chat, "_half_line", lambda: "half a li")
    monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"isatty": lambda self: True})())
    partner.conversation = chat.Conversation(partner, SamplingParams(), None)  # type: ignore[attr-defined]
    asyncio.run(partner.conversation.hold())
    out, err = capsys.readouterr()
    assert "> half a li. half a lia\nb\n> half a li" in out
    assert err.count("(Ctrl-D or /exit ends the conversation)") == 3


def test_save_writes_the_conversation(monkeypatch, tmp_path, capsys) -> None:
    file = tmp_path / "talk.json"
    hold(monkeypatch, ["é", f"/save {file}", "/save /no/such/folder/x", "b"])
    out, err = capsys.readouterr()
    assert f"(saved to {file})" in out
    assert "foretoken: /no/such/folder/x: No such file or directory\n" in err
    assert json.loads(file.read_text("utf-8")) == [
        {"role": "user", "content": "é"}, {"role": "assistant", "content": "é!"},
    ]  # fmt: skip


def test_unknown_commands_are_no_messages(monkeypatch, capsys) -> None:
    partner = hold(monkeypatch, ["/hlep", "/help", "/exit", "a"])
    assert partner.asked == []
    captured = capsys.readouterr()
    assert "unknown command /hlep" in captured.err
    assert "/save FILE" in captured.out


def test_a_message_may_have_several_lines(monkeypatch) -> None:
    partner = hold(monkeypatch, ['"""def f():', "", '    pass"""', '"""one"""', '"""open'])
    asked = [contents(messages)[-1] for messages, _ in partner.asked]
    assert asked == ["def f():\n\n    pass", "one"]


def test_in_a_pipe_every_line_is_a_message(monkeypatch) -> None:
    partner = hold(monkeypatch, ["/clear", '"""'], is_terminal=False)
    assert [contents(messages)[-1] for messages, _ in partner.asked] == ["/clear", '"""']


def test_an_interrupt_stops_the_answer_alone_and_what_was_written_counts(
    monkeypatch, capsys
) -> None:
    partner = Partner()
    partner.hangs = True
    hold(monkeypatch, ["a", "b"], partner)
    assert contents(partner.asked[1][0]) == ["a", "a", "b"]
    assert capsys.readouterr().err.count("[stopped]") == 2


def test_what_cancels_the_conversation_ends_it(monkeypatch) -> None:
    """Ctrl-C cancels the conversation where stdin is a pipe."""
    partner = Partner()

    async def answer(messages, params, texts) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        partner.answer = answer  # type: ignore[method-assign]
        task = asyncio.create_task(chat.Conversation(partner, SamplingParams(), None)._answer("a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())


def test_an_interrupt_between_answers_says_how_to_end(capsys) -> None:
    chat.Conversation(Partner(), SamplingParams(), None)._interrupt()
    assert "/exit" in capsys.readouterr().err


def test_a_message_that_is_refused_is_not_kept(monkeypatch, capsys) -> None:
    partner = hold(monkeypatch, ["too long", "b"])
    assert contents(partner.asked[1][0]) == ["b"]
    assert "prompt is too long" in capsys.readouterr().err


# -- token ids ----------------------------------------------------------------------------------


class Counting(Partner):
    """Returns ids with its answers, and refuses those of ``refused``."""

    refused: list[int] = []

    async def answer(self, messages, params, texts) -> list[int]:
        if self.refused in [each.get("token_ids") for each in messages]:
            raise InvalidRequest("of another model", param="messages[1].token_ids")
        await super().answer(messages, params, texts)
        return [len(self.asked)]


def test_answers_go_back_with_their_token_ids_and_are_saved_without(monkeypatch, tmp_path) -> None:
    file = tmp_path / "talk.json"
    partner = hold(monkeypatch, ["a", "b", f"/save {file}"], Counting())
    assert [each.get("token_ids") for each in partner.asked[1][0]] == [None, [1], None]
    assert "token_ids" not in file.read_text("utf-8")


def test_ids_that_a_model_refuses_are_left_out_from_then_on(monkeypatch, capsys) -> None:
    partner = Counting()
    partner.refused = [1]
    hold(monkeypatch, ["a", "b", "c"], partner)
    assert [[each.get("token_ids") for each in messages] for messages, _ in partner.asked] == [
        [None], [None, None, None], [None, None, None, [2], None],
    ]  # fmt: skip
    assert "another model" not in capsys.readouterr().err


def test_a_server_gets_the_ids_back_and_names_those_it_refuses(serve, engine, say) -> None:
    say("fine")
    talk: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]

    async def run() -> None:
        partner = await ServerModel.connect(serve(token_history=False).url, None)
        ids = await partner.answer(talk, SamplingParams(), [])
        talk.append({"role": "assistant", "content": "fine", "token_ids": ids})
        await partner.answer([*talk, talk[0]], SamplingParams(), [])
        talk[1]["content"] = "other"
        with pytest.raises(InvalidRequest) as caught:
            await partner.answer([*talk, talk[0]], SamplingParams(), [])
        assert caught.value.param == "messages[1].token_ids"

    asyncio.run(run())
    first, second = engine.requests
    start = [*first.tokens[: first.prompt_len], *talk[1]["token_ids"]]
    assert list(second.tokens[: len(start)]) == start


def test_the_model_of_this_process_returns_ids_unless_a_stop_string_cut_its_answer(
    run, tokenizer, say, capsys
) -> None:
    say("hello world")
    ids = tokenizer.encode_word("hello world")

    async def body(llm) -> None:
        partner = LocalModel(llm, PLAIN)
        talk: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        assert await partner.answer(talk, SamplingParams(), []) == ids
        assert await partner.answer(talk, SamplingParams(max_tokens=2), []) == ids[:2]
        assert await partner.answer(talk, SamplingParams(stop="wor"), []) is None

    run(body)


# -- a server ---------------------------------------------------------------------------------


def ask(url: str, text: str, params: SamplingParams, key: str | None = None) -> str:
    texts: list[str] = []

    async def run() -> None:
        partner = await ServerModel.connect(url, key, Style(has_stats=True))
        await partner.answer([{"role": "user", "content": text}], params, texts)

    asyncio.run(run())
    return "".join(texts)


def test_a_server_answers_as_a_model_does(serve, engine, say, capsys) -> None:
    say("fine, thanks")
    url = serve(api_keys=("k",)).url
    assert (
        ask(f"{url}/v1/", "how are you?", SamplingParams(temperature=0.5, seed=3), "k")
        == "fine, thanks"
    )
    captured = capsys.readouterr()
    assert "fine, thanks" in captured.out
    assert "prompt tokens cached" in captured.err
    sampling = engine.requests[0].sampling
    assert (sampling.params.temperature, sampling.seed) == (0.5, 3)


def test_the_models_own_values_come_from_the_list_of_models(serve, built) -> None:
    built.sampling_defaults = SamplingDefaults(temperature=0.25)
    partner = asyncio.run(ServerModel.connect(serve().url, None))
    assert partner.sampling["temperature"] == 0.25
    assert partner.sampling["top_p"] == 1.0


def test_only_what_was_set_is_sent(monkeypatch) -> None:
    from foretoken.api.cli.terminal import remote

    assert remote._given(SamplingParams()) == {}
    given = remote._given(SamplingParams(temperature=0.0, max_tokens=7, stop="x"))
    assert given == {"temperature": 0.0, "max_tokens": 7, "stop": ("x",)}


def test_refusals_of_a_server_carry_its_own_words(serve) -> None:
    url = serve(api_keys=("k",)).url
    with pytest.raises(ForetokenError, match="key is missing or wrong"):
        ask(url, "hi", SamplingParams())


def test_a_key_may_have_any_letters(serve, say) -> None:
    say("fine")
    url = serve(api_keys=("ключ",)).url.replace("://", "://user:password@")
    assert ask(f"{url}/", "hi", SamplingParams(), "ключ") == "fine"


def test_a_path_may_have_any_letters(serve) -> None:
    with pytest.raises(ForetokenError, match="no such route"):
        ask(f"{serve().url}/ä b", "hi", SamplingParams())


def test_a_server_without_tls_is_told(serve) -> None:
    with pytest.raises(ForetokenError, match=r"does not accept TLS connections \(.*(wrong|record)"):
        ask(serve().url.replace("http:", "https:"), "hi", SamplingParams())


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:99999", "http://h:x", "http://ä"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ForetokenError, match="is not the address of a server"):
        ask(url, "hi", SamplingParams())


def test_an_address_needs_no_scheme(serve, say) -> None:
    say("ok")
    assert ask(serve().url.removeprefix("http://"), "hi", SamplingParams()) == "ok"


def test_a_server_that_is_not_there_is_named() -> None:
    told = (
        r"http://127.0.0.1:1 does not answer \(Connection refused\): is `foretoken serve` running"
    )
    with pytest.raises(ForetokenError, match=told):
        ask("http://127.0.0.1:1", "hi", SamplingParams())


def test_a_program_that_speaks_no_http_is_named() -> None:
    async def connect() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await ServerModel.connect(f"http://127.0.0.1:{port}", None)

    with pytest.raises(ForetokenError, match="closed the connection: the connection was closed"):
        asyncio.run(connect())


@pytest.mark.parametrize(
    "flags",
    [["smollm2"], ["--threads", "1"], ["--show-drafts"], ["--revision", "x"], ["--offline"]],
    ids=str,
)
def test_a_server_has_its_own_model_and_flags(flags: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", "--url", "http://127.0.0.1:1", *flags])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "--url" in error
    assert ("MODEL" if flags[0] == "smollm2" else flags[0]) in error
