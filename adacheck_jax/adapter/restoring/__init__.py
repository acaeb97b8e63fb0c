"""Restores of one step: find its lineage, read the base, replay, verify, build the caller's tree.

What is read and replayed is known to the room ``restore``. Begin with
:mod:`~adacheck_jax.adapter.restoring.restorer`.
"""
