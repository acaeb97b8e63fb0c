"""The manager made in one call: what is kept, on which root, beside what, and what is refused."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import checkpoint_manager, v1
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

import adacheck_jax as adacheck
from adacheck_jax.errors import StorageError
from adacheck_jax.tools import listing
from tests import support
from tests.support import abstract, assert_same_bits, dict_run, host_copy, mesh_of, save_steps

OPTIONS = ocp.CheckpointManagerOptions


class Ordered(NamedTuple):
    """The leaves of a state in another order than that of their names."""

    z_best: Any
    params: Any
    opt_state: Any
    step: Any


@pytest.fixture
def run():
    return dict_run(mesh_of((2, 1)))


@pytest.fixture(params=[True, False], ids=["links", "references"])
def linked(request):
    """True on a file system with hard links."""
    with contextlib.nullcontext() if request.param else support.without_links():
        yield request.param


def kinds(manager):
    """Kinds of the steps that a manager lists, from a look at the disk."""
    manager.wait_until_finished()
    rows = listing.summarize_root(Path(str(manager.directory))).steps
    assert [row.step for row in rows] == list(manager.all_steps())
    assert all(row.error is None for row in rows)
    return "".join(f"{row.kind[0]}" for row in rows)


def test_every_kept_step_is_restored_and_a_new_process_goes_on(tmp_path, run, linked):
    with adacheck.checkpoint_manager(tmp_path, run.recorder, max_deltas=4) as manager:
        saved = save_steps(manager, run, 7)
        # Bases are 1 and 6; without links all steps that 5 builds on stay as long as it does.
        assert manager.all_steps() == ([5, 6, 7] if linked else [1, 2, 3, 4, 5, 6, 7])
        assert kinds(manager) == ("dbd" if linked else "bddddbd")
    assert manager.handler.last_save.step == 7
    with adacheck.checkpoint_manager(tmp_path, run.recorder, max_deltas=4) as manager:
        args = adacheck.RestoreArgs(abstract(run.state))
        run.state = manager.restore(manager.latest_step(), args=args)
        assert manager.handler.restored.exact
        saved |= save_steps(manager, run, 1)
        assert manager.all_steps() == [6, 7, 8]
        assert kinds(manager) == "bdd"
        for step in (6, 7, 8):
            assert_same_bits(manager.restore(step, args=args), saved[step])


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ({}, [6, 7, 8]),
        ({"max_to_keep": 2}, [7, 8]),
        ({"max_to_keep": None}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"options": OPTIONS()}, [1, 2, 3, 4, 5, 6, 7, 8]),  # as Orbax takes them
        ({"options": OPTIONS(max_to_keep=1, keep_period=3)}, [3, 6, 8]),
        ({"options": OPTIONS(keep_period=3), "max_to_keep": 2}, [3, 6, 7, 8]),
        ({"options": OPTIONS(preservation_policy=EveryNSteps(4))}, [4, 8]),
        ({"options": OPTIONS(preservation_policy=adacheck.KeepLineage(LatestN(1)))}, [8]),
        (  # and the newest step, without which each save would be a base
            {"options": OPTIONS(max_to_keep=1, best_fn=lambda m: m["loss"], best_mode="min")},
            [1, 8],
        ),
    ],
)
def test_what_is_kept_is_what_orbax_would_keep_and_the_newest_step(tmp_path, said, kept):
    with adacheck.checkpoint_manager(tmp_path, delta="bits", **said) as manager:
        for step in range(1, 9):
            args = adacheck.SaveArgs({"x": np.arange(9) + step})
            manager.save(step, args=args, metrics={"loss": float(step)})
        manager.wait_until_finished()
        assert manager.all_steps() == kept
    assert manager.handler.last_save.kind == "delta"


NAMED = ocp.path.step.standard_name_format(step_prefix="ckpt", step_format_fixed_length=6)


@pytest.mark.parametrize("names", [None, NAMED], ids=["numbers", "names"])
def test_a_step_that_another_holds_is_restored_by_its_number(tmp_path, run, names):
    items, states = {"json": ocp.JsonCheckpointHandler()}, {}
    given: Any = {"items": items, "options": OPTIONS(step_name_format=names)}
    with adacheck.checkpoint_manager(tmp_path, run.recorder, **given) as manager:
        for number in range(1, 5):
            states[number] = host_copy(run.advance())
            if number != 3:
                state, extra = adacheck.SaveArgs(run.state), ocp.args.JsonSave({"n": number})
                manager.save(number, args=ocp.args.Composite(state=state, json=extra))
            else:
                assert manager.handler.record_step(run.state, jnp.int32(number))
        manager.wait_until_finished()
        wanted = adacheck.RestoreArgs(abstract(run.state))
        with pytest.raises(FileNotFoundError, match=r"its state alone, recorded in step 4\."):
            manager.restore(3, args=ocp.args.Composite(state=wanted, json=ocp.args.JsonRestore()))
        only = ocp.args.Composite(state=dataclasses.replace(wanted, step=3))
        assert_same_bits(manager.restore(4, args=only).state, states[3])
        missing, told = FileNotFoundError, "step 9 not found; there: 1 to 2, 4"
        if names is not None:
            missing, told = ValueError, "No step path found"
        with pytest.raises(missing, match=told):
            manager.restore(9, args=ocp.args.Composite(state=wanted))


def test_recorded_steps_are_written_before_a_state_of_another_structure(tmp_path, run, caplog):
    with adacheck.checkpoint_manager(tmp_path, run.recorder) as manager:
        saved = save_steps(manager, run, 1)
        for step in (2, 3):
            assert manager.handler.record_step(run.advance(), step)
            saved[step] = host_copy(run.state)
        grown = {**run.state, "head": jnp.ones(3)}  # which is trained from here on
        assert not manager.handler.record_step(grown, 4)
        assert manager.save(4, args=adacheck.SaveArgs(grown))
        assert manager.all_steps() == [1, 3, 4]
        for step, expected in saved.items():
            args = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(step, args=args), expected)
        args = adacheck.RestoreArgs(abstract(grown))
        assert_same_bits(manager.restore(4, args=args), host_copy(grown))
    assert "not saved" not in caplog.text


def test_a_root_may_be_relative_or_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    state = {"x": jnp.ones(3), "n": 3, "key": jax.random.key(0)}
    for root, place in (("here", "here"), ("~/there", "home/there")):
        with adacheck.checkpoint_manager(root, delta="bits") as manager:
            for step in (np.int64(1), 2):
                manager.save(step, args=adacheck.SaveArgs(state | {"n": int(step)}))
            manager.wait_until_finished()
            assert manager.restore(2)["n"] == 2
        assert (tmp_path / place / "2/default").is_dir()
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize(
    ("root", "error", "message"),
    [
        *(
            (each, TypeError, "a path or a URL as the root, found")
            for each in (None, 5, b"root", "")
        ),
        *((each, StorageError, f"found '{each}' in it") for each in ("~", "s3:", "gs:")),
    ],
)
def test_what_is_no_root_or_stands_for_another_is_refused(tmp_path, run, root, error, message):
    root = tmp_path / root / "run" if error is StorageError else root
    with pytest.raises(error, match=message):
        adacheck.checkpoint_manager(root, run.recorder)
    if error is StorageError:
        assert not root.exists()
        handler = adacheck.AdaCheckHandler(run.recorder)
        with (
            ocp.CheckpointManager(root, item_handlers=handler) as manager,
            pytest.raises(error, match=message),
        ):
            save_steps(manager, run, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"options": OPTIONS(max_to_keep=2), "max_to_keep": 3},
            "found options.max_to_keep and max_to_keep",
        ),
        (
            {"options": OPTIONS(preservation_policy=LatestN(1)), "max_to_keep": None},
            "found max_to_keep and preservation_policy",
        ),
        (
            {"options": OPTIONS(preservation_policy=LatestN(1), keep_period=2)},
            "found options.keep_period and preservation_policy",
        ),
        ({"items": {"state": ocp.JsonCheckpointHandler()}}, r"found \['state'\]"),
        ({"items": {"metrics": ocp.JsonCheckpointHandler()}}, r"found \['metrics'\]"),
        (
            {
                "options": OPTIONS(save_decision_policy=adacheck.AdaptivePolicy()),
                "max_deltas": adacheck.AdaptivePolicy(),
            },
            "Leave max_deltas out",
        ),
        ({"options": OPTIONS(preservation_policy=AnyPreservationPolicy([]))}, None),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(tmp_path, run, given, message):
    root = tmp_path / "run"
    if message is None:
        adacheck.checkpoint_manager(root, run.recorder, **given).close()
        return
    with pytest.raises(ValueError, match=message):
        adacheck.checkpoint_manager(root, run.recorder, **given)
    assert not root.exists()


def test_a_part_of_the_processes_is_refused(tmp_path, run, monkeypatch):
    alone = OPTIONS(multiprocessing_options=ocp.options.MultiprocessingOptions(primary_host=None))
    adacheck.checkpoint_manager(tmp_path, run.recorder, options=alone).close()
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(ValueError, match="primary_host=None"):
        adacheck.checkpoint_manager(tmp_path, run.recorder, options=alone)


def test_options_of_orbax_change_those_of_the_handler(tmp_path, run):
    policy = adacheck.AdaptivePolicy()
    options = OPTIONS(enable_background_delete=True, save_decision_policy=policy)
    with adacheck.checkpoint_manager(tmp_path, run.recorder, options=options) as manager:
        found = manager.handler.run._options
        assert not found.shadow.background_bases
        assert found.max_deltas is policy
        save_steps(manager, run, 3)
    with adacheck.checkpoint_manager(
        tmp_path / "none", run.recorder, options=options, shadow=None
    ) as manager:
        assert manager.handler.run._options.shadow is None
    assert options.preservation_policy is None  # the caller's own are as they were


def test_jax_is_asked_about_the_steps_of_the_loop_alone(tmp_path, run, monkeypatch):
    """It ends a run at the step after the last one that it was asked about."""
    asked = []
    answer = lambda step: asked.append(step) or False  # noqa: E731
    monkeypatch.setattr(checkpoint_manager.utils, "reached_preemption", answer)
    with adacheck.checkpoint_manager(tmp_path, run.recorder) as manager:
        for step in (5, 6, 7):
            run.advance()
            manager.reached_preemption(step)
            manager.save(step, args=adacheck.SaveArgs(run.state))
            manager.reached_preemption(step + 1)  # before the save ends
            manager.wait_until_finished()
            assert asked[-1] == step + 1
    assert asked == sorted(asked)
    asked.clear()
    adacheck.checkpoint_manager(tmp_path, run.recorder).close()
    assert asked == [7]
    adacheck.checkpoint_manager(tmp_path).close()  # which reads beside a run
    assert asked == [7]


def test_v1_makes_its_checkpointer_in_one_call(tmp_path):
    run, saved = dict_run(mesh_of((2, 1))), {}
    with adacheck.v1.checkpointer(tmp_path, run.recorder, max_to_keep=2, max_deltas=3) as c:
        assert isinstance(c, v1.training.Checkpointer)
        for step in range(1, 7):
            run.advance()
            saved[step] = host_copy(run.state)
            c.save_async(step, run.state)
        c.wait()
        kept = [5, 6]
        assert [each.step for each in c.checkpoints] == kept
        for step in kept:
            assert_same_bits(c.load(step, abstract(run.state)), saved[step])
        assert c.handler.restored.exact
    with adacheck.v1.checkpointer(tmp_path, run.recorder, max_to_keep=None) as c:
        run.state = c.load(None, abstract(run.state))
        run.advance()
        c.save(7, run.state, force=True)
        assert c.handler.last_save.kind == "delta"
        assert [each.step for each in c.checkpoints] == [5, 6, 7]


def test_v1_takes_options_of_both_and_refuses_two_policies(tmp_path, run):
    every = v1.training.preservation_policies.EveryNSteps(2)
    with pytest.raises(ValueError, match="max_to_keep and preservation_policy"):
        adacheck.v1.checkpointer(tmp_path, run.recorder, max_to_keep=1, preservation_policy=every)
    with adacheck.v1.checkpointer(
        tmp_path,
        run.recorder,
        preservation_policy=every,
        checkpointable_name="train",
        delta="bits",
        custom_metadata={"a": 1},
    ) as c:
        for step in (1, 2, 3):
            run.advance()
            c.save_checkpointables(step, {"train": run.state, "more": {"b": 2}})
        assert [each.step for each in c.checkpoints] == [2, 3]
        found = c.load_checkpointables(3, {"train": abstract(run.state), "more": None})
        assert found["more"] == {"b": 2}
        assert np.array_equal(found["train"]["step"], jnp.asarray(run.state["step"]))


class TestWhatAManagerIsGiven:
    def test_arguments_that_are_none_of_this_library(self, tmp_path, run):
        state, stock = run.state, ocp.args
        with adacheck.checkpoint_manager(tmp_path, run.recorder) as manager:
            wrong: list[Any] = [state, stock.StandardSave(state), adacheck.SaveArgs]
            for args in [*wrong, stock.Composite(state=adacheck.SaveArgs(state))]:
                with pytest.raises(ValueError, match=r"expected args=adacheck.SaveArgs\(state\), "):
                    manager.save(1, args=args)
            assert manager.save(1, args=adacheck.SaveArgs(state))
            wrong = [state, stock.StandardRestore(state), adacheck.SaveArgs(state)]
            for args in wrong:
                with pytest.raises(ValueError, match=r"RestoreArgs.* found .*Nothing was restored"):
                    manager.restore(1, args=args)
            wrong_step: Any = state
            with pytest.raises(ValueError, match=r"found a dict as the step\. Give the number of"):
                manager.restore(wrong_step, args=adacheck.RestoreArgs(state))
            assert manager.all_steps() == [1]

    def test_arguments_among_other_items(self, tmp_path, run):
        items = {"notes": ocp.JsonCheckpointHandler()}
        with adacheck.checkpoint_manager(tmp_path, run.recorder, items=items) as manager:
            alone = adacheck.SaveArgs(run.state)
            for args in (alone, ocp.args.Composite(state=ocp.args.StandardSave(run.state))):
                with pytest.raises(ValueError, match=r"expected args=ocp.args.Composite\(state="):
                    manager.save(1, args=args)
            args = ocp.args.Composite(state=alone, notes=ocp.args.JsonSave({"epoch": 1}))
            assert manager.save(1, args=args)
            notes = ocp.args.Composite(notes=ocp.args.JsonRestore())
            assert manager.restore(1, args=notes)["notes"] == {"epoch": 1}

    def test_a_closed_manager_saves_nothing_and_says_so(self, tmp_path, run):
        manager = adacheck.checkpoint_manager(tmp_path, run.recorder)
        manager.close()
        with pytest.raises(adacheck.AdaCheckError, match="is closed: step 1 is not saved"):
            manager.save(1, args=adacheck.SaveArgs(run.state))

    def test_options_in_a_dictionary(self, tmp_path):
        options: Any = {"max_to_keep": 3}
        with pytest.raises(ValueError, match=r"ocp.CheckpointManagerOptions.*found dict"):
            adacheck.checkpoint_manager(tmp_path, options=options)


def test_managers_of_two_roots_have_barriers_of_their_own(tmp_path):
    """Those of one manager are numbered; two that save at once would wait for each other's."""

    def prefix(root, **own):
        options = ocp.CheckpointManagerOptions(
            multiprocessing_options=ocp.options.MultiprocessingOptions(**own)
        )
        with adacheck.checkpoint_manager(tmp_path / root, options=options) as manager:
            return manager._multiprocessing_options.barrier_sync_key_prefix

    assert prefix("a") == prefix("a") != prefix("b")
    assert prefix("a", barrier_sync_key_prefix="mine") == "mine"


