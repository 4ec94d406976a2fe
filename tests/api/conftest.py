"""Tiny tokenizers, the fake engine behind every face of the api package, and a real server."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import uvicorn

from foretoken import LLM, AsyncLLM
from foretoken.api.server.process import uvicorn_config
from foretoken.api.serving.limits import Limits
from foretoken.api.serving.settings import Listen, Settings
from foretoken.api.text.tokenizer import Tokenizer
from support.fake_engine import FakeEngine, ends_of, make_built

TEXTS = [
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "The quick brown fox jumps over the lazy dog, 12 times; naïve café, 東京 and 😀.",
    "Hello world, hello there. Stop here. return the answer to the question.",
] * 5
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'bad' %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SECONDS = 20.0


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises, also where the suite was started in the background and it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory) -> Path:
    """A byte-level BPE with special tokens, an added word that is text, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<think> é", normalized=False)])
    folder = tmp_path_factory.mktemp("byte-level")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def metaspace_folder(tmp_path_factory) -> Path:
    """A SentencePiece-like Unigram vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    folder = tmp_path_factory.mktemp("metaspace")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def byte_fallback_folder(tmp_path_factory) -> Path:
    """A Llama-2-like vocabulary: words, and a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    names += ["▁", *"abcdefgh", "▁ab", "▁cd", "ef", "▁▁"]
    merges = [("▁", "a"), ("e", "f")]
    vocab = {name: index for index, name in enumerate([*names, "▁a"])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder = tmp_path_factory.mktemp("byte-fallback")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(byte_level_folder) -> Iterator[Tokenizer]:
    loaded = Tokenizer.load(byte_level_folder, max_model_len=256)
    yield loaded
    loaded.close()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def built(engine, byte_level_folder, tokenizer) -> SimpleNamespace:
    vocab = tokenizer.vocab
    return make_built(engine, byte_level_folder, *ends_of(vocab), vocab_size=len(vocab))


@pytest.fixture
def say(engine, tokenizer) -> Callable[[str], None]:
    """Make the engine answer this text and end with its eos."""

    def tell(text: str) -> None:
        ids = [*tokenizer.encode_word(text), tokenizer.vocab["<|im_end|>"]]
        engine.answers = lambda request: ids

    return tell


@pytest.fixture
def run(built) -> Callable[..., Any]:
    """Run an async test body with an AsyncLLM over the fake engine."""

    def start(body: Callable[[AsyncLLM], Any]) -> Any:
        async def inner() -> Any:
            async with AsyncLLM.from_built(built) as llm:
                return await body(llm)

        return asyncio.run(asyncio.wait_for(inner(), SECONDS))

    return start


@pytest.fixture
def llm(built) -> Iterator[LLM]:
    with LLM.from_built(built) as llm:
        yield llm


class QuickServer(uvicorn.Server):
    """uvicorn that ends when it is asked to, without the tenths of a second that it sleeps."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._asked = asyncio.Event()

    def end(self) -> None:
        """Ask it from the loop's own thread."""
        self.should_exit = True
        self._asked.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), 0.1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in self.servers:
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for _ in range(20):  # turns of the loop, in which idle connections close
            if not (self.server_state.connections or self.server_state.tasks):
                await self.lifespan.shutdown()
                return
            await asyncio.sleep(0.001)
        await super().shutdown(sockets)


class RunningServer:
    """uvicorn on a free port of this machine, on a loop in its own thread."""

    def __init__(self, llm: AsyncLLM, settings: Settings) -> None:
        self.llm = llm
        self._settings = settings
        self._ready: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self.port = self._ready.result(SECONDS)
        self.url = f"http://127.0.0.1:{self.port}"

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.llm.start()
        listen = Listen(port=0, log_level="critical", settings=self._settings)
        config = uvicorn_config(self.llm, listen)
        config.timeout_graceful_shutdown = 1
        self._server = server = QuickServer(config)
        server.capture_signals = contextlib.nullcontext
        startup = server.startup

        async def start_and_tell_port(sockets=None) -> None:
            await startup(sockets)
            self._ready.set_result(server.servers[0].sockets[0].getsockname()[1])

        server.startup = start_and_tell_port
        await server.serve()
        await self.llm.close()

    def do(self, action: Callable[[], Any]) -> Any:
        """Run something on the server's loop and wait for it."""

        async def inner() -> Any:
            return action()

        return asyncio.run_coroutine_threadsafe(inner(), self.loop).result(SECONDS)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop of a server that ended by itself
            self.loop.call_soon_threadsafe(self._server.end)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


@pytest.fixture
def serve(built) -> Iterator[Callable[..., RunningServer]]:
    """Start a server with these settings and limits; it is stopped after the test."""
    running: list[RunningServer] = []

    def start(**settings: Any) -> RunningServer:
        # Tests count the engine's requests; `test_idle_prefill` has those of idle time.
        settings = {"idle_prefill": "off", **settings}
        names = {each.name for each in fields(Limits)} & set(settings)
        limits = Limits(**{name: settings.pop(name) for name in names})
        llm = AsyncLLM.from_built(built)
        running.append(RunningServer(llm, Settings(**settings, limits=limits)))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def connect(serve) -> Iterator[Callable[..., openai.OpenAI]]:
    """An OpenAI client of a server with these settings, closed at the end."""
    with contextlib.ExitStack() as opened:

        def connected(**settings: Any) -> openai.OpenAI:
            url = f"{serve(**settings).url}/v1"
            return opened.enter_context(openai.OpenAI(base_url=url, api_key="x", max_retries=0))

        yield connected


@pytest.fixture
def server(serve) -> RunningServer:
    return serve()
