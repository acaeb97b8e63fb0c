"""Params and records of each recorder are found in a state, or an error names the remedy."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from adacheck_jax import Recorder
from adacheck_jax.errors import RecorderError
from adacheck_jax.update import binding as bindings
from tests.update.replaying import bind_all

PARAMS = {
    "dense": {"kernel": jnp.linspace(-1.0, 1.0, 2048).reshape(32, 64), "bias": jnp.ones(64)},
    "scale": jnp.ones(()),
}
SMALL = {"dense": {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}}


def adam(rate=1e-2):
    return Recorder(optax.adamw(rate))


def sgd():
    return Recorder(optax.sgd(0.1, momentum=0.9))


def clipped(recorder):
    return optax.chain(optax.clip_by_global_norm(1.0), recorder)


def dict_state(recorder):
    return {"params": PARAMS, "opt_state": clipped(recorder).init(PARAMS), "step": 0}


def test_a_binding_names_all_that_a_replay_takes_and_gives():
    recorder = adam()
    (found,) = bind_all(recorder, dict_state(recorder))
    assert found.params == ("params/dense/bias", "params/dense/kernel", "params/scale")
    node = "opt_state/1/adacheck"
    assert found.record == tuple(f"{node}_record/{p[7:]}" for p in found.params)
    assert found.count == f"{node}_count"
    assert f"{node}_inner/0/mu/scale" in found.inner
    assert found.extra == ()
    assert found.explained == {*found.params, *found.inner}
    assert found.consumed == found.record
    with_extra = dataclasses.replace(found, extra=("value",))
    assert with_extra.consumed == (*found.record, "value")


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)


@pytest.mark.parametrize("in_order", [True, False])
def test_the_params_of_an_nnx_state_are_found(in_order):
    recorder, model = adam(), Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(optax.identity(), recorder), wrt=nnx.Param)
    state = nnx.state((model, optimizer) if in_order else {"o": optimizer, "z": model})
    (found,) = bind_all(recorder, state)
    root = "0" if in_order else "z"
    assert all(path.startswith(f"{root}/") for path in found.params)
    assert f"{root}/layers/0/kernel/value" in found.params
    assert len(found.params) == len(found.record) == 6
    assert not any("/norm/mean" in path for path in found.params)


def models(first, second):
    """Two models of the same shapes, each in one subtree with its optimizer."""
    return {
        "actor": {"params": PARAMS, "opt_state": clipped(first).init(PARAMS)},
        "critic": {"params": PARAMS, "opt_state": clipped(second).init(PARAMS)},
    }


def gan(first, second):
    optimizers = {"g_opt": clipped(first).init(PARAMS), "d_opt": clipped(second).init(SMALL)}
    return {"g_params": PARAMS, "d_params": SMALL, **optimizers}


def nnx_twins(first, second):
    own = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), Model(nnx.Rngs(0))
    trained = (
        nnx.Optimizer(model, clipped(recorder), wrt=nnx.Param)
        for model, recorder in zip(own, (first, second), strict=True)
    )
    return nnx.state((*own, *trained))


def train_state(recorder):
    return TrainState.create(apply_fn=None, params=PARAMS, tx=recorder)


def with_average(state):
    return {**state, "ema": PARAMS}


def apart(recorder):
    states = {"a_opt": recorder.init(PARAMS), "b_opt": recorder.init(PARAMS)}
    return {"a": PARAMS, "b": PARAMS, **states}


A, B, G, D = adam(), sgd(), adam(1e-3), Recorder(optax.adamw(1e-2), dtype=jnp.bfloat16)
MASK = {"dense": {"kernel": True, "bias": False}, "scale": False}
BARE = {"w": jnp.ones((3, 2)), "opt": B.init(jnp.ones((3, 2))), "step": 0}
MULTI = optax.MultiSteps(A, 2)
ACTOR, CRITIC = ("actor/opt_state/1", "actor/params"), ("critic/opt_state/1", "critic/params")
AVERAGED = {**models(A, A), "actor": with_average(models(A, A)["actor"])}
FOUND = {
    "a dictionary": (A, dict_state(A), None, [("opt_state/1", "params", A)]),
    "a train state": (A, train_state(A), None, [("opt_state", "params", A)]),
    "a plain tuple": (A, (A.init(PARAMS), PARAMS), None, [("0", "1", A)]),
    "at the root": (A, {**PARAMS, "opt": A.init(PARAMS)}, None, [("opt", "", A)]),
    "one bare array": (B, BARE, None, [("opt", "w", B)]),
    "under a mask": (
        A, {"params": PARAMS, "opt": optax.masked(A, MASK).init(PARAMS)}, None,
        [("opt/inner_state", "params", A)],
    ),
    "one of two by a path": (A, with_average(dict_state(A)), "ema", [("opt_state/1", "ema", A)]),
    "the other": (A, with_average(dict_state(A)), "params", [("opt_state/1", "params", A)]),
    "the root by a path": (
        A, {**PARAMS, "opt": A.init(PARAMS), "ema": PARAMS}, "", [("opt", "", A)]
    ),
    "by shapes": (
        [A, B], gan(A, B), None, [("d_opt/1", "d_params", B), ("g_opt/1", "g_params", A)]
    ),
    "by shapes, turned": (
        [B, A], gan(A, B), None, [("d_opt/1", "d_params", B), ("g_opt/1", "g_params", A)]
    ),
    "by where they lie": ([B, A], models(A, B), None, [(*ACTOR, A), (*CRITIC, B)]),
    "by data types": ([D, A], models(A, D), None, [(*ACTOR, A), (*CRITIC, D)]),
    "one for two": (A, models(A, A), None, [(*ACTOR, A), (*CRITIC, A)]),
    "twins by a mapping": (
        {"actor": A, "critic": clipped(G)}, models(A, G), None, [(*ACTOR, A), (*CRITIC, G)]
    ),
    "twins by longer names": (
        {"actor/opt_state": A, "critic/opt_state": G}, models(A, G), None,
        [(*ACTOR, A), (*CRITIC, G)],
    ),
    "by the longest prefix": (
        {"": A, "critic": G}, models(A, G), None, [(*ACTOR, A), (*CRITIC, G)]
    ),
    "paths by a mapping": (
        A, AVERAGED, {"actor": "actor/params", "critic": "critic/params"},
        [(*ACTOR, A), (*CRITIC, A)],
    ),
    "given to one, so not the other's": (
        A, apart(A), {"b_opt": "b"}, [("a_opt", "a", A), ("b_opt", "b", A)]
    ),
    "not a target network's": (
        A, {"critic": models(A, A)["critic"], "target": {"params": PARAMS}}, None, [(*CRITIC, A)]
    ),
    "not accumulated gradients": (
        A, {"params": PARAMS, "opt": MULTI.init(PARAMS)}, None,
        [("opt/inner_opt_state", "params", A)],
    ),
    "of nnx": (
        [B, A], nnx_twins(A, B), None, [("2/opt_state/1", "0", A), ("3/opt_state/1", "1", B)]
    ),
    "in a list": (
        [A, B], {"agents": [train_state(A), train_state(B)]}, None,
        [(f"agents/{n}/opt_state", f"agents/{n}/params", each) for n, each in enumerate((A, B))],
    ),
    "none of an empty tree": (
        [A, B], {"params": PARAMS, "opt": A.init(PARAMS), "none": B.init({})}, None,
        [("opt", "params", A)],
    ),
    "none": (None, {"params": PARAMS}, None, []),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_the_params_of_each_recorder_are_found(name):
    recorders, state, params_path, expected = FOUND[name]
    found = bind_all(recorders, state, params_path)
    assert [(each.prefix, each.recorder) for each in found] == [(x[0], x[2]) for x in expected]
    for each, (_, where, recorder) in zip(found, expected, strict=True):
        assert all(
            path == where or path.startswith(f"{where}/" * bool(where)) for path in each.params
        )
        assert len(each.params) == len(each.record)
        assert each.signature in recorder.signatures
    own = [path for each in found for path in each.explained]
    assert len(own) == len({*own})
    if name == "under a mask":
        assert found[0].params == ("params/dense/kernel",)


OTHER = jax.tree.map(lambda p: jnp.zeros((*p.shape, 2)), PARAMS)
BOTH = optax.chain(A, B)
NEAR = r".*'actor/opt_state/1', 'critic/opt_state/1"
ERRORS = {
    "ambiguous": (A, with_average(dict_state(A)), None, r"found 'ema', 'params'.*params_path="),
    "a path to nowhere": (A, dict_state(A), "nowhere", r"'nowhere'.* There: .*, params, step\."),
    "a path to a state": (A, dict_state(A), "opt_state", "dense/bias"),
    "a path too deep": (A, dict_state(A), "params/dense", "dense/bias"),
    "other shapes": (A, {**dict_state(A), "other": OTHER}, "other", "other"),
    "no params": (A, {"opt_state": A.init(PARAMS)}, None, "found none"),
    "no recorder's state": (A, {"params": PARAMS}, None, "no Recorder's state"),
    "params never seen": (adam(), dict_state(A), None, "has not seen the 3 params"),
    "one not given": (
        A, gan(A, B), None, r"has not seen the 2 params .* at 'd_opt/1'.*all opt"
    ),
    "twins": (
        [A, G], models(A, G), None, r"found 2 that fit equally.*\{'actor/opt_state/1'"
    ),
    "a path for several": (
        [A, B], gan(A, B), "g_params", r"a mapping.*2 recorders.*found 'g_params'"
    ),
    "an average": (A, AVERAGED, None, r"'actor/ema', 'actor/params', .*\{'actor/opt"),
    "two of the same params": (
        BOTH, {"params": PARAMS, "opt": BOTH.init(PARAMS)}, None,
        r"'opt/0' and 'opt/1' both update params/dense/bias",
    ),
    "not given to one": (A, apart(A), None, r"at 'a_opt' records; found 'a', 'b'"),
    **{
        f"no state at {path}": ({"": A, path: A}, models(A, A), None, rf"'{path}'{NEAR}")
        for path in ("actors", "act", "actor/params")
    },
    "no path at act": (A, models(A, A), {"act": "actor/params"}, r"params_path.*'act'"),
    "under vmap": (
        A, {"params": PARAMS, "opt": jax.vmap(A.init)({"w": jnp.ones((3, 4))})}, None,
        r"has \(3,\) update counters.*vmap or jax.pmap",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_told_is_an_error_that_names_the_remedy(name):
    recorders, state, params_path, match = ERRORS[name]
    with pytest.raises(RecorderError, match=match):
        bind_all(recorders, state, params_path)


def test_recorders_are_found_in_what_callers_have():
    of = bindings.recorders_of
    assert of(None) == {}
    assert of(A) == of(clipped(A)) == of([A, clipped(A)]) == of(MULTI) == {"": (A,)}
    assert of((A, clipped(B))) == {"": (A, B)}
    assert of({"a/b/": clipped(A), "c": [B]}) == {"a/b": (A,), "c": (B,)}
    for tx in (optax.adamw(1e-2), optax.masked(B, MASK), optax.chain(optax.clip(1.0))):
        with pytest.raises(RecorderError, match=r"none can be found.*the Recorder object itself"):
            of(tx)
    for argument in (3, "recorder", Recorder, [A, None]):
        with pytest.raises(TypeError, match="expected a Recorder"):
            of(argument)
        with pytest.raises(TypeError, match="expected a Recorder"):
            of({"actor": argument})
    with pytest.raises(TypeError, match="found the key 0"):
        of({0: A})
