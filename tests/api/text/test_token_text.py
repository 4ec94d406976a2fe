"""TokenText: text between the tokens of a target and of a draft model with another tokenizer."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from foretoken.api.build.model_files import BUILTIN
from foretoken.api.text.token_text import TokenText
from foretoken.api.text.tokenizer import Tokenizer
from foretoken.api.text.tokenizer_cache import LoadedTokenizer


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer.load(BUILTIN / "draft", max_model_len=99)


@pytest.fixture(scope="module")
def marked() -> Tokenizer:
    """SentencePiece's way: spaces are marks, one is put in front, BOS before and EOS behind."""
    words = ["<s>", "</s>", "<unk>", "\u2581", "\u2581a", "\u2581b", "a", "b", "\ue000"]
    words += [f"<0x{value:02X}>" for value in range(256)]
    vocab = {word: at for at, word in enumerate(words)}
    merges = [("\u2581", "a"), ("\u2581", "b")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(name, special=True) for name in words[:3]])
    ends = [("<s>", 0), ("</s>", 1)]
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ends)
    return Tokenizer(LoadedTokenizer(backend, None, {}), max_model_len=99)


def test_what_stands_in_front_of_a_text_is_found_not_what_stands_behind(byte_level, marked) -> None:
    assert byte_level.first_ids() == []
    assert marked.first_ids() == [0]
    assert TokenText(marked, reads_special=True).first_ids == [0]


@pytest.mark.parametrize("text", [" a b", "a b", "b", " a 語b", "\n", "🎉"])
def test_pieces_of_a_text_are_the_text(byte_level, marked, text: str) -> None:
    for tokenizer in (byte_level, marked):
        tokens = TokenText(tokenizer, reads_special=False)
        assert b"".join(map(tokens.piece, tokens.encode(text))) == text.encode()


def test_special_tokens_are_text_where_the_other_side_has_them(byte_level) -> None:
    end = byte_level.vocab["<|im_end|>"]
    hidden = TokenText(byte_level, reads_special=True)
    shown = TokenText(byte_level, reads_special=True, shown=frozenset({"<|im_end|>", "<other>"}))
    assert (hidden.piece(end), shown.piece(end)) == (b"", b"<|im_end|>")
    assert shown.encode("<|im_end|>") == [end]
    assert end not in TokenText(byte_level, reads_special=False).encode("<|im_end|>")


def test_an_id_without_a_token_is_no_text(byte_level) -> None:
    assert TokenText(byte_level, reads_special=True).piece(10**6) == b""
