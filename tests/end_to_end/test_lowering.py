"""Every program of this library can be lowered for a GPU and a TPU, though none is here."""

import jax
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.device import fingerprint, shard_sums
from adacheck_jax.device.loops import copier, xla_call
from tests import support
from tests.support import abstract, manager_of, mesh_of


class Lowered:
    """A program under ``jax.jit`` that is lowered for other platforms whenever it is run."""

    def __init__(self, jitted, names):
        self._jitted, self._names = jitted, names

    def __call__(self, *args, **kwargs):
        self._export(*args, **kwargs)
        return self._jitted(*args, **kwargs)

    def lower(self, *args, **kwargs):
        self._export(*args, **kwargs)
        return self._jitted.lower(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._jitted, name)

    def _export(self, *args, **kwargs):
        for platform in ("cuda", "tpu"):
            try:
                jax.export.export(self._jitted, platforms=[platform])(*args, **kwargs)
            except ValueError as error:
                if "was exported for platforms '('cpu',)'" not in str(error):
                    raise
                return  # of an update there is a program for each platform
        self._names.append(getattr(self._jitted, "__name__", "?"))


@pytest.fixture
def lowered(monkeypatch):
    """Names of the programs that were lowered, without the compiled loops of CPU devices."""
    jit, names = jax.jit, []
    xla_call.wait()
    monkeypatch.setattr(xla_call, "is_ready", lambda: False)
    monkeypatch.setattr(xla_call, "wait", lambda: False)
    monkeypatch.setattr(fingerprint, "hashes_on_device", lambda array: isinstance(array, jax.Array))
    for each in (shard_sums._summing, copier._copier):
        each.cache_clear()
    monkeypatch.setattr(jax, "jit", lambda *args, **kwargs: Lowered(jit(*args, **kwargs), names))
    yield names
    for each in (shard_sums._summing, copier._copier):
        each.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("on_devices", [False, True])
def test_programs_of_saves_and_restores_are_lowered_for_accelerators(tmp_path, lowered, on_devices):
    run = support.dict_run(mesh_of((4, 2)), optax.adamw(1e-2))
    shadow = adacheck.Shadow(on_devices=on_devices)
    handler = adacheck.AdaCheckHandler(run.recorder, shadow=shadow)
    with manager_of(tmp_path, handler) as manager:
        saved = support.save_steps(manager, run, 4)
        copier.copies(dict(enumerate(jax.tree.leaves(run.state))))
        fingerprint.of_leaves(dict(enumerate(jax.tree.leaves(run.state))))
        target = adacheck.RestoreArgs(abstract(run.state, mesh_of((2, 4))))
        support.assert_same_bits(manager.restore(4, args=target), saved[4])
    files = {path.name.split(".")[1] for path in tmp_path.rglob("update.*")}
    assert files == {"cpu", "cuda", "tpu"}, "the update itself"
    assert {"local", "copy"} <= {*lowered}, "fingerprints and copies"
    assert on_devices or "taken" in lowered, "samples"
