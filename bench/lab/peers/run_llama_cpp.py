"""llama.cpp as a worker, through the C interface that llama-cpp-python has.

Requests that run together are sequences of one context. Speculation is as llama.cpp's own
example has it: the draft decodes token by token, the target reads what was drafted in one batch.
Requests with a long shared prefix run one after another and keep it in the cache: llama.cpp
shares what is finished, and that is faster than all of them at once. So do requests of different
adapters, because a context has one at a time. Where a conversation goes on,
recurrent states are kept as llama.cpp's server keeps them: at two places before a prompt's end.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

if TYPE_CHECKING:
    from .llama_cpp_images import Images
    from .wire import (
        IMAGE_BEGIN,
        IMAGE_END,
        NO,
        NUM_VECTORS,
        YES,
        Call,
        Generate,
        Job,
        Numbers,
        Tokens,
        serve,
    )
else:  # run as a script, beside wire.py
    from llama_cpp_images import Images
    from wire import (
        IMAGE_BEGIN,
        IMAGE_END,
        NO,
        NUM_VECTORS,
        YES,
        Call,
        Generate,
        Job,
        Numbers,
        Tokens,
        serve,
    )

# Of llama.cpp's server: tokens before the end of a prompt at which it keeps a state.
KEPT_BEFORE_END = (4 + 512, 4)
PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
MAX_SEQS = 16
BATCH = 2048
CONTEXT = 4096


def _common(left: list[int], right: list[int]) -> int:
    """Leading tokens that are equal."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


