"""Replicas that differ are found and named; replicas that do not never are."""

import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import adacheck_jax as adacheck
from adacheck_jax.device import fingerprint, replicas
from adacheck_jax.device.primary import DeviceGrid, Primary, grid_of, nearest
from adacheck_jax.device.sharding import Holder, holders_of
from adacheck_jax.errors import ReplicaError
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.tools import replica_report
from tests import support
from tests.processes import launch
from tests.save.loop import Loop, manifest_of
from tests.strategies import any_bits


@pytest.fixture(params=["host", "device"])
def engine(request, monkeypatch):
    """Both ways to fingerprint, on CPU devices."""
    on_device = request.param == "device"
    monkeypatch.setattr(
        fingerprint, "hashes_on_device", lambda x: on_device and isinstance(x, jax.Array)
    )
    return request.param


def mesh_of(shape, axis_type=AxisType.Auto, devices=None):
    names = ("a", "b", "c")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape), devices=devices)


def with_flipped_bit(array, device_ids, byte=0, bit=0):
    """The same array, but for one bit in what some devices hold."""
    buffers = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id in device_ids:
            data.reshape(-1).view(np.uint8)[byte] ^= 1 << bit
        buffers.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, buffers)


def box_on(array, device_id):
    shards = {shard.device.id: shard for shard in array.addressable_shards}
    return Box.from_slices(shards[device_id].index, array.shape)


SHARDINGS = [
    ((8,), P()),
    ((4, 2), P("a")),
    ((4, 2), P(None, "b")),
    ((2, 4), P("a")),
    ((2, 2, 2), P("b", "c")),
    ((2, 2, 2), P(("c", "a"))),
]


@pytest.mark.covering(2)
@pytest.mark.parametrize(("mesh_shape", "spec"), SHARDINGS, ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("order", [1, -1], ids=["in order", "reversed"])
def test_one_bit_is_found_whichever_replica_has_it(engine, mesh_shape, spec, axis_type, order):
    """And none where there is none."""
    array = any_bits(np.random.default_rng(0), (16, 24), jnp.float32)
    mesh = mesh_of(mesh_shape, axis_type, jax.devices()[::order])
    array = jax.device_put(array, NamedSharding(mesh, spec))
    boxes = [box_on(array, device) for device in range(8)]
    for device in range(8):
        bad = with_flipped_bit(array, {device}, byte=device, bit=device)
        report = replica_report({"x": {"good": array, "bad": bad}})
        (found,) = report.divergences
        assert (found.path, found.box) == ("x/bad", boxes[device])
        count = boxes.count(boxes[device])
        assert (found.replica_count, found.is_tie) == (count, count == 2)
        named = [other for other in range(8) if boxes[other] == boxes[device]]
        named = named if count == 2 else [device]
        assert found.devices == tuple(f"cpu:{each}" for each in named)
        assert found.processes == (0,) * len(named)
        assert found.agreeing_count == count - 1
        assert (report.leaf_count, report.replica_count) == (2, 16)
        assert report.replicated_box_count == 2 * len(set(boxes))


def test_any_leaf_may_be_in_a_state(engine):
    whole = NamedSharding(mesh_of((8,)), P())
    state = {
        "key": jax.device_put(jax.random.key(1), whole),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(1), 8), NamedSharding(whole.mesh, P("a"))
        ),
        "numpy": np.arange(3),
        "python": 3,
        "none": None,
        "scalar": jax.device_put(1.5, whole),
        "empty": jax.device_put(jnp.zeros((0, 3)), whole),
        "single": jnp.ones(3),
    }
    report = replica_report(state)
    assert report == replicas.ReplicaReport(7, 2, 16, ())
    assert replica_report({}) == replicas.ReplicaReport(0, 0, 0, ())
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert donate(state["scalar"]) == 2.5, "the state is left as it was"
    data = with_flipped_bit(jax.device_put(jax.random.key_data(jax.random.key(1)), whole), {2})
    (found,) = replica_report({"rng": jax.random.wrap_key_data(data)}).divergences
    assert (found.path, found.devices, found.box) == ("rng", ("cpu:2",), Box((0,), (2,)))


