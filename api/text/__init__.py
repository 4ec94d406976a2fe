"""Conversion of text to token ids and back: tokenizers, detokenizers, chat templates."""
