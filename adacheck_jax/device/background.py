"""Work behind the caller's back: programs that are loaded or compiled on threads of their own.

A thread hands over nothing but its future, and holds no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from adacheck_jax.device import jax_settings

_Result = TypeVar("_Result")


def in_background(work: Callable[[], _Result]) -> Future[_Result]:
    """Load or compile a program on a new thread, with this library's own settings."""
    x64, future = jax_settings.x64_enabled(), Future[_Result]()

    def run() -> None:
        try:
            with jax_settings.own(x64):
                result = work()
            future.set_result(result)
        except BaseException as error:
            future.set_exception(error)

    # Not a daemon: a process must not end while XLA compiles.
    threading.Thread(target=run, name="adacheck_compile").start()
    return future
