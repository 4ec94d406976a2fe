"""Text to token ids and back: tokenizers, detokenisers, chat templates."""
