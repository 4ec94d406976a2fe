"""POST /v1/decisions."""

from __future__ import annotations

from functools import partial

from ....core.interface.request import Usage
from ...runtime.decisions.decider import Decider
from ...runtime.decisions.questions import Question, Score, check_questions
from ...serving.dialect import Dialect
from ...serving.pooled import PooledReply
from ...serving.serving_context import Service
from ...serving.sse import Reply
from ...types.results import Decision, Decisions
from ..pooled.reading import params_of
from .answers import (
    ChoiceAnswer,
    ChoiceProbability,
    DecisionAnswer,
    DecisionInputDetails,
    DecisionOutputDetails,
    DecisionsBody,
    DecisionUsage,
    LevelProbability,
    PredicateAnswer,
    ScoreAnswer,
)
from .bodies import DecisionsRequest
from .reading import read_conversation


class DecisionsRoute(Dialect[DecisionsRequest]):
    """Answer questions about an input by the probabilities of their labels."""

    path = "/v1/decisions"
    body = DecisionsRequest
    answer = DecisionsBody
    in_batches = True

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._decider = Decider(service.chat, service.llm)

    async def open(self, body: DecisionsRequest) -> Reply:
        """Check the questions. Their prompts are written and computed when the reply is read."""
        check_questions(body.questions)
        params = params_of(body)
        chat = await self.service.apart(partial(read_conversation, body, params))
        asked = await self._decider.open(chat, body.questions, params)
        return PooledReply(asked.prompts, lambda pooled: self._answer(body, asked.decide(pooled)))

    def _answer(self, body: DecisionsRequest, decided: Decisions) -> DecisionsBody:
        pairs = zip(body.questions, decided.answers, strict=True)
        return DecisionsBody(
            model=self.service.model,
            answers=[answer_body(question, answer) for question, answer in pairs],
            usage=self._usage(decided.usage),
        )

    def _usage(self, usage: Usage) -> DecisionUsage:
        return DecisionUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=DecisionInputDetails(
                cached_tokens=usage.cached_tokens, cache_write_tokens=usage.cache_write_tokens
            ),
            output_tokens_details=DecisionOutputDetails(),
            total_tokens=usage.prompt_tokens,
            cost=self.service.cost(usage),
        )


def answer_body(question: Question, answer: Decision) -> DecisionAnswer:
    """Return the answer to a question in OpenAI's form."""
    found = answer.probabilities
    if isinstance(question, Score):
        levels = [each.label for each in question.levels]
        return ScoreAnswer(
            name=answer.name,
            score=float(answer.value),
            confidence=answer.confidence,
            probabilities=[
                LevelProbability(label=label, value=index, probability=found[index])
                for index, label in enumerate(levels)
            ],
        )
    if isinstance(answer.value, float):
        return PredicateAnswer(name=answer.name, probability=answer.value)
    return ChoiceAnswer(
        name=answer.name,
        choice=answer.value,
        confidence=answer.confidence,
        probabilities=[
            ChoiceProbability(value=value, probability=each)
            for value, each in found.items()
            if isinstance(value, str | bool)
        ],
    )
