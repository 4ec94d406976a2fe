"""Decisions of a real tiny model: the probabilities of transformers, one input, named errors."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
import torch

from foretoken import LLM, InvalidRequest
from foretoken.api.build.built import Built
from foretoken.api.build.engine_builder import build
from foretoken.api.runtime.decisions.decider import Deciding, PromptLengths
from foretoken.api.runtime.pooled.pooled_prompts import PooledPrompts
from foretoken.core.engine.engine import Engine
from support.embedders import TinyModel, tiny_config, write_reranker

INPUT = "Which animals sleep in winter? Bears, bats and hedgehogs sleep; the swallow flies south."
PREDICATE = {"type": "predicate", "instructions": "Bears sleep."}
CHOICES = [{"value": text} for text in ("winter", "winter question", "south", "so")]
CHOICE = {"type": "choice", "instructions": "When?", "choices": CHOICES, "name": "when"}
LEVELS = [{"label": "cold", "description": "below zero"}, {"label": "warm"}, {"label": "hot"}]
SCORE = {"type": "score", "instructions": "How warm?", "levels": LEVELS}
TURN = "<|im_start|>user\n{}<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
ASKED = {
    "predicate": "Bears sleep.\n\nIs this true of the input above? Answer with yes or no only.",
    "choice": "When?\n\nChoices:\n- winter\n- winter question\n- south\n- so\n\n"
    "Answer with one of the choices only.",
    "score": "How warm?\n\nLevels:\n0: cold: below zero\n1: warm\n2: hot\n\n"
    "Answer with the number of a level only.",
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("judge")
    return TinyModel(folder, *write_reranker(folder))


@pytest.fixture
def built(judge: TinyModel) -> Built[Engine]:
    """The engine of the fixture `server`."""
    return build(judge.folder, tiny_config(kv_tokens=65536))


def post(server: Any, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/decisions", json={"input": INPUT} | body, timeout=60)


def cache_counts(server: Any) -> tuple[float, float]:
    """Prompt tokens looked up in the prefix cache so far, and those found."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    names = ("foretoken:prefix_cache_queries_total", "foretoken:prefix_cache_hits_total")
    queries, hits = (
        sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names
    )
    return queries, hits


@torch.inference_mode()
def label_logprob(judge: TinyModel, kind: str, label: str) -> float:
    """The sum of the log-probabilities of a label's tokens, by transformers."""
    encode = judge.tokenizer.encode
    prompt = encode(TURN.format(INPUT) + TURN.format(ASKED[kind]) + ANSWER)
    ids = encode(label)
    logits = judge.model(torch.tensor([[*prompt, *ids]])).logits[0].double()
    rows = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    return float(sum(row[token_id] for row, token_id in zip(rows, ids, strict=True)))


def normalised(logprobs: list[float]) -> list[float]:
    return torch.softmax(torch.tensor(logprobs, dtype=torch.float64), dim=0).tolist()


def test_answers_are_the_labels_probabilities_by_transformers(
    server: Any, judge: TinyModel
) -> None:
    answer = post(server, questions=[PREDICATE, CHOICE, SCORE]).raise_for_status().json()
    predicate, choice, score = answer["answers"]
    yes, _ = normalised([label_logprob(judge, "predicate", each) for each in ("yes", "no")])
    assert predicate == {"type": "predicate", "name": None, "probability": pytest.approx(yes, 1e-4)}

    texts = [each["value"] for each in CHOICES]
    logprobs = [label_logprob(judge, "choice", each) for each in texts]
    assert len(judge.tokenizer.encode("winter question")) > 2
    # "winter" stands for answers that begin with it and not with the longer choice.
    whole = torch.tensor(logprobs, dtype=torch.float64).exp()
    ids = [judge.tokenizer.encode(text) for text in texts]
    for short, long in ((0, 1), (3, 2)):
        if ids[long][: len(ids[short])] == ids[short]:
            whole[short] -= whole[long]
    wanted = (whole / whole.sum()).tolist()
    found = {each["value"]: each["probability"] for each in choice["probabilities"]}
    assert [*found] == texts
    assert [*found.values()] == pytest.approx(wanted, rel=1e-4)
    assert choice["choice"] == texts[wanted.index(max(wanted))]
    assert choice["confidence"] == max(found.values())
    assert (choice["type"], choice["name"]) == ("choice", "when")

    levels = normalised([label_logprob(judge, "score", str(index)) for index in range(3)])
    assert [each["probability"] for each in score["probabilities"]] == pytest.approx(levels, 1e-4)
    assert [each["label"] for each in score["probabilities"]] == ["cold", "warm", "hot"]
    assert [each["value"] for each in score["probabilities"]] == [0, 1, 2]
    assert score["score"] == pytest.approx(levels[1] + 2 * levels[2], rel=1e-4)
    assert answer["model"] == server.llm.built.name


