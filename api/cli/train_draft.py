"""``foretoken train-draft``: read data, train a draft, report its acceptance and speed."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import ForetokenError, InvalidRequest

if TYPE_CHECKING:
    from ...draft.training.conversations import Conversation, Messages
    from ...draft.training.evaluator import Acceptance
    from ...draft.training.new_drafts import Target, TrainOptions
    from ..text.tokenizer import Tokenizer

DEFAULT_MINUTES = 10.0
LAYERS, BLOCK = 2, 7
ANSWER_TOKENS = 384  # maximum number of tokens of a regenerated answer
NUM_TIMED, TIMED_TOKENS = 8, 96  # number of prompts, and tokens of each, to time a draft with
EXAMPLE = """\
examples:
  foretoken train-draft --target smollm2 --data chats.jsonl --kind block --out my-head --minutes 30
  foretoken train-draft --target ./Qwen3-8B --data traffic/ --kind eagle3 --init ./published-head \\
      --out tuned-head --tokens 10000000 --draft-vocab 32000
  foretoken serve smollm2 --draft auto,my-head

data: text files; .jsonl files with {"messages": [...]}, {"text": ...} or, a line each, traffic that
`foretoken serve --record-traffic` wrote; folders of such files. OUT holds the draft; OUT/training
the log (log.jsonl), the report, a plot if matplotlib is installed, and what --resume needs.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_files(parser)
    _add_training(parser)
    _add_head(parser)
    _add_machine(parser)


def _add_files(parser: argparse.ArgumentParser) -> None:
    from ...draft.training.new_drafts import TRAINED

    add = parser.add_argument
    kinds = "; ".join(f"{name}: {kind.about}" for name, kind in TRAINED.items())
    add("--target", required=True, metavar="MODEL", help="model that the draft is for")
    add(
        "--data",
        required=True,
        nargs="+",
        metavar="PATH",
        help="training data: files and folders; formats are listed below",
    )
    add(
        "--kind",
        required=True,
        choices=tuple(TRAINED),
        help=f"kind of draft; {kinds}",
    )
    add("--out", required=True, metavar="DIR", help="folder for the draft")
    add("--resume", action="store_true", help="resume the stopped run in OUT")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--minutes",
        type=_above_zero,
        metavar="N",
        help=f"training time in minutes ({DEFAULT_MINUTES:g} unless --tokens is given); "
        "regenerating answers may take as much time again",
    )
    budget.add_argument(
        "--tokens",
        type=_count,
        metavar="N",
        help="number of tokens to train on, instead of --minutes",
    )
    add(
        "--init",
        metavar="target|DIR",
        help="initial weights: the target's layers (target), or the draft in a folder; by default "
        f"target for {_begun('target')}, random for {_begun(None)}",
    )
    add(
        "--regenerate",
        choices=("auto", "on", "off"),
        default="auto",
        help="data for which the target generates new answers to train on: chats (auto), also "
        "recorded traffic and texts (on), or none (off) (auto)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the training (0); the same seed and data give the same draft",
    )


def _add_head(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name, does in (
        ("layers", f"number of layers ({LAYERS})"),
        ("block", f"tokens drafted in one pass ({BLOCK})"),
        (
            "draft_vocab",
            "size of the draft's vocabulary, its N most frequent tokens (all); smaller is faster",
        ),
    ):
        flag, kinds = f"--{name.replace('_', '-')}", " or ".join(_kinds_with(name))
        add(flag, type=_count, metavar="N", help=f"{does} (only for kind {kinds})")


def _add_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device of the training; auto: cuda if available",
    )
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="data type of the target's weights; auto: as in serve",
    )
    add("--threads", type=_count, metavar="N", help="number of CPU threads (all cores)")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 2**40:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return int(text)


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e6:  # false for NaN, too
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return number