def test_an_option_that_nobody_knows_is_named(tmp_path, run):
    options: Any = {"max_delta": 3}
    with pytest.raises(TypeError, match=r"checkpoint_manager: .*\['max_delta'\].* max_deltas,"):
        adacheck.checkpoint_manager(tmp_path, run.recorder, **options)


def test_a_run_that_does_not_go_on_from_the_newest_step_is_told_once(tmp_path, run, caplog):
    """What Orbax answers False to: the steps of the run before would be all there is."""

    def saves(manager, *steps):
        args = adacheck.SaveArgs(run.state)
        return [manager.save(step, args=args) for step in steps]

    def told():
        return [x for x in caplog.messages if "is not saved: the root has step" in x]

    def opened():
        return adacheck.checkpoint_manager(tmp_path, run.recorder, max_to_keep=None)

    with opened() as manager:
        assert saves(manager, 3, 4, 5, 5, 4) == [True, True, True, False, False]
    with opened() as manager:
        manager.restore(5, args=adacheck.RestoreArgs(run.state))
        assert saves(manager, 5, 6) == [False, True]
    assert not told(), "they are saved"
    with opened() as manager:
        assert saves(manager, 0, 1, 7) == [False, False, True]
    assert "step 0 is not saved: the root has step 6 already" in told()[0]
    with opened() as manager:
        manager.restore(4, args=adacheck.RestoreArgs(run.state))
        assert saves(manager, 5) == [False]
    assert [x.split(": ")[1] for x in told()] == ["step 0 is not saved", "step 5 is not saved"]


