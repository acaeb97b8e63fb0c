"""The files in memory from which a killed process gets its state back.

A :mod:`~adacheck_jax.memory.files.journal` holds a state that the host moves on; a
:mod:`~adacheck_jax.memory.files.record_log` a state and the steps since it, which devices replay.
Headers say what is in a file; each is whole, or counts as none. Begin with
:mod:`~adacheck_jax.memory.files.step_file`.
"""
