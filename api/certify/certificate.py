"""Certificate: the answers to the same requests under many conditions, compared by token.

A condition is an engine with certain options, such as a drafter. The reference answer comes from
plain decoding: the request alone in its batch, without drafts and without the prefix cache. The
certificate also lists the conditions that cannot be set up, with the reason (for example, the model
has no draft head), and the conditions that were set up but did not occur (for example, no request
was preempted).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from msgspec import Struct

from ..._version import __version__
from ...core.config import EngineConfig
from ...core.errors import ForetokenError, InvalidRequest, ModelLoadError
from ...core.interface.request import CacheOptions, Usage
from ...core.sampling.seeds import sibling_seed
from ..build.model_files import find_model
from ..sdk.async_llm import AsyncLLM
from ..types.results import Completion
from .cases import TEXTS, Case, make_cases
from .conditions import (
    BATCHES,
    CACHE,
    NO_CACHE,
    SHARES,
    SMALL_PAGE,
    Condition,
    State,
    conditions,
    reference_options,
)
from .records import VERSION, RecordedRequest, engine_facts, kernels_of, plain_params

Tell = Callable[[str], None]
COUNTED = ("cached_tokens", "loaded_tokens", "proposed_tokens", "accepted_tokens")
ALWAYS_THERE = {"grammar", "prediction"}  # drafters that no option can disable
DISK = "1GiB"  # the size of the folder that the restarted engine reads


class PassReport(Struct, kw_only=True):
    """The results of one pass over all requests.

    ``proposed_by_source`` counts draft tokens.
    """

    name: str
    requests: int
    tokens: int
    differing_tokens: int
    differing_requests: int
    cached_tokens: int
    loaded_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    proposed_by_source: dict[str, int]
    preemptions: int
    seconds: float


class Difference(Struct, kw_only=True):
    """The first answer that differs from its reference, and the condition that produced it.

    ``position`` is the index of the first differing token in choice ``choice``. ``batch`` is the
    number of concurrent requests. ``request`` records the request with the tokens of the reference
    answer.
    """

    condition: str
    request: RecordedRequest
    kind: str
    index: int
    choice: int
    position: int
    batch: int
    found: list[int]
    found_finish_reason: str
    error: str
    options: dict[str, Any]
    repeat: str


class Certificate(Struct, kw_only=True):
    """Results of all passes, with the model and the machine for which they hold."""

    exact: bool
    reason: str = ""  # the reason if ``exact`` is False
    model: str = ""
    foretoken: str = __version__
    command: str = ""
    machine: dict[str, str] = {}
    kernels: str = ""
    libraries: dict[str, str] = {}
    options: dict[str, Any] = {}
    weights: list[dict[str, object]] = []
    num_requests: int = 0
    answers: int = 0
    tokens: int = 0
    differing_tokens: int = 0
    kinds: dict[str, int] = {}
    passes: list[PassReport] = []
    skipped: dict[str, str] = {}  # conditions that the model or the machine does not support
    refused: dict[str, str] = {}  # kinds of requests that the model refuses
    unproven: list[str] = []  # conditions that were set up and did not occur
    first_difference: Difference | None = None
    seconds: float = 0.0


class _Answered(Struct):
    """The tokens and finish reasons of each choice; ``error`` if the request failed."""

    tokens: list[list[int]] = []
    ends: list[tuple[str, Any]] = []
    error: str = ""


class _Ran(NamedTuple):
    """An answer under one condition, its usage, and the number of concurrent requests."""

    answered: _Answered
    usage: Usage
    preemptions: int
    batch: int


def exactness(llm: AsyncLLM) -> str:
    """Return why this engine's answers may depend on the batch; "" if they do not."""
    if llm.config.exact == "off":
        return "--exact off does not guarantee equal bits"
    if llm.built.exact:
        return ""
    if llm.built.model_path == "transformers":
        return (
            "transformers' modules compute its layers, and the test at the start found that "
            "results depend on how tokens are split into steps, or could not test its recurrent "
            "states"
        )
    return "its kernels do not guarantee the same bits in any batch"


