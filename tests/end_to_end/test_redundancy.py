"""Nothing is written twice, and nothing is taken for equal that is not."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import adacheck_jax as adacheck
from adacheck_jax.errors import IntegrityError
from adacheck_jax.format import manifest
from adacheck_jax.store import volumes
from adacheck_jax.store.steps import folders, manifest_file
from adacheck_jax.tools import inspection
from tests import support
from tests.processes import launch
from tests.save.loop import Loop

MESH = support.mesh_of((4, 2))
CUT = NamedSharding(MESH, P("data", "model"))
WHOLE = NamedSharding(MESH, P())


def noise(seed, shape=(256, 128)):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def save(root, states, **options):
    """Saves states as steps 0, 1, ...; every one a base if there is no recorder."""
    handler = adacheck.AdaCheckHandler(**options)
    with support.manager_of(root, handler) as manager:
        for step, state in enumerate(states):
            manager.save(step, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()


def assert_restored(root, step, state, stock=False):
    """A step has the bits of a state, to stock Orbax too where it is a base."""
    expected, target = support.host_copy(state), support.abstract(state)
    support.assert_same_bits(support.restored(root, step, target), expected)
    if stock:
        found = ocp.StandardCheckpointer().restore(root / f"{step}/default", target)
        support.assert_same_bits(found, expected)


def new_bytes(root, step):
    return folders.new_bytes(root / str(step))


def base_of(root, step):
    return manifest_file.read(root / str(step) / "default")


def names(pairs, leaves):
    return {leaves[a].path: b for a, b in pairs}


ROWS = NamedSharding(support.mesh_of((8,)), P("data"))


def copies(seed, *names, sharding=CUT):
    return {name: jax.device_put(noise(seed), sharding) for name in names}


EQUAL = {
    "cut": lambda: (copies(1, *"abc"), 1),
    "whole": lambda: (copies(1, *"abc", sharding=WHOLE), 1),
    # An EMA that starts as the params, two moments of zero, a target network.
    "params": lambda: (
        {name: {f"{i}": copies(i, "w") for i in range(4)} for name in ("params", "ema", "target")}
        | {name: {"w": jnp.zeros((256, 128), device=CUT)} for name in ("mu", "nu")},
        4,
    ),
    "rows": lambda: ({"stacked": jax.device_put(np.stack([noise(3)] * 8), ROWS)}, 1),  # as of pmap
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_costs_one_and_stock_orbax_reads_all(tmp_path, name):
    state, count = EQUAL[name]()
    save(tmp_path, [state])
    assert 1 < new_bytes(tmp_path, 0) / (count * noise(1).nbytes) < 1.2
    assert_restored(tmp_path, 0, state, stock=True)
    found = ocp.StandardCheckpointer().restore(tmp_path / "0/default")
    support.assert_same_bits(found, support.host_copy(state))
    if name in ("cut", "whole"):
        base = base_of(tmp_path, 0)
        assert names(base.aliases, base.leaves) == {"b": 0, "c": 0}


def test_equal_boxes_are_stored_once_in_deltas_too(tmp_path):
    states = [
        {"stacked": jax.device_put(np.stack([noise(i)] * 8), ROWS), "copy": jnp.array(noise(i))}
        for i in range(3)
    ]
    save(tmp_path, states, delta="bits")
    base = base_of(tmp_path, 0)
    assert names(base.aliases, base.leaves) == {}  # rows of one are the other
    for step in (1, 2):
        assert isinstance(base_of(tmp_path, step), manifest.DeltaManifest)
        assert new_bytes(tmp_path, step) < 1.2 * noise(0).nbytes
        assert_restored(tmp_path, step, states[step])


edits = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from(["a", "b", "c", "d", "zero", "bit", "new", "nothing"]),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(edits, st.sampled_from(["base", "bits"]))
def test_whatever_becomes_equal_or_ceases_to_be_is_restored(tmp_path_factory, changes, kind):
    """Leaves are copied onto each other, zeroed, and changed by a bit, between saves."""
    root = tmp_path_factory.mktemp("edits")
    values = {key: noise(i, (64, 32)) for i, key in enumerate("abcd")}
    shardings = {"a": CUT, "b": CUT, "c": WHOLE, "d": WHOLE}
    states = []
    for number, (target, change) in enumerate([("a", "nothing"), *changes]):
        if change in values:
            values[target] = values[change].copy()
        elif change == "zero":
            values[target] = np.zeros_like(values[target])
        elif change == "bit":
            values[target] = values[target].copy()
            values[target].view(np.uint32)[number % 64, 7] ^= 1 << (number * 5 % 32)
        elif change == "new":
            values[target] = noise(100 + number, (64, 32))
        states.append({key: jax.device_put(values[key], shardings[key]) for key in values})
    save(root, states, delta="bits" if kind == "bits" else "auto")
    for step, state in enumerate(states):
        assert_restored(root, step, state, stock=kind == "base")


def frozen_loop(root, **options):
    """A run with leaves that no update changes, beside params that train."""
    frozen = {f"frozen{i}": jax.device_put(noise(i, (1024, 512)), CUT) for i in range(4)}
    recorder = adacheck.Recorder(optax.adamw(1e-2))
    return Loop(root, support.program_of(MESH, recorder, more=frozen).run(), **options)


@pytest.mark.slow
def test_frozen_leaves_are_written_once_for_all_bases(tmp_path):
    """Also where the trainer is restarted."""
    frozen_bytes = 4 * 1024 * 512 * 4
    with frozen_loop(tmp_path, max_deltas=2, manager={"max_to_keep": 2}) as loop:
        for step in range(1, 13):
            if step == 7:
                loop.reopen()
            loop.save()
            is_first = new_bytes(tmp_path, step) > frozen_bytes
            assert is_first or new_bytes(tmp_path, step) < frozen_bytes / 20
            assert is_first == (step == 1) or step == 7
            if step == 4:
                base = base_of(tmp_path, step)
                kept = names(base.kept, base.leaves)
                assert kept == {f"frozen{i}": 1 for i in range(4)}
        loop.forget(*range(1, 11))
    loop.check()


@pytest.mark.slow
def test_a_frozen_leaf_that_thaws_is_written_again(tmp_path):
    def with_another_bit(leaf):
        bits = np.array(leaf)
        bits.view(np.uint32)[5, loop.number] ^= 1
        return bits

    with frozen_loop(tmp_path, max_deltas=1) as loop:
        for step in range(1, 9):
            loop.train()
            if step in (4, 5):  # a delta and a base
                loop.edit("frozen1", with_another_bit)
            loop.put_and_wait()
        bases = [base_of(tmp_path, step) for step in (5, 7)]
    kept = [names(each.kept, each.leaves) for each in bases]
    assert kept[0]["frozen0"] == 1
    assert "frozen1" not in kept[0]
    assert {*kept[1].values()} <= {1, 5}
    assert loop.check() == "BRBRBRBR"


def test_a_damaged_base_is_not_relied_on(tmp_path):
    """What a later base would link is read first; if it is damaged it is written again."""
    state = {"frozen": jax.device_put(noise(1, (512, 256)), CUT), "count": jnp.int32(0)}
    handler = adacheck.AdaCheckHandler()
    with support.manager_of(tmp_path, handler) as manager:
        manager.save(0, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        largest = max((tmp_path / "0").rglob("*"), key=lambda p: p.is_file() and p.stat().st_size)
        largest.write_bytes(support.with_flipped_data(largest.read_bytes()))
        for step in (1, 2):
            manager.save(step, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
    assert base_of(tmp_path, 1).kept == ()
    assert base_of(tmp_path, 2).kept != ()
    for step in (1, 2):
        assert_restored(tmp_path, step, state)
    with pytest.raises(IntegrityError):
        assert_restored(tmp_path, 0, state)


def test_without_hard_links_every_base_is_whole(tmp_path):
    state = {"frozen": jax.device_put(noise(1, (512, 256)), CUT)}
    with support.without_links():
        save(tmp_path, [state, state])
    assert base_of(tmp_path, 1).kept == ()
    assert new_bytes(tmp_path, 1) > 512 * 256 * 4


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["small", "none"])
def test_experts_without_tokens_and_rows_without_gradient_cost_nothing(tmp_path, compression):
    """Expert 0 alone gets gradients, and 1 row in 64 of the embedding."""
    recorder = adacheck.Recorder(optax.adamw(1e-2))
    rng = np.random.default_rng(0)
    params = {
        "experts": jax.device_put(noise(1, (8, 128, 256)), NamedSharding(MESH, P("data"))),
        "embedding": jax.device_put(noise(2, (4096, 256)), WHOLE),
    }
    experts, embedding = (np.zeros(params[key].shape, np.float32) for key in params)
    experts[0] = rng.standard_normal((128, 256))
    embedding[::64] = rng.standard_normal((64, 256))
    grads = {"experts": jnp.array(experts), "embedding": jnp.array(embedding)}

    @jax.jit
    def train_step(state, _):
        updates, opt = recorder.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    run = support.Run(recorder, {"params": params, "opt": recorder.init(params)}, train_step)
    with Loop(tmp_path, run, compression=compression) as loop:
        loop.save(3)
    filled_bytes = (128 * 256 + 64 * 256) * 4
    assert new_bytes(tmp_path, 3) < (1.1 if compression == "none" else 1.0) * filled_bytes
    loop.check()


def test_inspect_says_where_a_leaf_is_taken_from(tmp_path):
    state = {
        "a": jax.device_put(noise(1, (512, 256)), CUT),
        "b": jax.device_put(noise(1, (512, 256)), CUT),
        "c": jnp.zeros(3),
    }
    save(tmp_path, [state, state | {"c": jnp.ones(3)}])
    sources = [
        {leaf.path: leaf.source for leaf in inspection.describe_step(tmp_path, step).leaves}
        for step in (0, 1)
    ]
    assert sources[0] == {"a": "stored", "b": "same as a", "c": "stored"}
    assert sources[1] == {"a": "kept from 0", "b": "kept from 0", "c": "stored"}


def test_a_file_with_very_many_links_is_written_again(tmp_path, monkeypatch):
    state = {"frozen": jax.device_put(noise(1, (512, 256)), CUT)}
    monkeypatch.setattr(volumes, "_MAX_LINKS", 1)
    save(tmp_path, [state] * 3)
    assert [base_of(tmp_path, step).kept for step in (1, 2)] == [((0, 0),), ()]


def told_by(tmp_path, mode, devices=1):
    """What each of four processes of a run says in the end."""
    launch(mode, 4, tmp_path / "run", tmp_path / "out", devices, "tests.end_to_end.equal_worker")
    return [json.loads((tmp_path / f"out-{process}.json").read_text()) for process in range(4)]


@pytest.mark.slow
def test_processes_write_once_what_each_has_for_itself_and_are_told_where_they_differ(tmp_path):
    for told in told_by(tmp_path, "local", 2):
        assert told["steps"] == [1, 2, 4]
        assert "leaf host: it lies on every process by itself" in told["message"]
        assert "processes 1 hold other bits than process 0" in told["message"]
    base = base_of(tmp_path / "run", 1)
    once = sum(leaf.nbytes for leaf in base.leaves)
    assert once < new_bytes(tmp_path / "run", 1) < 1.05 * once
    owners = {leaf.path: set(leaf.owners) for leaf in base.leaves}
    assert owners["one device"] == {0, 1, 2, 3}  # large enough to be shared out
    assert len(owners["host"]) == 1
    kept = names(base_of(tmp_path / "run", 2).kept, base.leaves)
    assert kept["one device"] == 1


@pytest.mark.slow
def test_equal_leaves_of_different_processes_are_written_once_and_stock_orbax_reads_them(tmp_path):
    told = told_by(tmp_path, "equal")
    assert told == [{"own": [True] * 3, "stock": [True] * 3}] * 4
    base = base_of(tmp_path / "run", 0)
    owners = {leaf.path: set(leaf.owners) for leaf in base.leaves}
    assert owners["experts"] == {0, 1, 2, 3}
    assert owners["embedding"] != owners["head"]
    leaf_bytes = 64 * 512 * 4
    # An embedding, the rest, and of the experts what one process has.
    wanted = [(2 + 2) * leaf_bytes, (3 + 2 * 2) * leaf_bytes, (2 + 2) * leaf_bytes]
    for step, size_bytes in enumerate(wanted):
        assert size_bytes < new_bytes(tmp_path / "run", step) < size_bytes + 32768
    paths = [leaf.path for leaf in base.leaves]
    ((a, b),) = base.aliases
    assert {paths[a], paths[b]} == {"embedding", "head"}
    assert base_of(tmp_path / "run", 1).aliases == ()


@pytest.mark.slow
def test_a_process_that_fails_once_others_rely_on_it_fails_the_step_for_all(tmp_path):
    for each in told_by(tmp_path, "failing"):
        assert "no such luck" in each["told"]
        assert each["steps"] == [1]
        assert each["own"]
