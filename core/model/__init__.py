"""One configurable decoder and its loader."""

from __future__ import annotations

from .config import DecoderConfig, read_config
from .decoder import Decoder
from .loader import load_decoder

__all__ = ["Decoder", "DecoderConfig", "load_decoder", "read_config"]
