"""Handing over: steps in formats that others read, roots copied, and states of others taken.

Begin with :mod:`~adacheck_jax.tools.handover.export`: it finds a recorded step, plans what is
written of it, has a format write it, and reads it back. The formats know nothing of steps.
"""
