"""Families of models: functions that make a `DecoderConfig` from a config.json.

One decoder computes the models of all families.
"""
