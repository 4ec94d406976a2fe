"""Predicted outputs: from what a caller expects to the request, and back as usage."""

from __future__ import annotations

import asyncio
from array import array

import openai
import pytest

from foretoken import InvalidRequest, SamplingParams
from foretoken.api.runtime.generation import count_predicted
from foretoken.api.text.chat_template import INLINE_CHARS
from foretoken.api.text.tokenizer import Tokenizer
from foretoken.api.types.sampling_params import MAX_PREDICTION_CHARS, MAX_PREDICTION_IDS
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata
from foretoken.core.scheduling.request_table import check_token_ids

TALK = [{"role": "user", "content": "hi"}]
SHAPES = [
    {"type": "content", "content": "hello world"},
    {
        "type": "content",
        "content": [{"type": "text", "text": part} for part in ("hello", " world")],
    },
]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


# -- parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prediction",
    [
        5, b"x", {"type": "content"}, [-1, 5], [5, 2**31], [1.0], ["a"], [True], [None], [[1]],
        "x" * (MAX_PREDICTION_CHARS + 1), [1] * (MAX_PREDICTION_IDS + 1),
    ],
    ids=lambda value: repr(value)[:16],
)  # fmt: skip
def test_a_bad_prediction_is_refused_by_name(prediction):
    with pytest.raises(InvalidRequest, match=r"^prediction ") as caught:
        SamplingParams(prediction=prediction)
    assert caught.value.param == "prediction"


def test_a_prediction_is_a_text_or_ids_up_to_a_bound():
    ids = range(MAX_PREDICTION_IDS)
    assert SamplingParams(prediction=ids).prediction == tuple(ids)
    text = "x" * MAX_PREDICTION_CHARS
    assert SamplingParams(prediction=text).prediction == text
    assert SamplingParams(prediction=array("q", [3, 4])).prediction == (3, 4)
    assert SamplingParams().prediction is None


def test_an_id_outside_the_vocabulary_is_refused_where_the_vocabulary_is_known():
    sampling = SamplingMetadata(params=SamplingParams(), seed=1, prompt_len=1)
    tokens = array("q", [1])
    request = Request(
        request_id="a", tokens=tokens, sampling=sampling, prediction=array("q", [2, 9])
    )
    check_token_ids(request, 10)
    with pytest.raises(
        InvalidRequest, match=r"^prediction must have token ids from 0 to 8, not 9$"
    ):
        check_token_ids(request, 9)


# -- on the way to the engine -------------------------------------------------------------------


def test_a_text_reaches_the_engine_as_ids_without_special_tokens(llm, engine, fallback):
    params = SamplingParams(prediction="hello world", max_tokens=1, n=2)
    llm.generate("hi", params)
    expected = array("q", llm._llm.tokenizer.encode_word("hello world"))
    assert [request.prediction for request in engine.requests] == [expected] * 2
    plain = asyncio.run(fallback.encode_prediction("ab cd"))
    assert fallback.decode(plain) == "ab cd"
    assert not fallback.special_ids & set(plain)


