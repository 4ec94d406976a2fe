"""Structs of step.c for Gemma 4's parts."""

from __future__ import annotations

import ctypes

from .declared import ActivationStruct, NormStruct
from .linear import LinearStruct

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
_LINEAR, _NORM = ctypes.POINTER(LinearStruct), ctypes.POINTER(NormStruct)


class BesideStruct(ctypes.Structure):
    """``ft_beside`` of step.c."""

    _fields_ = (
        ("experts", _PTR),
        ("norm", _NORM),
        ("router_norm", _NORM),
        ("out_norm", _NORM),
        ("mlp_out_norm", _NORM),
    )


class TokenInputStruct(ctypes.Structure):
    """``ft_token_input`` of step.c."""

    _fields_ = (
        ("gate", _LINEAR),
        ("out", _LINEAR),
        ("out_norm", _NORM),
        ("activation", ActivationStruct),
    )


class ExtrasStruct(ctypes.Structure):
    """``ft_extras`` of step.c."""

    _fields_ = (
        ("out_norm", _NORM),
        ("factor", ctypes.c_float),
        ("beside", BesideStruct),
        ("token_input", TokenInputStruct),
    )


class TokenInputsStruct(ctypes.Structure):
    """``ft_token_inputs`` of step.c."""

    _fields_ = (
        ("table", _PTR),
        ("projection", _LINEAR),
        ("norm", _NORM),
        ("width", _I64),
        ("factor", ctypes.c_float),
    )
