"""The engine that compares the replays of one structure."""

from __future__ import annotations

from adacheck_jax.proof.checker import Checker
from adacheck_jax.proof.identity import Identity
from adacheck_jax.proof.sample import Sampling
from adacheck_jax.proof.second_copy import Following
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure


def checker_of(structure: Structure, program: ExportedUpdate) -> Checker:
    """The checker of a structure; compiles in the background."""
    if program.pieces is not None:
        return Sampling(structure, program, program.pieces)
    if program.engine == "full":
        return Following(structure, program)
    return Identity(structure, program)
