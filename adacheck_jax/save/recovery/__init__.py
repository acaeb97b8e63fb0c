"""Recovery from memory: the shadow in a file, from which a killed process gets its state back.

:mod:`~adacheck_jax.save.recovery.shadow_file` is the file,
:mod:`~adacheck_jax.save.recovery.journal` what lies in it and in which order it is written, and
:mod:`~adacheck_jax.save.recovery.rebuilt` the caller's state made of it.
"""
