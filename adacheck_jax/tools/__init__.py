"""Roots looked at, verified and repaired, without the training run that wrote them.

A library: whatever prints is in :mod:`~adacheck_jax.cli`. Knows every room but that one. Begin
with :mod:`~adacheck_jax.tools.inspection`.
"""
