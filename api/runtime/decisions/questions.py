"""Questions in the form of OpenAI's Decisions API, their prompts and their answers.

A question lists its labels. The model is asked to answer with a label alone, and the answer is
computed from the probabilities of the labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ....core.errors import InvalidRequest
from ...types.results import Decision

MAX_QUESTIONS = 400
MAX_CHOICES = 255
MAX_LEVELS = 10  # so that each level's index is one digit
MAX_LABEL_CHARS = 4096
Text = Annotated[str, Meta(min_length=1)]
Label = Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS)]


class TextPart(Struct, tag="input_text"):
    """A text in instructions."""

    text: str


class JsonPart(Struct, tag="input_json"):
    """A JSON object, or a list of them, in instructions. The model reads it as compact JSON."""

    data: dict[str, Any] | list[dict[str, Any]]

    @property
    def text(self) -> str:
        """The compact JSON."""
        return json_text(self.data)


Instructions = Text | Annotated[list[TextPart | JsonPart], Meta(min_length=1)]


class Asked(Struct, kw_only=True):
    """Fields that all questions have."""

    instructions: Instructions
    name: str | None = None

    @property
    def text(self) -> str:
        """The instructions as one text."""
        given = self.instructions
        return given if isinstance(given, str) else "\n".join(part.text for part in given)

    def labels(self) -> list[str]:
        """Return the texts that the model may answer with."""
        raise NotImplementedError

    def prompt(self) -> str:
        """Return the message that asks the question."""
        raise NotImplementedError

    def decide(self, probabilities: Sequence[float]) -> Decision:
        """Return the answer. ``probabilities``: the labels' probabilities, with the sum 1."""
        raise NotImplementedError


class Predicate(Asked, tag="predicate", kw_only=True):
    """Asks how likely it is that a statement about the input is true."""

    def labels(self) -> list[str]:
        """Return yes and no."""
        return ["yes", "no"]

    def prompt(self) -> str:
        """Return the message that asks whether the statement is true."""
        return f"{self.text}\n\nIs this true of the input above? Answer with yes or no only."

    def decide(self, probabilities: Sequence[float]) -> Decision:
        """Return the probability of yes."""
        yes, no = probabilities
        return Decision(
            name=self.name,
            kind="predicate",
            value=yes,
            confidence=max(yes, no),
            probabilities={True: yes, False: no},
        )


class Option(Struct, kw_only=True):
    """A choice. A Boolean is written as true or false."""

    value: Label | bool
    description: str | None = None

    @property
    def label(self) -> str:
        """The text that the model may answer with."""
        return self.value.strip() if isinstance(self.value, str) else json_text(self.value)


class Choice(Asked, tag="choice", kw_only=True):
    """The choice that fits the input best."""

    choices: Annotated[list[Option], Meta(min_length=2, max_length=MAX_CHOICES)]

    def labels(self) -> list[str]:
        """Return the texts of the choices."""
        return [each.label for each in self.choices]

    def prompt(self) -> str:
        """Return the message with the instructions and the list of choices."""
        listed = [f"- {_described(each.label, each.description)}" for each in self.choices]
        return _listed(self.text, "Choices", listed, "one of the choices")

    def decide(self, probabilities: Sequence[float]) -> Decision:
        """Return the most likely choice, the first of equally likely ones."""
        confidence = max(probabilities)
        return Decision(
            name=self.name,
            kind="choice",
            value=self.choices[probabilities.index(confidence)].value,
            confidence=confidence,
            probabilities={
                each.value: probability
                for each, probability in zip(self.choices, probabilities, strict=True)
            },
        )


class Level(Struct, kw_only=True):
    """A level of a score."""

    label: Label
    description: str | None = None


class Score(Asked, tag="score", kw_only=True):
    """Asks for a rating of the input by ordered levels, which are numbered from 0."""

    levels: Annotated[list[Level], Meta(min_length=2, max_length=MAX_LEVELS)]

    def labels(self) -> list[str]:
        """Return the numbers of the levels."""
        return [str(index) for index in range(len(self.levels))]

    def prompt(self) -> str:
        """Return the message with the instructions and the numbered levels."""
        texts = [_described(each.label, each.description) for each in self.levels]
        listed = [f"{index}: {text}" for index, text in enumerate(texts)]
        return _listed(self.text, "Levels", listed, "the number of a level")

    def decide(self, probabilities: Sequence[float]) -> Decision:
        """Return the mean of the levels' indices, weighted by their probabilities."""
        return Decision(
            name=self.name,
            kind="score",
            value=sum(index * each for index, each in enumerate(probabilities)),
            confidence=max(probabilities),
            probabilities=dict(enumerate(probabilities)),
        )


Question = Predicate | Choice | Score
Questions = Annotated[list[Question], Meta(min_length=1, max_length=MAX_QUESTIONS)]


class _Given(Struct):
    questions: Questions


def check_questions(questions: Sequence[Question]) -> None:
    """Raise `InvalidRequest` naming the field of the first blank or repeated label."""
    for index, each in enumerate(questions):
        path = f"questions[{index}]"
        match each:
            case Choice():
                values = [option.label for option in each.choices]
                _check_labels(values, f"{path}.choices[{{}}].value")
            case Score():
                values = [level.label.strip() for level in each.levels]
                _check_labels(values, f"{path}.levels[{{}}].label")


def read_questions(given: Sequence[Mapping[str, Any]]) -> list[Question]:
    """Return checked questions from mappings in OpenAI's form.

    Raises `InvalidRequest` naming the field.
    """
    try:
        questions = msgspec.convert({"questions": given}, _Given).questions
    except msgspec.ValidationError as error:
        param = str(error).rpartition("`$.")[2].removesuffix("`")
        raise InvalidRequest(str(error), param=param) from None
    check_questions(questions)
    return questions


def json_text(value: object) -> str:
    """Return a value as compact JSON."""
    return msgspec.json.encode(value).decode()


def _check_labels(labels: Sequence[str], path: str) -> None:
    """Raise `InvalidRequest` for a blank or repeated label.

    ``path``: path of a label in the body, with {} for its index.
    """
    known: dict[str, int] = {}
    for index, label in enumerate(labels):
        param = path.format(index)
        if not label:
            raise InvalidRequest(f"{param} must not be blank", param=param)
        if (first := known.setdefault(label, index)) != index:
            raise InvalidRequest(f"{param} has the same text as {path.format(first)}", param=param)


def _described(label: str, description: str | None) -> str:
    return f"{label}: {description}" if description else label


def _listed(text: str, title: str, lines: Sequence[str], wanted: str) -> str:
    return "\n".join([f"{text}\n", f"{title}:", *lines, f"\nAnswer with {wanted} only."])
