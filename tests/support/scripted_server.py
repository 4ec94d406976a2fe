"""A real server whose model says what the conversation asks it to.

``python tests/support/scripted_server.py --port 0 [flags of foretoken serve]``: the built-in
pair behind the real HTTP stack and the real engine. What stands between ``[[`` and ``]]`` in the
last message that is not the assistant's is the answer, literally, and then the end token; without
such marks it is "OK.". So whole agent loops become deterministic: a tool's result can say what
comes next.

The model computes everything as ever; then the wanted token of each position gets a logit that
wins. Grammars mask on top of that, so an answer in the wrong form is bent into the right one:
white space may differ from the script's, and where nothing of the script is allowed the model
speaks for itself.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from foretoken.api.build import engine_builder as builder
from foretoken.api.cli.commands import main
from foretoken.api.text.tokenizer import Tokenizer
from foretoken.core.execution.model_runner import LaunchedStep, ModelRunner
from foretoken.core.execution.step_layout import num_logits
from foretoken.core.interface.draft import Draft
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.sampling import SamplingMetadata
from foretoken.core.sampling.verifier import Verified

WINNING = 1e4  # a logit above all others, per byte of the token
UNMARKED = "OK."
END = "<|im_end|>"
MAX_KNOWN = 512
MARKED = re.compile(r"\[\[(.*?)\]\](?!\])", re.DOTALL)
_TURN = re.compile(r"<\|im_start\|>(?!assistant)")
_SPACE = frozenset(b" \t\r\n")


def wanted_answer(prompt: str) -> str:
    """The answer that a rendered prompt asks for: the last marked text of its last message."""
    last = _TURN.split(prompt)[-1]
    marked = MARKED.findall(last)
    return marked[-1] if marked else UNMARKED


def progress(answer: bytes, said: bytes) -> int | None:
    """The part of the answer that was said, white space aside; None for something else."""
    at = 0
    for byte in said:
        if answer[at : at + 1] != bytes([byte]):
            if byte in _SPACE:
                continue
            while answer[at : at + 1].isspace():
                at += 1
            if answer[at : at + 1] != bytes([byte]):
                return None
        at += 1
    return at


class Script:
    """One answer, and which tokens go on with it."""

    def __init__(self, answer: str, tokens: Tokens) -> None:
        self._answer = answer.encode()
        self._tokens = tokens
        self._usual: dict[int, int] = {}  # the tokenizer's own token at each of its boundaries
        at = 0
        for token_id in tokens.encode(answer):
            self._usual[at] = token_id
            at += len(tokens.bytes_of[token_id])

    def next_logits(self, said: bytes) -> dict[int, float]:
        """Logits of the tokens that may follow what was said, the best one highest."""
        at = progress(self._answer, said)
        if at is None:
            return {}
        rest = self._answer[at:]
        if not rest:
            return {self._tokens.end_id: WINNING}
        # In the order of their weights: with white space that the script lacks, without white
        # space that the grammar forbids, as it is written.
        logits = self._prefixes(b" " + rest, WINNING) | self._prefixes(rest.lstrip(), 1e2 * WINNING)
        logits |= self._prefixes(rest, 1e4 * WINNING)
        if at in self._usual:
            logits[self._usual[at]] = 1e8 * WINNING
        if rest.isspace():
            logits[self._tokens.end_id] = WINNING / 2
        return logits

    def _prefixes(self, rest: bytes, weight: float) -> dict[int, float]:
        """Every token that ``rest`` begins with: a grammar may allow a short one alone."""
        ids = self._tokens.ids_of
        lengths = range(1, self._tokens.longest + 1)
        return {
            ids[rest[:length]]: weight * length
            for length in lengths
            if length <= len(rest) and rest[:length] in ids
        }


class Tokens:
    """The vocabulary as bytes."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.load(folder, max_model_len=2**20)
        self.encode = tokenizer.encode_word
        self.end_id = tokenizer.vocab[END]
        self.bytes_of = {i: tokenizer.token_bytes(i) for i in tokenizer.vocab.values()}
        self.ids_of = {data: token_id for token_id, data in self.bytes_of.items() if data}
        self._decode = tokenizer.decode

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.ids_of))

    def text(self, token_ids: Sequence[int]) -> str:
        """Special tokens included."""
        return self._decode(token_ids, skip_special_tokens=False)

    def join(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of all these tokens together."""
        return b"".join(self.bytes_of.get(token_id, b"") for token_id in token_ids)


class ScriptedRunner(ModelRunner):
    """Steers every request along the answer that its prompt asks for."""

    is_async = False  # a pass that chooses, too, would choose by its own logits
    tokens: Tokens
    scripts: dict[SamplingMetadata, Script]  # of the last MAX_KNOWN requests

    @classmethod
    def over(cls, runner: ModelRunner, tokens: Tokens) -> ScriptedRunner:
        """The same model, pool and proposer."""
        steered = cls.__new__(cls)
        vars(steered).update(vars(runner), tokens=tokens, scripts={})
        return steered

    def _verify(self, work: LaunchedStep) -> list[Verified]:
        at, logits = 0, work.output.logits
        for row, draft in zip(work.layout.requests, work.layout.drafts, strict=True):
            num_draft = len(draft.token_ids)
            at += num_logits(row, num_draft, samples=row.samples)
            if row.samples:
                self._steer(row, draft, logits[at - num_draft - 1 : at])
            elif row.sampling.compares:
                self._steer_recorded(row, logits[at - row.num_pooled : at])
        return super()._verify(work)

    def _steer(self, row: ScheduledRequest, draft: Draft, logits: torch.Tensor) -> None:
        """``logits`` [len(draft) + 1, vocab]: after the row's tokens and after each drafted one."""
        script = self._script(row)
        said = self.tokens.join(row.tokens[row.sampling.prompt_len :])
        for node, values in enumerate(logits, start=-1):
            path = [] if node < 0 else draft.path(node)
            after = said + self.tokens.join([draft.token_ids[each] for each in path])
            _raise(script, after, values)

    def _steer_recorded(self, row: ScheduledRequest, logits: torch.Tensor) -> None:
        """``logits`` [num_pooled, vocab]: after each of the row's last tokens."""
        script, first = self._script(row), row.stop - len(logits) + 1
        for stop, values in enumerate(logits, first):
            _raise(script, self.tokens.join(row.tokens[row.sampling.prompt_len : stop]), values)

    def _script(self, row: ScheduledRequest) -> Script:
        if row.sampling not in self.scripts:
            prompt = self.tokens.text(row.tokens[: row.sampling.prompt_len])
            if len(self.scripts) >= MAX_KNOWN:
                del self.scripts[next(iter(self.scripts))]
            self.scripts[row.sampling] = Script(wanted_answer(prompt), self.tokens)
        return self.scripts[row.sampling]


def _raise(script: Script, said: bytes, values: torch.Tensor) -> None:
    for token_id, logit in script.next_logits(said).items():
        values[token_id] = logit


def build_scripted(model: str | os.PathLike[str] | None, config: Any) -> builder.LocalBuilt:
    """`build`, with a scripted model in the engine."""
    built = _build(model, config)
    built.engine.runner = ScriptedRunner.over(built.engine.runner, Tokens(built.path))
    return built


_build = builder.build

if __name__ == "__main__":
    builder.build = build_scripted
    sys.exit(main(["serve", "builtin", *sys.argv[1:]]))
