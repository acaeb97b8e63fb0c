"""A page about a run: gathered from its root into one record, and drawn into one HTML file.

Begin with :mod:`~adacheck_jax.tools.report.gather`.
"""