def test_a_step_is_no_root(tmp_path, run):
    """A run that is resumed from there would find no steps, and begin anew."""
    with adacheck.checkpoint_manager(tmp_path, run.recorder) as manager:
        save_steps(manager, run, 1)
    with pytest.raises(ValueError, match=f"{tmp_path}/1: .*found the directory of a step"):
        adacheck.checkpoint_manager(tmp_path / "1", run.recorder)
    assert [each.name for each in tmp_path.iterdir()] == ["1"]


def test_steps_of_other_items_are_told_from_deleted_ones(tmp_path, run):
    """A loop that is told of a deletion restores the newest of those that are left."""
    items: dict[str, Any] = {"data": ocp.JsonCheckpointHandler()}
    state, recorder = run.state, run.recorder
    beside = {"data": ocp.args.JsonSave({"n": 1})}
    with adacheck.checkpoint_manager(tmp_path / "a", recorder, items=items, item="all") as manager:
        manager.save(1, args=ocp.args.Composite(all=adacheck.SaveArgs(state), **beside))
    with adacheck.checkpoint_manager(tmp_path / "b", recorder) as manager:
        manager.save(1, args=adacheck.SaveArgs(state))
    found = r"expected step 1 with an item '{}', found that it was saved with {}\. .*{}\."
    with adacheck.checkpoint_manager(tmp_path / "a") as manager:
        message = found.format("default", "'all' and 'data'", r"items={...}, item='all'\)")
        for skips in (False, True):
            with pytest.raises(ValueError, match=message):
                manager.restore(1, args=adacheck.RestoreArgs(state, skip_damaged=skips))
        with pytest.raises(ValueError, match=message):
            manager.restore_newest(state)
    with adacheck.checkpoint_manager(tmp_path / "b", items=items) as manager:
        args = ocp.args.Composite(state=adacheck.RestoreArgs(state))
        with pytest.raises(ValueError, match=found.format("state", "'default'", "without items")):
            manager.restore(1, args=args)


