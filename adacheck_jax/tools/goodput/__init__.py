"""Goodput: what checkpointing systems make of the time of a cluster that fails.

``cluster`` has the failures, ``systems`` what each system does and costs, with the source of every
figure, and ``simulation`` replays the ones against the others. Reads no checkpoint. Begin with
:mod:`~adacheck_jax.tools.goodput.simulation`.
"""
