"""Reports of saves and restores, for whoever watches a training run.

``reports`` has the records, and ``announce`` tells them: to the log, to listeners of
``jax.monitoring``, and to the caller's callback. Begin with
:mod:`~adacheck_jax.adapter.observe.reports`.
"""
