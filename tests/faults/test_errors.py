"""Bad input gets one clear error, and nothing that is committed is harmed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath

import adacheck_jax as adacheck
from adacheck_jax.cli.command import root_of
from adacheck_jax.errors import (
    FormatError,
    IntegrityError,
    LineageError,
    MismatchError,
    RecorderError,
    StorageError,
)
from adacheck_jax.store.steps import folders, manifest_file
from adacheck_jax.store.storage.location import located
from adacheck_jax.tools.handover import copying
from adacheck_jax.tools.handover.export import export
from adacheck_jax.tools.steps import InputError
from adacheck_jax.update import exported_program
from adacheck_jax.update.program import Kept
from tests import support
from tests.save.loop import Loop
from tests.support import abstract, assert_same_bits, host_copy, manager_of, mesh_of, save_steps


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """Steps 1 (base), 2 and 3 (deltas) of a run, and what they were."""
    root = tmp_path_factory.mktemp("run")
    run = support.dict_run(mesh_of((4, 2)))
    with manager_of(root, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
    return root, run, saved


@pytest.fixture
def copy(saved_run, tmp_path):
    """A copy that a test may damage."""
    root = tmp_path / "copy"
    shutil.copytree(saved_run[0], root)
    return root, saved_run[1]


def restore(root: Path, step: int, target=None, **options):
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        args = adacheck.RestoreArgs(target, **options)
        return manager.restore(step, args=args)


class TestAbstractState:
    """The state that is asked for is not the state that was saved."""

    @pytest.mark.parametrize("step", [1, 3])
    def test_every_difference_is_listed_at_once(self, saved_run, step):
        root, run, _ = saved_run
        target = abstract(run.state)
        del target["params"]["scale"]
        target["params"]["extra"] = jax.ShapeDtypeStruct((2,), jnp.float32)
        target["params"]["in"]["bias"] = jax.ShapeDtypeStruct((5,), jnp.float32)
        target["step"] = jax.ShapeDtypeStruct((), jnp.float32)
        with pytest.raises(MismatchError) as caught:
            restore(root, step, target)
        message = str(caught.value)
        assert "saved, not asked for (1): params/scale" in message
        assert "asked for, not saved (1): params/extra" in message
        assert "params/in/bias: saved float32[128], asked for float32[5]" in message
        assert "step: saved int32[], asked for float32[]" in message
        assert "jax.eval_shape" in message

    def test_a_key_is_not_an_array(self, tmp_path):
        state = {"key": jax.random.key(0), "x": jnp.ones(3)}
        with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
            manager.save(1, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()
        target = {"key": jax.ShapeDtypeStruct((2,), jnp.uint32), "x": state["x"]}
        with pytest.raises(MismatchError, match=r"key: saved key<fry>"):
            restore(tmp_path, 1, target)

    def test_devices_that_do_not_exist_ask_for_a_sharding(self, saved_run, monkeypatch):
        root, run, _ = saved_run

        def fail(self):
            raise ValueError("no such device")

        from orbax.checkpoint.metadata import NamedShardingMetadata

        monkeypatch.setattr(NamedShardingMetadata, "to_jax_sharding", fail)
        with pytest.raises(MismatchError, match="fallback_sharding"):
            restore(root, 3)
        whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        restored = restore(root, 3, fallback_sharding=whole)
        expected = jax.tree.unflatten(jax.tree.structure(run.state), saved_run[2][3])
        assert_same_bits(restored["params"], jax.tree.leaves(expected["params"]))
        params = abstract(run.state["params"], mesh_of((2, 2)))  # moments go where they go
        restored = restore(root, 3, {"params": params}, partial_restore=True)
        assert_same_bits(restored["params"], jax.tree.leaves(expected["params"]))


def forget_descriptions(item):
    """Writes a base's manifest anew, as somebody would who has changed the files beside it."""
    manifest_file.write(item, dataclasses.replace(manifest_file.read(item), described={}))