def held(values):
    """An array of which each device holds the number of its letter."""
    sharding = NamedSharding(mesh_of((len(values),), devices=jax.devices()[: len(values)]), P())
    pairs = zip(values, jax.devices(), strict=False)
    buffers = [jax.device_put(np.full(8, ord(v), np.float32), device) for v, device in pairs]
    return jax.make_array_from_single_device_arrays((8,), sharding, buffers)


VALUES = [
    ("aaab", [3], False, "cpu:3 (process 0) differs from 3 replicas that agree", 0),
    ("abbb", [0], False, "cpu:0 (process 0) differs from 3 replicas that agree", 1),
    ("aabc", [2, 3], False, "cpu:2 (process 0), cpu:3 (process 0) differ from 2 replicas", 0),
    ("aabb", [0, 1, 2, 3], True, "the 4 replicas on", 0),
    ("abcd", [0, 1, 2, 3], True, "the 4 replicas on", 0),
    ("abcc", [0, 1], False, "differ from 2 replicas that agree", 2),
    ("ab", [0, 1], True, "cpu:0 (process 0), cpu:1 (process 0) differ, with no majority", 0),
]


@pytest.mark.parametrize(("values", "named", "is_tie", "told", "primary"), VALUES)
def test_the_minority_is_named_and_the_next_saves_follow_the_majority(
    tmp_path, caplog, values, named, is_tie, told, primary
):
    state = {"w": held(values)}
    report = replica_report(state)
    (found,) = report.divergences
    assert found.devices == tuple(f"cpu:{i}" for i in named)
    assert found.is_tie == is_tie
    counts = max(map(values.count, values)), len(values)
    assert (found.agreeing_count, found.replica_count) == counts
    assert str(found).startswith("w[0:8]: ")
    assert told in str(found)
    assert "1 box of 1 leaf" in str(report)
    handler = adacheck.AdaCheckHandler()
    with support.manager_of(tmp_path, handler) as manager:
        for step, position in ((1, 0), (2, primary)):  # the first was staged before anybody knew
            manager.save(step, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()
            args = adacheck.RestoreArgs({"w": jnp.zeros(8)})
            assert manager.restore(step, args=args)["w"][0] == ord(values[position])
            assert handler.restored.replica == f"cpu:{position}"
    first, second = warnings_in(caplog)
    assert ("with which most agree" in first) == bool(primary)
    assert f"as the replica of cpu:{primary} has them" in second


def params_of(state):
    return state["params"]["in"]


def broken(state, path_of=params_of, name="bias", device=5):
    """A copy of a run's state with one bit of one replica flipped."""
    copied = jax.tree.map(jnp.copy, state)
    path_of(copied)[name] = with_flipped_bit(path_of(copied)[name], {device}, byte=7)
    return copied


def warnings_in(caplog):
    name = "adacheck_jax.device.replicas"
    return [record.getMessage() for record in caplog.records if record.name == name]


@pytest.mark.parametrize(
    ("mode", "is_async", "engine"),
    [
        ("warn", True, "host"),
        ("raise", True, "device"),
        ("off", True, "host"),
        *(pytest.param(x, False, "host", marks=pytest.mark.slow) for x in ("warn", "raise")),
        pytest.param("warn", True, "device", marks=pytest.mark.slow),
    ],
    indirect=["engine"],
)
def test_a_manager_warns_once_or_refuses_the_step(
    tmp_path, caplog, monkeypatch, mode, is_async, engine
):
    """Or looks at no replica."""
    asked, shards = [], fingerprint._replica_shards
    monkeypatch.setattr(fingerprint, "_replica_shards", lambda *a: asked.append(a) or shards(*a))
    manager = {"enable_async_checkpointing": is_async}
    loop = Loop(tmp_path, support.dict_run(support.mesh_of((4, 2))), manager=manager)
    loop.options["check_replicas"] = mode
    loop.manager.close()
    loop.open()
    loop.save(2)
    assert bool(asked) == (mode != "off")
    assert not warnings_in(caplog)
    loop.train()
    args = adacheck.SaveArgs(broken(loop.run.state))

    def save() -> None:
        loop.manager.save(3, args=args)
        loop.manager.wait_until_finished()

    if mode == "raise":
        with pytest.raises(ReplicaError, match=r"params/in/bias.*cpu:5.*not saved"):
            save()
        loop.manager.reload()
    else:
        loop.note()  # the primary has the right bits
        save()
    loop.save(2)
    loop.check()
    if mode == "warn":
        (message,) = warnings_in(caplog)
        assert "step 3: 1 box of 1 leaf" in message
        assert "params/in/bias[0:128]: cpu:5 (process 0) differs from 7 replicas" in message
        assert {each.levelname for each in caplog.records if "cpu:5" in each.getMessage()} == {
            "WARNING"
        }
    else:
        assert not warnings_in(caplog)


def test_only_a_few_divergences_are_named(tmp_path, caplog):
    mesh = mesh_of((8,))
    good = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P()))
    state = {f"leaf{i}": with_flipped_bit(good, {i % 8}) for i in range(10)}
    with ocp.Checkpointer(adacheck.AdaCheckHandler()) as checkpointer:
        checkpointer.save(tmp_path / "x", args=adacheck.SaveArgs(state))
    (message,) = warnings_in(caplog)
    assert "10 boxes of 10 leaves" in message
    assert "leaf2" in message
    assert "leaf3" not in message
    assert "and 7 more" in message


