import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from adacheck_jax import Recorder
from adacheck_jax.device import trees
from adacheck_jax.errors import RecorderError
from adacheck_jax.update import binding as bindings
from adacheck_jax.update import params_search

PARAMS = {
    "dense": {"kernel": jnp.linspace(-1.0, 1.0, 2048).reshape(32, 64), "bias": jnp.ones(64)},
    "scale": jnp.ones(()),
}


def types_of(state):
    return params_search.leaf_types(trees.flatten(state)[0])


def bind(recorder, state, params_path=None):
    (binding,) = bindings.bind_all({"": (recorder,)}, types_of(state), params_path)
    return binding


def dict_state():
    recorder = Recorder(optax.adamw(1e-2))
    tx = optax.chain(optax.clip_by_global_norm(1.0), recorder)
    return recorder, {"params": PARAMS, "opt_state": tx.init(PARAMS), "step": 0}


def test_the_params_of_a_dictionary_are_found():
    binding = bind(*dict_state())
    assert binding.params == ("params/dense/bias", "params/dense/kernel", "params/scale")
    node = "opt_state/1/adacheck"
    assert binding.record == tuple(f"{node}_record/{p[7:]}" for p in binding.params)
    assert binding.count == f"{node}_count"
    assert f"{node}_inner/0/mu/scale" in binding.inner
    assert binding.extra == ()


def test_the_params_of_a_train_state_are_found():
    recorder = Recorder(optax.adamw(1e-2))
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=recorder)
    assert bind(recorder, state).params[0] == "params/dense/bias"


def test_the_params_of_a_plain_tuple_are_found():
    recorder = Recorder(optax.adamw(1e-2))
    assert bind(recorder, (recorder.init(PARAMS), PARAMS)).params[0] == "1/dense/bias"


def test_params_at_the_root_of_the_state_are_found():
    recorder = Recorder(optax.sgd(0.1))
    state = {**PARAMS, "optimizer": recorder.init(PARAMS)}
    assert bind(recorder, state).params == ("dense/bias", "dense/kernel", "scale")


def test_params_that_are_one_bare_array_are_found():
    recorder = Recorder(optax.sgd(0.1, momentum=0.9))
    params = jnp.ones((3, 2))
    binding = bind(recorder, {"w": params, "opt": recorder.init(params), "step": 0})
    assert binding.params == ("w",)
    assert binding.record == ("opt/adacheck_record",)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)


@pytest.mark.parametrize("in_order", [True, False])
def test_the_params_of_an_nnx_state_are_found(in_order):
    recorder = Recorder(optax.adamw(1e-2))
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(optax.identity(), recorder), wrt=nnx.Param)
    state = nnx.state((model, optimizer) if in_order else {"o": optimizer, "z": model})
    binding = bind(recorder, state)
    root = "0" if in_order else "z"
    assert all(path.startswith(f"{root}/") for path in binding.params)
    assert f"{root}/layers/0/kernel/value" in binding.params
    assert len(binding.params) == len(binding.record) == 6
    assert not any("/norm/mean" in path for path in binding.params)


def test_only_the_recorded_part_of_the_params_is_bound_under_a_mask():
    recorder = Recorder(optax.adamw(1e-2))
    mask = {"dense": {"kernel": True, "bias": False}, "scale": False}
    tx = optax.masked(recorder, mask)
    assert bind(recorder, {"params": PARAMS, "opt": tx.init(PARAMS)}).params == (
        "params/dense/kernel",
    )


def test_a_copy_of_the_params_is_ambiguous_and_the_error_names_both_and_the_remedy():
    recorder, state = dict_state()
    with pytest.raises(RecorderError, match=r"found 'ema', 'params'.*params_path="):
        bind(recorder, {**state, "ema": PARAMS})


@pytest.mark.parametrize("path", ["ema", "params"])
def test_a_params_path_resolves_the_ambiguity(path):
    recorder, state = dict_state()
    binding = bind(recorder, {**state, "ema": PARAMS}, path)
    assert binding.params[0] == f"{path}/dense/bias"


