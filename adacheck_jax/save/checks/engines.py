"""The engine that compares the replays of one structure."""

from __future__ import annotations

from adacheck_jax.save.checks.identity import Identity
from adacheck_jax.save.checks.interface import Checker
from adacheck_jax.save.checks.sample import Sampling
from adacheck_jax.save.checks.second_copy import Following
from adacheck_jax.save.exported_update import ExportedUpdate
from adacheck_jax.save.snapshot import Structure


def checker_of(structure: Structure, program: ExportedUpdate) -> Checker:
    """The checker of a structure; compiles in the background."""
    if program.pieces is not None:
        return Sampling(structure, program, program.pieces)
    if program.engine == "full":
        return Following(structure, program)
    return Identity(structure, program)
