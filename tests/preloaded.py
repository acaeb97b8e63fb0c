"""All that forked processes import and set up alike: once, before they are forked."""
# ruff: noqa: F401

import jax.experimental.multihost_utils
import orbax.checkpoint.experimental.v1
import pytest
import scipy.linalg  # which numba imports for its first function
from numba.core.registry import cpu_target

import adacheck_jax.adapter.manager
import adacheck_jax.device.loops.xla_handler
import tests.support

# As numba does before it compiles or loads its first function.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
