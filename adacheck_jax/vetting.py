"""Keeps programs that end the process which parses them away from this one.

See :mod:`adacheck_jax.vet_program`. What this process exported itself needs no vetting, and the
same bytes are vetted once a process.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import jax.export

from adacheck_jax.errors import FormatError

_log = logging.getLogger(__name__)

_SCRIPT = Path(__file__).with_name("vet_program.py")
_TIMEOUT_S = 60.0
_lock = threading.Lock()
_verdicts: dict[str, Future[str]] = {}
"""By digest of the bytes, why they cannot be parsed; empty where they can."""


def trust(data: bytes) -> None:
    """Notes a program that was made here."""
    verdict: Future[str] = Future()
    verdict.set_result("")
    with _lock:
        _verdicts.setdefault(_digest(data), verdict)


def begin(data: bytes) -> None:
    """Starts to vet a program in the background, so that :func:`check` need not wait for long."""
    digest = _digest(data)
    with _lock:
        if digest in _verdicts:
            return
        verdict = _verdicts[digest] = Future()
    try:
        module = jax.export.deserialize(bytearray(data)).mlir_module_serialized
    except Exception:  # in Python, and harmless: whoever loads it will tell
        verdict.set_result("")
        return
    # A daemon: whoever ends meanwhile need not wait for it.
    thread = threading.Thread(target=_vet, args=(module, verdict), daemon=True, name="vetting")
    thread.start()


def check(data: bytes, where: str) -> None:
    """Waits until it is known that a program can be parsed.

    Args:
        data: the serialized program.
        where: the file, for the message.

    Raises:
        FormatError: it ended the process that parsed it, or took too long.
    """
    begin(data)
    verdict = _verdicts[_digest(data)].result()
    if verdict:
        raise FormatError(
            f"{where}: expected a program that can be parsed, found one that {verdict}: it was "
            "made to do so, since its digest is the manifest's. Do not trust this checkpoint."
        )


def _vet(module: bytes, verdict: Future[str]) -> None:
    try:
        verdict.set_result(_tried(module))
    except BaseException as error:
        verdict.set_exception(error)


def _tried(module: bytes) -> str:
    command = [sys.executable, "-P", str(_SCRIPT)]
    try:
        done = subprocess.run(
            command, input=module, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"takes the parser more than {_TIMEOUT_S:.0f} seconds"
    except OSError as error:  # no interpreter, or no further process
        _log.warning("An update program is parsed without a process of its own: %s", error)
        return ""
    if done.returncode > 0:
        _log.warning(
            "An update program is parsed without a process of its own, which failed: %s",
            done.stderr.decode(errors="replace")[-500:],
        )
    return f"ends the parser by signal {-done.returncode}" if done.returncode < 0 else ""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
