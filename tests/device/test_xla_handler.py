"""Handlers of XLA's foreign function interface leave alone what they do not know."""

import threading
import time

import numpy as np
import pytest

from adacheck_jax.device.loops import shard_tables, xla_call, xla_handler
from adacheck_jax.format import fingerprint

WORDS = np.arange(12, dtype=np.uint32)


class Call:
    """One call of the handler of sums, in the structures of ``xla/ffi/api/c_api.h``."""

    def __init__(self):
        self.result = np.zeros(1, np.uint64)
        table = shard_tables.of_sums([(3,)], [4]).view(np.int64).reshape(-1, 17)
        self._kept = []
        self.inputs = [self._buffer(table), self._buffer(WORDS)]
        self.outputs = [self._buffer(self.result)]
        self.api = np.zeros(1, xla_handler._API)
        self.frame = np.zeros(1, xla_handler._FRAME)
        self.frame["size_bytes"], self.frame["stage"] = 168, xla_handler._EXECUTE
        self.frame["api"] = self._kept_at(self.api)
        for name, buffers in (("args", self.inputs), ("rets", self.outputs)):
            items = np.array([self._kept_at(each) for each in buffers], np.uint64)
            own = self.frame[name]
            own["size_bytes"], own["length"], own["items"] = 40, len(buffers), self._kept_at(items)

    def _kept_at(self, array):
        self._kept.append(array)
        return array.ctypes.data

    def _buffer(self, array):
        buffer, dims = np.zeros(1, xla_handler._BUFFER), np.array(array.shape, np.int64)
        buffer["size_bytes"], buffer["rank"] = 48, array.ndim
        buffer["data"], buffer["dims"] = self._kept_at(array), self._kept_at(dims)
        return buffer

    def run(self):
        handler, *_ = xla_handler.compiled()
        assert handler.ctypes(self.frame.ctypes.data) == 0
        return int(self.result[0])


def test_a_call_of_the_layout_that_is_known_is_answered():
    assert Call().run() == fingerprint.multilinear(WORDS, (3,)) != 0


def test_the_version_is_told_in_a_structure_of_the_known_size_alone():
    for size_bytes, expected in ((24, 3), (32, 0)):
        call = Call()
        metadata = np.zeros(1, xla_handler._METADATA)
        metadata["version"]["size_bytes"] = size_bytes
        extension = np.zeros(1, xla_handler._EXTENSION)
        extension["kind"], extension["metadata"] = 1, metadata.ctypes.data
        call.frame["extension"] = extension.ctypes.data
        assert call.run() == 0
        assert metadata["version"]["minor"][0] == expected


@pytest.mark.parametrize("what", ["frame", "args", "rets", "buffer", "major"])
def test_a_call_of_another_layout_changes_nothing(what):
    call = Call()
    if what == "major":
        call.api["version"]["major"] = 1
    elif what == "buffer":
        call.inputs[0]["size_bytes"] += 8
    else:
        (call.frame if what == "frame" else call.frame[what])["size_bytes"] += 8
    assert call.run() == 0


def test_threads_that_begin_at_once_register_one_handler(monkeypatch):
    begun, barrier, started = [], threading.Barrier(8), threading.Thread.start

    def start_slowly(self: threading.Thread) -> None:
        if self.name == "adacheck_compile":
            time.sleep(0.05)
        started(self)

    def begin() -> None:
        barrier.wait()
        xla_call.begin()

    callers = [threading.Thread(target=begin) for _ in range(8)]
    monkeypatch.setattr(xla_call, "_trials", [])
    monkeypatch.setattr(xla_call, "_tried", lambda: begun.append(None))
    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    xla_call.wait()
    assert len(begun) == 1
