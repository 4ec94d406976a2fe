"""One configurable decoder and its loader."""

from __future__ import annotations

from .config import DecoderConfig
from .decoder import Decoder
from .families import read_config
from .loader import load_decoder

__all__ = ["Decoder", "DecoderConfig", "load_decoder", "read_config"]
