"""Managers as trainers make and call them, with names and arguments of stock Orbax."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp_v1

import adacheck_jax as adacheck
from tests.support import assert_same_bits, host_copy, kinds_of

BOTH = "model_params+optimizer_state"


@dataclasses.dataclass
class OwnSave(ocp.args.StandardSave):
    """Arguments as a trainer subclasses them."""

    note: str = ""


class OwnManager(ocp.CheckpointManager):
    """A manager as a trainer subclasses it."""

    def all_steps(self, read=False):
        return [each.step for each in self._checkpoints]


def new_run(recorded=True):
    """An nnx model and its optimizer, with a recorder or the transformation without one."""
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    tx = optax.adamw(optax.linear_schedule(1e-2, 0, 100))
    recorder = adacheck.Recorder(tx) if recorded else tx
    return recorder, (model, nnx.Optimizer(model, recorder, wrt=nnx.Param))


@nnx.jit
def train(model, optimizer):
    inputs = jax.random.normal(jax.random.key(0), (16, 8))
    optimizer.update(model, nnx.grad(lambda m: ((m(inputs) - 1) ** 2).mean())(model))


def states(run):
    """Items as tunix names them."""
    model, optimizer = run
    opt_state = nnx.state(optimizer, nnx.optimizer.OptState)
    return {"model_params": nnx.state(model), "optimizer_state": opt_state}


def saving(run):
    return ocp.args.Composite(
        **{
            name: ocp.args.PyTreeSave(each, save_args=jax.tree.map(lambda _: ocp.SaveArgs(), each))
            for name, each in states(run).items()
        }
    )


def restoring(run, *names):
    construct = ocp.checkpoint_utils.construct_restore_args
    return ocp.args.Composite(
        **{
            name: ocp.args.PyTreeRestore(each, restore_args=construct(each))
            for name, each in states(run).items()
            if name in (names or states(run))
        }
    )


def trainer_manager(root, **options):
    """A manager as tunix makes it."""
    return ocp.CheckpointManager(
        root,
        item_handlers={
            "model_params": ocp.PyTreeCheckpointHandler(),
            "optimizer_state": ocp.PyTreeCheckpointHandler(),
            "custom_metadata": ocp.JsonCheckpointHandler(),
        },
        options=ocp.CheckpointManagerOptions(**options),
    )


def plugged(root, recorder, make=trainer_manager, **options):
    with adacheck.plug_in(recorder):
        return make(root, **options)


def small_state():
    """A recorder, a state with it, and its train step."""
    recorder = adacheck.Recorder(optax.adam(1e-2))
    params = {"w": jnp.arange(32.0)}

    @jax.jit
    def step_of(state):
        updates, opt_state = recorder.update(state["params"], state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    return recorder, {"params": params, "opt_state": recorder.init(params)}, step_of


def save_steps(manager, run, steps):
    saved = {}
    for step in steps:
        train(*run)
        saved[step] = {name: host_copy(each) for name, each in states(run).items()}
        manager.save(step, args=saving(run), custom_metadata={"step": step})
    manager.wait_until_finished()
    return saved


@pytest.fixture(scope="module")
def root_and_saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("two_items")
    recorder, run = new_run()
    with plugged(root, recorder) as manager:
        return root, save_steps(manager, run, range(4))


def test_two_items_are_one_line_of_steps(root_and_saved):
    root, saved = root_and_saved
    assert kinds_of(root, BOTH) == "BDDD"
    recorder, run = new_run()
    with plugged(root, recorder) as manager:
        described = manager.metadata(3)
        assert described.custom_metadata == {"step": 3}
        assert {*described.item_metadata} == {*states(run)}
        found = manager.restore(3, args=restoring(run))
        assert manager.handler.restored.exact
        assert manager.handler.restored.replayed_count == 3
        for name, each in states(run).items():
            assert_same_bits(found[name], saved[3][name])
            assert jax.tree.structure(found[name]) == jax.tree.structure(each)
            described_tree = described.item_metadata[name].tree
            assert len(jax.tree.leaves(described_tree)) == len(jax.tree.leaves(each))
            alone = manager.restore(3, args=restoring(run, name))
            assert [*alone] == [name]
            assert_same_bits(alone[name], saved[3][name])


@pytest.mark.parametrize("args", [None, ocp.args.StandardRestore(), ocp.args.PyTreeRestore()])
def test_a_structure_that_nobody_knows(root_and_saved, args):
    root, saved = root_and_saved
    recorder, run = new_run()
    asked = {
        "model_params": args,
        "optimizer_state": ocp.args.PyTreeRestore(states(run)[BOTH[13:]]),
    }
    with plugged(root, recorder) as manager:
        found = manager.restore(2, args=ocp.args.Composite(**asked))
        everything = manager.restore(2)
    kernel = found["model_params"]["kernel"]
    assert_same_bits({"kernel": kernel}, [saved[2]["model_params"][1]])
    assert_same_bits(found["optimizer_state"], saved[2]["optimizer_state"])
    assert {*everything} == {*states(run)}
    assert_same_bits(everything["model_params"], saved[2]["model_params"])


def test_stock_orbax_reads_a_base_and_one_item_of_it(root_and_saved):
    root, saved = root_and_saved
    wanted = {"model_params": states(new_run()[1])["model_params"]}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        args = ocp.args.PyTreeRestore(wanted, partial_restore=True)
        found = checkpointer.restore(root / "0" / BOTH, args=args)
    assert_same_bits(found, saved[0]["model_params"])


def test_params_without_the_optimizer(tmp_path, caplog):
    recorder, run = new_run()
    with plugged(tmp_path, recorder) as manager:
        save_steps(manager, run, range(2))
        params = ocp.args.PyTreeSave(states(run)["model_params"])
        expected = host_copy(params.item)
        manager.save(2, args=ocp.args.Composite(model_params=params))
        assert "no Recorder's state is in them" in caplog.text
        saved = save_steps(manager, run, range(3, 5))
        found = manager.restore(2, args=restoring(run, "model_params"))
        assert {*manager.item_metadata(2)} == {"model_params"}
        with pytest.raises(KeyError, match="optimizer_state"):
            manager.restore(2, args=restoring(run))
        assert_same_bits(found["model_params"], expected)
        found = manager.restore(4, args=restoring(run))
        assert_same_bits(found["optimizer_state"], saved[4]["optimizer_state"])
    assert kinds_of(tmp_path, BOTH)[:2] == "BD"


@pytest.mark.parametrize("recorded", [False, True])
def test_a_root_that_stock_orbax_wrote_is_gone_on_from(tmp_path, recorded):
    _, run = new_run(recorded)
    with trainer_manager(tmp_path) as manager:
        save_steps(manager, run, range(2))
    recorder, again = new_run()
    with plugged(tmp_path, recorder) as manager:
        assert {*manager.item_metadata(1)} == {*states(run)}
        found = manager.restore(1, args=restoring(again))
        assert not manager.handler.restored.verified
        assert_same_bits(found["model_params"], host_copy(states(run)["model_params"]))
        for object_, name in zip(again, states(again), strict=True):
            nnx.update(object_, found[name])
        opt_state = run[1].opt_state
        stock = opt_state.adacheck_inner if recorded else opt_state
        assert_same_bits(again[1].opt_state.adacheck_inner, host_copy(stock))
        saved = save_steps(manager, again, range(2, 5))
    assert kinds_of(tmp_path, BOTH) == "BDD"
    with plugged(tmp_path, recorder) as manager:
        found = manager.restore(4, args=restoring(again))
        assert_same_bits(found["optimizer_state"], saved[4]["optimizer_state"])


@pytest.mark.parametrize("how", ["names", "registry", "nothing"])
def test_one_tree_keeps_its_name_and_others_beside_it(tmp_path, caplog, how):
    item = "default" if how == "names" else "state"  # by itself Orbax takes that for no name
    recorder, state, step_of = small_state()

    def make(root):
        items = {}
        if how == "names":
            items = {"item_names": ("default", "timer", "data")}
        elif how == "registry":
            registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
            for args in (ocp.args.StandardSave, ocp.args.StandardRestore):
                registry.add(item, args, ocp.StandardCheckpointHandler())
            for args in (ocp.args.JsonSave, ocp.args.JsonRestore):
                registry.add("data", args, ocp.JsonCheckpointHandler("data.json"))
            items = {"handler_registry": registry}
        return OwnManager(root, options=ocp.CheckpointManagerOptions(), **items)

    with plugged(tmp_path, recorder, make) as manager:
        assert isinstance(manager, OwnManager)
        for step in range(3):
            state = step_of(state)
            args = {
                item: OwnSave(state),
                "timer": ocp.args.StandardSave({"seconds": jnp.float32(step)}),
                "data": ocp.args.JsonSave({"batches": step}),
            }
            manager.save(step, args=ocp.args.Composite(**args))
        manager.wait_until_finished()
        assert kinds_of(tmp_path, item) == "BDD"
        assert kinds_of(tmp_path, "timer") == "BBB"
        assert manager.handler.last_save.kind == "delta"
    with plugged(tmp_path, recorder, make) as manager:
        asked = {
            item: ocp.args.StandardRestore(state),
            "timer": ocp.args.StandardRestore(),
            "data": ocp.args.JsonRestore(),
        }
        found = manager.restore(2, args=ocp.args.Composite(**asked))
        assert_same_bits(found[item], host_copy(state))
        assert found["timer"] == {"seconds": 2}
        assert found["data"] == {"batches": 2}
        state = step_of(found[item])
        args[item] = OwnSave(state)
        manager.save(3, args=ocp.args.Composite(**args))
        manager.wait_until_finished()
    assert kinds_of(tmp_path, item) == "BDDD"
    assert "saved as a full state" not in caplog.text
    assert (tmp_path / "3" / "data" / "data.json").exists() == (how == "registry")


@pytest.mark.parametrize("handlers", [None, "one"])
def test_a_state_without_a_name(tmp_path, handlers):
    recorder, state, _ = small_state()
    handler = None if handlers is None else ocp.StandardCheckpointHandler()

    def make(root):
        return ocp.CheckpointManager(root, item_handlers=handler)

    with plugged(tmp_path, recorder, make) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
    with plugged(tmp_path, recorder, make) as manager:
        assert manager.item_metadata(0).tree["params"]["w"].shape == (32,)
        assert_same_bits(manager.restore(0)["params"], host_copy(state["params"]))
        found = manager.restore(0, args=ocp.args.StandardRestore(state))
        assert_same_bits(found, host_copy(state))


def test_without_a_recorder_each_item_is_a_line(tmp_path):
    _, run = new_run(recorded=False)
    with adacheck.plug_in(delta="bits"):
        manager = trainer_manager(tmp_path)
    with manager:
        saved = save_steps(manager, run, range(3))
        found = manager.restore(2, args=restoring(run))
        for name in states(run):
            assert kinds_of(tmp_path, name) == "BDD"
            assert_same_bits(found[name], saved[2][name])


@pytest.mark.parametrize("prefix", [None, "ckpt"])
def test_items_without_a_pytree(tmp_path, prefix):
    recorder, run = new_run()
    data = ocp.args.Composite(custom_metadata=ocp.args.JsonSave({"seen": 1}))
    asked = ocp.args.Composite(custom_metadata=ocp.args.JsonRestore())
    with plugged(tmp_path, recorder, step_prefix=prefix) as manager:
        manager.save(0, args=data)
        assert manager.restore(0, args=asked)["custom_metadata"] == {"seen": 1}
        both = ocp.args.Composite(**saving(run), **data)
        train(*run)
        manager.save(1, args=both)
        manager.wait_until_finished()
        assert manager.restore(1, args=asked)["custom_metadata"] == {"seen": 1}
        with pytest.raises(FileNotFoundError, match="step 7 not found; there: 0 to 1"):
            manager.restore(7, args=restoring(run))
        with pytest.raises((FileNotFoundError, ValueError)):
            manager.metadata(7)


def test_params_that_only_a_name_tells_from_others(tmp_path):
    recorder, run = new_run()
    items = states(run)
    twin = ocp.args.PyTreeSave(jax.tree.map(jnp.copy, items["model_params"]))
    for item, path in (("params", "opt/params"), (None, "params")):
        opt = {"state": items["optimizer_state"], **({"params": items["model_params"]})}
        args = ocp.args.Composite(opt=ocp.args.PyTreeSave(opt), ema=twin)
        with adacheck.plug_in(recorder, params_path=path) as made:
            manager = trainer_manager(tmp_path / path.replace("/", "_"))
        assert made == [manager]
        with manager:
            if item:
                with pytest.raises(adacheck.AdaCheckError, match="below the item 'opt'"):
                    manager.save(0, args=args)
            else:
                manager.save(0, args=args)
    assert kinds_of(tmp_path / "params", "opt") == kinds_of(tmp_path / "params", "ema") == "B"
    manager = plugged(tmp_path / "none", recorder)
    with manager, pytest.raises(adacheck.AdaCheckError, match="Say which of them"):
        manager.save(0, args=args)


def test_the_trainers_options_say_when_to_save_and_are_asked_once(tmp_path):
    asked = list[int]()

    def should_save(step, newest):
        asked.append(step)
        return step % 2 == 0

    recorder, run = new_run()
    best = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}
    options = {"should_save_fn": should_save, "max_to_keep": 1, **best}
    with plugged(tmp_path, recorder, **options) as manager:
        saved = []
        for step in range(7):
            train(*run)
            metrics = {"loss": float(abs(step - 2))}
            saved.append(manager.save(step, args=saving(run), metrics=metrics))
        manager.wait_until_finished()
        assert saved == [True, False] * 3 + [True]
        assert asked == [*range(7)]
        assert manager.best_step() == 2
        assert manager.metrics(2) == {"loss": 0.0}
        assert manager.all_steps() == [2, 6]
        assert manager.restore(2, args=restoring(run)).keys() == states(run).keys()


def test_a_block_holds_for_itself_alone(tmp_path):
    with adacheck.plug_in() as outer, adacheck.plug_in() as inner:
        made = ocp.CheckpointManager(tmp_path / "a")
        outside = ocp.CheckpointManager(tmp_path / "b")
        assert inner == [made, outside]
        outer.append(made)
    assert type(ocp.CheckpointManager(tmp_path / "c")) is ocp.CheckpointManager


def test_a_block_without_a_manager_is_an_error():
    with pytest.raises(adacheck.AdaCheckError, match="found none"), adacheck.plug_in():
        pass
    with pytest.raises(KeyError, match="own"), adacheck.plug_in():  # no other error hides it
        raise KeyError("own")
    with pytest.raises(TypeError, match="expected a Recorder"), adacheck.plug_in("adam"):
        pass
    with pytest.raises(ValueError, match="expected delta to be"), adacheck.plug_in(delta="all"):
        pass
    with pytest.raises(TypeError, match="max_to_keep"), adacheck.plug_in(max_to_keep=3):
        pass


def test_arguments_that_are_refused(tmp_path):
    recorder, run = new_run()
    params = states(run)["model_params"]
    with plugged(tmp_path, recorder) as manager:
        with pytest.raises(ValueError, match="found no args="):
            manager.save(0, {"model_params": params})
        with pytest.raises(ValueError, match=r"without '\+'"):
            manager.save(0, args=ocp.args.Composite(**{"a+b": ocp.args.PyTreeSave(params)}))
        with pytest.raises(ValueError, match="OwnSave with note="):
            manager.save(0, args=ocp.args.Composite(model_params=OwnSave(params, note="new")))
        save_steps(manager, run, [0])
        asked = {
            "model_params": ocp.args.StandardRestore(params, strict=False),
            "optimizer_state": ocp.args.StandardRestore(states(run)["optimizer_state"]),
        }
        with pytest.raises(ValueError, match="restore one after the other"):
            manager.restore(0, args=ocp.args.Composite(**asked))
        made = ocp.args.PyTreeRestore(params, legacy_transform_fn=lambda *_: None)
        with pytest.raises(ValueError, match="legacy_transform_fn"):
            manager.restore(0, args=ocp.args.Composite(model_params=made))
        asked = ocp.args.Composite(modle=ocp.args.PyTreeRestore(params))
        with pytest.raises(KeyError, match=r"\['model_params', 'optimizer_state'\], found 'modle'"):
            manager.restore(0, args=asked)  # no step that retention deletes at this moment
    with pytest.raises(ValueError, match="`checkpointers`"), adacheck.plug_in(recorder):
        ocp.CheckpointManager(tmp_path, ocp.PyTreeCheckpointer())
    with pytest.raises(ValueError, match=r"adacheck\.v1\.context"), adacheck.plug_in(recorder):
        ocp_v1.training.Checkpointer(tmp_path / "v1")


@pytest.fixture(autouse=True)
def _warnings(caplog):
    caplog.set_level(logging.WARNING)


def test_a_leaf_of_a_stock_step_that_is_taken_twice_has_two_buffers(tmp_path):
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)
    params = {"w": jnp.ones(8)}
    with ocp.CheckpointManager(tmp_path / "root") as stock:
        stock.save(0, args=ocp.args.StandardSave({"params": params, "opt": tx.init(params)}))
    recorder = adacheck.Recorder(tx)
    state = {"params": params, "opt": recorder.init(params)}
    with adacheck.checkpoint_manager(tmp_path / "root", recorder) as manager:
        state = manager.restore(0, args=adacheck.RestoreArgs(state))
    assert_same_bits(state, host_copy({"params": params, "opt": recorder.init(params)}))
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state) if x.size]
    assert len({*pointers}) == len(pointers)  # else a donating step refuses the state


def test_threads_save_one_after_another(tmp_path):
    """Two calls of Orbax's at the same time would wait for each other's directories for ever."""
    recorder, run = new_run()
    with plugged(tmp_path, recorder, max_to_keep=None) as manager:
        manager.save(0, args=saving(run))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(manager.save, step, args=saving(run), force=True) for step in (1, 2)
            ]
            done = [each.result(timeout=60) for each in calls]
        assert any(done)  # a step that comes late is no newer one
        manager.wait_until_finished()
        assert 2 in manager.all_steps()
