"""Families of decoders: functions that make a `DecoderConfig` from a config.json.

Families are not copies of the decoder: one decoder computes all of them.
"""