def test_an_empty_params_path_is_the_root_of_the_state():
    recorder = Recorder(optax.sgd(0.1))
    state = {**PARAMS, "optimizer": recorder.init(PARAMS), "ema": PARAMS}
    assert bind(recorder, state, "").params == ("dense/bias", "dense/kernel", "scale")


@pytest.mark.parametrize("path", ["nowhere", "opt_state", "params/dense"])
def test_a_wrong_params_path_is_an_error_that_names_what_is_missing(path):
    with pytest.raises(RecorderError, match="dense/bias"):
        bind(*dict_state(), path)


def test_a_params_path_to_leaves_of_other_shapes_is_an_error():
    recorder, state = dict_state()
    other = jax.tree.map(lambda p: jnp.zeros((*p.shape, 2)), PARAMS)
    with pytest.raises(RecorderError, match="other"):
        bind(recorder, {**state, "other": other}, "other")


def test_a_state_without_params_is_an_error():
    recorder, state = dict_state()
    with pytest.raises(RecorderError, match="found none"):
        bind(recorder, {"opt_state": state["opt_state"]})


def test_a_state_without_a_recorder_is_an_error():
    with pytest.raises(RecorderError, match="no Recorder's state"):
        bind(Recorder(optax.sgd(0.1)), {"params": PARAMS})


def test_a_recorder_that_never_saw_these_params_is_an_error():
    _, state = dict_state()
    with pytest.raises(RecorderError, match="has not seen the 3 params"):
        bind(Recorder(optax.adamw(1e-2)), state)


def test_a_binding_says_what_replay_computes_and_what_it_consumes():
    binding = bind(*dict_state())
    assert binding.explained == {*binding.params, *binding.inner}
    assert binding.consumed == binding.record
    with_extra = dataclasses.replace(binding, extra=("value",))
    assert with_extra.consumed == (*binding.record, "value")


def clipped(recorder):
    return optax.chain(optax.clip_by_global_norm(1.0), recorder)


def bind_all(recorders, state, params_path=None):
    return bindings.bind_all(bindings.recorders_of(recorders), types_of(state), params_path)


def bound(found):
    """Prefix, first of the params and recorder of each binding."""
    return [(each.prefix, each.params[0], each.recorder) for each in found]


SMALL = {"dense": {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}}


def gan():
    generator, critic = Recorder(optax.adamw(1e-2)), Recorder(optax.sgd(0.1, momentum=0.9))
    state = {
        "g_params": PARAMS,
        "d_params": SMALL,
        "g_opt": clipped(generator).init(PARAMS),
        "d_opt": clipped(critic).init(SMALL),
    }
    return generator, critic, state


@pytest.mark.parametrize("swapped", [False, True])
def test_the_two_optimizers_of_a_gan_are_told_apart_by_the_shapes_of_their_params(swapped):
    generator, critic, state = gan()
    found = bind_all([critic, generator] if swapped else [generator, critic], state)
    assert bound(found) == [
        ("d_opt/1", "d_params/dense/bias", critic),
        ("g_opt/1", "g_params/dense/bias", generator),
    ]
    assert found[0].signature is critic.signatures[0]
    assert not found[0].explained & found[1].explained


def test_a_node_whose_recorder_was_not_given_is_an_error_that_names_it():
    generator, _, state = gan()
    with pytest.raises(RecorderError, match=r"has not seen the 2 params .* at 'd_opt/1'.*all opt"):
        bind_all(generator, state)


def models(first, second):
    """Two models of the same shapes, each in one subtree with its optimizer."""
    return {
        "actor": {"params": PARAMS, "opt_state": clipped(first).init(PARAMS)},
        "critic": {"params": PARAMS, "opt_state": clipped(second).init(PARAMS)},
    }


def test_models_of_the_same_shapes_are_told_apart_by_where_their_optimizers_lie():
    first, second = Recorder(optax.adamw(1e-2)), Recorder(optax.sgd(0.1, momentum=0.9))
    found = bind_all([second, first], models(first, second))
    assert bound(found) == [
        ("actor/opt_state/1", "actor/params/dense/bias", first),
        ("critic/opt_state/1", "critic/params/dense/bias", second),
    ]


