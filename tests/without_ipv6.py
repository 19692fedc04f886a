"""Becomes another program, for which this machine has no IPv6, as where its kernel has none: PROGRAM [ARGUMENT ...].

A filter of system calls, which nobody lifts again, refuses it every socket of IPv6.
"""

import ctypes
import errno
import os
import platform
import socket
import struct
import sys

# By machine: <linux/audit.h>, and the number of the call `socket` in <asm/unistd.h>.
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SOCKET = {"x86_64": 41, "aarch64": 198}
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
CALL_AT, ARCH_AT, FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # <linux/bpf_common.h>
ALLOW, FAIL = 0x7FFF0000, 0x00050000  # <linux/seccomp.h>

IS_POSSIBLE = platform.system() == "Linux" and platform.machine() in ARCHES


class Filter(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def give_up_ipv6() -> None:
    """For this process and all that it becomes or starts."""
    machine = platform.machine()
    instructions = [
        *_unless(ARCH_AT, ARCHES[machine], skipped=5),
        *_unless(CALL_AT, SOCKET[machine], skipped=3),
        *_unless(FIRST_ARGUMENT_AT, socket.AF_INET6, skipped=1),
        (RETURN, 0, 0, FAIL | errno.EAFNOSUPPORT),
        (RETURN, 0, 0, ALLOW),
    ]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    told = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    told |= prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(Filter(len(instructions), packed)))
    if told:
        raise OSError(ctypes.get_errno(), "no filter of system calls can be set")


def _unless(at: int, value: int, *, skipped: int) -> list[tuple[int, int, int, int]]:
    """Skips so many of the instructions behind it where another value stands there."""
    return [(LOAD, 0, 0, at), (JUMP_IF_EQUAL, 0, skipped, value)]


if __name__ == "__main__":
    give_up_ipv6()
    os.execv(sys.argv[1], sys.argv[1:])
