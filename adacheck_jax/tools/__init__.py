"""Tools: checkpoint roots inspected, verified and repaired without the run that wrote them.

A library: it prints nothing, :mod:`~adacheck_jax.cli` does. Knows every room but that one and the
room of saves. Begin with :mod:`~adacheck_jax.tools.inspection`.
"""
