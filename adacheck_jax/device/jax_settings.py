"""The jax settings of this library's own programs, whatever the caller has set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import jax

_ARITHMETIC = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


def x64_enabled() -> bool:
    """True if the calling thread makes 64-bit arrays; other threads do not inherit the setting."""
    return jax.dtypes.canonicalize_dtype("float64") == "float64"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Settings that decide what a function computes when it is traced.

    A context manager sets them for one thread and a part of a program: the train step may have been
    traced under others than a save is called with.

    Attributes:
        x64: True if arrays may have 64-bit elements.
        matmul_precision: default precision of matrix products.
        prng_impl: default kind of PRNG keys.
        threefry_partitionable: True for random bits that do not depend on the mesh.
    """

    x64: bool
    matmul_precision: str | None
    prng_impl: str
    threefry_partitionable: bool

    @classmethod
    def current(cls) -> Arithmetic:
        """The settings of the calling thread."""
        return cls(*(getattr(jax.config, name) for name in _ARITHMETIC))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Set them in this thread."""
        with (
            jax.enable_x64(self.x64),
            jax.default_matmul_precision(self.matmul_precision),
            jax.default_prng_impl(self.prng_impl),
            jax.threefry_partitionable(self.threefry_partitionable),
        ):
            yield


@contextlib.contextmanager
def compiled() -> Iterator[None]:
    """Let this thread compile programs, and give them constants, where the caller forbids both.

    So an update computes the same bits under ``jax.disable_jit``, which would run its operations
    one by one, and a conditional or a loop as Python does. What the caller's optimizer computes
    itself remains subject to all settings that look for its faults. It also decorates a function.
    """
    with jax.disable_jit(False), jax.transfer_guard("allow"):
        yield


@contextlib.contextmanager
def own(x64: bool | None = None) -> Iterator[None]:
    """Switch off, in this thread, the settings that help users to debug their own programs.

    Transfers and programs of a save or a restore were asked for; NaNs and infinities are saved like
    any other value; and the shapes, data types and keys that the library's programs combine are its
    own affair. None of these settings changes results. An ambient mesh (``jax.set_mesh``) does not
    apply either: the arrays' own shardings do. It also decorates a function::

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
        stack.enter_context(compiled())
        stack.enter_context(jax.no_tracing(False))
        stack.enter_context(jax.check_tracer_leaks(False))
        stack.enter_context(jax.debug_key_reuse(False))
        stack.enter_context(jax.debug_nans(False))
        stack.enter_context(jax.debug_infs(False))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        if x64 is not None:
            stack.enter_context(jax.enable_x64(x64))
        yield