class Model:
    """A model and one context; ``cached[seq]``: the tokens whose KV a sequence holds.

    ``states``: recurrent states of sequence 0 by their position, where they are kept at all.
    """

    def __init__(self, path: Path, job: Job) -> None:
        self._vocab_size = 0
        self._pick: Callable[[Any], int | float] = _greedy if job.mode != "score" else _yes
        self._adapters: dict[int, Any] = {}
        self._adapter = -1  # the one in use
        self.cached: Tokens = [[] for _ in range(MAX_SEQS)]
        self.states: dict[int, Any] = {}
        self._model = llama_cpp.llama_model_load_from_file(
            bytes(path), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"{path}: llama.cpp does not load it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max(CONTEXT, job.max_len)
        params.n_batch, params.n_ubatch = BATCH, 512
        params.n_seq_max, params.kv_unified = MAX_SEQS, True
        params.n_threads = params.n_threads_batch = job.threads
        if job.mode == "embed":
            params.embeddings, params.pooling_type = True, llama_cpp.LLAMA_POOLING_TYPE_LAST
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self.keeps_states = job.mode == "turn" and (
            llama_cpp.llama_model_is_hybrid(self._model)
            or llama_cpp.llama_model_is_recurrent(self._model)
        )

    def keep_state(self) -> None:
        """Keep the recurrent state of sequence 0 where it stands."""
        size = llama_cpp.llama_state_seq_get_size_ext(self._context, 0, PARTIAL)
        data = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data_ext(self._context, data, size, 0, PARTIAL)
        self.states[len(self.cached[0])] = data

    def go_back(self, num_tokens: int) -> None:
        """Have sequence 0 stand at the last kept state within its first ``num_tokens``, or at 0."""
        if num_tokens >= len(self.cached[0]):
            return
        self.states = {at: each for at, each in self.states.items() if at <= num_tokens}
        position = max(self.states, default=0)
        if position:
            data = self.states[position]
            args = (self._context, data, len(data), 0, PARTIAL)
            if not llama_cpp.llama_state_seq_set_data_ext(*args):
                raise RuntimeError(f"the state at {position} cannot be restored")
        self.keep(0, position)

    @property
    def handle(self) -> Any:  # noqa: ANN401 - llama.cpp's
        """The model, for other parts of llama.cpp."""
        return self._model

    def load_adapters(self, folder: Path) -> None:
        """Load ``adapter-0.gguf`` and so on."""
        for path in sorted(folder.glob("adapter-*.gguf")):
            adapter = llama_cpp.llama_adapter_lora_init(self._model, bytes(path))
            if not adapter:
                raise SystemExit(f"{path}: llama.cpp does not load it")
            self._adapters[int(path.stem.removeprefix("adapter-"))] = adapter

    def adapt(self, number: int) -> None:
        """Use an adapter from now on; what is cached is another one's."""
        if number == self._adapter:
            return
        self._adapter = number
        adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(self._adapters[number])
        llama_cpp.llama_set_adapters_lora(self._context, adapters, 1, (ctypes.c_float * 1)(1.0))
        for seq in range(MAX_SEQS):
            self.keep(seq, 0)

    def vectors(self, prompts: Tokens) -> Numbers:
        """The unit vector of each prompt, so many at a time as there are sequences."""
        found: Numbers = []
        for start in range(0, len(prompts), MAX_SEQS):
            part = prompts[start : start + MAX_SEQS]
            llama_cpp.llama_memory_clear(self._memory, True)
            rows = [(t, seq, at, True) for seq, p in enumerate(part) for at, t in enumerate(p)]
            self._submit(rows)
            found += [self._vector(seq) for seq in range(len(part))]
        return found

    def _vector(self, seq: int) -> list[float]:
        width = llama_cpp.llama_model_n_embd(self._model)
        numbers: Any = llama_cpp.llama_get_embeddings_seq(self._context, seq)
        vector = np.ctypeslib.as_array(numbers, (width,))
        unit: list[float] = (vector / np.linalg.norm(vector)).tolist()
        return unit

    def keep(self, seq: int, num_tokens: int) -> None:
        """Forget what a sequence holds beyond ``num_tokens``."""
        if num_tokens < len(self.cached[seq]):
            if not llama_cpp.llama_memory_seq_rm(self._memory, seq, num_tokens, -1):
                raise RuntimeError(f"sequence {seq} cannot go back to token {num_tokens}")
            del self.cached[seq][num_tokens:]

    def extend(self, news: dict[int, list[int]], *, all_logits: bool = False) -> Tokens:
        """Append tokens to sequences; the greedy next token after the last of each, or of all."""
        rows = [
            (token, seq, at, all_logits or at == len(new) - 1)
            for seq, new in news.items()
            for at, token in enumerate(new)
        ]
        found: dict[int, list[int]] = {seq: [] for seq in news}
        for start in range(0, len(rows), BATCH):
            self._decode(rows[start : start + BATCH], found)
        for seq, new in news.items():
            self.cached[seq] += new
        return [found[seq] for seq in news]

    def _decode(self, rows: list[tuple[int, int, int, bool]], found: dict[int, list[int]]) -> None:
        self._submit(rows)
        for row, (_, seq, _, wanted) in enumerate(rows):
            if wanted:
                found[seq].append(self._read(row))

    def see(self, images: Images, picture: str, prompt: list[int]) -> int:
        """Sequence 0 goes on with a picture; its rows are negative ids in what is cached.

        The greedy token behind the prompt's last row.
        """
        mark = -1 - zlib.crc32(picture.encode())
        before, behind = list(IMAGE_BEGIN), [*IMAGE_END, *prompt]
        ids = [*before, *[mark] * NUM_VECTORS, *behind]
        self.keep(0, min(_common(self.cached[0], ids), len(ids) - 1))
        if len(self.cached[0]) < len(ids) - len(behind):
            self.keep(0, 0)
            self._submit([(token, 0, at, False) for at, token in enumerate(before)])
            end = images.compute(picture, self._context, len(before))
            self.cached[0] = ids[:end]
        ((token,),) = self.extend({0: ids[len(self.cached[0]) :]})
        return token

    def _submit(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, seq, at, wanted) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = len(self.cached[seq]) + at
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = seq
            batch.logits[row] = wanted
        code = llama_cpp.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")

    def _read(self, row: int) -> Any:  # noqa: ANN401 - a token, or a number
        logits: Any = llama_cpp.llama_get_logits_ith(self._context, row)
        return self._pick(np.ctypeslib.as_array(logits, (self._vocab_size,)))


def _greedy(logits: Any) -> int:  # noqa: ANN401 - an array
    return int(logits.argmax())


def _yes(logits: Any) -> float:  # noqa: ANN401 - an array
    return float(logits[YES] - logits[NO])


@dataclass(slots=True)
class Row:
    """A request: its prompt, and what it said so far."""

    prompt: list[int]
    new: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """All of it."""
        return self.prompt + self.new


Guess = Callable[[dict[int, Row]], dict[int, list[int]]]
"""Function that guesses the tokens behind each row, by sequence."""


def load(job: Job) -> Generate:
    """Load the target and, for speculation, the draft."""
    llama_cpp.llama_backend_init()
    folder = Path(job.checkpoint, "gguf")
    target = Model(folder / f"{job.dtype}.gguf", job)
    guess = _guesser(job, folder)
    if job.mode == "image":
        return _seeing(target, Images(folder / "mmproj.gguf", target.handle, job.threads))
    if job.mode == "lora":
        target.load_adapters(folder)

    def generate(call: Call) -> Tokens | Numbers:
        if call.task == "embed":
            return target.vectors(call.prompts)
        if call.adapters:
            return _adapted(target, call)
        if call.num_shared:
            each = [Call([prompt], call.num_new) for prompt in call.prompts]
            return [_together(target, guess, one)[0] for one in each]
        return _together(target, guess, call)

    return generate


def _adapted(target: Model, call: Call) -> Tokens:
    """The requests of each adapter together, one adapter after another."""
    found: dict[int, list[int]] = {}
    for adapter in dict.fromkeys(call.adapters):
        own = [index for index, each in enumerate(call.adapters) if each == adapter]
        target.adapt(adapter)
        part = Call([call.prompts[index] for index in own], call.num_new)
        found |= dict(zip(own, _together(target, None, part), strict=True))
    return [found[index] for index in range(len(call.prompts))]


def _seeing(target: Model, images: Images) -> Generate:
    """One request at a time, with a picture before its prompt."""

    def generate(call: Call) -> Tokens:
        (prompt,) = call.prompts
        said = [target.see(images, call.image, prompt)]
        while len(said) < call.num_new:
            ((token,),) = target.extend({0: said[-1:]})
            said.append(token)
        return [said]

    return generate


def _guesser(job: Job, folder: Path) -> Guess | None:
    """Build the drafter: none, the draft model, or llama-cpp-python's own look-up."""
    if not job.depth:
        return None
    if job.mode == "lookup":
        look_up = LlamaPromptLookupDecoding(num_pred_tokens=job.depth)
        return lambda live: {
            seq: look_up(np.array(row.tokens)).tolist() for seq, row in live.items()
        }
    draft = Model(folder / f"{job.dtype}-draft.gguf", job)
    return lambda live: _draft(draft, live, job.depth)


def _together(target: Model, guess: Guess | None, call: Call) -> Tokens:
    """All prompts of a call at once."""
    rows = [Row(prompt) for prompt in call.prompts]
    for row, token in zip(rows, _prefill(target, rows), strict=True):
        row.new += token
    live = dict(enumerate(rows))
    while live := {seq: row for seq, row in live.items() if len(row.new) < call.num_new}:
        guesses = guess(live) if guess is not None else {}
        _verify(target, live, guesses)
    return [row.new[: call.num_new] for row in rows]


def _prefill(model: Model, rows: list[Row]) -> Tokens:
    """All of the prompts but what the sequence holds from before; its last token is read anew."""
    for seq in range(len(rows), MAX_SEQS):
        model.keep(seq, 0)
    if model.keeps_states:
        return [_prefill_with_states(model, rows[0].prompt)]
    for seq, row in enumerate(rows):
        model.keep(seq, min(_common(model.cached[seq], row.prompt), len(row.prompt) - 1))
    return model.extend({seq: row.prompt[len(model.cached[seq]) :] for seq, row in enumerate(rows)})


def _prefill_with_states(model: Model, prompt: list[int]) -> list[int]:
    """The same of one prompt, whose states are kept on the way."""
    model.go_back(min(_common(model.cached[0], prompt), len(prompt) - 1))
    for before_end in KEPT_BEFORE_END:
        if len(model.cached[0]) < len(prompt) - before_end:
            model.extend({0: prompt[len(model.cached[0]) : len(prompt) - before_end]})
            model.keep_state()
    return model.extend({0: prompt[len(model.cached[0]) :]})[0]


def _draft(draft: Model, live: dict[int, Row], depth: int) -> dict[int, list[int]]:
    """``depth`` greedy tokens for each row."""
    for seq, row in live.items():
        draft.keep(seq, _common(draft.cached[seq], row.tokens))
    news = {seq: row.tokens[len(draft.cached[seq]) :] for seq, row in live.items()}
    guesses: dict[int, list[int]] = {seq: [] for seq in live}
    for _ in range(depth):
        for seq, token in zip(live, draft.extend(news), strict=True):
            guesses[seq] += token
        news = {seq: guess[-1:] for seq, guess in guesses.items()}
    return guesses


def _verify(target: Model, live: dict[int, Row], guesses: dict[int, list[int]]) -> None:
    """Read the last token and what was drafted; keep what agrees and one token more."""
    news = {seq: row.new[-1:] + guesses.get(seq, []) for seq, row in live.items()}
    said = target.extend(news, all_logits=True)
    for (seq, row), tokens in zip(live.items(), said, strict=True):
        num_agreed = _common(guesses.get(seq, []), tokens)
        row.new += tokens[: num_agreed + 1]
        target.keep(seq, len(row.tokens) - 1)


if __name__ == "__main__":
    serve(load, ("llama-cpp-python",))
