"""Measurements side by side with stock Orbax; run one with ``python -m benchmarks.NAME``."""
