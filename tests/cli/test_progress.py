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
    progress.Progress(step=7).tell(40, 100)
    assert capsys.readouterr().err == "restoring step 7: replayed 40 of 100 deltas\n"


def test_a_file_is_told_nothing(log, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    command.show_restores()
    progress.Progress(step=7).tell(40, 100)
    assert capsys.readouterr().err == ""


def test_a_line_is_told_each_five_seconds(log, caplog):
    now_s = [0.0]
    with caplog.at_level(logging.INFO, command.RESTORES):
        part = progress.Progress(step=7, clock=lambda: now_s[0])
        for done in range(12):
            part.tell(done, 12)
            now_s[0] += 1
    assert [record.message for record in caplog.records] == [
        "restoring step 7: replayed 5 of 12 deltas",
        "restoring step 7: replayed 10 of 12 deltas",
    ]
