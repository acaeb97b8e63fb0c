"""Comparison of a delta's replay with the state that it stands for, before the delta is saved.

No delta is trusted unchecked: the compiler may compute an update otherwise in another program, and
something else than the update may change the state. Three engines tell. What one of them keeps of a
state, to check the next step with, is a *baseline*.

- ``sample``: small leaves whole, and of each large one elements a stride apart, at positions that
  change, are taken at each save, replayed at the next, and compared. Beside it the *shadow*, a copy
  in host memory, compares everything (:mod:`~adacheck_jax.memory.shadow`).
- ``full``: a second copy of the state follows training by replay, on the same devices. Its
  fingerprints must be those of the state.
- ``identity``: an update that runs as a program of its own (``separate_update``) is exact if the
  arrays that are saved are the very arrays that it returned, and it was given those saved before.

Knows no plan, and nothing of what is written. Begin with :mod:`~adacheck_jax.proof.checker`.
"""
