"""Pinning: an update whose every rounding is the same in whatever program it is compiled.

The fence, the rules that say where fences stand, and the evaluation of a function with them. Knows
JAX and nothing else of this library. Begin with
:mod:`~adacheck_jax.update.pinning.pinned_function`.
"""
