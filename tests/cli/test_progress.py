"""Progress of long restores, told by the command on a terminal alone."""

import logging

import pytest

from adacheck_jax.cli import command
from adacheck_jax.restore import progress


@pytest.fixture
def log():
    log = logging.getLogger(command.RESTORES)
    yield log
    log.handlers.clear()
    log.setLevel(logging.NOTSET)


def test_a_terminal_is_told_how_far_a_restore_is(log, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    command.show_restores()
    with progress.Progress("restoring step 7") as told:
        told.tell(40_000_000, 100_000_000, "replayed 4 of 9 deltas, ")
    assert capsys.readouterr().err == "restoring step 7: replayed 4 of 9 deltas, 40.0 of 100.0 MB\n"


def test_a_file_is_told_nothing(log, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    command.show_restores()
    with progress.Progress("restoring step 7") as told:
        told.tell(40, 100)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_terminal_that_gets_no_lines_gets_a_bar_unless_told_not_to(
    log, monkeypatch, capsys, is_silent
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    if is_silent:
        log.setLevel(logging.WARNING)
    with progress.Progress("restoring step 7") as told:
        told.tell(40_000_000, 100_000_000)
    told = capsys.readouterr().err
    assert ("restoring step 7: 40.0 of 100.0 MB" in told) is not is_silent
    assert bool(told) is not is_silent


def test_a_line_is_told_each_two_seconds(log, caplog):
    now_s = [0.0]
    with caplog.at_level(logging.INFO, command.RESTORES):
        part = progress.Progress("restoring step 7", clock=lambda: now_s[0])
        for done in range(6):
            part.tell(done * 10**6, 6 * 10**6)
            now_s[0] += 1
    assert [record.message for record in caplog.records] == [
        "restoring step 7: 2.0 of 6.0 MB",
        "restoring step 7: 4.0 of 6.0 MB",
    ]
