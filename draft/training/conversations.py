"""Training data: reads texts, chats and traffic as token ids, and splits off a held-out part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from ...core.errors import InvalidRequest, PromptTooLong
from .records import Record, digest, read_records

Origin: TypeAlias = Literal["text", "chat", "traffic"]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
HELD_OUT_PERCENT = 2.0
TEXTS = (".txt", ".md", ".rst", ".py")
MAX_ASSISTANT_TURNS = 8  # maximum number of last answers that are used of one conversation


class TextEncoder(Protocol):
    """Turns text into the target's token ids."""

    fingerprint: str  # hash of the tokenizer, to detect token ids of another one

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a plain text."""

    def encode_chat(self, messages: Messages, *, asks: bool) -> list[int]:
        """Return the token ids of a conversation in the chat template.

        ``asks``: whether to append the tokens that ask the model for an answer. Raises
        `PromptTooLong` for a conversation that is too long.
        """


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and its answer; only the answer is learnt. A plain text has no prompt."""

    tokens: Sequence[int]
    prompt_len: int
    temperature: float = 0.0  # temperature at which the answer was generated
    origin: Origin = "chat"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def first_row(self) -> int:
        """Position whose output predicts the first token to learn."""
        return max(0, self.prompt_len - 1)

    @property
    def key(self) -> bytes:
        """Hash of the prompt, or of a plain text; it selects the held-out conversations."""
        return digest(self.tokens[: self.prompt_len] if self.prompt_len else self.tokens)

    @property
    def is_held_out(self) -> bool:
        """Whether the conversation is held out for evaluation, according to its hash."""
        return int.from_bytes(self.key[:4]) < HELD_OUT_PERCENT / 100 * 2**32

    def cut(self, max_len: int) -> Conversation:
        """Return a copy with the first ``max_len`` tokens."""
        return Conversation(self.tokens[:max_len], self.prompt_len, self.temperature, self.origin)

    @classmethod
    def of(cls, record: Record, origin: Origin) -> Conversation:
        """Make a conversation from a record."""
        return cls(record.tokens, record.prompt_len, record.temperature, origin)


# -- files ----------------------------------------------------------------------------------------


def read_data(paths: Sequence[Path], encoder: TextEncoder, *, text_len: int) -> list[Conversation]:
    """Return the conversations of files and folders, in the order of file names in each folder.

    A line of a ``.jsonl`` file is a chat (``messages``), a text (``text``) or a record; files with
    a suffix of `TEXTS` are texts. Texts are cut into pieces of ``text_len`` tokens. A chat that
    ends with a user's message also yields a prompt without an answer. Raises `InvalidRequest` with
    the file and the line.
    """
    found: list[Conversation] = []
    for path in _files(paths):
        try:
            found += _read_file(path, encoder, text_len)
        except OSError as error:
            raise InvalidRequest(f"data: {path}: {error.strerror}", param="data") from error
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"data: {path} is not UTF-8", param="data") from error
    if not found:
        raise InvalidRequest("data contains no conversation and no text", param="data")
    return found


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            raise InvalidRequest(f"data: {path} does not exist", param="data")
        if not path.is_dir():
            yield path
            continue
        inside = (each for each in path.rglob("*") if each.suffix in (".jsonl", *TEXTS))
        yield from sorted(each for each in inside if each.is_file())


def _read_file(path: Path, encoder: TextEncoder, text_len: int) -> Iterator[Conversation]:
    if path.suffix != ".jsonl":
        yield from _pieces(encoder.encode(path.read_text(encoding="utf-8")), text_len)
        return
    if _is_traffic(path):
        for record in read_records(path):
            if record.tokenizer not in ("", encoder.fingerprint):
                message = (
                    f"data: {path} was recorded with a tokenizer that differs from the target's"
                )
                raise InvalidRequest(message, param="data")
            yield Conversation.of(record, "traffic")
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield from _read_line(line, f"{path}, line {number}", encoder, text_len)


def _is_traffic(path: Path) -> bool:
    with path.open("rb") as lines:
        return b'"prompt_len"' in lines.readline()


class _Line(msgspec.Struct):
    messages: list[dict[str, Any]] | None = None
    text: str | None = None


def _read_line(
    line: bytes, where: str, encoder: TextEncoder, text_len: int
) -> Iterator[Conversation]:
    try:
        parsed = msgspec.json.decode(line, type=_Line)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"data: {where}: {error}", param="data") from error
    if parsed.text is not None:
        yield from _pieces(encoder.encode(parsed.text), text_len)
    elif parsed.messages:
        with suppress(PromptTooLong):  # Prompts that are too long for the target are left out.
            yield from _chat(parsed.messages, encoder)
    else:
        raise InvalidRequest(f"data: {where}: messages or text is missing", param="data")


