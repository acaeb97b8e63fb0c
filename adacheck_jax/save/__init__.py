"""The way of a save: plan, copies to the host, write, exchange, commit.

The manifest is written last. Knows the rooms of states, plans, proofs and memory, and no Orbax.
Begin with :mod:`~adacheck_jax.save.saver`, which calls the stages.
"""
