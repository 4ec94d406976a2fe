"""Generates the target's own answers to prompts, with this engine and in large batches.

A draft must predict the target, so it is trained on the target's answers rather than on the answers
in the data.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from ...core.engine.engine import Engine
from ...core.execution.model_runner import ModelRunner
from ...core.interface.request import Request
from ...core.interface.sampling import SamplingMetadata, TokenSamplingParams
from ...core.model.decoder import Decoder, sequence_pool
from ...core.scheduling.request_table import SchedulerLimits
from ...core.scheduling.scheduler import Scheduler
from ...radix_cache import PrefixCache, StateSlots
from .records import VERSION, Record, digest, read_records, write_line

PAGE_SIZE = 16
STEP_TOKENS = 512  # token budget of a step, prompts included


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options for generating answers; the prompts cycle through ``temperatures``."""

    max_tokens: int = 384
    num_running: int = 96  # number of requests that are decoded together
    temperatures: tuple[float, ...] = (0.0, 1.0)
    seed: int = 0

    def pairs(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], float]]:
        """Yield each prompt with the temperature of its answer."""
        yield from zip(prompts, cycle(self.temperatures), strict=False)


class AnswerStore:
    """Answers in an append-only file of records, one for each prompt and temperature.

    Stored answers are not generated again, so a stopped run can resume.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: dict[bytes, Record] = {}
        if path.exists():
            _drop_half_line(path)
            for record in read_records(path):
                key = _key(record.tokens[: record.prompt_len], record.temperature)
                self._records[key] = record

    def __len__(self) -> int:
        return len(self._records)

    def find(self, prompt: Sequence[int], temperature: float) -> Record | None:
        """Return the stored answer to a prompt, or None."""
        return self._records.get(_key(prompt, temperature))

    def add(self, record: Record) -> None:
        """Store an answer in memory and in the file."""
        with self._path.open("ab") as file:
            file.write(write_line(record))
        self._records[_key(record.tokens[: record.prompt_len], record.temperature)] = record


def _key(prompt: Sequence[int], temperature: float) -> bytes:
    return digest(prompt) + str(float(temperature)).encode()


def _drop_half_line(path: Path) -> None:
    """Remove an incomplete last line, left by a process that was stopped while writing."""
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def answer_prompts(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    store: AnswerStore,
    options: AnswerOptions,
    on_answer: Callable[[Record], bool],
) -> None:
    """Generate the answers that ``store`` lacks, until ``on_answer`` returns False.

    The prompts are answered in their order. An answer depends on its prompt, its temperature and
    the seed only, not on the other requests of its batches. Raises the error of a request that
    fails.
    """
    asyncio.run(_Generator(decoder, store, options, on_answer).generate(prompts))


class _Generator:
    def __init__(
        self,
        decoder: Decoder,
        store: AnswerStore,
        options: AnswerOptions,
        on_answer: Callable[[Record], bool],
    ) -> None:
        self._decoder, self._store, self._options = decoder, store, options
        self._on_answer = on_answer
        self._goes_on = True

    async def generate(self, prompts: Sequence[Sequence[int]]) -> None:
        engine = self._engine()
        await engine.start()
        waiting = self._missing(prompts)
        seats = [
            asyncio.create_task(self._seat(engine, waiting))
            for _ in range(self._options.num_running)
        ]
        try:
            await asyncio.gather(*seats)
        finally:
            for seat in seats:
                seat.cancel()
            await engine.close()

    def _engine(self) -> Engine:
        decoder, options = self._decoder, self._options
        max_len = decoder.config.max_model_len
        num_tokens = options.num_running * (options.max_tokens + 512) + max_len
        num_pages = -(-num_tokens // PAGE_SIZE)
        limits = SchedulerLimits(
            max_batch_tokens=STEP_TOKENS,
            max_running=options.num_running,
            max_queued=options.num_running,
            max_model_len=max_len,
            vocab_size=decoder.config.vocab_size,
        )
        num_running = options.num_running
        # A request that starts needs a state while the ended request's state is still kept, so the
        # pool has more states than running requests.
        pool = sequence_pool(decoder, num_pages, num_running + 2, page_size=PAGE_SIZE)
        states = None if pool.states is None else StateSlots(pool.states.num_slots, num_running)
        scheduler = Scheduler(PrefixCache(num_pages, PAGE_SIZE, states=states), limits)
        return Engine(scheduler, ModelRunner(decoder, pool, None))

    def _missing(self, prompts: Sequence[Sequence[int]]) -> Iterator[Request]:
        options = self._options
        for index, (prompt, temperature) in enumerate(options.pairs(prompts)):
            fits = len(prompt) + 1 < self._decoder.config.max_model_len
            if fits and self._store.find(prompt, temperature) is None:
                seed = int.from_bytes(digest([options.seed, *prompt])[:8])
                params = TokenSamplingParams(temperature=temperature, max_tokens=options.max_tokens)
                stop_ids = frozenset(self._decoder.config.eos_token_ids)
                yield Request(
                    request_id=f"prompt-{index}",
                    tokens=array("q", prompt),
                    sampling=SamplingMetadata(
                        params=params, seed=seed, prompt_len=len(prompt), stop_ids=stop_ids
                    ),
                    stop_ids=stop_ids,
                )

    async def _seat(self, engine: Engine, waiting: Iterator[Request]) -> None:
        for request in waiting:
            answer: list[int] = []
            finish = ""
            async for delta in engine.submit(request):
                if delta.error is not None:
                    raise delta.error
                answer += delta.token_ids
                finish = delta.finish_reason or finish
            prompt_len = request.prompt_len
            record = Record(
                v=VERSION,
                tokens=[*request.tokens[:prompt_len], *answer],
                prompt_len=prompt_len,
                temperature=request.sampling.params.temperature,
                finish=str(finish),
            )
            self._store.add(record)
            self._goes_on = self._on_answer(record) and self._goes_on
            if not self._goes_on:
                return
