"""Parts of the recorder: records, extra arguments, and the trees of the updates that it has seen.

Each knows nothing of the recorder that uses it. Begin with
:mod:`~adacheck_jax.update.recording.record`, gradients as an update consumes them.
"""
