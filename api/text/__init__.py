"""Text to token ids and back: tokenizers, detokenizers, chat templates."""
