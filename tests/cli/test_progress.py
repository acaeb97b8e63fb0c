"""Progress of long restores, told on a terminal alone: in lines by the command, else in a bar."""

import logging

import pytest

from adacheck_jax.cli import command
from adacheck_jax.restore import progress

LINE = "restoring step 7: 4 of 9, 40.0 of 100.0 MB"


@pytest.fixture
def log():
    log = logging.getLogger(command.RESTORES)
    yield log
    log.handlers.clear()
    log.setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("is_command", "is_terminal", "level", "is_told"),
    [
        (True, True, logging.NOTSET, True),
        (True, False, logging.NOTSET, False),
        (False, True, logging.NOTSET, True),
        (False, True, logging.WARNING, False),
    ],
)
def test_a_terminal_is_told_how_far_a_restore_is(
    log, monkeypatch, capsys, is_command, is_terminal, level, is_told
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    log.setLevel(level)
    if is_command:
        command.show_restores()
    with progress.Progress("restoring step 7") as part:
        part.tell(40_000_000, 100_000_000, "4 of 9, ")
    told = capsys.readouterr().err
    assert (LINE in told) is bool(told) is is_told
    assert not (is_command and is_told) or told == f"{LINE}\n"


def test_a_line_is_told_each_two_seconds(log, caplog):
    now_s = [0.0]
    with caplog.at_level(logging.INFO, command.RESTORES):
        part = progress.Progress("restoring step 7", clock=lambda: now_s[0])
        for done in range(6):
            part.tell(done * 10**6, 6 * 10**6)
            now_s[0] += 1
    said = [record.message for record in caplog.records]
    assert said == [f"restoring step 7: {done}.0 of 6.0 MB" for done in (2, 4)]
