"""Families of decoders: functions that read a config.json and declare what differs.

Families are not copies of the decoder: one decoder computes all of them.
"""

from .registry import MODEL_FAMILIES, parse_config, read_config, read_folder_config

__all__ = ["MODEL_FAMILIES", "parse_config", "read_config", "read_folder_config"]
