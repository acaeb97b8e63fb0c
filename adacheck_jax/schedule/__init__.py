"""The schedule of saves: how many steps a save holds, and how many deltas follow a base.

Arithmetic alone: measured seconds and the mean time between failures go in, a schedule comes out,
and equal numbers give an equal schedule in every process. Knows no other room, no array and no
file, and reads no clock but one that it is given. Begin with
:mod:`~adacheck_jax.schedule.waste`, the share of the time that a schedule loses; a run holds a
:mod:`~adacheck_jax.schedule.line`.
"""
