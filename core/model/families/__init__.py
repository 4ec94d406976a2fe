"""Families of decoders: functions that read a config.json and declare differences.

Families are not copies of the decoder: one decoder computes all of them.
"""