def leaf_of(shape, cuts=None, owners=(0,)):
    return Leaf("w", shape, "float32", 4, None, cuts or tuple((0, n) for n in shape), owners)


def holders_on(processes, each):
    return [Holder(p, p * each + i, "gpu") for p in range(processes) for i in range(each)]


def test_processes_compare_one_sum_a_box():
    """Four processes of two devices: boxes held by one process, by two, and by all."""
    holders = holders_on(4, 2)
    table = {
        Box((0,), (4,)): holders[:2],
        Box((4,), (8,)): holders[2:6],
        Box((8,), (9,)): holders,
    }
    sites = [replicas.Site(0, "w", box, tuple(held)) for box, held in table.items()]
    devices = DeviceGrid((8,), ())
    check = replicas.ReplicaCheck("raise", sites, [leaf_of((9,))], devices, Primary())

    def found(odd):
        parts = []
        for process in range(4):
            sums = {
                box: {h: int((h.device, box.start[0]) in odd) for h in each if h.process == process}
                for box, each in table.items()
            }
            parts.append(json.loads(json.dumps(check.part({0: sums}))))
        assert [len(part["shared"]) for part in parts] == [1, 2, 2, 1]
        return replicas.compare(check.differing(parts))

    assert found(set()) == ()
    (tie,) = found({(1, 0)})
    assert (tie.devices, tie.is_tie, tie.box) == (("gpu:0", "gpu:1"), True, Box((0,), (4,)))
    for device in range(8):
        (one,) = found({(device, 8)})
        assert (one.devices, one.processes) == ((f"gpu:{device}",), (device // 2,))
        assert (one.agreeing_count, one.replica_count) == (7, 8)
    (host,) = found({(6, 8), (7, 8)})  # the replicas of one process agree, with no other
    assert (host.devices, host.processes) == (("gpu:6", "gpu:7"), (3, 3))
    assert [each.box.start for each in found({(3, 4), (0, 8)})] == [(4,), (8,)]


def told_by_two(tmp_path, mode):
    launch(mode, 2, tmp_path / "run", tmp_path / "out", 4, "tests.device.replica_worker")
    return [json.loads((tmp_path / f"out-{process}.json").read_text()) for process in "01"]


@pytest.mark.slow
def test_two_processes_name_the_one_whose_replica_differs(tmp_path):
    first, second = told_by_two(tmp_path, "warn")
    bad = f"cpu:{first['bad']}"
    assert first["report"] == second["report"]
    assert first["report"] == [["kernel", [8, 0], [16, 4], [bad], [1], 3, 4]]
    assert "step 2: 1 box of 1 leaf whose" in first["message"]
    assert f"kernel[8:16, 0:4]: {bad} (process 1) differs from 3 replicas" in first["message"]
    assert second["message"] == ""  # one line a step, by the process that commits
    assert first["steps"] == second["steps"] == [1, 2]


@pytest.mark.slow
def test_two_processes_both_refuse_the_step(tmp_path):
    """Neither is left waiting for the other."""
    for told in told_by_two(tmp_path, "raise"):
        assert f"cpu:{told['bad']} (process 1) differs from 3 replicas" in told["message"]
        assert "The step is not saved" in told["message"]
        assert told["steps"] == [1]


@pytest.mark.parametrize("shape", [(8,), (4, 2), (2, 4), (2, 2, 2)], ids=str)
def test_all_boxes_are_taken_next_to_the_lead(shape):
    mesh = mesh_of(shape, devices=random.Random(0).sample(jax.devices(), 8))
    specs = [P(), P("a"), P(None, mesh.axis_names[-1]), P(mesh.axis_names)]
    arrays = [jax.device_put(jnp.zeros((8, 16)), NamedSharding(mesh, spec)) for spec in specs]
    devices = grid_of([jnp.ones(3), np.ones(2), *arrays])
    assert (devices.shape, len(devices.devices)) == (shape, 8)
    where = {device.id: at for at, device in np.ndenumerate(mesh.devices)}
    for position, primary in enumerate(devices.devices):
        ranks = devices.ranks(position)
        for array, spec in zip(arrays, specs, strict=True):
            cut = {axis for entry in spec for axis in np.ravel(entry or ())}
            uncut = [n for n, axis in enumerate(mesh.axis_names) if axis not in cut]
            for holders in holders_of(array.sharding, array.shape).values():
                at = where[nearest(holders, ranks).device]
                assert [at[n] for n in uncut] == [where[primary.device][n] for n in uncut]
    assert grid_of([np.ones(2), 3.0]).ranks(0) == {}


def judged(values, owners=(0,), cuts=None, primary=None):
    """The verdict on one replicated leaf of two processes, from what each device holds of it."""
    devices = holders_on(2, len(values) // 2)
    grid = DeviceGrid((len(devices),), tuple(devices))
    check = replicas.ReplicaCheck(
        "warn", (), [leaf_of((8,), cuts, owners)], grid, primary or Primary()
    )
    each = [[h.process, h.device, h.platform, v] for h, v in zip(devices, values, strict=True)]
    part = {"shared": [], "divergent": [[0, "w", [0], [8], each]]}
    return check.settle(7, [part, {"shared": [], "divergent": []}])


def test_a_step_that_several_processes_wrote_of_several_replicas_is_refused():
    halves = ((0, 4, 8),)
    assert judged("aaab", owners=(0, 1), cuts=halves).replica == "gpu:0"  # of 2, the same bits
    assert judged("aabb", owners=(1,)).replica == "gpu:2"
    with pytest.raises(ReplicaError, match=r"parts of several replicas.*a base"):
        judged("aabb", owners=(0, 1), cuts=halves)


def test_the_lead_is_left_where_most_replicas_agree_without_it(tmp_path):
    loop = Loop(tmp_path, support.dict_run(support.mesh_of((4, 2))))
    state = loop.train()
    bad = broken(state, device=0)
    loop.manager.save(1, args=adacheck.SaveArgs(bad))
    loop.manager.wait_until_finished()
    loop.states[1] = support.host_copy(bad)
    bad = broken(loop.train(), device=0)
    assert not loop.handler.record_step(bad, 2)  # a base is due
    loop.manager.save(2, args=adacheck.SaveArgs(bad))
    loop.manager.wait_until_finished()
    loop.note()
    loop.save(2)
    assert loop.check() == "BBRR"
    found = [manifest_of(tmp_path, step) for step in (1, 2, 3, 4)]
    assert [each.replica for each in found] == ["cpu:0", "cpu:1", "", ""]
    assert "another one is saved" in found[1].reason


def record_of(state):
    return next(x.adacheck_record for x in state["opt_state"] if hasattr(x, "adacheck_record"))[
        "in"
    ]


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", ["warn", "off"])
@pytest.mark.parametrize("path_of", [params_of, record_of], ids=["param", "record"])
def test_a_bit_that_another_device_looks_at_is_not_lost_in_silence(tmp_path, mode, path_of):
    run = support.dict_run(support.mesh_of((4, 2)))
    loop = Loop(tmp_path, run, shadow=None, check_replicas=mode)
    loop.save(2)
    state = jax.block_until_ready(broken(loop.train(), path_of, device=0))
    loop.states[3] = support.host_copy(state)
    loop.manager.save(3, args=adacheck.SaveArgs(state))
    if mode == "warn":  # the device that takes this element has another replica
        loop.fail(ReplicaError, r"those of \S+in/bias differ")
    loop.save(3)  # else each device takes all: it is found, and stored
    loop.check()
