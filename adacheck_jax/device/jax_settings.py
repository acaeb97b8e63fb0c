"""The jax settings of this library's own programs, whatever the caller has set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def own(x64: bool | None = None) -> Iterator[None]:
    """Switches off, in this thread, the settings that help users to debug their own programs.

    Transfers of a save or a restore were asked for; NaNs and infinities are saved like any other
    value; and the shapes and data types that the library's programs combine are its own affair.
    None of these settings changes results. An ambient mesh (``jax.set_mesh``) does not apply
    either: the arrays' own shardings do. It also decorates a function::

        @jax_settings.own()
        def restore(): ...

    Args:
        x64: True if arrays may have 64-bit elements; None for the calling thread's setting. A new
            thread does not inherit settings.
    """
    with contextlib.ExitStack() as stack:
        if not jax.sharding.get_abstract_mesh().empty:
            with contextlib.suppress(ValueError):  # inside a trace, which raises elsewhere
                stack.enter_context(jax.set_mesh(None))
        stack.enter_context(jax.transfer_guard("allow"))
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        if x64 is not None:
            stack.enter_context(jax.enable_x64(x64))
        yield
