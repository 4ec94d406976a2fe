"""Trainer: trains a draft within a budget, with checkpoints and a log, and keeps the best draft."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ...core.errors import InvalidRequest
from ..heads.common.training import Student
from ..proposers.gap_model import FIRST_NUMBERS
from .conversations import Conversation, Shuffler, answer_pairs, frequent_ids, split
from .evaluator import TEMPERATURES, Acceptance, Evaluator, fit_gaps
from .new_drafts import Target, TrainOptions, make_student, save_student
from .status_line import status_line
from .teacher import Teacher

logger = logging.getLogger(__name__)

BATCH_TOKENS = 1024  # tokens; small, because at first more steps help more than less noise
MAX_LEN = 1024  # maximum length of a conversation in tokens; the rest is cut off
WARM_UP, DECAY_FROM = 0.03, 0.4  # end of the warm-up, start of the decay: shares of the budget
MUON_RATE, ADAM_RATE, NORM_RATE = 0.01, 2e-3, 1e-2
NUM_SCALED = 8  # number of conversations from which the scale of the taps is computed
CHECKPOINT_SECONDS, LOG_SECONDS = 60.0, 5.0
NUM_CHECKS = 10  # number of evaluations on held-out conversations during training
CHECKED, REPORTED = 8, 24  # conversations per temperature in a check and in the final report
STATE, LOG, REPORT, PLOT = "state.pt", "log.jsonl", "report.json", "curves.png"


@dataclass(slots=True)
class Progress:
    """Counters of a training run, which its checkpoints contain."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch: int = 0
    cursor: int = 0
    num_checks: int = 0
    best: float = 0.0  # tokens per step at the best check