def test_the_input_is_computed_once_for_all_questions(server: Any) -> None:
    questions = [{"type": "predicate", "instructions": f"Claim {index}."} for index in range(12)]
    first = post(server, input=INPUT * 4, questions=questions).raise_for_status().json()["usage"]
    queries, hits = cache_counts(server)
    one = post(server, input=INPUT * 4, questions=questions[:1]).json()["usage"]
    details, num_tokens = first["input_tokens_details"], first["input_tokens"]
    assert details["cached_tokens"] == 0
    assert 0 < details["cache_write_tokens"] <= num_tokens
    num_asked = (num_tokens - one["input_tokens"]) // 11
    num_shared = one["input_tokens"] - num_asked
    assert num_shared > num_asked
    # A prompt computes its question again up to the page where its labels part.
    assert queries - hits <= num_tokens + 12 * 2 * 16
    assert queries > 12 * num_shared
    assert one["input_tokens"] - one["input_tokens_details"]["cached_tokens"] <= 16
    assert (first["output_tokens"], first["total_tokens"]) == (0, num_tokens)


def test_as_many_questions_as_the_api_allows(server: Any) -> None:
    questions = [PREDICATE | {"name": str(index)} for index in range(400)]
    answers = post(server, questions=questions).raise_for_status().json()["answers"]
    assert [each["name"] for each in answers] == [str(index) for index in range(400)]
    assert len({each["probability"] for each in answers}) == 1
    refused = post(server, questions=[*questions, PREDICATE])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "questions")


def test_messages_calls_and_json_are_an_input(server: Any) -> None:
    items = [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": [{"type": "input_json", "data": {"a": [1, None]}}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "Nothing."},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I see."}]},
    ]
    parts = [{"type": "input_text", "text": "True?"}, {"type": "input_json", "data": {"b": 2}}]
    asked = {"type": "predicate", "instructions": parts}
    found = post(server, input=items, questions=[asked]).raise_for_status().json()
    other = post(server, input=items[:2], questions=[asked]).raise_for_status().json()
    assert found["usage"]["input_tokens"] > other["usage"]["input_tokens"]


LONG = [{"value": letter * 99} for letter in "qwx"]
WIDE = [{"value": f"{index:03} " + "q w x " * 30} for index in range(255)]  # too many reads


