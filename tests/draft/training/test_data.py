"""Data for drafts: what files hold, what is learnt, what is held out, what the target answers."""

from __future__ import annotations

import json

import pytest

from foretoken.core.errors import InvalidRequest, PromptTooLong
from foretoken.draft.training.answers import AnswerStore, answer_prompts
from foretoken.draft.training.conversations import (
    Conversation,
    Shuffler,
    answer_pairs,
    frequent_ids,
    read_data,
    split,
)
from foretoken.draft.training.gathering import GatherOptions, gather
from foretoken.draft.training.records import VERSION, Record, read_records, write_line
from support.draft_training import ASKING


class Letters:
    """An encoder of one id a letter; an answer is asked for by 0, a message ends with 1."""

    fingerprint = "letters"

    def encode(self, text):
        return [ord(letter) for letter in text]

    def encode_chat(self, messages, *, asks):
        if any(message["content"] == "too long" for message in messages):
            raise PromptTooLong(9, 8)
        ids = []
        for message in messages:
            ids += [0] if message["role"] == "assistant" else []
            ids += [*self.encode(message["content"]), 1]
        return [*ids, 0] if asks else ids


def write(path, *lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def read(*paths, text_len=4):
    return read_data(paths, Letters(), text_len=text_len)


def test_of_a_chat_every_answer_is_learnt_and_nothing_else(tmp_path):
    file = write(
        tmp_path / "a.jsonl", {"messages": [user("x"), answer("yz"), user("w"), answer("v")]}
    )
    first, second = read(file)
    assert first.tokens == [ord("x"), 1, 0, ord("y"), ord("z"), 1]
    assert first.tokens[first.prompt_len :] == [ord("y"), ord("z"), 1]
    assert second.tokens[second.prompt_len :] == [ord("v"), 1]
    assert second.tokens[: second.prompt_len] == [*first.tokens, ord("w"), 1, 0]


def test_a_chat_that_ends_with_a_question_is_a_prompt_too(tmp_path):
    file = write(tmp_path / "a.jsonl", {"messages": [user("x"), answer("y"), user("z")]})
    assert [len(conversation) - conversation.prompt_len for conversation in read(file)] == [2, 0]


def test_texts_are_cut_into_pieces_that_are_learnt_whole(tmp_path):
    (tmp_path / "b.txt").write_text("abcdefgh")
    file = write(tmp_path / "a.jsonl", {"text": "ijk"})
    found = read(tmp_path)
    assert ["".join(map(chr, conversation.tokens)) for conversation in found] == [
        "ijk",
        "abcd",
        "efgh",
    ]
    assert {(conversation.prompt_len, conversation.origin) for conversation in found} == {
        (0, "text")
    }
    assert file.exists()


def test_recorded_traffic_is_read_as_it_was_written(tmp_path):
    record = Record(v=VERSION, tokens=[5, 6, 7], prompt_len=2, temperature=0.5, finish="stop")
    (tmp_path / "t.jsonl").write_bytes(write_line(record) + b'{"v":1,"tok')  # it was being written
    (conversation,) = read(tmp_path / "t.jsonl")
    assert conversation == Conversation([5, 6, 7], 2, 0.5, "traffic")


def test_traffic_of_another_tokenizer_is_refused(tmp_path):
    for name, tokenizer in (("same", "letters"), ("other", "words")):
        record = Record(v=VERSION, tokens=[5, 6, 7], prompt_len=2, tokenizer=tokenizer)
        (tmp_path / f"{name}.jsonl").write_bytes(write_line(record))
    assert len(read(tmp_path / "same.jsonl")) == 1
    with pytest.raises(InvalidRequest, match="a tokenizer that differs"):
        read(tmp_path / "other.jsonl")


def test_a_chat_that_the_target_cannot_hold_is_left_out(tmp_path):
    file = write(
        tmp_path / "a.jsonl", {"messages": [user("too long")]}, {"messages": [user("short")]}
    )
    assert len(read(file)) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"messages": 3}', "messages"),
        ("nonsense", "malformed"),
        ('{"other": 1}', "messages or text is missing"),
        ('{"v": 2, "tokens": [1], "prompt_len": 0}', "version 2"),
        ('{"v": 1, "tokens": [1], "prompt_len": 2}', "prompt_len"),
        ('{"v": 1, "tokens": [-1], "prompt_len": 0}', "token id"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_text(f"{line}\n")
    with pytest.raises(InvalidRequest, match=rf"a\.jsonl, line 1.*{problem}") as refused:
        read(tmp_path / "a.jsonl")
    assert refused.value.param == "data"


def test_data_that_is_missing_empty_or_no_text_is_refused(tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    for path, problem in (("gone", "not exist"), ("binary.txt", "UTF-8")):
        with pytest.raises(InvalidRequest, match=problem):
            read(tmp_path / path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match="no conversation"):
        read(tmp_path / "empty")


def test_what_is_held_out_follows_from_the_prompt_alone():
    conversations = [
        Conversation([index, index + 1, answer], 2) for index in range(3000) for answer in (1, 2)
    ]
    train, held = split(conversations)
    assert len(train) + len(held) == len(conversations)
    assert 60 <= len(held) <= 180  # 2% of 6,000
    assert {tuple(conversation.tokens[:2]) for conversation in train}.isdisjoint(
        tuple(t.tokens[:2]) for t in held
    )
    assert split(conversations[::-1])[1] == held[::-1]


def test_of_few_conversations_the_last_are_held_out():
    conversations = [Conversation([1, 2, index], 2) for index in range(20)]
    assert not any(conversation.is_held_out for conversation in conversations)
    assert split(conversations) == (conversations[:18], conversations[18:])


def test_frequent_ids_count_answers_only():
    conversations = [Conversation([9, 9, 9, 4, 4, 3], 3), Conversation([8, 3, 3], 1)]
    assert frequent_ids(conversations, 3, 10, always=[7]).tolist() == [3, 4, 7]
    assert answer_pairs(conversations).tolist() == [[9, 4], [4, 4], [4, 3], [8, 3], [3, 3]]


def test_batches_hold_everything_once_an_epoch_and_go_on_from_a_place():
    conversations = [Conversation(list(range(2 + index % 5)), 1) for index in range(40)]
    shuffler = Shuffler(conversations, 12, seed=3)
    seen = []
    while shuffler.epoch == 0:
        batch = shuffler.next()
        assert max(map(len, batch)) * len(batch) <= 12 or len(batch) == 1
        seen += batch if shuffler.epoch == 0 else []
    assert sorted(map(id, seen)) == sorted(map(id, conversations))
    place = (shuffler.epoch, shuffler.cursor)
    other = Shuffler(conversations, 12, seed=3)
    other.seek(*place)
    assert [other.next() for _ in range(30)] == [shuffler.next() for _ in range(30)]


# -- answers --------------------------------------------------------------------------------------


def test_an_answer_does_not_depend_on_what_else_is_asked(target, prompts, book, tmp_path):
    alone = AnswerStore(tmp_path / "alone.jsonl")
    answer_prompts(target.decoder, prompts[:2], alone, ASKING, lambda record: True)
    together = AnswerStore(book)
    for prompt, temperature in ASKING.pairs(prompts[:2]):
        found = alone.find(prompt, temperature)
        assert found is not None
        assert found == together.find(prompt, temperature)
    assert {record.temperature for record in read_records(book)} == {0.0, 1.0}


def test_answers_that_are_there_are_not_asked_again(target, prompts, book, tmp_path):
    path = tmp_path / "answers.jsonl"
    lines = book.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # stopped in the middle of the last
    asked = []
    answer_prompts(
        target.decoder, prompts, AnswerStore(path), ASKING, lambda r: asked.append(r) or True
    )
    assert len(asked) == 1
    assert sorted(path.read_bytes().splitlines()) == sorted(book.read_bytes().splitlines())


def test_which_answers_are_given_anew(target, tmp_path):
    chat = Conversation([5, 6, 7, 8], 2, origin="chat")
    traffic = Conversation([5, 9, 7, 8], 2, origin="traffic")
    text = Conversation([4, 3, 2, 1], 0, origin="text")
    found = [chat, traffic, text]

    def gathered(regenerate):
        conversations = gather(
            found,
            target,
            tmp_path / regenerate,
            GatherOptions(regenerate=regenerate, answers=ASKING),
        )
        return [conversation for conversation in conversations if conversation not in found]

    assert gathered("off") == []
    assert [conversation.tokens[:2] for conversation in gathered("auto")] == [[5, 6]]
    assert len(gathered("on")) == 3
    with pytest.raises(InvalidRequest, match="prompts without answers"):
        gather([Conversation([1, 2], 2)], target, tmp_path, GatherOptions(regenerate="off"))


def test_token_ids_of_another_model_are_refused(target, tmp_path):
    conversation = Conversation([5, target.config.vocab_size, 7], 1, origin="traffic")
    with pytest.raises(InvalidRequest, match="token ids"):
        gather([conversation], target, tmp_path, GatherOptions())