def _pieces(tokens: Sequence[int], length: int) -> Iterator[Conversation]:
    for at in range(0, len(tokens) - 1, length):
        piece = tokens[at : at + length]
        if len(piece) > 1:
            yield Conversation(piece, 0, origin="text")


def _chat(messages: Messages, encoder: TextEncoder) -> Iterator[Conversation]:
    """Yield conversations for the last `MAX_ASSISTANT_TURNS` answers of a chat.

    The prompt of each one is all messages before the answer. If a message follows the last answer,
    or if there is no answer, also yield the whole chat as a prompt.
    """
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    for turn in turns[-MAX_ASSISTANT_TURNS:]:
        prompt = encoder.encode_chat(messages[:turn], asks=True)
        whole = encoder.encode_chat(messages[: turn + 1], asks=False)
        if whole[: len(prompt)] == prompt and len(whole) > len(prompt):
            yield Conversation(whole, len(prompt))
    if not turns or turns[-1] < len(messages) - 1:
        prompt = encoder.encode_chat(messages, asks=True)
        yield Conversation(prompt, len(prompt))


# -- choosing -------------------------------------------------------------------------------------


def split(found: Iterable[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Split conversations into training and held-out ones by hash; drop any without an answer.

    Conversations with the same prompt are in the same part. If the hashes hold out no conversation,
    the last tenth is held out.
    """
    usable = [each for each in found if len(each) - each.first_row > 1]
    train = [each for each in usable if not each.is_held_out]
    held = [each for each in usable if each.is_held_out]
    if not held and len(train) > 1:
        at = len(train) - max(1, len(train) // 10)
        train, held = train[:at], train[at:]
    return train, held


def frequent_ids(
    conversations: Iterable[Conversation], count: int, vocab_size: int, always: Iterable[int]
) -> Tensor:
    """Return the ids ``always`` and the most frequent ids of answers, in ascending order.

    If they are fewer than ``count``, other ids of the vocabulary fill the tensor [count].
    """
    counted: Counter[int] = Counter()
    for conversation in conversations:
        counted.update(conversation.tokens[conversation.prompt_len :])
    order = [*always, *(token for token, _ in counted.most_common()), *range(vocab_size)]
    chosen = list(dict.fromkeys(token for token in order if token < vocab_size))[:count]
    return torch.tensor(sorted(chosen))


def answer_pairs(conversations: Iterable[Conversation]) -> Tensor:
    """Return a pair (preceding token, token) for every token of an answer, [num, 2]."""
    pairs = [
        torch.tensor(
            [
                conversation.tokens[at - 1 : at + 1]
                for at in range(conversation.first_row + 1, len(conversation))
            ]
        )
        for conversation in conversations
    ]
    return torch.cat(pairs)


class Shuffler:
    """Endless batches of conversations of similar length, about ``batch_tokens`` tokens each.

    ``epoch`` and ``cursor`` are its position, from which a stopped run can resume.
    """

    POOL = 64  # number of conversations that are sorted by length together

    def __init__(self, found: Sequence[Conversation], batch_tokens: int, seed: int) -> None:
        self._found, self._batch_tokens, self._seed = found, batch_tokens, seed
        self.epoch, self.cursor = 0, 0
        self._batches = self._shuffle()

    def seek(self, epoch: int, cursor: int) -> None:
        """Move to batch number ``cursor`` of an epoch."""
        self.epoch, self.cursor = epoch, cursor
        self._batches = self._shuffle()

    def next(self) -> list[Conversation]:
        """Return the next batch."""
        if self.cursor == len(self._batches):
            self.seek(self.epoch + 1, 0)
        self.cursor += 1
        return self._batches[self.cursor - 1]

    def _shuffle(self) -> list[list[Conversation]]:
        rng = np.random.default_rng((self._seed, self.epoch))
        order = rng.permutation(len(self._found))
        batches: list[list[Conversation]] = []
        for at in range(0, len(order), self.POOL):
            pool = sorted((self._found[i] for i in order[at : at + self.POOL]), key=len)
            batch: list[Conversation] = []
            for conversation in pool:
                if batch and len(conversation) * (len(batch) + 1) > self._batch_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(conversation)
            batches.append(batch)
        return [batches[i] for i in rng.permutation(len(batches))]
