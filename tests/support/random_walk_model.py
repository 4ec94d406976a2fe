"""A model without weights: what its grammars allow, and answers at random within them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken
from transformers import AutoTokenizer

from foretoken import SamplingParams
from foretoken.api.build.model_files import BUILTIN
from foretoken.api.parsing.families import FAMILIES
from foretoken.api.parsing.output_format import Syntax
from foretoken.api.structured.compiler import Grammars
from foretoken.api.structured.matcher import Grammar
from foretoken.api.text.tokenizer import Tokenizer

MARKS = sorted({mark for family in FAMILIES.values() for mark in family.marks})
MARKS += ["<think>", "</think>"]
END = 2  # <|im_end|>


class Model:
    """A tokenizer, what is compiled for it, and one that answers at random within a grammar."""

    def __init__(self, marks: str, runner: asyncio.Runner, more: Sequence[str] = ()) -> None:
        hf = AutoTokenizer.from_pretrained(BUILTIN / "target")
        if marks != "spelt":
            is_special, names = marks == "special", dict.fromkeys([*MARKS, *more])
            tokens = [AddedToken(m, normalized=False, special=is_special) for m in names]
            hf.add_tokens(tokens, special_tokens=marks == "special")
        self.tokenizer = Tokenizer(hf, max_model_len=4096)
        self.grammars = Grammars(self.tokenizer, len(hf), frozenset({END}))
        self._runner = runner
        texts = [self.tokenizer.token_bytes(i) for i in range(len(hf))]
        ends = (  # of free text
            "</parameter>", "</arg_value>", '<|"|>', "<escape>", "<|end|>", "<|eom|>",
            "</atem:parameter>", "</｜DSML｜parameter>", "</｜GCML｜parameter>",
            "<|close|>argument<|sep|>", "]<]minimax[>[</text>", "]<]minimax[>[</more>",
            "]<]minimax[>[</a>", "\n]<]minimax[>[</tool_call>",
        )  # fmt: skip
        self._tag_ends = [self.tokenizer.encode_word(end) for end in ends]
        self._weights = np.array([40.0 if set(b'"}])>\n<') & set(t) else 1.0 for t in texts])

    def close(self) -> None:
        self.tokenizer.close()
        self.grammars.close()

    def syntax(self, family: str, *, reasoning: str = "none", template: str = "") -> Syntax:
        vocab, special = self.tokenizer.vocab, self.tokenizer.special_ids
        return Syntax.choose(
            template, vocab, special, tool_parser=family, reasoning_parser=reasoning
        )

    def grammar(self, text: str | None) -> Grammar:
        assert text is not None
        grammar = self._runner.run(self.grammars.compile(SamplingParams(grammar=text)))
        assert grammar is not None
        return grammar

    def accepts(self, text: str | None, answer: str) -> bool:
        """Whether the grammar allows exactly this and then the end."""
        matcher = self.grammar(text).matcher(frozenset({END}))
        ids = self.tokenizer.encode_word(answer)
        mask = matcher.allowed(array("i"), 0, ids)
        return mask is not None and bool(mask[END])

    def walk(self, text: str | None, seed: int, begin: str = "") -> list[int]:
        """An answer at random; it ends soon after it may."""
        matcher, rng = self.grammar(text).matcher(frozenset({END})), np.random.default_rng(seed)
        ids = array("i", self.tokenizer.encode_word(begin))
        for _ in range(600):
            mask = matcher.allowed(ids, 0, ())
            assert mask is not None
            if mask[END] and rng.random() < 0.5:
                return list(ids)
            weights = np.where(mask, self._weights, 0.0)
            weights[END] = 0.0
            if not weights.any():
                return list(ids)
            if rng.random() < 0.2:
                fits = [e for e in self._tag_ends if matcher.allowed(ids, 0, e) is not None]
                if fits:
                    ids.extend(fits[int(rng.integers(len(fits)))])
                    continue
            ids.append(int(rng.choice(len(weights), p=weights / weights.sum())))
        raise AssertionError(f"no end: {self.tokenizer.decode(ids)}")

    def spell(self, ids: list[int], shown: frozenset[int]) -> str:
        detokenizer = self.tokenizer.detokenizer((), shown)
        return "".join([*map(detokenizer.decode, ids), detokenizer.finish()])
