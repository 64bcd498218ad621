"""The release of NCCL that runs, which need not be the one that torch was built with."""

import ctypes


def loaded_nccl() -> tuple[int, ...] | None:
    """Return the version of the library that this process has loaded, or None where it cannot be asked.

    Another library than torch's is loaded where LD_PRELOAD or a container brings one.
    """
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    # NCCL_VERSION of nccl.h, since 2.9
    return None if failed else (number.value // 10000, number.value // 100 % 100, number.value % 100)
