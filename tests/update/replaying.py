"""The update of a recorder, bound to a state and replayed by itself."""

from __future__ import annotations

import hashlib
from typing import Any

import jax

from adacheck_jax.device import trees
from adacheck_jax.format.manifest import Update
from adacheck_jax.update import binding, params_search
from adacheck_jax.update import program as update_program
from tests.support import host_copy


def bind_all(recorders: Any, state: Any, params_path: Any = None) -> Any:
    types = params_search.leaf_types(trees.flatten(state)[0])
    return binding.bind_all(binding.recorders_of(recorders), types, params_path)


def bind(recorder: Any, state: Any, params_path: Any = None) -> Any:
    (found,) = bind_all(recorder, state, params_path)
    return found


def lists_of(bound: Any, state: Any) -> list[list[Any]]:
    """The leaves of a state that are an update's params, inner state, record and arguments."""
    leaves, _ = trees.flatten(state)
    names = (bound.params, bound.inner, bound.record, bound.extra)
    return [[leaves[path] for path in each] for each in names]


def replay(bound: Any, before: Any, after: Any, function: Any = None) -> Any:
    """What an update makes of the state before, given the record of the one after."""
    function = function or jax.jit(update_program.joint_function([bound]))
    arguments = (*lists_of(bound, before)[:2], *lists_of(bound, after)[2:])
    return function(*arguments, update_program.switches(1))


def expected_of(bound: Any, after: Any) -> Any:
    """The bits that a replay is to give."""
    return host_copy(lists_of(bound, after)[:2])


def note_of(data: bytes) -> Update:
    """A manifest's note of an exported update."""
    digests = {update_program.platform(): hashlib.sha256(data).hexdigest()}
    rest = ((), (), (), (), (0,), ((0, 0, 0, 0),), (), (), "", "")
    return Update(*rest, digests, jax.__version__, True)
