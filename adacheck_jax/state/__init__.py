"""A state that is to be saved, taken apart: leaves, places, owners, and the updates that tie them.

Structures that were seen before are known again by one look at each leaf. The updates are exported
and classified once. Knows nothing of steps. Begin with :mod:`~adacheck_jax.state.snapshot`.
"""