def test_a_run_that_asks_for_a_number_goes_on_with_deltas(tmp_path, run):
    """The first state of a flax run, which a resumed one gives as the target, has step 0."""
    with adacheck.checkpoint_manager(tmp_path, run.recorder, max_to_keep=None) as manager:
        saved = save_steps(manager, run, 3)
    target = abstract(run.state) | {"step": 0}
    with adacheck.checkpoint_manager(tmp_path, run.recorder, max_to_keep=None) as manager:
        newest, run.state = manager.restore_newest(target)
        assert (newest, type(run.state["step"])) == (3, int)
        saved |= save_steps(manager, run, 2)
        assert kinds(manager) == "bdddd"
        for step, expected in saved.items():
            found = manager.restore(step, args=adacheck.RestoreArgs(abstract(run.state)))
            assert_same_bits(found, expected)


def test_numbers_in_a_tree_of_another_order_are_restored(tmp_path, run):
    """The next save is a base then: nothing pairs its leaves with those that were saved."""
    state = run.state | {"z_best": np.float32(np.inf)}
    saved = Ordered(state["z_best"], state["params"], state["opt_state"], state["step"])
    with adacheck.checkpoint_manager(tmp_path, run.recorder) as manager:
        manager.save(1, args=adacheck.SaveArgs(saved))
    target = abstract(run.state) | {"z_best": 0.0, "step": 0}
    with adacheck.checkpoint_manager(tmp_path, run.recorder) as manager:
        found = manager.restore(1, args=adacheck.RestoreArgs(target))
        assert (found["z_best"], found["step"]) == (np.inf, int(state["step"]))
        assert manager.handler.restored.exact
