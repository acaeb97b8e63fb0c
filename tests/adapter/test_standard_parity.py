"""What callers of ``StandardSave`` and ``StandardRestore`` rely on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck

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


def test_what_can_be_seen_as_an_array_is_saved_as_one(tmp_path):
    class Tensor:
        dtype = "of another library"

        def __array__(self, dtype=None, copy=None):
            return np.asarray(np.arange(3.0), dtype)

    for name, kind in (("stock", STOCK), ("ours", OURS)):
        found = restored(kind, tmp_path / name, {"a": Tensor()})
        np.testing.assert_array_equal(found["a"], np.arange(3.0))
