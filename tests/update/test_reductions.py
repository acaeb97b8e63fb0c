"""Updates that add up elements are replayed by what their sums gave, on whatever mesh."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

import adacheck_jax as adacheck
from adacheck_jax.device import trees
from adacheck_jax.errors import ReplayError
from adacheck_jax.state.exported_update import ExportedUpdates
from adacheck_jax.state.snapshot import Snapshots
from adacheck_jax.store.steps import manifest_file, roots
from adacheck_jax.update.binding import recorders_of
from adacheck_jax.update.pinning import reductions
from adacheck_jax.update.pinning.fence import zero_of
from adacheck_jax.update.pinning.pinned_function import PinnedFunction
from adacheck_jax.update.recorder_state import is_result
from tests import support
from tests.support import abstract, assert_same_bits, manager_of, mesh_of, save_steps

ZERO = zero_of(jnp.int32(0))
CLIP = optax.clip_by_global_norm(0.3)
SUMS = {
    "clip": optax.chain(CLIP, optax.adam(1e-3)),
    "block clip": optax.chain(optax.clip_by_block_rms(1e-3), optax.adam(1e-3)),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(1e-2), optax.adam(1e-3)),
    "lamb": optax.lamb(1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=16),
    "accumulated": optax.MultiSteps(
        optax.chain(CLIP, optax.adam(1e-3)), 2
    ).gradient_transformation(),
    "if finite": optax.apply_if_finite(optax.chain(CLIP, optax.adam(1e-3)), 3),
}


def words_of(state):
    return [leaf for path, leaf in trees.flatten(state)[0].items() if is_result(path)]


@given(data=st.data())
def test_values_come_back_from_their_words(data):
    dtypes = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8, jnp.bool_, np.int16]
    dtypes += [jnp.float64, jnp.int64]  # of which a number takes two words
    shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
    kinds = data.draw(st.lists(st.tuples(shapes, st.sampled_from(dtypes)), min_size=1, max_size=4))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    with jax.enable_x64(True):
        values = [jnp.asarray(random.standard_normal(shape) * 3, dtype) for shape, dtype in kinds]
        slots = tuple(reductions.Slot(n, x.shape, np.dtype(x.dtype)) for n, x in enumerate(values))
        words = reductions.packed(values)
        assert words.shape == (reductions.word_count(slots),)
        assert_same_bits(reductions.unpacked(words, slots), support.host_copy(values))


def recorded_shapes(function, *arguments):
    _, slots = PinnedFunction(function, records=True).known(*arguments)
    return [each.shape for each in slots]


X = jnp.ones((40, 30))


def test_what_is_recorded_follows_from_operations_and_shapes():
    norm = lambda x: jnp.sqrt(jnp.sum(x * x))  # noqa: E731
    assert recorded_shapes(lambda x: x * 2 + 1, X) == []
    assert recorded_shapes(lambda x: x / norm(x), X) == [()]
    # The sum over leaves, and not that of each; nothing of what nobody takes.
    clip = lambda tree: CLIP.update(tree, ())[0]  # noqa: E731
    assert recorded_shapes(clip, [X] * 9) == [()]
    assert recorded_shapes(lambda x: (x, norm(x) * 0 + 1)[0] * 2, X) == []
    assert recorded_shapes(lambda x: x - x.mean(1, keepdims=True), X) == [(40,)]
    assert recorded_shapes(lambda x: x + x @ x.T @ x, X) == []  # too large
    assert recorded_shapes(lambda x: x * jnp.all(jnp.isfinite(x)), X) == [()]
    assert recorded_shapes(lambda x: x * jnp.linalg.slogdet(x @ x.T)[1], X) == [()]
    assert recorded_shapes(lambda x: jnp.outer(x.sum(1), x.sum(0)), jnp.ones((8, 8))) == [
        (8,),
        (8,),
    ]


def test_results_that_are_many_beside_the_record_are_not_recorded():
    def many(tree):
        return jax.tree.map(lambda x: x * x.sum(1, keepdims=True), tree)

    for shape, recorded in (((50, 40), [(50,)]), ((50, 10), [(50,)]), ((500, 10), [])):
        assert recorded_shapes(many, {"a": jnp.ones(shape)}) == recorded


def test_a_replay_adds_nothing_up_and_gives_the_bits():
    def function(x, flag):
        double = lambda y: y * y.sum()  # noqa: E731
        y = jax.lax.cond(flag, double, lambda y: y - y.max(), x)
        return y / jnp.sqrt(jnp.mean(y * y)), y.sum()

    pinned = PinnedFunction(function, records=True)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 32)), jnp.float32)
    for flag in (True, False):
        expected, words = jax.jit(pinned.recording)(ZERO, x, flag)
        _, slots = pinned.known(x, flag)
        replay = jax.jit(lambda *a: pinned.replaying(ZERO, a[0], slots, *a[1:]))  # noqa: B023
        text = replay.lower(words, x, flag).as_text()
        assert "stablehlo.reduce" not in text
        assert_same_bits(replay(words, x, flag), support.host_copy(expected))
        for a, b in zip(
            replay(words + 99, x, flag), expected, strict=True
        ):  # they are what is used
            assert not np.array_equal(a, b)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((4, 2), AxisType.Explicit), ((1,), AxisType.Auto), ((4, 2), AxisType.Auto)],
    ids=str,
)
@pytest.mark.first(1, slow=3)
def test_words_lie_on_all_devices_alike(shape, axes):
    run = support.dict_run(mesh_of(shape, axes), SUMS["adafactor"])
    for _ in range(2):
        run.advance()
        (words,) = words_of(run.state)
        assert words.sharding.is_fully_replicated
        assert words.size > 1
        assert np.asarray(words).any()


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.first(0, slow=2)
def test_steps_with_sums_are_replayed_on_every_mesh(tmp_path, name):
    run = support.dict_run(mesh_of((4, 2)), SUMS[name])
    handler = adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 4)
        for mesh in (mesh_of((4, 2)), mesh_of((2, 4)), mesh_of((1, 1))):
            args = adacheck.RestoreArgs(abstract(run.state, mesh))
            assert_same_bits(manager.restore(4, args=args), saved[4])
            assert handler.restored.exact
        found = [step.manifest for step in roots.steps_of(tmp_path)]
        assert [each.has_update for each in found[1:]] == [True] * 3
        assert {each.checked for step in found[1:] for each in step.deltas} == {"full"}
        assert not any(each.unreplayed for step in found[1:] for each in step.deltas)
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:  # by the stored program
        args = adacheck.RestoreArgs(abstract(run.state, mesh_of((2, 2))))
        assert_same_bits(manager.restore(4, args=args), saved[4])


@pytest.mark.parametrize("name", ["clip", "lamb", "accumulated"])
def test_a_sample_checks_them_as_it_checks_others(name):
    """Sums of all elements do not keep an update from being computed on some."""
    run = support.dict_run(mesh_of((4, 2)), SUMS[name])
    structure = Snapshots(recorders_of(run.recorder), None).take(run.state).structure
    update = ExportedUpdates("auto").of(structure)
    assert (update.engine, [*update.unreplayed], update.pinned) == ("sample", [], True)


@pytest.mark.first(0, slow=2)
@pytest.mark.parametrize("other", [(), (reductions.Slot(0, (3,), np.dtype(np.float32)),)])
def test_a_run_of_a_release_that_recorded_other_results_or_none_goes_on(
    tmp_path, monkeypatch, other
):
    with monkeypatch.context() as patched:
        patched.setattr(reductions, "chosen", lambda *_: other)
        run = support.dict_run(mesh_of((4, 2)), SUMS["clip"])
        with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
            saved = save_steps(manager, run, 2)
        assert [x.shape for x in words_of(run.state)] == [x.shape for x in other]
    run = support.dict_run(mesh_of((4, 2)), SUMS["clip"])
    (words,) = words_of(run.state)
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        found = manager.restore(2, args=adacheck.RestoreArgs(abstract(run.state)))
        assert_same_bits(words_of(found), [np.zeros_like(words)])
        paths = [*trees.flatten(run.state)[0]]
        if other:
            paths = [path for path in paths if not is_result(path)]
            saved[2] = [x for x in saved[2] if x.shape != (3,)]
        leaves = trees.flatten(found)[0]
        assert_same_bits([leaves[path] for path in paths if not is_result(path)], saved[2])
        run.state, run.count = found, 2
        saved = save_steps(manager, run, 2)
        for step in (3, 4):
            args = adacheck.RestoreArgs(abstract(run.state, mesh_of((2, 2))))
            assert_same_bits(manager.restore(step, args=args), saved[step])
    kinds = [hasattr(step.manifest, "update") for step in roots.steps_of(tmp_path)]
    assert kinds == [True, False, True, False]  # a base is the first of its own
    assert manifest_file.read(tmp_path / "4" / "default").has_update


@pytest.mark.slow
def test_results_that_are_not_those_of_the_update_are_found(tmp_path, caplog):
    """Edited by hand, they are consumed by a replay that gives another state than was trained."""
    run = support.dict_run(mesh_of((4, 2)), SUMS["clip"])
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 2)
        run.advance()
        node = run.state["opt_state"][1]
        node = node._replace(adacheck_reduced=jax.tree.map(lambda x: x + 1, node.adacheck_reduced))
        edited = {**run.state, "opt_state": (run.state["opt_state"][0], node)}
        saved[3] = support.host_copy(edited)
        with contextlib.suppress(ReplayError):  # where the save had returned before
            manager.save(3, args=adacheck.SaveArgs(edited))
            manager.wait_until_finished()
        assert "does not give the state that was trained" in caplog.text
        saved |= save_steps(manager, run, 1)
        for step in (3, 4):
            args = adacheck.RestoreArgs(abstract(run.state, mesh_of((2, 2))))
            if step in manager.all_steps():
                assert_same_bits(manager.restore(step, args=args), saved[step])
        assert manager.latest_step() == 4


def test_optax_maps_over_the_params_of_the_state():
    recorder = adacheck.Recorder(SUMS["clip"])
    state = recorder.init(support.initial_params())
    found = optax.tree_utils.tree_map_params(recorder, jnp.zeros_like, state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert found.adacheck_reduced is not state.adacheck_reduced
