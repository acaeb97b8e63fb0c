"""Leaf paths, whatever the containers, and the comparison of two trees."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from adacheck_jax.device import trees
from adacheck_jax.errors import MismatchError


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclass
class Block:
    kernel: Any
    bias: Any


@pytest.mark.parametrize(
    ("tree", "plain"),
    [
        ({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 2}}),
        ([1, [2, 3]], {"0": 1, "1": {"0": 2, "1": 3}}),
        ((1, (2,)), [1, [2]]),
        (Pair(1, Pair(2, 3)), {"first": 1, "second": {"first": 2, "second": 3}}),
        (Block(1, 2), {"kernel": 1, "bias": 2}),
        ({"layers": [Block(1, 2)]}, {"layers": [{"kernel": 1, "bias": 2}]}),
        ({0: 1, 1: 2}, [1, 2]),
        ({"a": None, "b": 1}, {"b": 1}),
        ([], {}),
        (7, {"": 7}),
    ],
    ids=repr,
)
def test_a_leaf_path_does_not_depend_on_the_type_of_the_container(tree, plain):
    leaves, treedef = trees.flatten(tree)
    assert leaves == trees.flatten(plain)[0]
    assert trees.unflatten(treedef, leaves.values()) == tree


def test_leaves_of_flax_have_the_paths_of_nested_dictionaries():
    params = {"dense": {"kernel": np.zeros((2, 3)), "bias": np.zeros(3)}}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1e-3, momentum=0.9))
    assert sorted(trees.flatten(state)[0]) == [
        *("opt_state/0/trace/dense/bias", "opt_state/0/trace/dense/kernel"),
        *("params/dense/bias", "params/dense/kernel", "step"),
    ]
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    assert sorted(trees.flatten(nnx.state((model, optimizer)))[0]) == [
        *("0/bias/value", "0/kernel/value", "1/opt_state/0/trace/bias/value"),
        *("1/opt_state/0/trace/kernel/value", "1/step/value"),
    ]


def test_two_leaves_with_one_path_are_an_error_that_names_it():
    with pytest.raises(MismatchError, match=r"1 leaf paths occur twice: a/b\."):
        trees.flatten({"a/b": 1, "a": {"b": 2, "c": 3}})


def test_every_difference_is_listed_at_once_and_a_long_list_is_cut():
    expected = {"same": "f32[2]", "gone": "f32[1]", "lost": "f32[1]", "cut": "f32[4]"}
    found = {"cut": "f32[3]", "new": "i32[]", "same": "f32[2]"}
    with pytest.raises(MismatchError) as caught:
        trees.check_same_leaves(expected, found, where="step 7", remedy="Do this.")
    assert str(caught.value).splitlines() == [
        "step 7: 4 leaves differ.",
        "  expected, not found (2): gone, lost.",
        "  found, not expected (1): new.",
        "  different (1): cut: expected f32[4], found f32[3].",
        "  Do this.",
    ]
    with pytest.raises(MismatchError, match="and 80 more"):
        trees.check_same_leaves({str(i): "" for i in range(100)}, {}, where="", remedy="")
    trees.check_same_leaves({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, where="", remedy="")
