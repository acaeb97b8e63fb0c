"""Compiled loops that XLA programs on CPU devices call, and the tables that they are given.

Begin with :mod:`~adacheck_jax.device.loops.xla_call`.
"""