@dataclass(slots=True)
class Outcome:
    """The result of a run."""

    progress: Progress
    was_stopped: bool
    acceptance: list[Acceptance] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """One draft, its optimisers and the position in the data.

    The draft is written to ``folder``, and the files of the training run to ``folder``/training.
    """

    def __init__(
        self,
        target: Target,
        found: Sequence[Conversation],
        options: TrainOptions,
        folder: Path,
    ) -> None:
        """Start a run, or resume one.

        Raises `InvalidRequest` if the data contains no answers, or if there is no checkpoint to
        resume.
        """
        self._target, self._options, self._folder = target, options, folder
        max_len = min(MAX_LEN, target.config.max_model_len)
        train, held = split(conversation.cut(max_len) for conversation in found)
        if not train:
            raise InvalidRequest("data contains no answer to train on", param="data")
        self.num_train, self.num_held = len(train), len(held)
        torch.manual_seed(options.seed)
        draft_ids, pairs = self._draft_ids(train), answer_pairs(train)
        self.student: Student = make_student(target, options, draft_ids, pairs)
        teacher = Teacher(target.decoder, self.student.taps, self._taught_ids(), max_len)
        self._teacher = teacher
        if options.init is None and self.student.taps:
            teacher.fit_tap_scale(train[:NUM_SCALED])
        self._evaluator = Evaluator(teacher, held, seed=options.seed)
        self._shuffler = Shuffler(train, BATCH_TOKENS, options.seed)
        self._generator = torch.Generator().manual_seed(options.seed)
        self._optimizers = make_optimizers(self.student)
        self.progress = Progress()
        self._stopped = False
        work = folder / "training"
        work.mkdir(parents=True, exist_ok=True)
        self._state, self._log = work / STATE, work / LOG
        if options.resume:
            self._load_state()
        else:
            self._log.unlink(missing_ok=True)

    def _draft_ids(self, train: Sequence[Conversation]) -> Tensor | None:
        config, count = self._target.config, self._options.draft_vocab
        if count is None or count >= config.vocab_size:
            return None
        return frequent_ids(train, count, config.vocab_size, config.eos_token_ids)

    def _taught_ids(self) -> Tensor | None:
        """Return the ids that the student can draft, or None for all.

        The ids of a head that was loaded from a folder may differ from `_draft_ids`.
        """
        ids = getattr(self.student.module, "draft_ids", None)
        return ids if isinstance(ids, Tensor) else None

    @property
    def done(self) -> float:
        """Share of the budget that is spent; it may exceed 1."""
        if self._options.tokens is not None:
            return self.progress.tokens / self._options.tokens
        return self.progress.seconds / (60 * (self._options.minutes or 1))

    # -- the loop -------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Train until the budget is spent or Ctrl-C is pressed; leave the best draft on disk."""
        with self._stopping_gently(), self._showing() as show:
            saved = logged = time.monotonic()
            losses: list[float] = []
            while self.done < 1 and not self._stopped:
                losses.append(self.step())
                show(losses[-1])
                now = time.monotonic()
                if now - logged > LOG_SECONDS:
                    self._note(loss=sum(losses) / len(losses), rate=self._rate())
                    logged, losses = now, []
                if self.done * NUM_CHECKS >= self.progress.num_checks + 1:
                    self._check()
                if now - saved > CHECKPOINT_SECONDS:
                    self.save_state()
                    saved = now
        self.save_state()
        if not self.progress.best:  # The run was stopped before the first check.
            self._keep()
        return self._report()

    def step(self) -> float:
        """Train on one batch; return its loss."""
        began = time.monotonic()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * self._rate()
        taught = self._teacher(self._shuffler.next())
        with torch.autocast(taught.taps.device.type, torch.bfloat16):
            loss = self.student.loss(taught, self._generator)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.student.module.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        progress = self.progress
        progress.step += 1
        progress.tokens += taught.num_tokens
        progress.seconds += time.monotonic() - began
        progress.epoch, progress.cursor = self._shuffler.epoch, self._shuffler.cursor
        return loss.item()

    def _rate(self) -> float:
        """Return the learning rate as a share of its peak: warm-up, constant, linear decay to 0."""
        done = self.done
        return max(0.0, min(done / WARM_UP + 0.02, (1 - done) / (1 - DECAY_FROM), 1.0))

    def _check(self) -> None:
        """Evaluate on held-out answers; write the draft if it is the best so far."""
        self.progress.num_checks += 1
        found = [self._evaluator.acceptance(self.student, t, CHECKED)[0] for t in (0.0, 1.0)]
        score = sum(each.tokens_per_step for each in found) / len(found)
        self._note(held_out=[each.to_dict() for each in found])
        if score > self.progress.best:
            self.progress.best = score
            self._keep()

    def _keep(self) -> None:
        self._save({})

    def _save(self, extra: Mapping[str, object]) -> None:
        scale = self._teacher.tap_scale
        save_student(self.student, self._target, self._folder, extra, scale)

    # -- state ----------------------------------------------------------------------------------

    def save_state(self) -> None:
        """Write a checkpoint from which the run can be resumed with identical results."""
        state = {
            "options": asdict(self._options) | {"resume": False},
            "module": self.student.module.state_dict(),
            "draft_ids": self._taught_ids(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "generator": self._generator.get_state(),
            "tap_scale": self._teacher.tap_scale,
            "progress": asdict(self.progress),
        }
        new = self._state.with_suffix(".new")
        torch.save(state, new)
        os.replace(new, self._state)

    def _load_state(self) -> None:
        if not self._state.exists():
            raise InvalidRequest(f"resume: {self._folder} contains no checkpoint", param="resume")
        state = torch.load(self._state, weights_only=True)
        wanted = asdict(self._options) | {"resume": False}
        budget = {"minutes", "tokens"}
        for name in wanted.keys() - budget:
            if wanted[name] != state["options"][name]:
                was = state["options"][name]
                message = f"resume: the run in {self._folder} had {name} {was}, not {wanted[name]}"
                raise InvalidRequest(message, param=name)
        if not _same(state["draft_ids"], self._taught_ids()):
            message = (
                "resume: the data has changed since the first run: its most frequent tokens differ"
            )
            raise InvalidRequest(message, param="data")
        self.student.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._generator.set_state(state["generator"])
        self._teacher.tap_scale = state["tap_scale"]
        self.progress = Progress(**state["progress"])
        self._shuffler.seek(self.progress.epoch, self.progress.cursor)

    @contextmanager
    def _stopping_gently(self) -> Iterator[None]:
        """Handle Ctrl-C: the first one ends the loop after the current batch.

        The second one raises KeyboardInterrupt.
        """

        def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as signals are
            if self._stopped:
                raise KeyboardInterrupt
            self._stopped = True
            print("stopping; the best draft so far is kept", file=sys.stderr)

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    # -- display --------------------------------------------------------------------------------

    def _note(self, **values: object) -> None:
        """Write a line to the log, with the counters and ``values``."""
        progress = self.progress
        known = {"step": progress.step, "tokens": progress.tokens}
        line = known | {"seconds": round(progress.seconds, 3)} | values
        with self._log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")

    @contextmanager
    def _showing(self) -> Iterator[Callable[[float], None]]:
        """Show the progress on a terminal, and each loss in the program's log."""
        with status_line() as show:

            def note(loss: float) -> None:
                logger.debug("loss %.3f", loss)
                rate = self.progress.tokens / max(self.progress.seconds, 1e-9)
                done, best = min(1.0, self.done), self.progress.best
                show(f"{done:.1%}, loss {loss:.3f}, {rate:.0f} tokens/s, best {best:.2f}")

            yield note

    def _report(self) -> Outcome:
        """Measure the draft, fit its gap models, and write the report.

        The draft is written again if it is no worse than the best one so far, or if the budget is
        spent.
        """
        outcome = Outcome(self.progress, self._stopped)
        gaps: dict[str, object] = {}
        for temperature in TEMPERATURES:
            acceptance, ranked = self._evaluator.acceptance(self.student, temperature, REPORTED)
            outcome.acceptance.append(acceptance)
            kind = {0.0: "greedy", 1.0: "sampled"}.get(temperature)
            if kind is not None:
                first = FIRST_NUMBERS[kind == "sampled"]
                gaps[kind] = [round(n, 3) for n in fit_gaps(ranked, first)]
        outcome.report = {
            "options": asdict(self._options),
            "progress": asdict(self.progress),
            "conversations": {"learnt": self.num_train, "held_out": self.num_held},
            "acceptance": [each.to_dict() for each in outcome.acceptance],
            "odds": gaps,
        }
        final = sum(each.tokens_per_step for each in outcome.acceptance[::2]) / 2
        if final >= self.progress.best or self.done >= 1:
            self._save({"odds": gaps})
        write_report(self._folder, outcome.report)
        return outcome


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write ``training/report.json``, and the plot if matplotlib is installed."""
    work = folder / "training"
    (work / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plot(work / LOG, work / PLOT)


def make_optimizers(student: Student) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of layers, and AdamW for tables, norms and biases."""
    named = [(n, p) for n, p in student.module.named_parameters() if p.requires_grad]
    is_table = {n: any(word in n for word in ("embed", "markov", "lm_head")) for n, _ in named}
    matrices = [p for n, p in named if p.ndim == 2 and not is_table[n]]
    tables = [p for n, p in named if p.ndim == 2 and is_table[n]]
    vectors = [p for _, p in named if p.ndim == 1]
    muon = torch.optim.Muon(
        matrices, lr=MUON_RATE * student.rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    groups: list[dict[str, Any]] = [
        {"params": tables, "lr": ADAM_RATE * student.rate},
        {"params": vectors, "lr": NORM_RATE * student.rate},
    ]
    adam = torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, 0.95))
    optimizers: list[torch.optim.Optimizer] = [muon, adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def _same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return torch.equal(ours.cpu(), theirs.cpu())


def plot(log: Path, image: Path) -> bool:
    """Plot loss and tokens per step over training tokens; return False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    losses = [(each["tokens"], each["loss"]) for each in lines if "loss" in each]
    checks = [(each["tokens"], each["held_out"]) for each in lines if "held_out" in each]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    left.plot(*zip(*losses, strict=True) if losses else ((), ()))
    left.set(xlabel="training tokens", ylabel="loss")
    for index, label in enumerate(("T 0", "T 1")):
        points = [(tokens, found[index]["tokens_per_step"]) for tokens, found in checks]
        right.plot(*zip(*points, strict=True) if points else ((), ()), label=label, marker="o")
    right.set(xlabel="training tokens", ylabel="tokens per step on held-out data")
    right.legend()
    figure.tight_layout()
    figure.savefig(image)
    pyplot.close(figure)
    return True
