"""The demonstration of ``adacheck demo``, and the training script that it runs.

``train_lm`` is also an example to copy. ``run`` plays the demonstration, ``stage`` starts its child
processes, ``measure`` runs in them, and ``report`` shows the result. Begin with
:mod:`~adacheck_jax.cli.demo.run`.
"""