class TestDamage:
    """A missing, truncated or altered file."""

    @pytest.mark.covering(1)
    @pytest.mark.parametrize(
        ("step", "file", "error"),
        [
            (1, manifest_file.FILE, FormatError),
            (3, manifest_file.FILE, FormatError),
            (
                3,
                f"{folders.LINEAGE}/1/{manifest_file.update_file('cpu')}",
                FormatError,
            ),
            (3, f"{folders.LINEAGE}/2.{manifest_file.NAME}", FormatError),
            (3, f"{folders.LINEAGE}/2.delta.0.manifest.ocdbt", FormatError),
            (3, "adacheck/delta.0.manifest.ocdbt", FormatError),
        ],
    )
    @pytest.mark.parametrize("damage", ["missing", "truncated", "emptied"])
    def test_a_damaged_file_is_an_error(self, copy, step, file, error, damage):
        root, run = copy
        path = root / str(step) / "default" / file
        data = path.read_bytes()
        path.unlink()
        if damage != "missing":
            path.write_bytes(data[: len(data) // 2] if damage == "truncated" else b"")
        with pytest.raises((error, IntegrityError, LineageError)) as caught:
            restore(root, step, abstract(run.state))
        assert str(path.parent) in str(caught.value)

    def test_a_flipped_bit_in_a_record_is_an_integrity_error(self, copy):
        root, run = copy
        files = support.pack_files(root / "3" / "default")
        path = max(files, key=lambda path: path.stat().st_size)
        data = support.with_flipped_data(path.read_bytes())
        path.unlink()
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match="adacheck_record"):
            restore(root, 3, abstract(run.state))

    # Orbax abandons its readers when one of them fails; they complain to their closed event loop.
    @pytest.mark.slow
    @pytest.mark.covering(1)
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize("step", [1, 3])
    @pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
    def test_damage_to_any_file_of_a_base_is_an_error_of_ours_or_harmless(
        self, saved_run, tmp_path, step, damage
    ):
        source, run, saved = saved_run
        base = Path(str(step), "default", *([] if step == 1 else [folders.LINEAGE, "1"]))
        files = [p.relative_to(source) for p in (source / base).rglob("*") if p.is_file()]
        errors = 0
        for number, file in enumerate(files):
            root = tmp_path / str(number)
            shutil.copytree(source, root)
            data = bytearray((root / file).read_bytes())
            (root / file).unlink()
            if damage == "flipped" and data:
                data[len(data) * 2 // 3] ^= 16
            elif damage == "truncated":
                del data[len(data) // 2 :]
            if damage != "missing":
                (root / file).write_bytes(data)
            try:
                restored = restore(root, step, abstract(run.state))
            except adacheck.AdaCheckError:
                errors += 1
            else:
                assert_same_bits(restored, saved[step])
        assert errors >= 3

    def test_a_changed_value_in_a_base_is_an_integrity_error_that_names_the_leaf(self, copy):
        """Stock Orbax restores such a checkpoint without a word."""
        root, run = copy
        state = jax.tree.map(jnp.copy, restore(root, 1, abstract(run.state)))
        kernel = state["params"]["in"]["kernel"]
        state["params"]["in"]["kernel"] = kernel.at[3, 5].add(jnp.float32(2**-20))
        target = root / "1" / "default"
        forged = root.parent / "forged"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(forged, state)
        shutil.copytree(target / manifest_file.DIRECTORY, forged / manifest_file.DIRECTORY)
        shutil.rmtree(target)
        forged.rename(target)
        with pytest.raises(IntegrityError, match="_METADATA: expected the file that was"):
            restore(root, 1, abstract(run.state))
        with manager_of(root.parent / "again", adacheck.AdaCheckHandler(run.recorder)) as manager:
            manager.save(1, args=adacheck.SaveArgs(state))
        again = root.parent / "again" / "1" / "default"
        shutil.copy(target / manifest_file.FILE, again / manifest_file.FILE)
        shutil.rmtree(target)
        again.rename(target)
        forget_descriptions(target)
        message = r"1 of .* leaves.*params/in/kernel\. The stored data is damaged\. Nothing"
        with pytest.raises(IntegrityError, match=message):
            restore(root, 1, abstract(run.state))

    def test_a_replay_that_gives_other_bits_is_told_with_its_causes(self, tmp_path):
        recorder = adacheck.Recorder(optax.sgd(0.1))
        params = {"w": jnp.ones(1 << 18)}
        state = {"params": params, "opt_state": recorder.init(params)}
        with adacheck.checkpoint_manager(tmp_path, recorder, shadow=None) as manager:
            manager.save(1, args=adacheck.SaveArgs(state))
            updates, inner = jax.jit(recorder.update)(params, state["opt_state"], params)
            trained = optax.apply_updates(params, updates)["w"]
            edited = {"w": trained.at[12345].set(7.0)}  # no sample of this step has it
            state = {"params": edited, "opt_state": inner}
            manager.save(2, args=adacheck.SaveArgs(state))
            with pytest.raises(
                IntegrityError, match=r"damaged, or replay .* another processor, or .*flags\. Noth"
            ):
                manager.restore(2, args=adacheck.RestoreArgs(state))

    @pytest.mark.parametrize("asks", [False, True])
    def test_a_lost_description_is_told_and_keys_do_not_depend_on_it(self, tmp_path, asks):
        """Of a lost ``array_metadatas`` Orbax makes plain arrays; the manifest knows the type."""
        state = {"key": jax.random.key(3), "x": jnp.ones(3)}
        with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
            manager.save(1, args=adacheck.SaveArgs(state))
        item = tmp_path / "1" / "default"
        shutil.rmtree(item / "array_metadatas")
        with pytest.raises(IntegrityError, match=r"array_metadatas.*found none"):
            restore(tmp_path, 1, abstract(state) if asks else None)
        forget_descriptions(item)
        assert_same_bits(restore(tmp_path, 1, abstract(state) if asks else None), host_copy(state))

    def test_an_unknown_format_version_names_the_remedy(self, copy):
        root, run = copy
        path = root / "3" / "default" / manifest_file.FILE
        body = json.loads(path.read_text())
        body["format"] = 99
        path.unlink()
        path.write_text(json.dumps(body))
        with pytest.raises(FormatError, match="expected format version 6 to 9, found 99"):
            restore(root, 3, abstract(run.state))

    def test_other_steps_stay_restorable(self, copy, saved_run):
        root, run = copy
        (root / "2" / "default" / manifest_file.FILE).unlink()
        with pytest.raises(FormatError):
            restore(root, 2, abstract(run.state))
        assert_same_bits(restore(root, 3, abstract(run.state)), saved_run[2][3])


class TestUpdateProgram:
    """A stored program that this jax cannot read."""

    @pytest.fixture
    def unreadable(self, monkeypatch):
        def fail(_data):
            raise ValueError("unsupported version 99")

        monkeypatch.setattr(exported_program.jax.export, "deserialize", fail)
        monkeypatch.setattr(exported_program, "_parsed", Kept(1))

    @pytest.mark.usefixtures("unreadable")
    def test_without_a_recorder_the_error_says_which_jax_wrote_it(self, saved_run):
        root, run, _ = saved_run
        with pytest.raises(FormatError, match=f"exported by jax {jax.__version__}"):
            restore(root, 3, abstract(run.state))

    @pytest.mark.usefixtures("unreadable")
    def test_a_recorder_takes_its_place(self, saved_run):
        root, run, saved = saved_run
        with manager_of(root, adacheck.AdaCheckHandler(run.recorder)) as manager:
            args = adacheck.RestoreArgs(abstract(run.state, mesh_of((2, 4))))
            assert_same_bits(manager.restore(3, args=args), saved[3])


class TestRecorder:
    """A recorder that cannot be tied to the state."""

    def save(self, root, recorder, state, **options):
        handler = adacheck.AdaCheckHandler(recorder, **options)
        with manager_of(root, handler) as manager:
            manager.save(1, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()

    def test_absent_from_the_state(self, tmp_path):
        recorder = adacheck.Recorder(optax.adam(1e-3))
        params = support.initial_params()
        state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
        with pytest.raises(RecorderError, match="holds no Recorder's state"):
            self.save(tmp_path, recorder, state)

    def test_twice_in_the_state(self, tmp_path):
        recorder = adacheck.Recorder(optax.adam(1e-3))
        chain_of_two = recorder, adacheck.Recorder(optax.scale(0.5))
        chain = optax.chain(*chain_of_two)
        params = support.initial_params()
        state = {"params": params, "opt_state": chain.init(params)}
        with pytest.raises(
            RecorderError,
            match=r"recorded at 'opt_state/1'.*the recorders of all optimizers",
        ):
            self.save(tmp_path, recorder, state)
        both = {"opt_state/0": recorder, "opt_state/1": chain_of_two[1]}
        with pytest.raises(RecorderError, match=r"both update params/in/bias.* record one, or"):
            self.save(tmp_path, both, state)

    def test_another_object_than_the_optimizer_was_built_with(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        with pytest.raises(RecorderError, match="same Recorder object"):
            self.save(tmp_path, adacheck.Recorder(optax.adamw(1e-2)), run.state)

    def test_ambiguous_params_ask_for_a_path(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        state = {**run.advance(), "ema": jax.tree.map(jnp.copy, run.state["params"])}
        with pytest.raises(RecorderError, match=r"'ema', 'params'.*params_path="):
            self.save(tmp_path, run.recorder, state)
        self.save(tmp_path, run.recorder, state, params_path="params")
        assert_same_bits(restore(tmp_path, 1, abstract(state)), host_copy(state))

    def test_nothing_is_left_behind_by_a_refused_save(self, tmp_path):
        run = support.dict_run(mesh_of((4, 2)))
        handler = adacheck.AdaCheckHandler(run.recorder)
        with manager_of(tmp_path, handler) as manager:
            saved = save_steps(manager, run, 2)
            with pytest.raises(RecorderError):
                manager.save(3, args=adacheck.SaveArgs({"params": run.state["params"]}))
            saved |= save_steps(manager, run, 1)
        assert_same_bits(restore(tmp_path, 3, abstract(run.state)), saved[3])
        assert_same_bits(restore(tmp_path, 2, abstract(run.state)), saved[2])


DOORS = {
    "handler.save": lambda path: adacheck.AdaCheckHandler().save(
        epath.Path(path) / "1", adacheck.SaveArgs({"x": jnp.ones(300)})
    ),
    "handler.restore": lambda path: adacheck.AdaCheckHandler().restore(epath.Path(path) / "1"),
    "handler.metadata": lambda path: adacheck.AdaCheckHandler().metadata(epath.Path(path) / "1"),
    "manager": adacheck.checkpoint_manager,
    "v1": adacheck.v1.checkpointer,
    "latest_restorable": adacheck.latest_restorable,
    "command line": lambda path: root_of(str(path)),
    "export": lambda path: export(path, None, "there"),
    "export to": lambda path: export(path.parent, None, str(path)),
    "copy": lambda path: copying.copy([path], path.parent / "there"),
    "copy to": lambda path: copying.copy([path.parent], path),
    "Publisher": adacheck.publish.Publisher,
    "Follower": lambda path: adacheck.publish.Follower(path, {"x": jnp.ones(3)}),
}
"""All that takes a path of a root or a step."""


class TestPlaces:
    """Roots and steps that are not there."""

    def test_a_step_that_does_not_exist(self, saved_run):
        root, run, _ = saved_run
        with pytest.raises(FileNotFoundError, match="77"):
            restore(root, 77, abstract(run.state))

    def test_a_root_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("in the way")
        args = adacheck.SaveArgs({"x": jnp.ones(3)})
        handler = adacheck.AdaCheckHandler()
        with pytest.raises(StorageError, match="is a file"):
            handler.save(epath.Path(tmp_path / "file" / "1"), args)

    @pytest.mark.parametrize("url", ["hdfs://host/run/1", "file:///run/1", "gs://", "s3:///run"])
    def test_a_url_of_no_known_kind(self, url):
        with pytest.raises(StorageError, match="gs://BUCKET/"):
            located(url)

    @pytest.mark.parametrize(
        ("door", "name"),
        [
            *itertools.product(DOORS, ["a\\1", "a\0b", "a\udcff"]),
            *itertools.product(["handler.save", "manager", "v1"], ["link"]),
        ],
    )
    def test_a_path_that_is_read_otherwise_in_some_places(self, door, name, tmp_path):
        if name == "link":
            (tmp_path / "to\\1").mkdir()
            (tmp_path / "link").symlink_to(tmp_path / "to\\1")
        there = {*tmp_path.iterdir()}
        with pytest.raises((StorageError, InputError), match="take for the same, found '"):
            DOORS[door](tmp_path / name)
        assert {*tmp_path.iterdir()} == there

    @pytest.mark.parametrize("name", ["a?b#c%2F d", " a:b\n* ", "ä//b/../c/"])
    def test_other_characters_are_as_good_as_letters(self, name, tmp_path):
        states = [{"x": jnp.full(300, each)} for each in (1.0, 1.5)]
        with adacheck.checkpoint_manager(f"{tmp_path}/{name}", delta="bits") as manager:
            for step, state in enumerate(states):
                manager.save(step, args=adacheck.SaveArgs(state))
            for step, state in enumerate(states):
                found = manager.restore(step, args=adacheck.RestoreArgs(state))
                assert_same_bits(found, host_copy(state))
        assert len([*tmp_path.iterdir()]) == 1

    def test_keys_of_a_store(self):
        for url in ("gs://bucket//a//b/", "gs://bucket/../a/./b", "gs://bucket/c/../a/b"):
            assert str(located(url)) == "gs://bucket/a/b"
        assert str(located("s3://bucket/a\\b?#%2F ")) == "s3://bucket/a\\b?#%2F "
        for url in ("gs://bucket/a\nb", "s3://bucket/a\0", "gs://bucket/\udcff"):
            with pytest.raises(StorageError, match="take for the same"):
                located(url)

    @pytest.mark.parametrize("options", [None, ocp.CheckpointManagerOptions(read_only=True)])
    @pytest.mark.parametrize("kind", ["a file", "a link to .*nowhere, where nothing is"])
    def test_a_root_where_no_directory_can_be(self, kind, options, tmp_path):
        root = tmp_path / "root"
        root.touch() if kind == "a file" else root.symlink_to(tmp_path / "nowhere")
        for place in (root, root / "below"):
            with pytest.raises(StorageError, match=f"root is {kind}"):
                adacheck.checkpoint_manager(place, options=options)
            with pytest.raises(StorageError, match=f"root is {kind}"):
                adacheck.v1.checkpointer(place)

    @pytest.mark.parametrize("name", ["a\\b", "a\0b", "a/b", "..", ""])
    def test_names_of_items_and_steps(self, name, tmp_path):
        class Named:
            def build_name(self, step):
                return f"{name}_{step}"

        kinds = (StorageError, ValueError)
        own = {"o": ocp.JsonCheckpointHandler()}
        with pytest.raises(kinds, match="found '"):
            adacheck.checkpoint_manager(tmp_path, item=name, items=own)
        with pytest.raises(kinds, match="found '"):
            adacheck.checkpoint_manager(tmp_path, items={name: own["o"]})
        with pytest.raises(kinds, match="found '"):
            adacheck.v1.checkpointer(tmp_path, checkpointable_name=name)
        if {"\\", "\0"} & {*name}:
            options = ocp.CheckpointManagerOptions(step_prefix=name)
            with pytest.raises(StorageError, match="found '"):
                adacheck.checkpoint_manager(tmp_path, options=options)
            with pytest.raises(StorageError, match="found '"):
                adacheck.v1.checkpointer(tmp_path, step_name_format=Named())
        assert not [*tmp_path.iterdir()]

    def test_a_stock_step_holds_no_earlier_steps(self, tmp_path):
        with manager_of(tmp_path, ocp.StandardCheckpointHandler()) as manager:
            manager.save(1, args=ocp.args.StandardSave({"x": jnp.ones(3)}))
            manager.wait_until_finished()
        with (
            manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager,
            pytest.raises(FormatError, match="StandardCheckpointer"),
        ):
            manager.restore(1, args=adacheck.RestoreArgs(step=0))

    def test_a_value_that_cannot_be_stored(self, tmp_path):
        with (
            manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager,
            pytest.raises(ValueError, match="Unsupported type: leaf name"),
        ):
            manager.save(1, args=adacheck.SaveArgs({"name": "text", "x": jnp.ones(3)}))

    @pytest.mark.parametrize(
        ("make", "told"),
        [
            (lambda: handler(max_deltas=-1), "max_deltas to be an int >= 0"),
            (lambda: handler(max_deltas=SURVIVING, shadow=None), "every failure needs storage"),
            (lambda: handler(max_deltas=SURVIVING), "every failure needs storage"),
            *(
                (lambda x=x: handler(**{x: "zip"}), rf"{x} to be one of .*'\), found 'zip'")
                for x in ("delta", "compression", "check_replicas")
            ),
            (lambda: handler(shadow=False), "shadow to be a Shadow or None, found False"),
            (lambda: shadow(bytes=0), "None or an int > 0, found 0.*Write shadow=None"),
            (lambda: shadow(on_devices="yes"), "on_devices=.*True or False, found 'yes'"),
            (lambda: shadow(background_bases=None), "background_bases=.*True or False, found None"),
            (lambda: shadow(on_devices=True, bytes=10), "neither bytes nor a directory"),
            (
                lambda: shadow(copies=2),
                r"a directory with Shadow\(copies=2\), found none.*leave copies out",
            ),
            (
                lambda: shadow(directory=__file__),
                "to be a directory, found a file at .*Name another place",
            ),
        ],
        ids=lambda each: each if isinstance(each, str) else "",
    )
    def test_options_that_do_not_exist(self, make, told):
        with pytest.raises(ValueError, match=told):
            make()


@pytest.mark.parametrize("argument", ["derived", "extra_args"])
def test_a_list_where_a_recorder_takes_names(argument):
    with pytest.raises(RecorderError, match=rf"{argument}: expected a dictionary .* found list"):
        adacheck.Recorder(optax.sgd(0.1), **{argument: ["ema"]})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"items": ["data"]}, r"Orbax's handlers by names.*JsonCheck.*, found \['data'\]"),
        ({"items": {"data": ocp.JsonCheckpointHandler}}, "Orbax's handlers by names.*found <class"),
        ({"item": 5, "items": {}}, "names of directories, found 5"),
        ({"on_save": 5}, "on_save to be a function of a SaveReport, found 5"),
        ({"ephemeral": 5}, "ephemeral to be a sequence of patterns.*found 5"),
        ({"max_to_keep": -1}, "max_to_keep to be an int >= 0.*found -1"),
        (
            {
                "options": ocp.CheckpointManagerOptions(
                    preservation_policy=ocp.checkpoint_managers.LatestN
                )
            },
            r"such as LatestN\(3\), found <class",
        ),
        (
            {"options": ocp.CheckpointManagerOptions(save_decision_policy=5)},
            r"such as AdaptivePolicy\(\), found 5",
        ),
    ],
)
def test_arguments_of_another_kind_are_told_when_a_manager_is_made(given, told, tmp_path):
    with pytest.raises((TypeError, ValueError), match=f"expected .*{told}"):
        adacheck.checkpoint_manager(tmp_path, delta="bits", **given)


def test_no_optimizer_where_an_update_is_to_be_compiled():
    with pytest.raises(TypeError, match="ends in a Recorder, found <function adamw"):
        adacheck.separate_update(optax.adamw)


handler, shadow = adacheck.AdaCheckHandler, adacheck.Shadow
SURVIVING = adacheck.AdaptivePolicy(3600.0, storage_mtbf_s=86_400.0)


def test_a_failed_save_is_raised_once_and_the_next_one_is_a_base(tmp_path, monkeypatch):
    loop = Loop(tmp_path, support.dict_run(mesh_of((4, 2))))
    loop.save(2)
    with monkeypatch.context() as patch:

        def full(*_args, **_kwargs):
            raise OSError(28, "No space left on device")

        patch.setattr("adacheck_jax.store.packs.writer.write_pack", full)
        loop.train()
        loop.put()
        loop.fail(StorageError, r"/3/default: .*No space left")
    loop.save(2)
    assert loop.check() == "BRBR"
