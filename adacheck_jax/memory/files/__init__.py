"""The files in memory from which a killed process gets its state back.

Of the two kinds one holds a state that the host moves on,
:mod:`~adacheck_jax.memory.files.journal`; the other a state and the steps since it,
:mod:`~adacheck_jax.memory.files.record_log`, which devices replay. Both say what is in them by
headers, each of which is whole or none. Begin with :mod:`~adacheck_jax.memory.files.step_file`.
"""