def many(count: int) -> list[dict[str, str]]:
    return [{"value": f"choice {index}"} for index in range(count)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": None}, "questions"),
        ({}, "questions"),
        ({"questions": [{"type": "yesno", "instructions": "a"}]}, "questions[0].type"),
        ({"questions": [PREDICATE, {"instructions": "a"}]}, "questions[1].type"),
        ({"questions": [PREDICATE | {"instructions": ""}]}, "questions[0].instructions"),
        ({"questions": [PREDICATE | {"instructions": []}]}, "questions[0].instructions"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
        ({"questions": [CHOICE | {"choices": many(1)}]}, "questions[0].choices"),
        ({"questions": [CHOICE | {"choices": many(256)}]}, "questions[0].choices"),
        ({"questions": [CHOICE | {"choices": [{"value": ""}, *CHOICES]}]},
         "questions[0].choices[0].value"),
        ({"questions": [CHOICE | {"choices": [*CHOICES, {"value": "  "}]}]},
         "questions[0].choices[4].value"),
        ({"questions": [PREDICATE, CHOICE | {"choices": [*CHOICES, {"value": " so"}]}]},
         "questions[1].choices[4].value"),
        ({"questions": [CHOICE | {"choices": [{"value": True}, {"value": "true"}]}]},
         "questions[0].choices[1].value"),
        ({"questions": [CHOICE | {"choices": [{"value": 3}, {"value": "true"}]}]},
         "questions[0].choices[0].value"),
        ({"questions": [SCORE | {"levels": [{"label": "a"}, {"label": "a"}]}]},
         "questions[0].levels[1].label"),
        ({"questions": [SCORE | {"levels": [{"label": str(each)} for each in range(11)]}]},
         "questions[0].levels"),
        ({"questions": [PREDICATE], "input": ""}, "input"),
        ({"questions": [PREDICATE], "input": []}, "input"),
        ({"questions": [PREDICATE], "input": None}, "input"),
        ({"questions": [PREDICATE], "input": INPUT * 99}, "input"),
        ({"questions": [PREDICATE, PREDICATE | {"instructions": INPUT * 99}]}, "questions[1]"),
        *(({"questions": [PREDICATE], "input": [{"role": "user", "content": "a"}, {"type": kind}]},
           "input[1]") for kind in ("compaction", "compaction_trigger", "additional_tools",
                                    "web_search_call", "unknown")),
        ({"questions": [PREDICATE], "input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        ({"questions": [PREDICATE], "input": [{"role": "user", "content": [
            {"type": "input_json", "data": 3}]}]}, "input[0].content[0]"),
        ({"questions": [PREDICATE], "input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}]},
         "input[0].content[0]"),
        ({"questions": [CHOICE | {"choices": LONG}] * 400}, "questions"),
        ({"questions": [PREDICATE, CHOICE | {"choices": WIDE}]}, "questions[1]"),
        ({"questions": [CHOICE | {"choices": [{"value": "q" * 4097}, *CHOICES]}]},
         "questions[0].choices[0].value"),
        ({"questions": [SCORE | {"levels": [{"label": "q" * 4097}, *LEVELS]}]},
         "questions[0].levels[0].label"),
        ({"questions": [PREDICATE], "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ],
)  # fmt: skip
def test_a_bad_body_is_refused_by_the_name_of_its_field(
    server: Any, body: dict[str, Any], param: str
) -> None:
    answer = post(server, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_labels_that_do_not_fit_are_refused_before_anything_is_computed(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[str] = []
    submit = server.llm.open

    async def noting(*given: Any, **options: Any) -> Any:
        submitted.append(options["request_id"])
        return await submit(*given, **options)

    monkeypatch.setattr(server.llm, "open", noting)
    monkeypatch.setattr(PooledPrompts, "_num_places", 1)  # one prompt after the other

    def asked(length: int) -> httpx.Response:
        choices = [{"value": "x" * length}, *CHOICES[:1]]
        return post(server, questions=[CHOICE | {"instructions": "q" * 60, "choices": choices}])

    assert asked(150).status_code == 200
    assert submitted
    submitted.clear()
    refused = asked(200)  # the prompt lists the label, and alone it would fit
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "questions[0]")
    assert not submitted


def test_a_label_of_too_many_tokens_is_refused(server: Any) -> None:
    choices = [{"value": "x" * 257}, *CHOICES]
    refused = post(server, input="Hi.", questions=[PREDICATE, CHOICE | {"choices": choices}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "questions[1]")
    assert "a label has 257 tokens" in refused.json()["error"]["message"]


def test_prompts_whose_labels_are_read_are_not_kept(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Any]] = []
    kept: list[int] = []
    add, decide = PromptLengths.add, Deciding.decide

    def noting_add(self: PromptLengths, question: int, token_ids: Any) -> None:
        seen.append(weakref.ref(token_ids))
        add(self, question, token_ids)

    def noting_decide(self: Deciding, pooled: Any) -> Any:
        kept.append(sum(each() is not None for each in seen))
        return decide(self, pooled)

    monkeypatch.setattr(PromptLengths, "add", noting_add)
    monkeypatch.setattr(Deciding, "decide", noting_decide)
    post(server, questions=[PREDICATE, CHOICE, SCORE] * 3).raise_for_status()
    assert len(seen) >= 9
    assert kept == [0]


def test_the_openai_client_reads_the_answers(connect: Any) -> None:
    client: openai.OpenAI = connect()
    decision = client.decisions.create(
        model="", input=INPUT, questions=[PREDICATE, CHOICE, SCORE], extra_body={"model": None}
    )
    predicate, choice, score = decision.answers
    assert 0 < predicate.probability < 1
    assert choice.choice in {each.value for each in choice.probabilities}
    assert sum(each.probability for each in choice.probabilities) == pytest.approx(1)
    assert 0 <= score.score <= 2


def test_a_client_that_leaves_ends_its_questions(server: Any) -> None:
    async def until(holds: Callable[[], bool]) -> None:
        while not await asyncio.to_thread(server.do, holds):
            pass

    async def leave() -> None:
        async with httpx.AsyncClient() as client:
            url, body = f"{server.url}/v1/decisions", {"input": INPUT, "questions": [CHOICE] * 400}
            task = asyncio.create_task(client.post(url, json=body, timeout=60))
            await until(lambda: bool(server.llm._answers))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not server.llm._answers)

    asyncio.run(asyncio.wait_for(leave(), 60))


def test_the_sdk_decides_as_the_route_does(judge: TinyModel, server: Any) -> None:
    wanted = post(server, questions=[PREDICATE, CHOICE, SCORE]).json()["answers"]
    config = tiny_config()
    with LLM(str(judge.folder), draft=config.draft, threads=1, kv_tokens=8192) as llm:
        predicate, choice, score = llm.decide(INPUT, [PREDICATE, CHOICE, SCORE]).answers
        messages = [{"role": "user", "content": INPUT}]
        decided = llm.decide(messages, [PREDICATE])
        assert decided.answers[0].value == pytest.approx(predicate.value, rel=1e-5)
        assert decided.usage.prompt_tokens > 0
        with pytest.raises(InvalidRequest) as caught:
            llm.decide(INPUT, [PREDICATE, CHOICE | {"choices": [{"value": "a"}]}])
        assert caught.value.param == "questions[1].choices"
        with pytest.raises(InvalidRequest) as caught:
            llm.decide(INPUT, [])
        assert caught.value.param == "questions"
    assert predicate.value == pytest.approx(wanted[0]["probability"], rel=1e-5)
    assert (choice.name, choice.value) == ("when", wanted[1]["choice"])
    assert score.value == pytest.approx(wanted[2]["score"], rel=1e-5)
    assert sum(score.probabilities.values()) == pytest.approx(1)


def test_a_batch_may_ask_questions(server: Any) -> None:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/decisions",
        "body": {"input": INPUT, "questions": [PREDICATE]},
    }
    sent = {"file": ("lines.jsonl", json.dumps(line).encode())}
    url = f"{server.url}/v1"
    file = httpx.post(f"{url}/files", files=sent, data={"purpose": "batch"}).json()
    made = {"input_file_id": file["id"], "endpoint": "/v1/decisions", "completion_window": "24h"}
    batch = httpx.post(f"{url}/batches", json=made).raise_for_status().json()
    while batch["status"] not in ("completed", "failed"):
        batch = httpx.get(f"{url}/batches/{batch['id']}").json()
    output = httpx.get(f"{url}/files/{batch['output_file_id']}/content").json()
    assert output["response"]["body"]["answers"][0]["type"] == "predicate"
