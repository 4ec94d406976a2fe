"""Run a command that may open sockets of some address families only, as systemd runs a service.

``python -m support.address_families AF_UNIX,AF_INET COMMAND ...``: a seccomp filter answers other
families with EAFNOSUPPORT, as `RestrictAddressFamilies=` does. Linux on x86-64 alone; exits with
`UNSUPPORTED` elsewhere.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys
from collections.abc import Sequence

UNSUPPORTED = 77
NO_NEW_PRIVS, SET_SECCOMP, FILTER_MODE = 38, 22, 2  # of prctl
SOCKET = 41  # the system call's number on x86-64
LOAD, EQUALS, RETURN = 0x20, 0x15, 0x06  # operations of a BPF program
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EAFNOSUPPORT
NUMBER, FIRST_ARGUMENT = 0, 16  # offsets in seccomp_data


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def filter_of(families: Sequence[str]) -> bytes:
    """Return a BPF program that allows sockets of these families, and every other system call."""
    numbers = [int(getattr(socket, each)) for each in families]
    count = len(numbers)
    lines = [
        (LOAD, 0, 0, NUMBER),
        (EQUALS, 0, count + 2, SOCKET),  # another call: to ALLOW
        (LOAD, 0, 0, FIRST_ARGUMENT),
        *((EQUALS, count - place, 0, each) for place, each in enumerate(numbers)),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def main(families: str, *command: str) -> None:
    """Restrict this process and become the command."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        sys.exit(UNSUPPORTED)
    code = filter_of(families.split(","))
    held = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(held, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        SET_SECCOMP, FILTER_MODE, ctypes.byref(program), 0, 0
    ):
        sys.exit(UNSUPPORTED)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
