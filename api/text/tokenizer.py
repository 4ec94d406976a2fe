"""Tokenizer: conversion of text to token ids and back, for one model folder or GGUF file."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from ...core.errors import EngineDead, ForetokenError, InvalidRequest, ModelLoadError, PromptTooLong
from ...core.interface.sampling import beyond_vocabulary
from ...core.startup import timed
from ..types.request_context import origin
from .chat_template import (
    INLINE_CHARS,
    INLINE_SECONDS,
    Budget,
    ChatTemplate,
    TemplateRefusal,
    TooLong,
    check_messages,
    check_options,
    count_chars,
)
from .chat_template import SECONDS as TEMPLATE_SECONDS
from .detokenizer import (
    BYTE_OF_CHAR,
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    is_byte_level,
    stop_table,
)
from .executor import Worker
from .literal_encoder import Encoder, LiteralEncoder
from .marks import Marks
from .tokenizer_cache import load_tokenizer

T = TypeVar("T")
logger = logging.getLogger(__name__)
APART_BYTES = 2**15  # reading fewer bytes takes about a millisecond
STOP_COST = 64  # number of bytes that are read in the time for one character of a stop string
NUM_WORD_LISTS = 4  # number of cached lists of bad words, which the prompts of a request share
SECONDS = 30.0  # time limit for one text in a thread
TRIED_CHARS = 2**20  # length limit of conversations that probe a template
NUM_CONTEXT_IDS = 4  # number of prompt tokens after which the first output token is decoded
JOB_CHARS = 64  # a short job takes at least as long as reading this many characters
LOSSY = 4  # maximum number of characters that a normaliser may merge into one
SPACE_MARK = "\u2581"  # SentencePiece's character for a space


def log_refusal(error: TemplateRefusal) -> None:
    """Log that a template failed.

    Its long traceback is logged at level debug only, since clients could otherwise fill the log.
    """
    logger.warning("the chat template failed: %s", type(error.__cause__).__name__)
    logger.debug("the chat template failed", exc_info=error.__cause__)


def _bytes_of(backend: Any, token_id: int) -> bytes:  # noqa: ANN401 - tokenizers is untyped
    token = backend.id_to_token(token_id) or ""
    if all(char in BYTE_OF_CHAR for char in token):
        return bytes(BYTE_OF_CHAR[char] for char in token)
    return token.encode("utf-8", "replace")


class _Pieces(dict[int, bytes]):
    """The bytes of the text of each token by id, none for special tokens. Filled as it is read."""

    def __init__(self, backend: Any, special_ids: frozenset[int]) -> None:  # noqa: ANN401 - tokenizers is untyped
        super().__init__()
        self._backend, self._special_ids = backend, special_ids

    def __missing__(self, token_id: int) -> bytes:
        is_special = token_id in self._special_ids
        piece = self[token_id] = b"" if is_special else _bytes_of(self._backend, token_id)
        return piece


class Tokenizer:
    """A fast (Rust) Hugging Face tokenizer and its chat template.

    Texts that cannot fit into ``max_model_len`` tokens are rejected by their length in characters,
    before they are tokenized.
    """

    def __init__(self, hf: Any, *, max_model_len: int) -> None:  # noqa: ANN401 - transformers is untyped
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise ModelLoadError("the model has no fast tokenizer (tokenizer.json)")
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._encoder = backend, Encoder(backend)
        self._literals: dict[frozenset[str], LiteralEncoder] = {}
        self._template = ChatTemplate(hf)
        self._response_template: object = getattr(hf, "response_template", None)
        self._template_options: dict[str, Any] = {}  # defaults for options that requests leave out
        self.max_model_len = max_model_len
        # Two workers, so that short conversations do not wait for long texts.
        self._short, self._long = Worker("foretoken-template"), Worker("foretoken-tokenizer")
        self._closed = False
        self._word_ids: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        # characters of short jobs since `work` last let other tasks run
        self._num_inline = 0

    @classmethod
    @timed("tokenizer")
    def load(cls, path: Path, *, max_model_len: int) -> Tokenizer:
        """Load a tokenizer from a local folder or a GGUF file. Raises `ModelLoadError`."""
        try:
            hf = load_tokenizer(path)
        except Exception as error:  # damaged files can cause any error
            raise ModelLoadError(f"{path}: the tokenizer does not load: {error}") from error
        return cls(hf, max_model_len=max_model_len)

    def close(self) -> None:
        """Stop the threads. Running jobs finish, waiting jobs are refused."""
        self._closed = True
        self._short.close()
        self._long.close()

    # -- text to ids ----------------------------------------------------------------------------

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        generates: bool = True,
    ) -> list[int]:
        """Return the token ids of a text. Raises `PromptTooLong` and `InvalidRequest`.

        ``param``: the name of the text's field, for errors. ``generates``: False for a text that
        may fill the whole context.
        """
        if len(text) > self._most_chars:
            raise self._too_long(len(text), param, generates=generates)
        job = partial(self._encode, text, add_special_tokens=add_special_tokens)
        return await self.work(len(text), job, param)

    async def encode_start(self, text: str, param: str) -> list[int]:
        """Return the token ids of the beginning of a text, as much as fits into the context.

        Special tokens that the tokenizer adds at the end are kept. ``param``: the name of the
        text's field, for errors.
        """
        start = text[: self._most_chars]
        job = partial(self._encode, start, add_special_tokens=True)
        ids = await self.work(len(start), job, param)
        num_beyond = len(ids) - self.max_model_len
        if num_beyond <= 0:
            return ids
        added = self._encode("", add_special_tokens=True)
        num_last = max(n for n in range(len(added) + 1) if added[len(added) - n :] == ids[-n:][:n])
        stop = len(ids) - num_last
        return ids[: stop - num_beyond] + ids[stop:]

    async def encode_marked(
        self, marked: str, texts: Mapping[str, str], names: frozenset[str] | None = None
    ) -> list[int]:
        """Return the token ids of a text after replacing the marks in it.

        ``texts``: the replacement of each mark. ``names``: names of tokens that are encoded as text
        in replacements and as tokens elsewhere; by default the names of all special tokens. Raises
        the errors of `encode`.
        """
        num_chars = len(marked) + sum(map(len, texts.values()))
        if num_chars > self._most_chars:
            raise self._too_long(num_chars)
        names = self._special_names.names if names is None else names
        # Run in the thread, since the first such text creates another tokenizer.
        job = partial(self._encode_marked, marked, texts, names)
        return await self.work(INLINE_CHARS + 1, job)

    def _encode_marked(
        self, marked: str, texts: Mapping[str, str], names: frozenset[str]
    ) -> list[int]:
        return self.literal(names).encode_with(marked, texts)

    def literal(self, names: frozenset[str]) -> LiteralEncoder:
        """Return a tokenizer that encodes these names of tokens as text. Creating it is slow."""
        if names not in self._literals:
            self._literals[names] = LiteralEncoder(self._encoder, names)
        return self._literals[names]

    def names_special(self, text: str) -> bool:
        """Whether a text spells out a special token. False if it cannot fit into the context."""
        return len(text) <= self._most_chars and self._special_names.is_in(text)

    async def encode_prediction(self, text: str) -> list[int]:
        """Return the token ids of a prediction of any length."""
        job = partial(self._encode, text, add_special_tokens=False)
        return await self.work(len(text), job, "prediction")

    def encode_word(self, word: str) -> list[int]:
        """Return the token ids of a short text as part of a longer text."""
        return self._encoder.encode(word)

    def first_ids(self) -> list[int]:
        """Return the token ids that are added before any text, such as BOS."""
        alone, whole = (
            self._encoder.encode("a", add_special_tokens=each) for each in (False, True)
        )
        starts = range(len(whole) - len(alone) + 1)
        first = next((at for at in starts if whole[at : at + len(alone)] == alone), 0)
        return whole[:first]

    async def encode_words(self, words: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Return the token ids of short texts as parts of longer texts."""
        if words not in self._word_ids:
            num_chars = sum(map(len, words)) + len(words)
            ids = await self.work(num_chars, lambda: self._encode_words(words))
            if len(self._word_ids) >= NUM_WORD_LISTS:
                del self._word_ids[next(iter(self._word_ids))]
            self._word_ids[words] = ids
        return self._word_ids[words]

    def encode_after(self, text: str, *, is_literal: bool = False) -> list[int]:
        """Return the token ids of a text that follows other text: no space is added before it.

        ``is_literal``: encode special tokens that the text spells out as text.
        """
        encoder = self.literal(self._special_names.names) if is_literal else self._encoder
        return encoder.encode_after(text)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._encoder.encode(text, add_special_tokens=add_special_tokens)

    def _encode_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        batch = self._backend.encode_batch_fast(list(words), add_special_tokens=False)
        return [tuple(each.ids) for each in batch]

    @property
    def _most_chars(self) -> int:
        """Maximum number of characters that may fit into the context."""
        return self.max_model_len * self._most_chars_per_token

    def _too_long(
        self, num_chars: int, param: str = "prompt", *, generates: bool = True
    ) -> PromptTooLong:
        num_tokens = -(-num_chars // self._most_chars_per_token)
        most = self.max_model_len
        return PromptTooLong(num_tokens, most - generates, param=param, context=most)

    @cached_property
    def _most_chars_per_token(self) -> int:
        longest = max((len(token) for token in self.vocab), default=1)
        exact = self.is_byte_level and self._backend.normalizer is None
        return longest if exact else longest * LOSSY

    def fingerprint(self) -> str:
        """Return a hash of the whole tokenizer. Tokenizers with equal hashes give the same ids."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()[:16]

    def check_ids(
        self,
        token_ids: Sequence[int],
        vocab_size: int,
        param: str = "prompt",
        *,
        generates: bool = True,
    ) -> None:
        """Raise `InvalidRequest` for ids outside the vocabulary, and for too many ids.

        ``generates``: False for a prompt that may fill the whole context.
        """
        is_list = type(token_ids) is list or isinstance(token_ids, Sequence)
        if not is_list or isinstance(token_ids, bytes):
            raise InvalidRequest(f"{param} must be a text or a list of token ids", param=param)
        most = self.max_model_len - generates
        if len(token_ids) > most:
            raise PromptTooLong(len(token_ids), most, param=param, context=self.max_model_len)
        # Compare types and extremes only: a Python loop would block the event loop for tens of
        # milliseconds.
        kinds = {*map(type, token_ids)} - {int}
        if kinds and any(not issubclass(kind, int) or kind is bool for kind in kinds):
            raise InvalidRequest(f"{param} must be a text or a list of token ids", param=param)
        if message := beyond_vocabulary(param, token_ids, vocab_size):
            raise InvalidRequest(message, param=param)

    async def work(self, num_chars: int, job: Callable[[], T], param: str = "prompt") -> T:
        """Run a job on ``num_chars`` characters: a short one at once, a long one in the thread.

        Raises `InvalidRequest` if the job fails or takes too long, and `EngineDead` if the
        tokenizer is closed meanwhile. The text of an unexpected error is logged but not exposed.
        """
        try:
            if num_chars > INLINE_CHARS:
                return await self._run(self._long, job, SECONDS)
            done = job()
            self._num_inline += num_chars + JOB_CHARS
            if self._num_inline > INLINE_CHARS:
                self._num_inline = 0
                await asyncio.sleep(0)  # lets other tasks run between many short jobs
        except TimeoutError:
            raise InvalidRequest(f"the {param} took too long to tokenise", param=param) from None
        except ForetokenError:
            raise
        except UnicodeEncodeError:
            raise InvalidRequest(f"the {param} must be valid Unicode", param=param) from None
        except Exception as error:
            logger.warning("a %s could not be tokenised", param, exc_info=error)
            raise InvalidRequest(f"the {param} cannot be tokenised", param=param) from error
        return done

    async def apart(self, size: int, job: Callable[[], T]) -> T:
        """Run a job on a body of ``size`` bytes: a short one at once, a long one in the thread.

        Raises the job's errors, and `InvalidRequest` if it takes too long.
        """
        if size <= APART_BYTES:
            return job()
        work = partial(copy_context().run, job)  # the context identifies the caller
        try:
            return await self._run(self._long, work, SECONDS)
        except TimeoutError:
            raise InvalidRequest(f"the body took longer than {SECONDS:g} s to read") from None

    async def prepare_stops(self, stops: Sequence[str]) -> None:
        """Prepare the table of stop strings, in a thread if it is large."""
        if stops:
            size = STOP_COST * sum(map(len, stops))
            await self.apart(size, partial(stop_table, tuple(stops)))

    async def _run(self, worker: Worker, job: Callable[[], T], seconds: float) -> T:
        self._check_open()
        try:
            return await worker.run(job, seconds=seconds, origin=origin())
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # the job was cancelled, not its caller
                self._check_open()
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("this LLM is closed") from None

    # -- conversations --------------------------------------------------------------------------

    @property
    def chat_template(self) -> str:
        """The text of the chat template; "" if the model has none."""
        return self._template.text

    @property
    def response_template(self) -> object:
        """The model's own description of its answers, as JSON; None without one.

        It is None, too, if a chat template was set: it need not be one of the same format.
        """
        return None if self._template.own else self._response_template

    def use_template(self, text: str, options: Mapping[str, Any]) -> None:
        """Set the chat template, unless it is "", and its default options."""
        self._template.own = text
        self._template_options = dict(options)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the token ids of the text that `render_chat` returns."""
        text = await self.render_chat(messages, options, tools=tools)
        return await self.encode(text, add_special_tokens=False)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        is_try: bool = False,
    ) -> str:
        """Return the text of a conversation in the model's format.

        ``options``: variables of the template. ``tools``: functions in OpenAI's form. ``is_try``:
        do not log a failure. Raises `TemplateRefusal` if the template fails.
        """
        if not self._template.text:
            raise InvalidRequest("the model has no chat template", param="messages")
        check_messages(messages)
        check_options(options)
        settings = {**self._template_options, **options}
        if tools:
            settings["tools"] = list(tools)
        try:
            return await self._rendered(messages, settings)
        except TemplateRefusal as error:
            if not is_try:
                log_refusal(error)
            raise

    async def try_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the text of a short conversation, even if it exceeds the context length.

        Return "" if rendering fails.
        """
        settings = {**self._template_options, **({"tools": list(tools)} if tools else {})}
        try:
            return await self._rendered(messages, settings, TRIED_CHARS)
        except TemplateRefusal:
            return ""

    def written(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the text of a short conversation, rendered synchronously.

        The text ends with the last message. Return "" if the template rejects the conversation or
        takes too long.
        """
        settings = {**self._template_options, "add_generation_prompt": False}
        if tools:
            settings["tools"] = list(tools)
        try:
            return self._template.render(messages, settings, Budget(TRIED_CHARS, TEMPLATE_SECONDS))
        except Exception as error:  # templates can raise any error
            logger.debug("the chat template rejects a conversation: %s", error)
            return ""

    async def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any],
        most_chars: int | None = None,
    ) -> str:
        """Return the rendered text of a conversation.

        A short conversation is rendered at once, or in a thread if the template turns out to be
        slow; a long one is rendered in a thread. ``most_chars``: maximum length of the text, by
        default as much as may fit into the context.
        """
        most_chars = self._most_chars if most_chars is None else most_chars
        is_short = count_chars(messages, settings) <= INLINE_CHARS
        worker = self._short if is_short else self._long
        render = partial(self._template.render, messages, settings)
        try:
            if is_short:
                with suppress(TimeoutError):
                    return render(Budget(most_chars, INLINE_SECONDS))
            return await self._rendered_apart(worker, render, most_chars)
        except TimeoutError:
            logger.warning("the chat template was stopped after %s s", TEMPLATE_SECONDS)
            message = f"the chat template took longer than {TEMPLATE_SECONDS:g} s"
            raise InvalidRequest(message, param="messages") from None
        except TooLong as error:
            raise self._too_long(error.num_chars) from None
        except InvalidRequest as error:
            if not isinstance(error, TemplateRefusal):
                logger.warning("the chat template failed: %s", error)
            raise

    async def _rendered_apart(
        self, worker: Worker, render: Callable[[Budget], str], most_chars: int
    ) -> str:
        """Render in a thread. If this call is cancelled, the template stops at its next check."""
        budget: Budget | None = None

        def job() -> str:
            nonlocal budget
            budget = Budget(most_chars, TEMPLATE_SECONDS)
            return render(budget)

        try:
            return await self._run(worker, job, TEMPLATE_SECONDS)
        finally:
            if budget is not None:
                budget.end()

    # -- ids to text ----------------------------------------------------------------------------

    def detokenizer(
        self, context_ids: Sequence[int] = (), shown: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Return a detokenizer for an answer that follows the tokens ``context_ids``.

        ``shown``: special tokens that are converted to text.
        """
        if self.is_byte_level:
            pieces = self._pieces
            return ByteDetokenizer(
                partial(self._shown_piece, shown) if shown else pieces.__getitem__
            )
        return WindowDetokenizer(
            partial(self.decode, skip_special_tokens=not shown),
            context_ids=context_ids[-NUM_CONTEXT_IDS:],
            skipped=self.special_ids - shown,
            byte_values=self._byte_values,
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token: its name if it is special, no bytes for an unknown id."""
        if self.is_byte_level:
            return self._bytes_of(token_id)
        if token_id in self._byte_values:
            return bytes([self._byte_values[token_id]])
        token = self._backend.id_to_token(token_id) or ""
        return token.replace(SPACE_MARK, " ").encode("utf-8", "replace")

    @cached_property
    def _pieces(self) -> _Pieces:
        return _Pieces(self._backend, self.special_ids)

    def _shown_piece(self, shown: frozenset[int], token_id: int) -> bytes:
        return self._bytes_of(token_id) if token_id in shown else self._pieces[token_id]

    def _bytes_of(self, token_id: int) -> bytes:
        return _bytes_of(self._backend, token_id)

    def has_silent(self, token_ids: Sequence[int], shown: frozenset[int]) -> bool:
        """Whether any of the ids has no text: unknown ids, and special tokens not in ``shown``."""
        ids = {*token_ids} - shown
        return not ids.isdisjoint(self.special_ids) or any(
            not self._backend.id_to_token(each) for each in ids
        )

    # -- the vocabulary -------------------------------------------------------------------------

    @cached_property
    def vocab(self) -> dict[str, int]:
        """The id of each token, including added tokens."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def added_tokens(self) -> dict[str, int]:
        """The id of each added token by its name, whether the token is special or not.

        Merges of byte pairs never produce these tokens.
        """
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items()}

    @property
    def eos_ids(self) -> frozenset[int]:
        """The id of the tokenizer's end-of-text token, if it has one."""
        name = self._template.special_tokens.get("eos_token", "")
        return frozenset((self.added_tokens[name],) if name in self.added_tokens else ())

    def special_in(self, text: str) -> list[int]:
        """Return the ids of the special tokens that a text spells out, in order."""
        return [self.added_tokens[name] for name in self._special_names.found(text)]

    @cached_property
    def added_names(self) -> Mapping[str, bool]:
        """Names of tokens that are recognised anywhere in a text, and whether each is special."""
        added = self._backend.get_added_tokens_decoder().values()
        return {token.content: bool(token.special) for token in added}

    @cached_property
    def _special_names(self) -> Marks:
        return Marks(name for name, is_special in self.added_names.items() if is_special)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether every token is a sequence of bytes in GPT-2's alphabet."""
        decoder = self._backend.decoder
        return decoder is not None and is_byte_level(json.loads(decoder.__getstate__()))

    @cached_property
    def _byte_values(self) -> dict[int, int]:
        names = {f"<0x{value:02X}>": value for value in range(256)}
        return {self.vocab[name]: value for name, value in names.items() if name in self.vocab}
