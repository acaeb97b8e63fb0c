"""The optimizer update, so that it can be replayed bit by bit.

The recorder, the pinning of every rounding, the export of the update as a program, its
classification, and its evaluation on samples. Knows JAX, optax, :mod:`~adacheck_jax.format` and
:mod:`~adacheck_jax.device`, and no file of a checkpoint. Begin with
:mod:`~adacheck_jax.update.recorder`.
"""

from typing import TYPE_CHECKING

from adacheck_jax import lazy

if TYPE_CHECKING:  # for type checkers and editors; must name what follows
    from adacheck_jax.update.recorder_state import RecorderState
    from adacheck_jax.update.separate import SeparateUpdate

__all__ = ["RecorderState", "SeparateUpdate"]
__getattr__, __dir__ = lazy.names_of(
    __name__, {"recorder_state": "RecorderState", "separate": "SeparateUpdate"}
)