class Certifier:
    """Makes a `Certificate` for a model, with ``number`` requests.

    ``options`` are options of `EngineConfig` and apply to every condition. Without a
    ``kv_cache_dtype`` among them, "auto" and "int8" are tested. ``only``: run only the passes whose
    names contain this text. ``tell``: called with each line of progress.
    """

    def __init__(
        self,
        model: str | None,
        options: Mapping[str, Any],
        *,
        number: int,
        only: str | None = None,
        tell: Tell = lambda _: None,
    ) -> None:
        self._model, self._options, self._number = model, dict(options), number
        self._only, self._tell = only, tell
        self.found = Certificate(exact=True, num_requests=number)
        self._path = ""  # the model's folder
        self._cases: list[Case] = []
        self._expected: dict[int, _Answered] = {}

    async def run(self) -> Certificate:
        """Run all passes and return the certificate.

        Raises `ModelLoadError` and `InvalidRequest` as `AsyncLLM` does.
        """
        since = time.monotonic()
        asked = self._options.get("kv_cache_dtype")
        for kv in ("auto", "int8") if asked is None else (asked,):
            if not any(self._wanted(each) for each in self._conditions(kv)):
                continue
            try:
                await self._certify(kv)
            except (InvalidRequest, ModelLoadError) as error:
                if kv == asked or kv == "auto":
                    raise
                self.found.skipped[f"{kv}/*"] = str(error)
            if not self.found.exact:
                break
        self.found.seconds = round(time.monotonic() - since, 1)
        return self.found

    async def _certify(self, kv: str) -> None:
        """Run all conditions with one data type of the KV cache."""
        async with self._engine(reference_options(self._options, kv)) as llm:
            self._describe(llm)
            if not self.found.exact:
                return
            if not self._cases:
                await self._prepare(llm)
            await self._compute_references(llm, kv)
            has_states = llm.built.set_openings is not None
            # The CPU's kernels sum independently of the page size; other kernels may not.
            on_cpu = llm.built.settings["device"] == "cpu"
            page_size = SMALL_PAGE if on_cpu and not has_states else llm.page_size
        longest = max(len(case.prompt) + (case.params.max_tokens or 0) for case in self._cases)
        for condition in self._conditions(kv, longest, page_size):
            wanted = self._wanted(condition)
            if not wanted:
                continue
            if condition.restarts and has_states:
                self.found.skipped[condition.name("restarted")] = (
                    "recurrent states are not written to disk"
                )
                continue
            try:
                await self._pass_all(condition, wanted)
            except (InvalidRequest, ModelLoadError) as error:
                self.found.skipped[condition.name(condition.passes[0])] = str(error)

    def _conditions(self, kv: str, longest: int = 1, page_size: int = 1) -> Iterator[Condition]:
        draft = find_model(self._model).draft
        own_draft = None if draft is None else str(draft)
        return conditions(
            self._options, kv, own_draft=own_draft, longest=longest, page_size=page_size
        )

    def _wanted(self, condition: Condition) -> Sequence[State]:
        """Return the passes of a condition that the certifier's ``only`` selects by name."""
        only = self._only or ""
        return [each for each in condition.passes if only in condition.name(each)]

    @asynccontextmanager
    async def _engine(self, options: Mapping[str, Any]) -> AsyncIterator[AsyncLLM]:
        llm = AsyncLLM(self._model, **options)
        try:
            await llm.start()
            yield llm
        finally:
            await llm.close()

    def _describe(self, llm: AsyncLLM) -> None:
        """Record the model, the machine and the kernels."""
        from .identity import libraries, machine, weight_hashes  # imports torch

        found, settings = self.found, llm.built.settings
        found.reason = exactness(llm)
        found.exact = not found.reason
        if not found.model:
            found.model, found.kernels = llm.built.name, kernels_of(settings)
            self._path = str(llm.built.path)
            found.machine, found.libraries = machine(str(settings["device"])), libraries()
            found.weights = weight_hashes(llm.built.path)
            own = EngineConfig(**reference_options(self._options, "auto"))
            found.options = engine_facts({**settings, "exact": own.exact})

    async def _prepare(self, llm: AsyncLLM) -> None:
        texts = [await llm.tokenizer.encode(text) for text in TEXTS]
        adapters = tuple(EngineConfig(**self._options).lora_folders)
        self._cases = make_cases(texts, self._number, llm.built.vocab_size, adapters)

    async def _compute_references(self, llm: AsyncLLM, kv: str) -> None:
        """Compute the reference answers one by one; leave out requests that the model refuses."""
        self._tell(f"{kv}: reference, {len(self._cases)} requests one by one")
        self._expected, kept = {}, []
        for case in self._cases:
            try:
                done = await _answer(llm, case, NO_CACHE, None)
            except InvalidRequest as error:
                self.found.refused.setdefault(case.kind, str(error))
                continue
            self._expected[case.index] = _answered(done)
            kept.append(case)
        self._cases = kept
        if not kept:
            raise InvalidRequest("the model rejects all requests of the certificate")
        self.found.kinds = _counted(case.kind for case in kept)

    async def _pass_all(self, condition: Condition, wanted: Sequence[State]) -> None:
        """Run the passes of one condition.

        If the condition has ``restarts``, another engine first fills the folder that this one
        reads.
        """
        with tempfile.TemporaryDirectory(prefix="foretoken-certify-") as folder:
            disk = {"kv_disk": f"{folder}:{DISK}"} if condition.restarts else {}
            options = {**condition.options, **disk}
            if condition.restarts:  # not compared: another condition has the same cold pass
                async with self._engine(options) as first:
                    await self._answers(first, CACHE["cold"])
            async with self._engine(options) as llm:
                # passes before a wanted one must run too, because they fill the cache
                for state in condition.passes:
                    await self._pass(llm, condition, state, counts=state in wanted)

    async def _pass(
        self, llm: AsyncLLM, condition: Condition, state: State, *, counts: bool
    ) -> None:
        """Run one pass; if ``counts``, compare its answers and add its report to the results."""
        name = condition.name(state)
        since = time.monotonic()
        report = PassReport(
            name=name, requests=0, tokens=0, differing_tokens=0, differing_requests=0,
            cached_tokens=0, loaded_tokens=0, proposed_tokens=0, accepted_tokens=0,
            proposed_by_source={}, preemptions=0, seconds=0.0,
        )  # fmt: skip
        answers = await self._answers(llm, CACHE[state])
        if not counts:
            return
        for case, ran in zip(self._cases, answers, strict=True):
            answer, batch = ran.answered, ran.batch
            report.requests += 1
            report.tokens += sum(map(len, answer.tokens))
            for counted in COUNTED:
                setattr(report, counted, getattr(report, counted) + getattr(ran.usage, counted))
            for source, number in ran.usage.proposed_by_source.items():
                known = report.proposed_by_source
                known[source] = known.get(source, 0) + number
            report.preemptions += ran.preemptions
            count, first = _compare(self._expected[case.index], answer)
            report.differing_tokens += count
            report.differing_requests += first is not None
            if first is not None and self.found.first_difference is None:
                self.found.first_difference = self._difference(
                    condition, name, case, answer, first, batch
                )
        report.seconds = round(time.monotonic() - since, 1)
        self._add(report, state)

    def _add(self, report: PassReport, state: State) -> None:
        found = self.found
        found.passes.append(report)
        found.answers += report.requests
        found.tokens += report.tokens
        found.differing_tokens += report.differing_tokens
        proof = {
            "cold": True,
            "cached": report.cached_tokens,
            "repeated": report.cached_tokens and report.proposed_by_source.keys() - ALWAYS_THERE,
            "preempted": report.preemptions,
            "restarted": report.loaded_tokens,
        }[state]
        if not proof:
            found.unproven.append(report.name)
        self._tell(
            f"{report.name}: {report.requests} requests, {report.tokens} tokens, "
            f"{report.differing_tokens} differ, {report.seconds:.0f} s"
        )

    async def _answers(self, llm: AsyncLLM, cache: CacheOptions) -> list[_Ran]:
        """Return the answers to all requests, in order."""
        found: dict[int, _Ran] = {}
        for batch, places in _groups(len(self._cases)):
            room = asyncio.Semaphore(batch)

            async def ask(place: int, room: asyncio.Semaphore, batch: int) -> None:
                async with room:
                    found[place] = await self._ask(llm, self._cases[place], cache, batch)

            async with asyncio.TaskGroup() as group:
                for place in places:
                    group.create_task(ask(place, room, batch))
        return [found[place] for place in range(len(self._cases))]

    async def _ask(self, llm: AsyncLLM, case: Case, cache: CacheOptions, batch: int) -> _Ran:
        """Return the answer to one request.

        Every fourth request has a prediction, which differs slightly from the expected answer.
        """
        guess = _guess(self._expected[case.index].tokens[0]) if case.index % 4 == 3 else None
        preemptions: list[int] = []
        try:
            done = await _answer(llm, case, cache, guess, preemptions)
        except ForetokenError as error:
            return _Ran(_Answered(error=str(error)), Usage(), 0, batch)
        return _Ran(_answered(done), done.usage, sum(preemptions), batch)

    def _difference(
        self,
        condition: Condition,
        name: str,
        case: Case,
        answer: _Answered,
        first: tuple[int, int],
        batch: int,
    ) -> Difference:
        choice, position = first
        seed = case.params.seed or 0
        expected = self._expected[case.index]
        tokens = answer.tokens[choice] if choice < len(answer.tokens) else []
        end = answer.ends[choice][0] if choice < len(answer.ends) else ""
        record = RecordedRequest(
            id=f"certify-{case.index}",
            model=self._path,
            prompt=list(case.prompt),
            params=plain_params(case.params),
            seed=sibling_seed(seed, choice) if choice else seed,
            tokens=expected.tokens[choice],
            finish_reason=expected.ends[choice][0],
            options=engine_facts(condition.options),
            kernels=self.found.kernels,
            foretoken=__version__,
            v=VERSION,
        )
        return Difference(
            condition=name, request=record, kind=case.kind, index=case.index, choice=choice,
            position=position, batch=batch, found=tokens, found_finish_reason=end,
            error=answer.error, options=dict(condition.options),
            repeat=f"foretoken certify {self.found.model} --requests {self._number} --only {name}",
        )  # fmt: skip


