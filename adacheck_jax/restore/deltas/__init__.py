"""Contents of deltas: boxes of leaves, records of the updates to replay, and patches behind them.

Readers of one lineage share their work. Begin with
:mod:`~adacheck_jax.restore.deltas.delta_reader`, the boxes of one delta.
"""
