"""What callers of ``StandardSave`` and ``StandardRestore`` rely on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.adapter.wanted import targets

ARRAY = jnp.arange(3.0)
SPEC = jax.ShapeDtypeStruct((3,), jnp.float32)
STOCK = ocp.StandardCheckpointHandler, ocp.args.StandardSave, ocp.args.StandardRestore
OURS = adacheck.AdaCheckHandler, adacheck.SaveArgs, adacheck.RestoreArgs


def restored(kind, path, state, **args):
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
    state, abstract = {"a": ARRAY, "b": {"c": saved}}, {"a": SPEC, "b": {"c": wanted}}
    stock = restored(STOCK, tmp_path / "stock", state, item=abstract)
    ours = restored(OURS, tmp_path / "ours", state, item=abstract)
    assert jax.tree.structure(ours) == jax.tree.structure(stock)
    np.testing.assert_array_equal(ours["a"], ARRAY)


@pytest.mark.parametrize(
    "abstract",
    [
        {"a": SPEC},
        {"a": SPEC, "b": SPEC, "c": SPEC},
        {"a": SPEC, "b": "text"},
        {"a": SPEC, "b": SPEC, "c": "text"},
        {"a": SPEC, "b": jax.ShapeDtypeStruct((4,), jnp.float32)},
    ],
)
def test_what_does_not_fit_is_a_value_error(tmp_path, abstract):
    state = {"a": ARRAY, "b": ARRAY}
    for name, kind in (("stock", STOCK), ("ours", OURS)):
        with pytest.raises(
            ValueError, match=r"(?i)mismatch|fit|Unsupported type|not compatible"
        ) as error:
            restored(kind, tmp_path / name, state, item=abstract)
        assert ("Unsupported type" in str(error.value)) == ("text" in abstract.values())


@pytest.mark.parametrize("leaf", ["text", b"bytes", 3j, object()])
def test_refused_leaf_types(tmp_path, leaf):
    for name, kind in (("stock", STOCK), ("ours", OURS)):
        with pytest.raises(ValueError, match="Unsupported type"):
            restored(kind, tmp_path / name, {"a": ARRAY, "b": leaf})


@pytest.mark.parametrize("state", [None, 3, ARRAY])
def test_refused_states(tmp_path, state):
    for name, kind in (("stock", STOCK), ("ours", OURS)):
        with pytest.raises(ValueError, match=r"expected|Must|support"):
            restored(kind, tmp_path / name, state)


def test_what_can_be_seen_as_an_array_is_saved_as_one(tmp_path):
    class Tensor:
        dtype = "of another library"

        def __array__(self, dtype=None, copy=None):
            return np.asarray(np.arange(3.0), dtype)

    for name, kind in (("stock", STOCK), ("ours", OURS)):
        found = restored(kind, tmp_path / name, {"a": Tensor()})
        np.testing.assert_array_equal(found["a"], np.arange(3.0))


def test_devices_that_do_not_exist_here(tmp_path, monkeypatch):
    restored(OURS, tmp_path / "1", {"a": ARRAY})

    def missing(*_):
        raise ValueError("device 9 was not found")

    monkeypatch.setattr(targets.Target, "_saved_sharding", missing)
    with pytest.raises(ValueError, match="Topology mismatch detected: leaf a: it was saved"):
        restored(OURS, tmp_path / "1", None)