def test_one_recorder_serves_two_models():
    recorder = Recorder(optax.adamw(1e-2))
    found = bind_all(recorder, models(recorder, recorder))
    assert [each.recorder for each in found] == [recorder, recorder]
    assert found[1].params[0] == "critic/params/dense/bias"


def twins():
    first, second = Recorder(optax.adamw(1e-2)), Recorder(optax.adamw(1e-3))
    return first, second, models(first, second)


def test_twins_that_differ_in_nothing_that_is_saved_ask_for_a_mapping():
    first, second, state = twins()
    with pytest.raises(RecorderError, match=r"found 2 that fit equally.*\{'actor/opt_state/1'"):
        bind_all([first, second], state)


@pytest.mark.parametrize("prefixes", [("actor", "critic"), ("actor/opt_state", "critic/opt_state")])
def test_a_mapping_tells_twins_apart(prefixes):
    first, second, state = twins()
    found = bind_all(dict(zip(prefixes, (first, clipped(second)), strict=True)), state)
    assert [each.recorder for each in found] == [first, second]


def test_the_longest_prefix_of_a_mapping_counts():
    first, second, state = twins()
    found = bind_all({"": first, "critic": second}, state)
    assert [each.recorder for each in found] == [first, second]


@pytest.mark.parametrize("path", ["actors", "act", "actor/params"])
def test_a_prefix_with_no_recorders_state_below_it_is_an_error_that_names_those_that_are(path):
    first, _, state = twins()
    with pytest.raises(RecorderError, match=rf"'{path}'.*'actor/opt_state/1', 'critic/opt_state/1"):
        bind_all({"": first, path: first}, state)
    with pytest.raises(RecorderError, match=rf"params_path.*'{path}'"):
        bind_all(first, state, {path: "actor/params"})


def test_data_types_tell_recorders_apart():
    first, second = Recorder(optax.sgd(0.1)), Recorder(optax.sgd(0.1), dtype=jnp.bfloat16)
    assert [each.recorder for each in bind_all([second, first], models(first, second))] == [
        first,
        second,
    ]


def test_an_average_beside_a_models_params_is_ambiguous_and_a_mapping_resolves_it():
    recorder = Recorder(optax.adamw(1e-2))
    state = models(recorder, recorder)
    state["actor"]["ema"] = PARAMS
    with pytest.raises(RecorderError, match=r"'actor/ema', 'actor/params', .*\{'actor/opt"):
        bind_all(recorder, state)
    found = bind_all(recorder, state, {"actor": "actor/params", "critic": "critic/params"})
    assert [each.params[0] for each in found] == [
        "actor/params/dense/bias",
        "critic/params/dense/bias",
    ]


def test_the_params_of_a_target_network_are_not_those_that_are_trained():
    recorder = Recorder(optax.adamw(1e-2))
    state = {**models(recorder, recorder)["actor"], "other": jnp.ones(3)}
    state = {"critic": state, "target": {"params": PARAMS}}
    assert bind_all(recorder, state)[0].params[0] == "critic/params/dense/bias"


def test_accumulated_gradients_beside_the_recorder_are_not_taken_for_params():
    recorder = Recorder(optax.adamw(1e-2))
    chain = optax.MultiSteps(recorder, 2)
    state = {"params": PARAMS, "opt": chain.init(PARAMS)}
    assert bind_all(recorder, state)[0].params[0] == "params/dense/bias"


def test_two_recorders_of_the_same_params_are_an_error_that_names_both():
    first, second = Recorder(optax.identity()), Recorder(optax.sgd(0.1, momentum=0.9))
    chain = optax.chain(first, second)
    with pytest.raises(RecorderError, match=r"'opt/0' and 'opt/1' both update params/dense/bias"):
        bind_all(chain, {"params": PARAMS, "opt": chain.init(PARAMS)})


def test_a_path_for_several_recorders_has_to_be_a_mapping():
    generator, critic, state = gan()
    with pytest.raises(RecorderError, match=r"a mapping.*2 recorders.*found 'g_params'"):
        bind_all([generator, critic], state, "g_params")


