"""The training loop of one stage: steps against the clock, checkpoints, resuming."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from . import models
from .measure import cpu_model
from .packing import Ids, Packer, in_order
from .recipe import Stage, cross_entropy

log = logging.getLogger(__name__)

WARM_UP = 0.02
DECAY_FROM = 0.35
LONG_ROW = 4096
LOG_SECONDS = 30.0
HELD_OUT_ROWS = 40

Loss = Callable[[torch.Tensor, float], torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """One stage's recipe. `minutes` is wall-clock time; `tokens` is tokens per optimiser step."""

    stage: Stage
    minutes: float
    seed: int = 0
    threads: int = 1
    row: int = 512
    micro_rows: int = 8
    tokens: int = 4096
    muon_lr: float = 0.01
    adam_lr: float = 3e-3
    weight_decay: float = 0.1
    checkpoint_minutes: float = 5.0
    long_from: float = 0.9
    compile: bool = False


@dataclass
class Progress:
    """State of a stopped run besides weights and moments; `seconds` includes checkpoints."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch: int = 0
    cursor: int = 0


def learning_rate_factor(done: float) -> float:
    """The share of the peak rate at the share `done` of the time: up, flat, straight to zero."""
    return max(0.0, min(done / WARM_UP, (1 - done) / (1 - DECAY_FROM), 1.0))


def optimizers(model: Qwen3ForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding (decayed) and the norms (not)."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    embedding = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" in name]
    norms = [p for p in model.parameters() if p.ndim < 2]
    adam = torch.optim.AdamW(
        [
            {"params": embedding, "weight_decay": settings.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ],
        lr=settings.adam_lr * settings.stage.rate,
        betas=(0.9, 0.95),
    )
    muon = torch.optim.Muon(
        matrices,
        lr=settings.muon_lr * settings.stage.rate,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


@torch.inference_mode()
def held_out_loss(model: Qwen3ForCausalLM, documents: list[Ids], limit: int | None = None) -> float:
    """Mean nats per token over the first `limit` windows of 1,024 tokens."""
    total, count = 0.0, 0
    for index, rows in enumerate(in_order(documents, 1024)):
        if index == limit:
            break
        with torch.autocast("cpu", torch.bfloat16):
            total += cross_entropy(model, rows).item() * (rows.shape[1] - 1)
        count += rows.shape[1] - 1
    return total / max(count, 1)


class Trainer:
    """One stage: a model, its optimisers, and the place in the data."""

    def __init__(
        self,
        settings: Settings,
        model: Qwen3ForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        folder: Path,
        loss: Loss,
        train: list[Ids],
        held: list[Ids],
    ) -> None:
        """`loss(rows, done)` is the training loss; `train` and `held` are documents of ids."""
        self.settings, self.model, self.tokenizer, self.folder = settings, model, tokenizer, folder
        self.loss, self.train, self.held = loss, train, held
        self.state_path = folder / ".state" / f"{settings.stage.name}.pt"
        self.optimizers = optimizers(model, settings)
        self.progress = Progress()
        self._resume()
        self.packer = Packer(
            train, settings.row, settings.seed, self.progress.epoch, self.progress.cursor
        )

    @property
    def done(self) -> float:
        """The share of the time budget that is spent."""
        return self.progress.seconds / (60 * self.settings.minutes)

    def _resume(self) -> None:
        if not self.state_path.exists():
            return
        state = torch.load(self.state_path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        log.info("%s: resumed at step %d", self.settings.stage.name, self.progress.step)

    def checkpoint(self) -> None:
        """Save the model folder and the state to resume from, each atomically."""
        models.save(self.model, self.tokenizer, self.folder / self.settings.stage.role)
        self._record()
        self.progress.epoch, self.progress.cursor = self.packer.epoch, self.packer.cursor
        self.state_path.parent.mkdir(exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }
        temporary = self.state_path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.state_path)
        held = held_out_loss(self.model, self.held, HELD_OUT_ROWS)
        log.info(
            "%s: checkpoint at step %d, held-out %.4f",
            self.settings.stage.name,
            self.progress.step,
            held,
        )

    def _record(self) -> None:
        """Write what the model card says of this stage beside the weights."""
        path = self.folder / self.settings.stage.role / "training.json"
        records = json.loads(path.read_text()) if path.exists() else {}
        records[self.settings.stage.name] = {
            "settings": asdict(self.settings),
            "steps": self.progress.step,
            "tokens_seen": self.progress.tokens,
            "seconds": round(self.progress.seconds, 1),
            "cpu": cpu_model(),
            "torch": torch.__version__,
        }
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(records, indent=2) + "\n")
        os.replace(temporary, path)

    def _batches(self) -> list[torch.Tensor]:
        """The micro-batches of one step; rows are long in the last part of the run."""
        settings = self.settings
        micro_rows = settings.micro_rows
        if self.done >= settings.long_from:
            micro_rows = 1
            if self.packer.row != LONG_ROW:
                self.packer = Packer(self.train, LONG_ROW, settings.seed + 1000)
        count = max(1, settings.tokens // (micro_rows * self.packer.row))
        return [self.packer.next(micro_rows) for _ in range(count)]

    def step(self) -> float:
        """One optimiser step; the mean loss of its batches, in nats per token."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * learning_rate_factor(self.done)
        batches = self._batches()
        total = 0.0
        for rows in batches:
            loss = self.loss(rows, self.done) / len(batches)
            torch.autograd.backward(loss)
            total += loss.item()
            self.progress.tokens += rows.shape[0] * (rows.shape[1] - 1)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.progress.step += 1
        return total

    def run(self) -> None:
        """Step until the time is spent, with a checkpoint now and then."""
        origin = time.monotonic() - self.progress.seconds
        logged, saved = self.progress.seconds, self.progress.seconds
        with tqdm(disable=not sys.stderr.isatty(), unit="step", initial=self.progress.step) as bar:
            while self.done < 1:
                loss = self.step()
                self.progress.seconds = time.monotonic() - origin
                bar.update()
                if self.progress.seconds - logged > LOG_SECONDS:
                    logged = self.progress.seconds
                    self._log(loss)
                if self.progress.seconds - saved > 60 * self.settings.checkpoint_minutes:
                    saved = self.progress.seconds
                    self.checkpoint()
        self.checkpoint()

    def _log(self, loss: float) -> None:
        progress = self.progress
        log.info(
            "%s: step %d, %.1f%%, loss %.4f, %d tokens, %.0f tokens/s",
            self.settings.stage.name,
            progress.step,
            100 * self.done,
            loss,
            progress.tokens,
            progress.tokens / progress.seconds,
        )
