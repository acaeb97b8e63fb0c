"""Long series of planted faults, perturbed runs and recomputed updates, run by hand.

They hunt for steps that are lost and bits that differ; what measures speed is in ``benchmarks``.
``command`` has what all their command lines share.
"""