@pytest.fixture
def fallback(byte_fallback_folder):
    """A tokenizer that puts a special token before every prompt."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.load(byte_fallback_folder, max_model_len=64)
    bos = ("<s>", tokenizer.vocab["<s>"])
    tokenizer._backend.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[bos]
    )
    assert asyncio.run(tokenizer.encode("ab"))[0] == bos[1]
    yield tokenizer
    tokenizer.close()


def test_ids_reach_the_engine_as_they_are_and_an_empty_guess_is_none(llm, engine):
    for prediction in ([7, 8], "", [], None):
        llm.generate("hi", SamplingParams(prediction=prediction, max_tokens=1))
    assert [request.prediction for request in engine.requests] == [
        array("q", [7, 8]), None, None, None,
    ]  # fmt: skip


def test_a_prediction_may_be_longer_than_the_context_and_is_tokenised_off_the_loop(
    llm, engine, monkeypatch
):
    jobs = []
    worker = llm._llm.tokenizer._long
    submit = worker.submit
    monkeypatch.setattr(worker, "submit", lambda *a, **k: jobs.append(a) or submit(*a, **k))
    text = "hello " * INLINE_CHARS
    llm.generate([1], SamplingParams(prediction=text, max_tokens=1))
    assert len(jobs) == 1
    assert len(engine.requests[0].prediction) > llm._llm.tokenizer.max_model_len


def test_a_prediction_that_cannot_be_tokenised_is_named(llm, engine, monkeypatch):
    def fail(text, *, add_special_tokens):
        raise RuntimeError("secret")

    monkeypatch.setattr(llm._llm.tokenizer, "_encode", fail)
    with pytest.raises(InvalidRequest, match=r"^the prediction cannot be tokenised$") as caught:
        llm.generate([1], SamplingParams(prediction="x"))
    assert caught.value.param == "prediction"
    assert not engine.requests


@pytest.mark.parametrize(
    ("speculation", "depth"), [(None, None), ("off", 0), ("auto", "auto"), (0, 0), (3, 3)]
)
def test_what_is_said_of_speculation_reaches_the_engine(llm, engine, speculation, depth):
    llm.generate("hi", SamplingParams(speculation=speculation, max_tokens=1))
    assert engine.requests[0].depth == depth
    assert type(engine.requests[0].depth) is type(depth)


# -- over HTTP ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", SHAPES)
def test_openais_shapes_reach_the_engine_as_ids(client, engine, tokenizer, prediction):
    client.chat.completions.create(
        model="tiny/model", messages=TALK, prediction=prediction, max_tokens=1
    )
    client.completions.create(
        model="tiny/model", prompt="hi", max_tokens=1, extra_body={"prediction": prediction}
    )
    client.completions.create(
        model="tiny/model", prompt="hi", max_tokens=1, extra_body={"prediction": "hello world"}
    )
    expected = array("q", tokenizer.encode_word("hello world"))
    assert [request.prediction for request in engine.requests] == [expected] * 3


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prediction": {"type": "x", "content": "a"}}, "prediction.type"),
        ({"prediction": {"type": "content", "content": [3]}}, "prediction.content[0]"),
        ({"prediction": [1, 2]}, "prediction"),
        ({"prediction": "x", "prompt": ["a", "b"]}, "prediction"),
    ],
    ids=str,
)
def test_a_wrong_shape_of_a_completion_is_a_400_that_names_it(client, engine, options, param):
    body = {"prompt": "hi", **options}
    with pytest.raises(openai.BadRequestError) as info:
        client.completions.create(model="tiny/model", prompt="hi", extra_body=body)
    assert info.value.param == param
    assert not engine.requests


def with_sources(engine):
    """Four tokens a step, three of them drafted; ten tokens, so that the last step is cut short."""
    engine.tokens_per_step, engine.sources = 4, ["prediction", "ngram"]
    engine.answers = lambda request: iter(lambda: 5, None)
    return {"max_tokens": 10, "extra_body": {"ignore_eos": True}}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_what_each_source_drafted(client, engine, n, stream):
    options = with_sources(engine)
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = client.chat.completions.create(
        model="tiny/model", messages=TALK, prediction=SHAPES[0], n=n, **options
    )
    usage = list(answer)[-1].usage if stream else answer.usage
    assert usage.speculation == {
        "proposed_tokens": 9 * n, "accepted_tokens": 7 * n, "verify_steps": 3 * n,
        "accepted_by_source": {"prediction": 5 * n, "ngram": 2 * n},
        "proposed_by_source": {"prediction": 6 * n, "ngram": 3 * n},
        "tree_steps": 0, "steps_by_accepted": {"1": n, "3": 2 * n},
    }  # fmt: skip


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("source", ["", "radix", "prediction"])
def test_tokens_of_a_prediction_that_stand_in_the_answer_are_accepted_whoever_drafted_them(
    client, engine, say, tokenizer, n, stream, source
):
    engine.tokens_per_step, engine.sources = (4, [source]) if source else (1, [])
    text = "Hello world, hello there. Stop here."
    say(text)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    wrong = tokenizer.encode_word(" 12 times")
    prediction = {"type": "content", "content": f"{text} 12 times"}
    for ask, question in (
        (client.chat.completions.create, {"messages": TALK, "prediction": prediction}),
        (client.completions.create, {"prompt": "hi", "extra_body": {"prediction": prediction}}),
    ):
        answer = ask(model="tiny/model", n=n, **question, **options)
        usage = list(answer)[-1].usage if stream else answer.usage
        details = usage.completion_tokens_details
        assert details.accepted_prediction_tokens == n * len(tokenizer.encode_word(text))
        assert details.rejected_prediction_tokens == n * len(wrong)


def test_without_a_prediction_both_counts_are_zero(client, say):
    say("hello")
    answer = client.chat.completions.create(model="tiny/model", messages=TALK)
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("prediction", "answer", "count"),
    [
        ([], [1, 2], 0),
        ([1, 2, 3], [], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 9, 9, 4, 5, 6, 7], 6),  # replaced
        ([1, 2, 3, 4, 5, 6], [1, 9, 9, 2, 3, 4, 5, 6], 6),  # inserted
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 6, 7, 8], 5),  # left out
        ([1, 1, 1, 1], [1] * 9, 4),  # no token stands there twice
        ([1, 2, 3], [9, 2, 9], 0),  # a token alone is no place
    ],
)
def test_where_the_answer_leaves_a_prediction_it_is_found_again(prediction, answer, count):
    assert count_predicted(array("q", prediction), answer) == count


def test_the_sdk_shows_the_same_counts_and_the_source_of_each_token(llm, engine):
    engine.tokens_per_step, engine.sources = 4, ["prediction", "ngram"]
    engine.answers = lambda request: iter(lambda: 5, None)
    params = SamplingParams(max_tokens=10, n=2, ignore_eos=True)
    usage = llm.generate("hi", params).usage
    assert usage.proposed_by_source == {"prediction": 12, "ngram": 6}
    assert usage.accepted_by_source == {"prediction": 10, "ngram": 4}
    assert usage.steps_by_accepted == {3: 4, 1: 2}
    deltas = list(llm.stream("hi", SamplingParams(max_tokens=6, ignore_eos=True)))
    sources = [source for delta in deltas for source in delta.sources]
    assert sources == ["prediction", "ngram", "prediction", "", "prediction", ""]
