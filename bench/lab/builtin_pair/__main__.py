"""Train the built-in pair: `python -m foretoken.bench.lab.builtin_pair all`.

Every stage has a budget of wall-clock time, and the learning rate follows the share of it that is
spent: it reaches zero at the deadline, however fast the machine is. A stage that was stopped goes
on from its last checkpoint.
"""

import argparse
import logging
import sys
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM
from transformers.utils import logging as hf_logging

from . import models
from .data import Corpus, load_corpus
from .measure import measure, write_metrics
from .packing import encode, encode_cut
from .recipe import (
    STAGES,
    Mix,
    Stage,
    StageName,
    copying_loss,
    cross_entropy,
    mixed_loss,
    with_repeats,
)
from .tokenizer import FOLDER, load_tokenizer, train_tokenizer
from .trainer import Loss, Settings, Trainer

log = logging.getLogger(__name__)

MINUTES: dict[StageName, float] = {
    "target": 60,
    "draft": 20,
    "copy": 15,
    "match": 5,
    "refine": 5,
}


def use_attention(model: Qwen3ForCausalLM, implementation: str) -> None:
    """Switch the attention function, only if it is another."""
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)


def stage_loss(model: Qwen3ForCausalLM, other: Qwen3ForCausalLM | None, settings: Settings) -> Loss:
    """The stage's loss, compiled for the short rows if asked; `other` is the model to match."""
    stage, fast_plain, fast_mixed = settings.stage, cross_entropy, mixed_loss
    if settings.compile:
        fast_plain, fast_mixed = torch.compile(cross_entropy), torch.compile(mixed_loss)

    generator = torch.Generator().manual_seed(settings.seed)

    def loss(rows: torch.Tensor, done: float) -> torch.Tensor:
        """Loss of ``rows`` [batch, length + 1] token ids; ``done``: share of the stage, 0 to 1."""
        copying = done < stage.repeat_until
        use_attention(model, "eager" if copying else "sdpa")
        short = rows.shape[1] == settings.row + 1
        mix = next(mix for start, mix in reversed(stage.phases) if done >= start)
        with torch.autocast("cpu", torch.bfloat16):
            if copying:
                return copying_loss(model, *with_repeats(rows, stage.repeat_rows, generator))
            if other is None or mix == Mix(ce=1):
                return (fast_plain if short else cross_entropy)(model, rows)
            return (fast_mixed if short else mixed_loss)(model, other, rows, mix)

    return loss


def prepare_tokenizer(corpus: Corpus, folder: Path) -> None:
    """Train the tokenizer and put it into both model folders."""
    tokenizer = train_tokenizer(corpus.train_code + corpus.train_chat)
    for role in models.SHAPES:
        tokenizer.save_pretrained(folder / role)
        models.name_plain_tokenizer_class(folder / role)


def load_other(role: models.Role, folder: Path) -> Qwen3ForCausalLM | None:
    """The other model of the pair, to be matched: None while it has no weights."""
    other = folder / ("draft" if role == "target" else "target")
    if not (other / "model.safetensors").exists():
        return None
    return models.load(other).requires_grad_(False)


def train_stage(settings: Settings, corpus: Corpus, folder: Path) -> None:
    """Train one model of the pair for one stage, and save it."""
    torch.set_num_threads(settings.threads)
    stage = settings.stage
    tokenizer = load_tokenizer(folder / stage.role)
    train = encode_cut(tokenizer, corpus.train_code + corpus.train_chat)
    held = encode(tokenizer, corpus.held_code)
    other = load_other(stage.role, folder)
    fresh = models.build(stage.role, settings.seed)
    model = fresh if stage.fresh else models.load(folder / stage.role).train()
    log.info("%s: %d parameters", stage.name, models.num_parameters(model))
    log.info("%s: %d tokens of data", stage.name, sum(map(len, train)))
    loss = stage_loss(model, other, settings)
    Trainer(settings, model, tokenizer, folder, loss, train, held).run()


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.builtin_pair", description=__doc__
    )
    parser.add_argument("steps", nargs="+", choices=("tokenizer", *STAGES, "measure", "all"))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder for target/ and draft/")
    for name, minutes in MINUTES.items():
        parser.add_argument(f"--{name}-minutes", type=float, default=minutes)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--adam-lr", type=float, default=Settings.adam_lr, help="peak rate of embedding and norms"
    )
    parser.add_argument(
        "--muon-lr", type=float, default=Settings.muon_lr, help="peak rate of the matrices"
    )
    parser.add_argument(
        "--tokens", type=int, default=Settings.tokens, help="tokens per optimiser step"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the step (needs a C++ compiler)"
    )
    return parser.parse_args(arguments)


def settings_of(stage: Stage, options: argparse.Namespace) -> Settings:
    """One stage's recipe from the command line."""
    given = vars(options)
    shared = {name: given[name] for name in Settings.__dataclass_fields__ if name in given}
    return Settings(stage=stage, minutes=given[f"{stage.name}_minutes"], **shared)


def main(arguments: list[str] | None = None) -> None:
    """Run the steps that the command line names, in their natural order."""
    options = parse_arguments(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for name in ("transformers", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    steps = set(options.steps)
    corpus = load_corpus(seed=options.seed)
    if steps & {"tokenizer", "all"}:
        prepare_tokenizer(corpus, options.folder)
    for name, stage in STAGES.items():
        if steps & {name, "all"}:
            train_stage(settings_of(stage, options), corpus, options.folder)
    if steps & {"measure", "all"}:
        report = measure(options.folder, corpus, threads=options.threads, seed=options.seed)
        write_metrics(options.folder, report)


if __name__ == "__main__":
    main()
