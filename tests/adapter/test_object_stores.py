"""Steps in object stores, through the stock manager, from servers on this machine."""

import json
import uuid
from urllib.parse import unquote

import jax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from adacheck_jax.errors import LineageError, StorageError
from adacheck_jax.schemes import SCHEMES
from adacheck_jax.store.steps import manifest_file, marks, roots
from adacheck_jax.store.storage.location import at, located
from adacheck_jax.tools import audit
from adacheck_jax.tools import repair as of_repair
from tests import object_stores
from tests.support import (
    abstract,
    assert_same_bits,
    batch,
    dict_run,
    host_copy,
    kinds_of,
    mesh_of,
    save_steps,
)

FIRST, *OTHERS = SCHEMES


@pytest.fixture(params=[FIRST, *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)])
def store(request):
    found = request.getfixturevalue(request.param)
    yield found
    found.proxy.reset()


@pytest.fixture
def root(store):
    return f"{store.url}/{uuid.uuid4().hex}"


def kept(count=3):
    return adacheck.KeepLineage(preservation_policy.LatestN(count))


def manager_of(root, run, keep=None, **options):
    stock = ocp.CheckpointManagerOptions(preservation_policy=keep) if keep else None
    return adacheck.checkpoint_manager(root, run.recorder, options=stock, **options)


def stock_manager(root, handler, **options):
    options = ocp.CheckpointManagerOptions(**options, **object_stores.stock_options(root))
    return ocp.CheckpointManager(epath.Path(root), item_handlers=handler, options=options)


@pytest.mark.slow
@pytest.mark.first(1)
def test_steps_are_saved_retained_and_restored_on_other_meshes(root, caplog):
    caplog.set_level("INFO", logger="adacheck_jax.store.retention")
    run = dict_run(mesh_of((2, 2)))
    with manager_of(root, run, max_deltas=4) as manager:
        saved = save_steps(manager, run, 8)
        assert manager.all_steps() == [6, 7, 8]
    told = [each.getMessage() for each in caplog.records if "stay beside" in each.getMessage()]
    assert len(told) == 1
    assert "Steps 1 stay beside those that were asked for (2 to 4)" in told[0]
    assert kinds_of(root) == "BDD"
    assert all(each.error is None for each in roots.steps_of(located(root)))
    assert adacheck.latest_restorable(root) == 8
    with manager_of(root, run) as manager:  # another process, as far as the handler knows
        for shape in ((1,), (2,), (2, 4)):
            args = adacheck.RestoreArgs(abstract(run.state, mesh_of(shape)))
            for step in (6, 8):
                assert_same_bits(manager.restore(step, args=args), saved[step])
        run.state = manager.restore(8, args=adacheck.RestoreArgs(abstract(run.state)))
        save_steps(manager, run, 1)
    assert kinds_of(root) == "BDDD"


@pytest.mark.slow
@pytest.mark.parametrize("store", ["gs"], indirect=True)  # of S3 tensorstore asks twice
def test_a_delta_is_six_requests(root, store):
    run = dict_run(mesh_of((1, 1)))
    with manager_of(root, run) as manager:
        for _ in range(3):
            save_steps(manager, run, 1)
            store.proxy.requests.clear()
        save_steps(manager, run, 1)
    # Orbax's file system asks without these marks of tensorstore.
    ours = [
        (each.method, each.key.rpartition("/")[2])
        for each in store.proxy.requests
        if any(mark in each.path for mark in ("tensorstore=", "ifGenerationMatch", "startOffset"))
    ]
    assert len(ours) == 6
    looks = [manifest_file.NAME, "o"]  # the parent's, and a listing of the lineage
    assert sorted(name for method, name in ours if method == "GET") == looks


@pytest.mark.slow
@pytest.mark.first(1, slow=6)  # one of them on s3
@pytest.mark.parametrize(
    "lost", ["deleted", "replaced", "uncommitted", "base deleted", "data deleted"]
)
def test_no_delta_is_left_behind_a_parent_that_is_gone(root, lost):
    run = dict_run(mesh_of((1, 1)))
    with manager_of(root, run) as manager:
        save_steps(manager, run, 3)
        step = located(root) / "3"
        base = located(root) / "1" / "default"
        if lost == "base deleted":
            (base / manifest_file.FILE).delete()
        elif lost == "data deleted":
            (base / "manifest.ocdbt").delete()
        elif lost == "deleted":
            step.delete()
        elif lost == "replaced":
            manifest = step / "default" / manifest_file.FILE
            manifest.write(manifest.read() + b" ")
        elif lost == "uncommitted":
            (step / marks.COMMIT_MARK).delete()
        with pytest.raises(LineageError, match="This step is not saved, the next one will be"):
            save_steps(manager, run, 1)
        (saved,) = save_steps(manager, run, 1).values()
        args = adacheck.RestoreArgs(abstract(run.state))
        assert_same_bits(manager.restore(manager.latest_step(), args=args), saved)
    assert kinds_of(root)[-1] == "B"


