"""Saves of one training run, as the handlers of both Orbax APIs make them.

Orbax calls three times: to begin a save on the caller's thread, to write it in every process, and
to commit it in one. Begin with :mod:`~adacheck_jax.adapter.saving.saves`.
"""
