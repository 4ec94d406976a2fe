"""The pair's shared tokenizer: byte-level BPE over 4,096 tokens, split for source code."""

from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ....api.build.model_files import BUILTIN
from .data import END_OF_TEXT, IM_END, IM_START

FOLDER = BUILTIN  # of the pair
VOCAB_SIZE = 4096
MAX_POSITIONS = 4096
NUM_RESERVED = 5
SPECIAL_TOKENS = [
    END_OF_TEXT,
    IM_START,
    IM_END,
    *(f"<|reserved_{i}|>" for i in range(NUM_RESERVED)),
]

# A word takes one leading space, a digit stands alone, newlines are never glued to punctuation, and
# an indentation is one run of spaces less the last, which the word after it takes (the idea of
# GPT-4's split, arranged for code).
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+|[^\S\r\n]+(?=[\r\n])|[^\S\r\n]+(?!\S)|\s"

# ChatML, and tools in the form of Hermes: see docs/tools.md.
CHAT_TEMPLATE = (FOLDER / "target" / "chat_template.jinja").read_text("utf-8")


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn the merges from `texts`; the special tokens take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return wrap(tokenizer)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer with its special tokens named and its chat template, ready to be saved."""
    fast: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=SPECIAL_TOKENS[1:2],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in a model folder."""
    loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded
