"""The host's memory of a state: followed step by step, kept in a file, and recovered.

The *shadow* is this process's copy of the state in host memory
(:mod:`~adacheck_jax.memory.shadow`). It follows training, so that it proves each step in full. Its
memory may be a file (:mod:`~adacheck_jax.memory.files.shadow_file`), from which a killed process
gets its state back (:mod:`~adacheck_jax.memory.recovered`):
:mod:`~adacheck_jax.memory.files.journal` says what lies in it and in which order it is written.

Each of several processes has a file, with boxes of its own and of others
(:mod:`~adacheck_jax.memory.holdings`), which are sent where no device of its own has them
(:mod:`~adacheck_jax.memory.sending.wire`). They go from step to step together
(:mod:`~adacheck_jax.memory.peers`), agree on one after a restart
(:mod:`~adacheck_jax.memory.agreement`), and give each other what each needs of it
(:mod:`~adacheck_jax.memory.together`).

Knows no plan, no save and no storage. Begin with :mod:`~adacheck_jax.memory.shadow`.
"""
