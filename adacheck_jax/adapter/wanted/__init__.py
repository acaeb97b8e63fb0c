"""Wanted states: the forms in which callers ask for a state, compared with what was saved.

Knows the saved leaves by their manifest, and reads nothing. Begin with
:mod:`~adacheck_jax.adapter.wanted.targets`.
"""