@pytest.mark.slow
@pytest.mark.first(1)
def test_tools_take_urls(root):
    run = dict_run(mesh_of((1, 1)))
    with manager_of(root, run) as manager:
        save_steps(manager, run, 3)
    runner = CliRunner()
    listed = runner.invoke(app, ["ls", root, "--json"])
    assert listed.exit_code == 0, listed.output
    assert [each["kind"] for each in json.loads(listed.stdout)["steps"]] == ["base"] + 2 * ["delta"]
    assert runner.invoke(app, ["ls", root]).exit_code == 0
    assert runner.invoke(app, ["inspect", root, "3"]).exit_code == 0
    for option in ("--read-data", "--replay"):
        assert runner.invoke(app, ["verify", root, option]).exit_code == 0
    files = (located(root) / "3/default/adacheck").list()
    (damaged,) = (each for each in files if "delta" in each.name and "manifest" not in each.name)
    content = bytearray(damaged.read())
    content[len(content) // 2] ^= 1
    damaged.write(bytes(content))
    assert runner.invoke(app, ["verify", root, "--read-data"]).exit_code == 1
    assert audit.verify_root(located(root)).damaged_count == 0, "no data is read"
    assert adacheck.latest_restorable(root) == 2


@pytest.mark.slow
@pytest.mark.first(1)
def test_a_server_that_fails_for_a_while_costs_no_step(root, store):
    run, seen, refused = dict_run(mesh_of((1, 1))), set(), []

    def refuse(method, path):
        key = (method, path.split("tensorstore=")[0])
        if "adacheck" not in path or key in seen:
            return 0
        seen.add(key)
        if len(seen) % 3:  # each refusal costs a second of patience
            return 0
        refused.append(key)
        return 503

    with manager_of(root, run) as manager:
        store.proxy.refuse = refuse
        saved = save_steps(manager, run, 3)
        args = adacheck.RestoreArgs(abstract(run.state))
        for step in (1, 3):
            assert_same_bits(manager.restore(step, args=args), saved[step])
    assert len(refused) > 5


@pytest.mark.slow
@pytest.mark.parametrize("store", ["gs"], indirect=True)  # its conditions are in the address
def test_an_answer_that_is_lost_costs_no_step(root, store):
    run, lost = dict_run(mesh_of((1, 1))), set()

    def forget(_, path):
        value, condition, _ = path.partition("&ifGenerationMatch=")
        is_first = bool(condition) and value not in lost
        lost.add(value)
        return is_first

    with manager_of(root, run) as manager:
        store.proxy.forget = forget
        saved = save_steps(manager, run, 3)
        args = adacheck.RestoreArgs(abstract(run.state))
        for step in (1, 3):
            assert_same_bits(manager.restore(step, args=args), saved[step])
    assert any(manifest_file.NAME in each for each in lost)


@pytest.mark.first(1)
def test_credentials_reach_neither_files_nor_messages(root, store):
    run = dict_run(mesh_of((1, 1)))
    with manager_of(root, run) as manager:
        save_steps(manager, run, 2)
    secret = b"secret-of-the-test"
    assert secret in repr(store.environment).encode()
    for each in located(root).list():
        if not each.name.startswith("_"):
            assert secret not in each.read()


def test_a_store_that_would_have_to_rename_is_refused(s3):
    run = dict_run(mesh_of((1, 1)))
    root = epath.Path(f"{s3.url}/{uuid.uuid4().hex}")
    handler = adacheck.AdaCheckHandler(run.recorder)
    with (
        ocp.CheckpointManager(root, item_handlers=handler) as manager,
        pytest.raises(StorageError, match=r"AtomicityMode\.COMMIT_FILE"),
    ):
        save_steps(manager, run, 1)


def with_every_kind(state):
    """A state with what Orbax itself does not store on ``s3://``."""
    return state | {"number": 3, "rate": 0.1, "keys": jax.random.split(jax.random.key(3), 2)}


def kinds_in(state):
    return [type(state["number"]), type(state["rate"]), str(state["keys"].dtype)]


def test_numbers_and_keys_are_saved_on_s3_and_restored_as_what_they_were(s3):
    run, saved = dict_run(mesh_of((2, 1))), {}
    root = f"{s3.url}/{uuid.uuid4().hex}"
    with adacheck.checkpoint_manager(root, run.recorder) as manager:
        for step in (1, 2, 3):
            run.advance()
            state = with_every_kind(run.state) | {"number": step}
            saved[step] = host_copy(state)
            manager.save(step, args=adacheck.SaveArgs(state))
        manager.wait_until_finished()
        assert kinds_of(root) == "BDD"
        for step, expected in saved.items():
            args = adacheck.RestoreArgs(with_every_kind(run.state))
            restored = manager.restore(step, args=args)
            assert_same_bits(restored, expected)
            for found in (restored, manager.restore(step, args=adacheck.RestoreArgs())):
                assert kinds_in(found) == [int, float, "key<fry>"]
                assert found["number"] == step
        described = manager.item_metadata(3).tree
        assert isinstance(described["number"], ocp.metadata.ScalarMetadata)


@pytest.mark.parametrize("store", ["gs"], indirect=True)  # a checkpointer renames elsewhere
@pytest.mark.parametrize("place", ["run_7/5", "run_7/final", "final", "20261123/step_5"])
def test_a_checkpointer_and_a_handler_alone_save_under_any_name(root, place):
    run, handler = dict_run(mesh_of((1, 1))), adacheck.AdaCheckHandler()
    path = epath.Path(f"{root}/{place}")
    args = adacheck.RestoreArgs(abstract(run.advance()))
    with ocp.AsyncCheckpointer(adacheck.AdaCheckHandler(run.recorder)) as checkpointer:
        checkpointer.save(path, args=adacheck.SaveArgs(run.state))
        checkpointer.wait_until_finished()
        assert_same_bits(checkpointer.restore(path, args=args), host_copy(run.state))
    report = audit.verify_root(located(f"{root}/{place}").parent)
    assert [each.damage for each in report.steps] == [()]
    alone = epath.Path(f"{root}/alone/{place}")
    handler.save(alone, args=adacheck.SaveArgs(run.state))
    with pytest.raises(LineageError, match="call its finalize"):
        handler.restore(alone)
    handler.finalize(alone)
    assert_same_bits(adacheck.AdaCheckHandler().restore(alone, args), host_copy(run.state))


@pytest.mark.slow
@pytest.mark.first(1)
def test_what_may_not_be_read_now_is_not_damaged(root, store):
    run = dict_run(mesh_of((1, 1)))
    with manager_of(root, run) as manager:
        save_steps(manager, run, 3)
        args = adacheck.RestoreArgs(abstract(run.state), skip_damaged=True)
        for part in ("adacheck/base/", "adacheck/delta"):
            store.proxy.refuse = lambda method, path, own=part: (
                403 if method == "GET" and own in unquote(path) else 0
            )
            with pytest.raises(StorageError, match="cannot be read now"):
                manager.restore(3, args=args)
            with pytest.raises(StorageError):
                adacheck.latest_restorable(root)
            before = {*located(root).list()}
            CliRunner().invoke(app, ["repair", root])
            assert {*located(root).list()} == before
            store.proxy.reset()


@pytest.mark.slow
@pytest.mark.first(1)
def test_repair_removes_what_a_deletion_left_wherever_it_stopped(root):
    run = dict_run(mesh_of((2, 2)))
    with manager_of(root, run, max_deltas=3) as manager:
        save_steps(manager, run, 1)
    top = at(located(root))
    values = {each.below(top): each.read() for each in top.list()}
    names = sorted(values)
    (top / "2024/notes.txt").write(b"somebody's")
    for count in range(1, len(names)):
        for gone in (names[:count], names[count:]):
            for name, value in values.items():
                (top / name).write(value)
            for name in gone:
                (top / name).delete()
            of_repair.repair(top, force=True)
            left = [each.below(top) for each in top.list()]
            good = [each.error is None for each in roots.steps_of(top)]
            assert good == [True] or left == ["2024/notes.txt"], (gone, left)


@pytest.mark.slow
@pytest.mark.first(1)
def test_a_policy_that_the_manager_does_not_know_keeps_nothing(root, caplog):
    run = dict_run(mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(run.recorder, keep_lineage=kept())
    with stock_manager(root, handler, max_to_keep=2) as manager:
        saved = save_steps(manager, run, 5)
        args = adacheck.RestoreArgs(abstract(run.state))
        for step in manager.all_steps():
            assert_same_bits(manager.restore(step, args=args), saved[step])
    assert kinds_of(root) == "BB"
    assert "give both the same keep = adacheck.KeepLineage" in caplog.text


@pytest.mark.slow
def test_of_two_jobs_that_save_a_step_one_is_told(root):
    first, second = dict_run(mesh_of((1, 1))), dict_run(mesh_of((1, 1)))
    with manager_of(root, first) as one:
        saved = save_steps(one, first, 2)
        with manager_of(root, second) as two:
            args = adacheck.RestoreArgs(abstract(first.state))
            second.state = two.restore(2, args=args)
            # The first job lingers: it has begun a step, which the second one saves meanwhile.
            with pytest.MonkeyPatch.context() as patch:
                commit = manifest_file.write

                def late(*args):
                    patch.undo()
                    second.state = second.train_step(second.state, batch(99))
                    saved[3] = host_copy(second.state)
                    two.save(3, args=adacheck.SaveArgs(second.state))
                    two.wait_until_finished()
                    return commit(*args)

                patch.setattr(manifest_file, "write", late)
                with pytest.raises(StorageError, match="expected one writer"):
                    save_steps(one, first, 1)
    with manager_of(root, first) as manager:
        assert_same_bits(manager.restore(3, args=args), saved[3])


def test_a_store_that_refuses_is_told_with_what_to_look_after(root, store):
    store.proxy.refuse = lambda method, path: 403
    told = "expected an object store that answers, found: .* the credentials"
    with pytest.raises(StorageError, match=told):
        adacheck.checkpoint_manager(root)
