"""Trees that follow from the params: pinned, tied to a state by name, and part of its update."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from adacheck_jax import Recorder
from adacheck_jax.errors import RecorderError
from adacheck_jax.update import program as update_program
from tests.support import assert_same_bits, host_copy, mesh_of
from tests.update.replaying import bind, bind_all, expected_of, replay

PARAMS = {
    "dense": {"kernel": jnp.linspace(-1.0, 1.0, 2048).reshape(32, 64), "bias": jnp.ones(64)},
    "scale": jnp.ones(()),
}


def average(params: Any, ema: Any, count: Any) -> Any:
    del count
    return optax.incremental_update(params, ema, 0.003)


def warming_average(params: Any, ema: Any, count: Any) -> Any:
    decay = jnp.minimum(0.99, (1.0 + count) / (10.0 + count))
    return optax.incremental_update(params, ema, 1 - decay)


def hard_copy(params: Any, target: Any, count: Any) -> Any:
    same = jax.tree.map(lambda p, t: p.astype(t.dtype), params, target)
    return optax.periodic_update(same, target, count, 3)


def state_of(recorder: Recorder, names: Any = None) -> Any:
    state = {"params": PARAMS, "opt": recorder.init(PARAMS)}
    trees_of = recorder.derived if names is None else names
    return state | {name: jax.tree.map(jnp.copy, PARAMS) for name in trees_of}


DTYPES = [(jnp.float32, jnp.float32), (jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)]


@pytest.mark.covering(1, quick=1)
@pytest.mark.parametrize("dtypes", DTYPES, ids=["float32", "short", "long"])
@pytest.mark.parametrize("function", [average, warming_average, hard_copy])
def test_the_update_program_computes_the_bits_of_the_train_step(function, dtypes):
    recorder = Recorder(optax.adamw(1e-2), derived={"ema": function})
    params, ema = (jax.tree.map(lambda x, d=each: x.astype(d), PARAMS) for each in dtypes)
    state = {"params": params, "opt": recorder.init(params), "ema": ema}

    @jax.jit
    def train_step(state, x):
        # The gradient, the update and the average are element-wise: a compiler fuses them.
        grads = jax.tree.map(
            lambda p: (jnp.sin(p * x) * 0.3 + p * 0.01).astype(p.dtype), state["params"]
        )
        updates, opt = recorder.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        ema = recorder.derive("ema", opt, params, state["ema"])
        return {"params": params, "opt": opt, "ema": ema}

    binding = bind(recorder, state)
    function = jax.jit(update_program.joint_function([binding]))
    for number in range(4):
        after = train_step(state, jnp.float32(number))
        found = replay(binding, state, after, function)
        assert_same_bits(found, expected_of(binding, after))
        # Evaluated for itself no compiler has anything to fuse it with.
        alone = recorder.derive("ema", after["opt"], after["params"], state["ema"])
        assert_same_bits(alone, host_copy(after["ema"]))
        state = after
    assert any(path.startswith("ema/") for path in binding.inner)


@pytest.mark.parametrize("number", range(1, 7))
def test_a_conditional_is_a_choice_for_each_leaf(number):
    recorder = Recorder(optax.adamw(1e-2), derived={"target": hard_copy})
    state = state_of(recorder, [])
    opt = state["opt"]._replace(adacheck_count=jnp.int32(number))
    old = jax.tree.map(lambda p: p + 1, PARAMS)
    found = recorder.derive("target", opt, PARAMS, old)
    expected = PARAMS if number % 3 == 0 else old
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, expected))
    jaxpr = jax.make_jaxpr(lambda o: recorder.derive("target", o, PARAMS, old))(opt)
    assert "cond[" not in str(jaxpr)


def test_a_choice_among_several_branches_takes_the_nearest_for_others():
    def chosen(params, old, count):
        branches = [lambda p, k=k: jax.tree.map(lambda x: x * 0 + k, p) for k in range(3)]
        return jax.lax.switch(count - 1, branches, params)

    recorder = Recorder(optax.sgd(1e-2), derived={"ema": chosen})
    for count, expected in ((0, 0), (1, 0), (2, 1), (3, 2), (9, 2)):
        opt = recorder.init(PARAMS)._replace(adacheck_count=jnp.int32(count))
        found = recorder.derive("ema", opt, PARAMS, PARAMS)
        assert float(found["scale"]) == expected


def test_the_bits_inside_shard_map_are_those_outside():
    recorder = Recorder(optax.adamw(1e-2), derived={"ema": warming_average})
    params = {"kernel": PARAMS["dense"]["kernel"]}
    ema = jax.tree.map(lambda x: x * 1.01, params)
    opt = recorder.init(params)._replace(adacheck_count=jnp.int32(7))
    cut = PartitionSpec("data")

    def derive(count, params, ema):
        return recorder.derive("ema", {"adacheck_count": count}, params, ema)

    mapped = jax.shard_map(
        derive, mesh=mesh_of((8,)), in_specs=(PartitionSpec(), cut, cut), out_specs=cut
    )
    found = jax.jit(mapped)(opt.adacheck_count, params, ema)
    expected = recorder.derive("ema", opt, params, ema)
    assert np.asarray(found["kernel"]).tobytes() == np.asarray(expected["kernel"]).tobytes()


def test_a_copy_of_the_params_that_is_named_is_not_taken_for_the_params():
    recorder = Recorder(optax.adamw(1e-2), derived={"ema": average})
    binding = bind(recorder, state_of(recorder))
    assert binding.params[0] == "params/dense/bias"
    assert binding.inner[-3:] == ("ema/dense/bias", "ema/dense/kernel", "ema/scale")
    assert binding.extra == ()


def test_the_counter_is_consumed_if_a_tree_depends_on_it():
    derived = {"ema": average, "slow": warming_average}
    recorder = Recorder(optax.adamw(1e-2), derived=derived)
    binding = bind(recorder, state_of(recorder))
    assert binding.extra == ("opt/adacheck_count",)


def test_each_recorder_has_the_tree_beside_it():
    recorders = {
        f"{name}/opt": Recorder(optax.adam(1e-2), derived={"ema": average}) for name in "dg"
    }
    state = {prefix[0]: state_of(each) for prefix, each in recorders.items()}
    found = {each.prefix: each.inner[-1] for each in bind_all(recorders, state)}
    assert found == {"d/opt": "d/ema/scale", "g/opt": "g/ema/scale"}


def test_a_name_that_fits_two_subtrees_is_refused_with_the_remedy():
    recorder = Recorder(optax.adam(1e-2), derived={"ema": average})
    state = {**state_of(recorder, []), "a": {"ema": PARAMS}, "b": {"ema": PARAMS}}
    with pytest.raises(RecorderError, match=r"found 'a/ema', 'b/ema'.*derived=\{'a/ema': \.\.\.\}"):
        bind(recorder, state)
    recorder = Recorder(optax.adam(1e-2), derived={"b/ema": average})
    state["opt"] = recorder.init(PARAMS)
    binding = bind(recorder, state, "params")
    assert binding.inner[-1] == "b/ema/scale"


class Pair(NamedTuple):
    first: Any
    second: Any


def test_a_tree_of_another_form_is_bound_once_it_was_seen(caplog):
    def both(params, pair, count):
        del count
        return Pair(optax.incremental_update(params["dense"], pair.first, 0.1), pair.second)

    recorder = Recorder(optax.adam(1e-2), derived={"ema": both})
    state = {**state_of(recorder, []), "ema": Pair(PARAMS["dense"], PARAMS["scale"])}
    with caplog.at_level(logging.INFO):
        binding = bind(recorder, state)
    assert "is stored until derive() was called with it" in caplog.text
    assert not any(path.startswith("ema/") for path in binding.inner)
    before = recorder.version
    jax.eval_shape(lambda s: recorder.derive("ema", s["opt"], PARAMS, s["ema"]), state)
    assert recorder.version != before
    binding = bind(recorder, state)
    own = ("ema/first/bias", "ema/first/kernel", "ema/second")
    assert binding.inner[-3:] == own


def test_a_tree_that_was_guessed_right_is_bound_only_once():
    recorder = Recorder(optax.adam(1e-2), derived={"ema": average})
    state = state_of(recorder)
    bind(recorder, state)
    before = recorder.version
    recorder.derive("ema", state["opt"], PARAMS, state["ema"])
    assert recorder.version == before


def test_a_recorder_that_runs_apart_binds_no_tree():
    recorder = Recorder(optax.adam(1e-2), derived={"ema": average})
    recorder.separate = True
    binding = bind(recorder, state_of(recorder), "params")
    assert binding.derived == ()


def test_mistakes_are_named():
    recorder = Recorder(optax.adam(1e-2), derived={"ema": lambda p, e, c: {"other": p}})
    opt = recorder.init(PARAMS)
    with pytest.raises(RecorderError, match=r"one of \['ema'\], found 'target'"):
        recorder.derive("target", opt, PARAMS, PARAMS)
    with pytest.raises(RecorderError, match="with one Recorder's state in it, found 2"):
        recorder.derive("ema", [opt, opt], PARAMS, PARAMS)
    with pytest.raises(RecorderError, match="to return the tree and the shapes that it takes"):
        recorder.derive("ema", opt, PARAMS, PARAMS)
