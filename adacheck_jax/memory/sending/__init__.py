"""Copies that are sent to processes of other failure domains, whose devices do not hold them.

All processes compute the same plans from layouts and domains. Before each collective they consent
to it, so that none enters one alone. What does not come costs the copy, never the step. Begin with
:mod:`~adacheck_jax.memory.sending.wire`.
"""