def train_draft(parsed: argparse.Namespace) -> int:
    """Run the command and return the exit status. Raises `InvalidRequest` for invalid arguments."""
    _check(parsed)
    from ...draft.training.answers import AnswerOptions
    from ...draft.training.conversations import read_data
    from ...draft.training.gathering import GatherOptions, gather
    from ...draft.training.trainer import MAX_LEN, Trainer, write_report

    target = _load_target(parsed)
    target.decoder.ops.set_threads(parsed.threads or len(os.sched_getaffinity(0)))
    out = Path(parsed.out)
    with _Encoder(target) as encoder:
        found = read_data([Path(each) for each in parsed.data], encoder, text_len=MAX_LEN)
    options = _options(parsed)
    gathering = GatherOptions(
        regenerate=parsed.regenerate,
        minutes=options.minutes,
        answers=AnswerOptions(max_tokens=ANSWER_TOKENS),
    )
    talks = gather(found, target, out, gathering)
    trainer = Trainer(target, talks, options, out)
    print(f"{trainer.num_train} conversations to train on, {trainer.num_held} held out")
    outcome = trainer.run()
    _print_acceptance(outcome.acceptance)
    if not outcome.was_stopped:
        prompts = [talk for talk in talks if talk.is_held_out and talk.prompt_len] or talks
        outcome.report["tokens_per_s"] = _print_rates(parsed, prompts)
        write_report(out, outcome.report)
    print(f"{out}: serve it with --draft auto,{out}")
    return 130 if outcome.was_stopped else 0


def _check(parsed: argparse.Namespace) -> None:
    """Check the arguments before anything is loaded."""
    out = Path(parsed.out)
    if out.exists() and not out.is_dir():
        raise InvalidRequest(f"out: {out} is not a folder", param="out")
    state = out / "training" / "state.pt"
    if state.exists() and not parsed.resume:
        message = (
            f"out: {out} already contains a run: continue it with --resume, or use another folder"
        )
        raise InvalidRequest(message, param="out")
    if parsed.resume and not state.exists():
        raise InvalidRequest(f"resume: {out} contains no checkpoint of a run", param="resume")
    for each in parsed.data:
        if not Path(each).exists():
            raise InvalidRequest(f"data: {each} does not exist", param="data")
    if parsed.init not in (None, "target") and not Path(parsed.init).is_dir():
        raise InvalidRequest(f"init: {parsed.init} is not a folder", param="init")
    for name in ("layers", "block", "draft_vocab"):
        kinds = _kinds_with(name)
        if getattr(parsed, name) is not None and parsed.kind not in kinds:
            raise InvalidRequest(f"{name} is only for {' and '.join(kinds)}", param=name)


def _begun(init: str | None) -> str:
    """Return the kinds of drafts for which ``init`` is the default of ``--init``, as a text."""
    from ...draft.training.new_drafts import TRAINED

    return " and ".join(name for name, kind in TRAINED.items() if kind.init == init)


def _kinds_with(option: str) -> list[str]:
    """Return the kinds of drafts that have the option."""
    from ...draft.training.new_drafts import TRAINED

    return [name for name, kind in TRAINED.items() if option in kind.options]


def _options(parsed: argparse.Namespace) -> TrainOptions:
    from ...draft.training.new_drafts import TRAINED, TrainOptions

    minutes = parsed.minutes
    if minutes is None and parsed.tokens is None:
        minutes = DEFAULT_MINUTES
    return TrainOptions(
        kind=parsed.kind,
        minutes=minutes,
        tokens=parsed.tokens,
        init=parsed.init or TRAINED[parsed.kind].init,
        layers=parsed.layers or LAYERS,
        block=parsed.block or BLOCK,
        draft_vocab=parsed.draft_vocab,
        resume=parsed.resume,
        seed=parsed.seed,
    )


