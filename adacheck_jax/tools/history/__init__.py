"""Looking back through a training run: any recorded step, and what changed from step to step.

Begin with :mod:`~adacheck_jax.tools.history.walk`.
"""
