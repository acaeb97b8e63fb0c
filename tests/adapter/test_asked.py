"""All that may be asked of a step of each kind: whole, in part, elsewhere, as other types."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import adacheck_jax as adacheck
from adacheck_jax import layout
from adacheck_jax.errors import IntegrityError
from adacheck_jax.restore import base_reader
from tests import support
from tests.support import abstract, assert_same_bits, dict_run, manager_of, mesh_of, save_steps

HOLE = ocp.PLACEHOLDER
STEPS = {"base": 1, "delta": 3, "difference": 3, "standard": 3, "pytree": 3, "zarr": 3}


@pytest.fixture(scope="module", params=STEPS)
def step(request, tmp_path_factory):
    """A root, the number of a step in it, and the state that was saved."""
    kind = request.param
    root, run = tmp_path_factory.mktemp(kind), dict_run(mesh_of((4, 2)))
    if kind in ("base", "delta", "difference"):
        delta: Any = "bits" if kind == "difference" else "auto"
        with manager_of(root, adacheck.AdaCheckHandler(run.recorder, delta=delta)) as manager:
            save_steps(manager, run, STEPS[kind])
        assert support.kinds_of(root) == "BDD"[: STEPS[kind]]
        return kind, root, run.state
    run.state, run.count = run.advance(), 3
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False) if kind == "zarr" else None
    save = ocp.args.StandardSave if kind == "standard" else ocp.args.PyTreeSave
    with ocp.CheckpointManager(root, item_handlers=handler) as stock:
        stock.save(3, args=save(run.state))
    return kind, root, run.state


def bare(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def on_host(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)


def other(leaf: Any, shape: Any = None, dtype: Any = None) -> Any:
    return jax.ShapeDtypeStruct(
        leaf.shape if shape is None else shape, dtype or leaf.dtype, sharding=leaf.sharding
    )


def changed(tree: Any, path: str, leaf: Any) -> Any:
    """The tree with another leaf, or subtree, at a path."""
    first, _, rest = path.partition("/")
    return {**tree, first: changed(tree[first], rest, leaf) if rest else leaf}


def args_of(tree: Any, make: Callable[[Any], Any]) -> Any:
    return jax.tree.map(make, tree)


KERNEL, BIAS, SCALE = "params/in/kernel", "params/in/bias", "params/scale"
TWO = NamedSharding(mesh_of((2,)), PartitionSpec())
ONE = SingleDeviceSharding(jax.devices()[1])
Asked = tuple[dict[str, Any], Any]


def in_other_sizes(s: Any) -> Asked:
    target = changed(abstract(s), BIAS, other(s["params"]["in"]["bias"], (140,)))
    target = changed(target, KERNEL, other(s["params"]["in"]["kernel"], (48, 16)))
    kernel = np.ascontiguousarray(np.asarray(s["params"]["in"]["kernel"])[:48, :16])
    cut = changed(s, BIAS, np.pad(np.asarray(s["params"]["in"]["bias"]), (0, 12)))
    return {"abstract_state": target, "strict": False}, changed(cut, KERNEL, kernel)


def by_restore_args(s: Any) -> Asked:
    """They come before what the abstract state says."""
    args = args_of(s, lambda _: ocp.ArrayRestoreArgs(sharding=TWO))
    args = changed(args, SCALE, ocp.RestoreArgs(restore_type=np.ndarray))
    args = changed(args, BIAS, None)
    args = changed(args, "step", ocp.RestoreArgs(restore_type=int))
    kernel = args["params"]["in"]["kernel"]
    kernel.mesh, kernel.mesh_axes, kernel.sharding = TWO.mesh, PartitionSpec("data"), None
    out = ocp.ArrayRestoreArgs(dtype=jnp.bfloat16)
    args = changed(args, "params/out/kernel", out)
    expected = changed(s, "params/out/kernel", s["params"]["out"]["kernel"].astype(jnp.bfloat16))
    return {"item": bare(s), "restore_args": args}, changed(expected, "step", int(s["step"]))


def by_transforms(s: Any) -> Asked:
    target = {"params": abstract(s["params"], mesh_of((2,)))}
    args = ocp.checkpoint_utils.construct_restore_args(target)
    return {"item": target, "transforms": {}, "restore_args": args}, {"params": s["params"]}


def by_one_replica(s: Any) -> Asked:
    single = ocp.type_handlers.SingleReplicaArrayRestoreArgs
    args = args_of(s, lambda x: single(sharding=x.sharding, global_shape=x.shape))
    assert adacheck.RestoreArgs(abstract(s), restore_args=args).read_once is True
    assert adacheck.RestoreArgs(abstract(s), restore_args=args, read_once=False).read_once is False
    return {"item": abstract(s), "restore_args": args}, s


def turned(s: Any) -> Asked:
    args = args_of(s, lambda _: ocp.ArrayRestoreArgs(sharding=ONE))
    args = changed(args, KERNEL, ocp.ArrayRestoreArgs(sharding=Format(Layout((1, 0)), ONE)))
    return {"item": abstract(s), "restore_args": args}, s


def with_a_record_apart(s: Any) -> Asked:
    def place(path: Any, x: Any) -> Any:
        is_recorded = "adacheck_record" in jax.tree_util.keystr(path)
        where = ONE if is_recorded else x.sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return {"abstract_state": jax.tree_util.tree_map_with_path(place, s)}, s


ASKED: dict[str, Callable[[Any], Asked]] = {
    "a record apart": with_a_record_apart,
    "whole": lambda s: ({"abstract_state": abstract(s)}, s),
    "elsewhere": lambda s: ({"abstract_state": abstract(s, mesh_of((2, 4)))}, s),
    "one device": lambda s: ({"abstract_state": abstract(s, mesh_of((1, 1)))}, s),
    "no shardings": lambda s: ({"abstract_state": bare(s)}, s),
    "on the host": lambda s: ({"abstract_state": on_host(s)}, s),
    "scalars on one device": lambda s: (
        {"abstract_state": args_of(abstract(s), lambda x: x if x.ndim else x.update(sharding=ONE))},
        s,
    ),
    "layouts": lambda s: (
        {
            "abstract_state": args_of(
                s, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.format)
            ),
            "support_layout": True,
        },
        s,
    ),
    "turned": turned,
    "a cast": lambda s: (
        {
            "abstract_state": changed(
                abstract(s), SCALE, other(s["params"]["scale"], dtype=jnp.bfloat16)
            )
        },
        changed(s, SCALE, s["params"]["scale"].astype(jnp.bfloat16)),
    ),
    "other sizes": in_other_sizes,
    "params": lambda s: (
        {"abstract_state": {"params": abstract(s["params"])}, "partial_restore": True},
        {"params": s["params"]},
    ),
    "params of one layer elsewhere": lambda s: (
        {
            "abstract_state": {"params": {"in": abstract(s["params"]["in"], mesh_of((2, 4)))}},
            "partial_restore": True,
        },
        {"params": {"in": s["params"]["in"]}},
    ),
    "a hole for a subtree": lambda s: (
        {"abstract_state": {**abstract(s), "opt_state": HOLE}},
        {**s, "opt_state": HOLE},
    ),
    "holes for leaves": lambda s: (
        {"abstract_state": {**abstract(s), "opt_state": args_of(s["opt_state"], lambda _: HOLE)}},
        {**s, "opt_state": args_of(s["opt_state"], lambda _: HOLE)},
    ),
    "a hole beside restore_args": lambda s: (
        {
            "item": {**abstract(s), "opt_state": HOLE},
            "restore_args": args_of(s, lambda _: ocp.RestoreArgs()),
        },
        {**s, "opt_state": HOLE},
    ),
    "restore_args": by_restore_args,
    "restore_args of stock": lambda s: (
        {
            "item": abstract(s, mesh_of((2,))),
            "restore_args": ocp.checkpoint_utils.construct_restore_args(abstract(s, mesh_of((2,)))),
        },
        s,
    ),
    "transforms": by_transforms,
    "one replica": by_one_replica,
}
"""Arguments of ``RestoreArgs`` for a saved state, and what they ask for."""


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_of_a_step_comes_as_it_was_saved(step, name):
    kind, root, state = step
    arguments, expected = ASKED[name](state)
    target = arguments.get("abstract_state", arguments.get("item"))
    handler = adacheck.AdaCheckHandler()
    with manager_of(root, handler) as manager:
        found = manager.restore(STEPS[kind], args=adacheck.RestoreArgs(**arguments))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, saved, asked in zip(*map(jax.tree.leaves, (found, expected, target)), strict=True):
        if saved is HOLE:
            assert leaf is HOLE
            continue
        assert_same_bits(leaf, [np.asarray(saved)])
        if isinstance(asked, np.ndarray):
            assert type(leaf) is np.ndarray
        elif "restore_args" not in arguments and asked.sharding is not None:
            place = leaf.format if isinstance(asked.sharding, Format) else leaf.sharding
            assert place == asked.sharding
        elif name == "no shardings":
            assert leaf.sharding.is_equivalent_to(saved.sharding, leaf.ndim)
    layer = found["params"].get("in", {}) if "params" in found else {}
    if name == "turned":
        assert layer["kernel"].format.layout.major_to_minor == (1, 0)
    if name == "restore_args":
        assert type(found["step"]) is int
        assert type(found["params"]["scale"]) is np.ndarray
        assert layer["kernel"].sharding.spec == PartitionSpec("data")
        assert layer["bias"].sharding == state["params"]["in"]["bias"].sharding
        assert {x.sharding for x in jax.tree.leaves(found["opt_state"])} == {TWO}
    assert handler.restored is not None
    assert handler.restored.exact == (kind in ("base", "delta", "difference"))
    assert handler.restored.verified == handler.restored.exact


def test_a_description_of_the_step_is_an_abstract_state(step):
    kind, root, state = step
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        described = manager.item_metadata(STEPS[kind])
        args = args_of(described.tree, lambda _: ocp.RestoreArgs(restore_type=np.ndarray))
        wanted = adacheck.RestoreArgs(item=described, restore_args=args)
        found = jax.tree.leaves(manager.restore(STEPS[kind], args=wanted))
    assert all(isinstance(leaf, np.ndarray) for leaf in found)
    expected = sorted(x.tobytes() for x in support.host_copy(state))
    assert sorted(x.tobytes() for x in found) == expected


def test_params_alone_read_nothing_else(step, monkeypatch):
    kind, root, state = step
    names: list[str] = []
    read = base_reader.read

    def noted(directory: Any, wanted: Any, *options: Any, **named: Any) -> Any:
        names.extend(wanted)
        return read(directory, wanted, *options, **named)

    monkeypatch.setattr(base_reader, "read", noted)
    support.restored(root, STEPS[kind], {"params": abstract(state["params"])}, partial_restore=True)
    if kind == "delta":  # a replay needs the optimizer's state, and has the records in deltas
        assert any("nu" in name for name in names)
        assert not any("record" in name or name == "step" for name in names)
    else:
        assert all(name.startswith("params.") for name in names)


EXTRA = jax.ShapeDtypeStruct((2,), jnp.float32)
REFUSED: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "a part without a word": (
        lambda s: {"abstract_state": {"params": abstract(s["params"])}},
        r"saved, not asked for[^\n]*step[^$]*partial_restore=True",
    ),
    "a hole for nothing": (
        lambda s: {
            "abstract_state": {"params": abstract(s["params"]), "parms": HOLE},
            "partial_restore": True,
        },
        r"asked for, not saved \(1\): parms",
    ),
    "more than was saved": (
        lambda s: {
            "abstract_state": {"params": abstract(s["params"]), "head": EXTRA},
            "partial_restore": True,
        },
        r"asked for, not saved \(1\): head",
    ),
    "another shape": (
        lambda s: {"abstract_state": changed(abstract(s), "step", EXTRA)},
        r"different \(1\): step: saved int32\[\], asked for float32\[2\]",
    ),
    "text": (
        lambda s: {"abstract_state": changed(abstract(s), "step", "text")},
        "Unsupported type",
    ),
    "arguments": (
        lambda s: {"abstract_state": adacheck.RestoreArgs(s)},
        "expected a state, found .*give the state",
    ),
    "loose": (
        lambda s: {
            "abstract_state": bare(s),
            "restore_args": args_of(s, lambda _: ocp.ArrayRestoreArgs(strict=False)),
        },
        r"ArrayRestoreArgs\(strict=False\)",
    ),
    "restore_args alone": (
        lambda s: {"restore_args": args_of(s, lambda _: ocp.RestoreArgs())},
        "abstract state beside restore_args",
    ),
    "restore_args of others": (
        lambda s: {"abstract_state": bare(s), "restore_args": {"b": ocp.RestoreArgs()}},
        "b",
    ),
    "transforms that do something": (
        lambda s: {"abstract_state": bare(s), "transforms": {"a": ocp.Transform("b")}},
        r"transforms: expected \{\} or None",
    ),
    "a rule alone": (
        lambda s: {"abstract_state": bare(s), "rules": layout.rename("a", to="b")},
        r"rules: expected a list of rules .*found Rule",
    ),
    "a device as sharding": (
        lambda s: {"abstract_state": bare(s), "fallback_sharding": jax.devices()[0]},
        r"fallback_sharding: expected a jax.sharding.Sharding, found \w*Cpu",
    ),
    "a state twice": (
        lambda s: {"abstract_state": bare(s), "item": bare(s)},
        "expected abstract_state or item",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_asked_is_refused_by_name(step, name):
    kind, root, state = step
    make, message = REFUSED[name]
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
            manager.restore(STEPS[kind], args=adacheck.RestoreArgs(**make(state)))
        assert re.search(message, str(caught.value)), caught.value
        if name == "another shape" and kind in ("standard", "pytree", "zarr"):
            args = adacheck.RestoreArgs(abstract(state), require_exact=True)
            with pytest.raises(IntegrityError, match="stock Orbax saved"):
                manager.restore(STEPS[kind], args=args)


@pytest.mark.parametrize("empty", [None, {}, ()])
def test_a_hole_for_an_empty_node(tmp_path, empty):
    state = {"a": jnp.arange(3.0), "b": empty}
    with ocp.Checkpointer(adacheck.AdaCheckHandler()) as checkpointer:
        checkpointer.save(tmp_path / "1", args=adacheck.SaveArgs(state))
        target = adacheck.RestoreArgs({"a": abstract(state["a"]), "b": HOLE})
        found = checkpointer.restore(tmp_path / "1", args=target)
    assert found["b"] is HOLE
    np.testing.assert_array_equal(found["a"], state["a"])


@pytest.mark.parametrize("name", ["arrays", "abstract"])
def test_restore_args_of_stock_helpers_describe_the_words_of_keys(tmp_path, name):
    state = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4), 8)}
    target = state if name == "arrays" else abstract(state)
    args = ocp.checkpoint_utils.construct_restore_args(state)
    with ocp.Checkpointer(adacheck.AdaCheckHandler()) as checkpointer:
        checkpointer.save(tmp_path / name, args=adacheck.SaveArgs(state))
        wanted = adacheck.RestoreArgs(target, restore_args=args)
        found = checkpointer.restore(tmp_path / name, args=wanted)
    assert [x.dtype for x in found.values()] == [x.dtype for x in state.values()]
    assert_same_bits(found, support.host_copy(state))


@pytest.mark.parametrize("delta", ["auto", "bits"])
def test_params_that_were_restored_alone_begin_a_run_or_leave_it_as_it_was(tmp_path, delta):
    run, tuned = dict_run(mesh_of((2, 2))), dict_run(mesh_of((2, 2)))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder, delta=delta)) as manager:
        saved = save_steps(manager, run, 2)
        target = {"params": abstract(run.state["params"])}
        args = adacheck.RestoreArgs(target, partial_restore=True)
        found = manager.restore(1, args=args)
        saved |= save_steps(manager, run, 1)
        tuned.state, tuned.count = {**tuned.state, **found}, 3
        saved |= save_steps(manager, tuned, 2)
    support.assert_steps(tmp_path, saved, run.state)
    (tmp_path / "5/default/adacheck/manifest.json").write_text("{}")
    found = support.restored(tmp_path, 5, target, partial_restore=True, skip_damaged=True)
    params = jax.tree.unflatten(jax.tree.structure(run.state), saved[4])["params"]
    assert_same_bits(found["params"], jax.tree.leaves(params))


ARRAY = jnp.arange(3.0)
SPEC = jax.ShapeDtypeStruct((3,), jnp.float32)
STOCK = ocp.StandardCheckpointHandler, ocp.args.StandardSave, ocp.args.StandardRestore
OURS = adacheck.AdaCheckHandler, adacheck.SaveArgs, adacheck.RestoreArgs


def through(kind, path, state, **args):
    """What stock Orbax, or this library, restores of a state."""
    handler, save_args, restore_args = kind
    with ocp.Checkpointer(handler()) as checkpointer:
        if not path.exists():
            checkpointer.save(path, args=save_args(state))
        return checkpointer.restore(path, args=restore_args(**args))


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (optax.MaskedNode(), optax.MaskedNode()),
        (None, None),
        (ARRAY, None),
        (ARRAY, optax.MaskedNode()),
        (None, optax.MaskedNode()),
        (optax.MaskedNode(), None),
        (None, {}),
    ],
)
def test_masked_and_none_nodes(tmp_path, saved, wanted):
    state, asked = {"a": ARRAY, "b": {"c": saved}}, {"a": SPEC, "b": {"c": wanted}}
    stock = through(STOCK, tmp_path / "stock", state, item=asked)
    ours = through(OURS, tmp_path / "ours", state, item=asked)
    assert jax.tree.structure(ours) == jax.tree.structure(stock)
    np.testing.assert_array_equal(ours["a"], ARRAY)


def test_what_can_be_seen_as_an_array_is_saved_as_one(tmp_path):
    class Tensor:
        dtype = "of another library"

        def __array__(self, dtype=None, copy=None):
            return np.asarray(np.arange(3.0), dtype)

    for name, kind in (("stock", STOCK), ("ours", OURS)):
        found = through(kind, tmp_path / name, {"a": Tensor()})
        np.testing.assert_array_equal(found["a"], np.arange(3.0))
