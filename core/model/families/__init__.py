"""Families of decoders: functions that read a config.json and declare what differs.

Families are not copies of the decoder: one decoder computes all of them.
"""
