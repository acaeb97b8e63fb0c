"""The jax settings that this library's own work runs under, whatever its caller debugs with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def own(x64: bool | None = None) -> Iterator[None]:
    """Switches off, in this thread, what helps users to find faults of theirs.

    A transfer that a save or a restore makes is one that was asked for; a NaN or an infinity in a
    state is to be saved like any other value; and the shapes and data types that the library's
    programs combine are its own affair. None of these settings changes what a program computes.
    Nor does an ambient mesh belong in those programs (``jax.set_mesh``): their arrays say where
    they lie. It also decorates a function::

        @settings.own()
        def restore(): ...

    Args:
        x64: whether arrays may have 64-bit elements; None for what the calling thread has. Settings
            belong to threads, so a new one has to be told.
    """
    with contextlib.ExitStack() as stack:
        if not jax.sharding.get_abstract_mesh().empty:
            with contextlib.suppress(ValueError):  # inside a trace, which the caller is told of
                stack.enter_context(jax.set_mesh(None))
        stack.enter_context(jax.transfer_guard("allow"))
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        if x64 is not None:
            stack.enter_context(jax.enable_x64(x64))
        yield
