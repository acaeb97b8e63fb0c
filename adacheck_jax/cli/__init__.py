"""The ``adacheck`` command and its demo.

Reads arguments and prints what :mod:`~adacheck_jax.tools` found. Knows every room, and no room
knows it. Begin with :mod:`~adacheck_jax.cli.main`.
"""
