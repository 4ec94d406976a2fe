"""Drafts of targets with recurrent states learn what transformers' hidden states would teach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.core.errors import InvalidRequest
from foretoken.core.model.loader import load_decoder
from foretoken.draft.heads.kinds import open_head
from foretoken.draft.training import trainer as run
from foretoken.draft.training.answers import AnswerStore, answer_prompts
from foretoken.draft.training.conversations import Conversation
from foretoken.draft.training.new_drafts import Target, TrainOptions, make_student
from foretoken.draft.training.records import read_records
from foretoken.draft.training.teacher import Teacher, TeacherOutput
from foretoken.draft.training.trainer import Trainer
from support.checkpoints import make_checkpoint
from support.draft_training import ASKING
from support.greedy_streams import generate, random_ids


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = make_checkpoint(tmp_path_factory.mktemp("hybrid"), "qwen3_5")
    return Target(load_decoder(folder, dtype="float32", backend="torch"), folder, "")


@pytest.fixture(scope="module")
def reference(target: Target) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        target.path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    """Shorter than a page of positions, and over the ends of several."""
    return [Conversation(random_ids(length), length // 3) for length in (9, 40, 21, 33, 16)]


@torch.no_grad()
def by_transformers(
    reference: Any, batch: Sequence[Conversation], taught: TeacherOutput, taps: Sequence[int]
) -> TeacherOutput:
    """The same with hidden states and distributions that transformers computes."""
    states, p = torch.zeros_like(taught.taps), torch.zeros_like(taught.p)
    for index, conversation in enumerate(batch):
        ids = torch.tensor([conversation.tokens])
        out = reference(ids, output_hidden_states=True)
        found: list[Tensor] = [out.hidden_states[boundary][0] for boundary in taps]
        states[index, : len(conversation)] = torch.cat(found, dim=-1)
        rows = taught.rows[index, : len(conversation)]
        p[rows[rows >= 0]] = out.logits[0].softmax(-1)[rows >= 0]
    return replace(taught, taps=states, p=p)


@pytest.mark.parametrize("kind", ["block", "eagle3"])
def test_the_loss_is_that_of_teacher_forced_hidden_states(
    target: Target, reference: Any, conversations: list[Conversation], kind: str
) -> None:
    student = make_student(target, TrainOptions(kind=kind, init=None))
    teacher = Teacher(target.decoder, student.taps, None, max_len=64)
    for _ in range(2):  # in the same seats, whose states begin anew
        taught = teacher(conversations)
    expected = by_transformers(reference, conversations, taught, student.taps)
    torch.testing.assert_close(taught.taps, expected.taps, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(taught.p, expected.p, atol=1e-4, rtol=1e-3)
    with torch.no_grad():
        ours, theirs = (
            float(student.loss(each, torch.Generator().manual_seed(1)))
            for each in (taught, expected)
        )
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_a_head_that_was_trained_drafts_for_its_target(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Any
) -> None:
    """From answers of the target's own to a folder that is served."""
    monkeypatch.setattr(run, "BATCH_TOKENS", 64)
    monkeypatch.setattr(run, "NUM_CHECKS", 1)
    prompts = [random_ids(4 + index) for index in range(8)]
    book = tmp_path / "answers.jsonl"
    answer_prompts(target.decoder, prompts, AnswerStore(book), ASKING, lambda record: True)
    records = list(read_records(book))
    greedy = next(each for each in records if each.temperature == 0.0)
    answer = greedy.tokens[greedy.prompt_len :]
    expected = generate(reference, greedy.tokens[: greedy.prompt_len])
    assert list(answer[: len(expected)]) == expected[: len(answer)]
    found = [Conversation.of(record, "chat") for record in records]
    options = TrainOptions(kind="block", init=None, tokens=200, block=3, layers=1)
    out = tmp_path / "head"
    Trainer(target, found, options, out).run()
    served = open_head(out, target.config).config
    trained = make_student(target, options)
    assert served.rope == trained.module.config.rope, "a part of each of the target's heads turns"
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    answers = []
    for draft, speculation in (("none", "off"), (str(out), 3)):
        with LLM(target.path, draft=draft, speculation=speculation, device="cpu") as llm:
            answers.append([each.token_ids for each in llm.generate(prompts[:2], params)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["block", "eagle3", "lm"])
def test_a_draft_does_not_begin_as_layers_with_states_or_gates(target: Target, kind: str) -> None:
    with pytest.raises(InvalidRequest, match="recurrent states, gates or heads"):
        make_student(target, TrainOptions(kind=kind))
