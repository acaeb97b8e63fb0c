"""The ``adacheck`` command and its demo.

Reads arguments, calls :mod:`~adacheck_jax.tools`, and prints the results. Knows every room, and no
room knows it. Begin with :mod:`~adacheck_jax.cli.main`.
"""