def test_two_optimizers_of_an_nnx_state_are_found():
    first, second = Recorder(optax.adamw(1e-2)), Recorder(optax.adamw(1e-3))
    actor = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    critic = Model(nnx.Rngs(0))
    trained = (
        nnx.Optimizer(actor, clipped(first), wrt=nnx.Param),
        nnx.Optimizer(critic, clipped(second), wrt=nnx.Param),
    )
    found = bind_all([second, first], nnx.state((actor, critic, *trained)))
    assert bound(found) == [
        ("2/opt_state/1", "0/bias/value", first),
        ("3/opt_state/1", "1/layers/0/bias/value", second),
    ]


def test_params_that_are_given_to_one_recorder_are_none_of_another():
    recorder = Recorder(optax.adamw(1e-2))
    states = {"a_opt": recorder.init(PARAMS), "b_opt": recorder.init(PARAMS)}
    state = {"a": PARAMS, "b": PARAMS, **states}
    with pytest.raises(RecorderError, match=r"at 'a_opt' records; found 'a', 'b'"):
        bind_all(recorder, state)
    found = bind_all(recorder, state, {"b_opt": "b"})
    assert [each.params[0] for each in found] == ["a/dense/bias", "b/dense/bias"]


def test_train_states_in_a_list_are_told_apart():
    recorders = [Recorder(optax.adamw(1e-2)), Recorder(optax.sgd(0.1, momentum=0.9))]
    states = [TrainState.create(apply_fn=None, params=PARAMS, tx=tx) for tx in recorders]
    found = bind_all(recorders, {"agents": states})
    assert bound(found) == [
        ("agents/0/opt_state", "agents/0/params/dense/bias", recorders[0]),
        ("agents/1/opt_state", "agents/1/params/dense/bias", recorders[1]),
    ]


def test_a_recorder_of_an_empty_tree_is_bound_to_nothing():
    recorder, frozen = Recorder(optax.adamw(1e-2)), Recorder(optax.sgd(0.1))
    state = {"params": PARAMS, "opt": recorder.init(PARAMS), "none": frozen.init({})}
    assert [each.prefix for each in bind_all([recorder, frozen], state)] == ["opt"]


def test_recorders_are_found_in_what_callers_have():
    first, second = Recorder(optax.adamw(1e-2)), Recorder(optax.sgd(0.1))
    of = bindings.recorders_of
    assert of(None) == {}
    assert of(first) == of(clipped(first)) == of([first, clipped(first)]) == {"": (first,)}
    assert of(optax.MultiSteps(first, 2)) == {"": (first,)}
    assert of((first, clipped(second))) == {"": (first, second)}
    assert of({"a/b/": clipped(first), "c": [second]}) == {"a/b": (first,), "c": (second,)}
    assert bind_all(None, {"params": PARAMS}) == ()


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-2),
        optax.masked(Recorder(optax.sgd(0.1)), {"kernel": True, "bias": False}),
        optax.chain(optax.identity(), optax.clip(1.0)),
    ],
)
def test_a_chain_in_which_no_recorder_is_found_is_an_error_that_says_what_to_give(tx):
    with pytest.raises(RecorderError, match=r"none can be found.*the Recorder object itself"):
        bindings.recorders_of(tx)


@pytest.mark.parametrize("argument", [3, "recorder", Recorder, [Recorder(optax.sgd(0.1)), None]])
def test_what_is_no_recorder_is_refused_with_what_is_expected(argument):
    with pytest.raises(TypeError, match="expected a Recorder"):
        bindings.recorders_of(argument)
    with pytest.raises(TypeError, match="expected a Recorder"):
        bindings.recorders_of({"actor": argument})


def test_a_key_that_is_no_leaf_path_is_refused():
    with pytest.raises(TypeError, match="found the key 0"):
        bindings.recorders_of({0: Recorder(optax.sgd(0.1))})


def test_a_recorder_under_vmap_is_named_as_what_it_is():
    recorder = Recorder(optax.adamw(1e-3))
    params = {"w": jnp.ones((3, 4))}
    state = {"params": params, "opt": jax.vmap(recorder.init)(params)}
    with pytest.raises(RecorderError, match=r"has \(3,\) update counters.*vmap or jax.pmap"):
        bindings.bind_all(
            {"": (recorder,)}, params_search.leaf_types(trees.flatten(state)[0]), None
        )