def _counted(kinds: Iterator[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for kind in kinds:
        found[kind] = found.get(kind, 0) + 1
    return found


def _groups(number: int) -> Iterator[tuple[int, list[int]]]:
    """Yield each batch size with the indices of the requests that run in such batches.

    The indices are interleaved, so that each size gets requests of all kinds.
    """
    owners = [batch for batch, share in zip(BATCHES, SHARES, strict=True) for _ in range(share)]
    for batch in BATCHES:
        yield batch, [at for at in range(number) if owners[at % len(owners)] == batch]


async def _answer(
    llm: AsyncLLM,
    case: Case,
    cache: CacheOptions,
    guess: Sequence[int] | None,
    preemptions: list[int] | None = None,
) -> Completion:
    params = case.params if guess is None else replace(case.params, prediction=guess)
    answer = await llm.open(list(case.prompt), params, cache=cache)
    try:
        return await llm.finish(answer)
    finally:
        if preemptions is not None:
            preemptions += [each.request.num_preemptions for each in answer.generations]


def _answered(done: Completion) -> _Answered:
    return _Answered(
        [list(choice.token_ids) for choice in done.choices],
        [(choice.finish_reason, choice.stop_reason) for choice in done.choices],
    )


def _guess(tokens: Sequence[int]) -> list[int]:
    """Return a wrong prediction of the tokens: one is repeated, and one is left out."""
    return [*tokens[:3], *tokens[2:6], *tokens[7:]]


def _compare(expected: _Answered, found: _Answered) -> tuple[int, tuple[int, int] | None]:
    """Return the number of differing tokens, and the choice and index of the first one.

    A different finish reason counts as one token. If ``found`` is an error, all tokens differ.
    """
    if found.error:
        return max(1, sum(map(len, expected.tokens))), (0, 0)
    count, first = 0, None
    for choice, (left, right) in enumerate(zip(expected.tokens, found.tokens, strict=True)):
        places = [at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b]
        if len(left) != len(right):
            places += range(min(len(left), len(right)), max(len(left), len(right)))
        elif not places and expected.ends[choice] != found.ends[choice]:
            places = [len(left)]
        count += len(places)
        if places and first is None:
            first = choice, places[0]
    return count, first