def _load_target(parsed: argparse.Namespace) -> Target:
    from ...core.model.decoder import OwnDecoder
    from ...core.model.loader import load_decoder
    from ...core.ops.machine.device import choose_device
    from ...draft.training.new_drafts import Target
    from ..build.drafts import tokenizer_json
    from ..build.model_files import find_model

    path = find_model(parsed.target).path
    device = choose_device(parsed.device)
    decoder = load_decoder(path, dtype=parsed.dtype, device=device, backend="auto", impl="own")
    assert isinstance(decoder, OwnDecoder)  # drafts are initialised with its weights
    return Target(decoder, path, tokenizer_json(path))


class _Encoder:
    """The target's tokenizer, with synchronous methods."""

    def __init__(self, target: Target) -> None:
        from ..text.tokenizer import Tokenizer

        self._runner = asyncio.Runner()
        longest = target.config.max_model_len
        self._tokenizer: Tokenizer = Tokenizer.load(target.path, max_model_len=longest)
        self.fingerprint = self._tokenizer.fingerprint()

    def __enter__(self) -> _Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        self._tokenizer.close()
        self._runner.close()

    def encode(self, text: str) -> list[int]:
        return self._runner.run(self._tokenizer.encode_prediction(text))

    def encode_chat(self, messages: Messages, *, asks: bool) -> list[int]:
        options: dict[str, Any] = {"add_generation_prompt": asks}
        return self._runner.run(self._tokenizer.encode_chat(messages, options))


# -- output --------------------------------------------------------------------------------------


def _print_acceptance(found: Sequence[Acceptance]) -> None:
    found = [each for each in found if each.by_position]
    if not found:
        print("\nacceptance was not measured: the data has too few conversations to hold one out")
        return
    print("\nheld-out answers: fraction of draft tokens accepted, by position")
    for each in found:
        shown = " ".join(f"{share:.2f}" for share in each.by_position)
        best = " ".join(f"{share:.2f}" for share in each.best_4)
        print(
            f"  T {each.temperature:<3g} chain {shown}  ({each.tokens_per_step:.2f} "
            "tokens per step)"
        )
        print(f"        best of 4 {best}")


def _print_rates(
    parsed: argparse.Namespace, talks: Sequence[Conversation]
) -> dict[str, dict[str, float]]:
    """Return the tokens per second of single requests, without and with the new draft."""
    prompts = [list(talk.tokens[: talk.prompt_len or 32]) for talk in talks[:NUM_TIMED]]
    found = {}
    for name, draft in (("before", "auto"), ("with it", f"auto,{parsed.out}")):
        try:
            found[name] = _rates(parsed, prompts, draft)
        except ForetokenError as error:
            print(f"tokens per second could not be measured: {error}", file=sys.stderr)
            return found
    for temperature in ("0", "1"):
        before, now = (found[name][temperature] for name in ("before", "with it"))
        ratio = now / before
        print(
            f"  T {temperature}: {before:.0f} tokens/s before, {now:.0f} with the draft "
            f"({ratio:.2f}x)"
        )
    return found


def _rates(
    parsed: argparse.Namespace, prompts: Sequence[list[int]], draft: str
) -> dict[str, float]:
    from ..sdk.llm import LLM
    from ..types.sampling_params import SamplingParams

    options = {"device": parsed.device, "dtype": parsed.dtype, "threads": parsed.threads}
    options["generation_config"] = "none"  # training uses a temperature and no filters
    found = {}
    with LLM(parsed.target, draft=draft, **options) as llm:
        for temperature in (0.0, 1.0):
            count, seconds = 0, 0.0
            for index, prompt in enumerate([prompts[0], *prompts]):
                params = SamplingParams(
                    temperature=temperature,
                    max_tokens=TIMED_TOKENS,
                    seed=index,
                    cache_salt=f"{temperature}-{index}",  # prevents drafting from earlier requests
                )
                began = time.perf_counter()
                num_tokens = len(llm.generate(prompt, params).token_ids)
                if index:  # the first request warms up
                    seconds += time.perf_counter() - began
                    count += num_tokens
            found[f"{temperature:g}"] = count / seconds
    return found
