"""AsyncLLM and LLM over an engine that says what it is told."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import subprocess
import sys
import threading
from contextlib import aclosing

import pytest

import foretoken
from foretoken import LLM, AsyncLLM, EngineDead, InvalidRequest, QueueFull, SamplingParams, Usage
from foretoken.api.sdk import async_llm
from foretoken.api.types.results import total_usage

FOUR = SamplingParams(max_tokens=4, seed=0)


def test_a_text_prompt_is_answered_with_text_and_tokens(llm, say, tokenizer):
    say("hello world")
    out = llm.generate("The quick", SamplingParams())
    assert out.text == "hello world"
    assert out.finish_reason == "stop"
    assert out.stop_reason is None
    assert out.prompt_token_ids == tokenizer.encode_word("The quick")
    assert out.token_ids[-1] == tokenizer.vocab["<|im_end|>"], "the stop token is counted"
    assert out.usage.completion_tokens == len(out.token_ids)
    assert out.logprobs is None
    assert out.prompt_logprobs is None


def test_the_cost_of_an_answer_is_a_dataclass_that_json_can_write(llm, say):
    say("hello")
    out = llm.generate("The quick", SamplingParams())
    found = json.loads(json.dumps(dataclasses.asdict(out.usage)))
    assert found["completion_tokens"] == len(out.token_ids)
    assert found["cached_tokens"] == 0, "what is 0 is there, too"


class Loading(AsyncLLM):
    """An LLM whose model is loaded once ``loaded`` is set; `num_loads` counts the tries."""

    def __init__(self, made):
        super().__init__()
        self.begun, self.loaded = asyncio.Event(), asyncio.Event()
        self.num_loads, self._made = 0, made

    async def _load(self):
        self.num_loads += 1
        self.begun.set()
        await self.loaded.wait()
        return self._made


async def cancelled(work):
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_request_whose_caller_leaves_during_the_load_leaves_it_to_the_next(built, say):
    """Once, the next request loaded the model again, beside the first load."""
    say("hello world")
    llm = Loading(built)
    await cancelled(llm.generate("x", FOUR))
    asyncio.get_running_loop().call_soon(llm.loaded.set)
    assert (await llm.generate("x", SamplingParams())).text == "hello world"
    assert llm.num_loads == 1
    await llm.close()


@pytest.mark.parametrize("in_a_block", [True, False])
async def test_a_load_that_nobody_waits_for_is_closed(built, engine, in_a_block):
    llm = Loading(built)
    await cancelled(llm.__aenter__() if in_a_block else llm.start())
    asyncio.get_running_loop().call_soon(llm.loaded.set)
    await llm.close()
    assert engine.draining
    with pytest.raises(EngineDead):
        await llm.start()


async def test_a_start_that_is_cancelled_as_its_load_ends_leaves_it_to_the_next(built):
    llm = Loading(built)
    start = asyncio.create_task(llm.start())
    await llm.begun.wait()
    llm._loading.add_done_callback(lambda _: start.cancel())
    llm.loaded.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    async with llm:
        assert llm.num_loads == 1


async def test_a_load_that_fails_is_tried_again_by_the_next_start(built):
    class Failing(Loading):
        async def _load(self):
            await super()._load()
            if self.num_loads == 1:
                raise OSError("gone")
            return self._made

    llm = Failing(built)
    llm.loaded.set()
    with pytest.raises(OSError, match="gone"):
        await llm.start()
    async with llm:
        assert llm.num_loads == 2


def test_a_stop_string_over_several_tokens_ends_the_answer_before_it(llm, say, engine):
    say("hello there. Stop here. And more")
    engine.tokens_per_step = 3
    out = llm.generate("x", SamplingParams(stop=["Stop here"]))
    assert out.text == "hello there. "
    assert (out.finish_reason, out.stop_reason) == ("stop", "Stop here")


def test_streamed_texts_add_up_to_the_whole_and_each_step_is_one_delta(run, say, engine):
    say("zażółć, 東京 and 😀. The end.")
    engine.tokens_per_step = 2

    async def body(llm):
        whole = await llm.generate("x", SamplingParams(stop="The end"))
        deltas = [delta async for delta in llm.stream("x", SamplingParams(stop="The end"))]
        assert "".join(delta.text for delta in deltas) == whole.text == "zażółć, 東京 and 😀. "
        assert [i for delta in deltas for i in delta.token_ids] == whole.token_ids
        assert {len(delta.token_ids) for delta in deltas[:-1]} == {2}
        reasons = [delta.finish_reason for delta in deltas]
        assert reasons == [None] * (len(deltas) - 1) + ["stop"]
        assert deltas[-1].stop_reason == "The end"

    run(body)


def test_a_slow_reader_gets_the_same_text_in_fewer_deltas(run, say, engine):
    say("The quick brown fox, 東京.")
    engine.by_hand = True

    async def body(llm):
        stream = llm.stream("x")
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: engine.requests)
        texts = []
        for count in (1, 2, 3, 100):
            for _ in range(count):
                engine.step()
            texts.append((await first).text)
            if count < 100:
                first = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
        assert "".join(texts) == "The quick brown fox, 東京."

    run(body)


def test_siblings_have_their_own_seeds_and_ids_and_share_the_count_of_the_prompt(llm, engine):
    out = llm.generate([5, 6, 7, 8, 9], SamplingParams(n=3, seed=7, max_tokens=4), request_id="me")
    assert [request.request_id for request in engine.requests] == ["me-0", "me-1", "me-2"]
    assert engine.requests[0].sampling.seed == 7, "choice 0 is what n = 1 gives"
    assert len({request.sampling.seed for request in engine.requests}) == 3
    assert [choice.index for choice in out.choices] == [0, 1, 2]
    assert out.token_ids == out.choices[0].token_ids == [7, 8, 9, 5]
    assert out.usage.prompt_tokens == 5
    assert out.usage.completion_tokens == 12


def test_only_the_first_sibling_computes_the_prompts_logprobs(llm, engine):
    out = llm.generate([5, 6], SamplingParams(n=2, max_tokens=1, prompt_logprobs=1))
    asked = [request.sampling.params.prompt_logprobs for request in engine.requests]
    assert asked == [1, None]
    assert len(out.prompt_logprobs) == 2


def test_usage_of_siblings_counts_the_prompt_once_and_sums_the_rest():
    one = Usage(
        prompt_tokens=9, cached_tokens=1, completion_tokens=3, proposed_tokens=4, accepted_tokens=2,
        verify_steps=1, accepted_by_source={"lm": 2}, queue_time=0.1, time_to_first_token=0.5,
        total_time=2.0,
    )  # fmt: skip
    two = Usage(
        prompt_tokens=9, cached_tokens=8, completion_tokens=4, proposed_tokens=3, accepted_tokens=2,
        verify_steps=2, accepted_by_source={"lm": 1, "ngram": 1}, time_to_first_token=0.4,
        total_time=3.0,
    )  # fmt: skip
    assert total_usage([one, two]) == Usage(
        prompt_tokens=9, cached_tokens=1, completion_tokens=7, proposed_tokens=7, accepted_tokens=4,
        verify_steps=3, accepted_by_source={"lm": 3, "ngram": 1}, queue_time=0.1,
        time_to_first_token=0.4, total_time=3.0,
    )  # fmt: skip


def test_siblings_write_no_more_of_their_prompt_than_was_missing():
    one = Usage(prompt_tokens=9, cached_tokens=4, cache_write_tokens=5)
    two = Usage(prompt_tokens=9, cached_tokens=4, cache_write_tokens=3)  # what was evicted between
    assert total_usage([one, two]).cache_write_tokens == 5


def test_without_a_seed_each_request_draws_its_own(llm, engine):
    llm.generate([[5], [5]], SamplingParams(max_tokens=1))
    assert engine.requests[0].sampling.seed != engine.requests[1].sampling.seed


def test_the_engine_is_told_what_the_parameters_say(built, llm, engine, tokenizer):
    llm.generate(
        "x",
        SamplingParams(
            max_tokens=1, stop_token_ids=[9], speculation=3, cache_salt="a", priority=-2,
            deadline=5.0, seed=-1, bad_words=["hello"],
        ),
    )  # fmt: skip
    llm.generate("x", SamplingParams(max_tokens=1, ignore_eos=True, speculation="off"))
    first, second = engine.requests
    assert first.stop_ids == first.sampling.stop_ids == {9, *built.eos_token_ids}
    assert (first.depth, first.namespace, first.priority) == (3, "a", -2)
    assert 4 < first.deadline <= 5, "what is left of it"
    assert first.sampling.seed == 2**64 - 1, "unsigned"
    assert tuple(tokenizer.encode_word(" hello")) in first.sampling.bad_words_ids
    assert tuple(tokenizer.encode_word("hello")) in first.sampling.bad_words_ids
    assert (second.stop_ids, second.depth) == (frozenset(), 0)
    assert second.deadline is None


def test_chat_puts_the_conversation_into_the_models_format(llm, engine, tokenizer):
    talk = [{"role": "user", "content": "hi"}]
    llm.chat(talk, FOUR)
    prompt = engine.requests[0].tokens[: engine.requests[0].prompt_len]
    text = tokenizer.decode(prompt, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert len(llm.chat([talk, talk], FOUR)) == 2


@pytest.mark.parametrize(
    ("messages", "param"),
    [([], "messages"), ([{"role": "bad", "content": "x"}], "messages")],
)
def test_a_conversation_that_the_template_refuses_is_an_invalid_request(llm, messages, param):
    with pytest.raises(InvalidRequest) as info:
        llm.chat(messages, FOUR)
    assert info.value.param == param
    assert llm.generate([5], FOUR).finish_reason == "length", "only that request failed"


def test_a_revision_is_of_a_model_of_the_hub(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(InvalidRequest) as info:
        LLM("builtin", revision="main")
    assert info.value.param == "revision"
    offline = []
    monkeypatch.setattr(async_llm, "go_offline", lambda: offline.append(True))
    llm = async_llm.AsyncLLM("owner/name", revision="v1", offline=True)
    assert (llm._model, offline) == ("owner/name@v1", [True])


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(llm, monkeypatch):
    monkeypatch.setattr("foretoken.api.text.tokenizer.Tokenizer._encode", None)
    said = r"> 255 maximum\..* maximum context length is 256 tokens"
    with pytest.raises(foretoken.PromptTooLong, match=said):
        llm.generate("x" * 100_000, FOUR)


def test_parameters_and_ids_must_match_the_prompts(llm):
    with pytest.raises(InvalidRequest, match="a list of 2"):
        llm.generate([[5], [6]], [FOUR])
    with pytest.raises(InvalidRequest, match="request_id"):
        llm.generate([[5], [6]], FOUR, request_id="a")
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        llm.generate([5], {"max_tokens": 4})


def test_leaving_a_stream_early_aborts_the_request(run, engine):
    async def body(llm):
        async with aclosing(llm.stream([5], SamplingParams(n=2), request_id="me")) as stream:
            async for _ in stream:
                break
        await until(lambda: sorted(engine.aborted) == ["me-0", "me-1"])
        engine.requests.clear()
        async for _ in llm.stream([5], request_id="me"):  # no aclosing: the finaliser does it
            break
        gc.collect()
        await until(lambda: "me" in engine.aborted)

    run(body)


def test_cancelling_aborts_the_request(run, engine):
    engine.by_hand = True

    async def body(llm):
        task = asyncio.create_task(llm.generate([[5], [6]], FOUR, request_id=["a", "b"]))
        await until(lambda: len(engine.requests) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: sorted(engine.aborted) == ["a", "b"])

    run(body)


def test_abort_ends_all_choices_with_their_reason(run, engine):
    engine.by_hand = True

    async def body(llm):
        task = asyncio.create_task(llm.generate([5], SamplingParams(n=2), request_id="me"))
        await until(lambda: len(engine.requests) == 2)
        engine.step()
        llm.abort("me")
        llm.abort("nobody")
        out = await task
        assert [choice.finish_reason for choice in out.choices] == ["abort", "abort"]

    run(body)


def test_a_live_request_id_is_refused_and_one_just_aborted_may_come_again(run, engine):
    engine.by_hand = True

    async def body(llm):
        first = asyncio.create_task(llm.generate([5], FOUR, request_id="me"))
        await until(lambda: engine.requests)
        with pytest.raises(InvalidRequest) as info:
            await llm.generate([6], FOUR, request_id="me")
        assert info.value.param == "request_id"
        llm.abort("me")
        second = asyncio.create_task(llm.generate([6], FOUR, request_id="me"))
        assert (await first).finish_reason == "abort"
        engine.by_hand = False
        engine._work.set()
        assert (await second).token_ids == [6] * 4
        assert (await llm.generate([6], FOUR, request_id="me")).request_id == "me"

    run(body)


def test_a_full_queue_is_an_error_for_one_prompt_and_a_wait_for_a_list(run, engine):
    engine.refusal = QueueFull("full", retry_after=0.01)
    submit, counts = engine.submit, []

    def picky(request):
        engine.refusal = QueueFull("full", retry_after=60) if len(engine._live) >= 2 else None
        counts.append(len(engine._live))
        return submit(request)

    async def body(llm):
        with pytest.raises(QueueFull):
            await llm.generate([5], FOUR)
        engine.submit = picky
        outs = await llm.generate([[5]] * 10, FOUR)
        assert len(outs) == 10
        assert max(counts) == 2

    run(body)


def test_one_bad_prompt_of_a_list_ends_the_others(run, engine):
    engine.by_hand = True

    async def body(llm):
        with pytest.raises(InvalidRequest):
            await llm.generate([[5], [-1]], FOUR, request_id=["a", "b"])
        await until(lambda: engine.aborted == ["a"])

    run(body)


def test_a_request_that_fails_raises_and_the_next_is_fine(llm, engine):
    engine.row_error = "NaN"
    with pytest.raises(foretoken.ForetokenError, match="NaN"):
        llm.generate([5], FOUR)
    engine.row_error = None
    assert llm.generate([5], FOUR).finish_reason == "length"


async def test_after_close_there_is_a_clear_error(built):
    llm = LLM.from_built(built)
    llm.close()
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate([5])
    with pytest.raises(EngineDead, match="closed"):
        next(llm.stream([5]))
    llm.abort("nobody")
    other = AsyncLLM.from_built(built)
    await other.close()
    with pytest.raises(EngineDead, match="closed"):
        await other.generate([5])


def test_close_ends_what_other_threads_wait_for(built, engine):
    engine.by_hand = True
    llm = LLM.from_built(built)
    caught = []

    def ask():
        try:
            llm.generate([5])
        except EngineDead as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert engine.submitted.acquire(timeout=10)
    llm.close()
    thread.join(10)
    assert len(caught) == 1


def test_an_llm_that_is_dropped_or_left_open_at_exit_ends_quietly(built, engine):
    llm = LLM.from_built(built)
    del llm
    gc.collect()
    assert engine.draining, "closed"
    assert not [t for t in threading.enumerate() if t.name == "foretoken-loop"]


def test_llm_streams_to_a_plain_loop_and_leaving_it_aborts(llm, engine):
    assert [i for delta in llm.stream([5, 6], FOUR) for i in delta.token_ids] == [5, 6, 5, 6]
    engine.by_hand = True
    assert engine.submitted.acquire(timeout=10)

    def step_once():
        engine.submitted.acquire()
        llm._thread.loop.call_soon_threadsafe(engine.step)

    threading.Thread(target=step_once, daemon=True).start()
    for _ in llm.stream([5], request_id="me"):
        break
    assert engine.was_aborted.acquire(timeout=10)
    assert engine.aborted == ["me"]


def test_a_model_that_does_not_load_raises_in_the_constructor_and_leaves_no_thread(monkeypatch):
    def fail(model, config):
        raise foretoken.ModelLoadError("nothing there")

    monkeypatch.setattr("foretoken.api.runtime.engine_client._build", fail)
    with pytest.raises(foretoken.ModelLoadError, match="nothing there"):
        LLM("nowhere")
    assert not [t for t in threading.enumerate() if t.name == "foretoken-loop"]


def test_a_long_prompt_is_tokenised_in_a_thread_and_the_loop_goes_on(run, built):
    seen = []

    async def body(llm):
        encode = llm.tokenizer._encode
        llm.tokenizer.max_model_len = 10**9

        def watch(text, **options):
            seen.append(threading.current_thread().name)
            return encode(text, **options)

        llm.tokenizer._encode = watch
        assert len(await llm.tokenizer.encode("hello " * 10_000)) >= 10_000
        await llm.tokenizer.encode("hello")

    run(body)
    assert seen[0].startswith("foretoken-tokenizer")
    assert seen[1] == "MainThread"


def test_the_public_face_is_small_and_free_of_torch():
    code = (
        "import sys, foretoken\n"
        "assert not {'torch', 'transformers', 'starlette'} & set(sys.modules)\n"
        "assert set(foretoken.__all__) <= set(dir(foretoken))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert foretoken.__version__


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "loop.stop()"])
def test_an_engine_that_is_left_open_at_exit_ends_quietly(ending, tmp_path):
    code = f"""
import asyncio
from foretoken import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM("builtin", kv_tokens=1024, dump_dir={str(tmp_path)!r})
    running = asyncio.create_task(llm.generate("def", SamplingParams(max_tokens=900)))
    await llm.generate("a", SamplingParams(max_tokens=2))
    return llm, running

loop = asyncio.new_event_loop()
left = loop.run_until_complete(main())
{ending}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "the engine" not in done.stderr
    assert "Engine._run" not in done.stderr
    assert not list(tmp_path.iterdir())


async def until(holds):
    """Let the loop turn until something holds; the test's own deadline ends a vain wait."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0)
