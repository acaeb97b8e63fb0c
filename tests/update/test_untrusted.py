"""Programs that end the process which parses them do not end this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.export
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.store.steps import lookup, manifest_file
from adacheck_jax.update import exported_program, untrusted
from adacheck_jax.update import program as update_program
from tests import support
from tests.update.replaying import note_of

ENDED = Path(__file__).parents[1] / "fuzz/corpus/ended"
GOOD = Path(__file__).parents[1] / "fuzz/corpus/update/sgd.stablehlo"


@pytest.fixture(autouse=True)
def forgetful(monkeypatch, tmp_path_factory):
    """As a new process of a new user: nothing is known of any program."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user")))
    monkeypatch.setattr(untrusted, "_verdicts", {})


@pytest.fixture
def processes(monkeypatch):
    """The processes that were started."""
    started, run = [], subprocess.run

    def count(*args, **options):
        started.append(args)
        return run(*args, **options)

    monkeypatch.setattr(untrusted.subprocess, "run", count)
    return started


def load(data: bytes, noted: bytes | None = None):
    note = note_of(data if noted is None else noted)
    exported = exported_program.vetted(data, note, "update.stablehlo")
    return exported_program.function_of(exported, "update.stablehlo")


@pytest.mark.parametrize("name", ["abort", "segfault"])
def test_a_program_that_ends_its_parser_is_refused(name):
    data = (ENDED / f"{name}.stablehlo").read_bytes()
    for _ in range(2):  # it is not remembered as one that parses
        with pytest.raises(FormatError, match=r"update\.stablehlo: .*ends the parser by signal"):
            load(data)
        untrusted._verdicts.clear()


@pytest.mark.slow
def test_a_program_that_keeps_its_parser_busy_is_refused(monkeypatch):
    monkeypatch.setattr(untrusted, "_TIMEOUT_S", 5.0)
    with pytest.raises(FormatError, match="takes the parser more than 5 seconds"):
        load((ENDED / "loop.stablehlo").read_bytes())


def test_a_good_program_gets_through_the_parser():
    """Refused there and taken here, it would not have been looked at."""
    module = jax.export.deserialize(bytearray(GOOD.read_bytes())).mlir_module_serialized
    command = [sys.executable, "-P", str(untrusted._SCRIPT)]
    done = subprocess.run(command, input=module, capture_output=True, check=True)
    assert done.stdout.split() == [b"parsed"]


def test_a_good_program_is_parsed_elsewhere_once(processes):
    data = GOOD.read_bytes()
    for _ in range(2):
        assert jax.eval_shape(
            load(data), *[[jax.ShapeDtypeStruct((4, 2), "float32")]] * 3, [], None
        )
    assert len(processes) == 1


def test_bytes_that_do_not_match_their_digest_are_not_even_parsed(processes):
    with pytest.raises(IntegrityError, match="digest"):
        load(GOOD.read_bytes(), b"another")
    assert not processes


def test_where_no_process_can_be_started_it_is_said(monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    load(GOOD.read_bytes())
    assert "without a process of its own" in caplog.text


@pytest.mark.slow
def test_what_was_exported_or_parsed_before_is_trusted_and_all_else_is_not(
    tmp_path, processes, monkeypatch, tmp_path_factory
):
    run = support.dict_run(support.mesh_of((2, 2)), optax.adamw(1e-2))
    with support.manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = support.save_steps(manager, run, 3)
    item = tmp_path / "3" / "default"
    args = adacheck.RestoreArgs(support.abstract(run.state))

    def restored():
        with support.manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
            return manager.restore(3, args=args)

    support.assert_same_bits(restored(), saved[3])
    assert not processes
    untrusted._verdicts.clear()
    support.assert_same_bits(restored(), saved[3])
    assert not processes, "a process before this one has parsed it"
    untrusted._verdicts.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("other")))
    for _ in range(2):
        support.assert_same_bits(restored(), saved[3])
        assert len(processes) == 1
        untrusted._verdicts.clear()
    base = lookup.resolve(item).base_directory
    (base / manifest_file.update_file(update_program.platform())).write_bytes(b"damaged")
    with pytest.raises(IntegrityError):
        restored()
    assert len(processes) == 1
