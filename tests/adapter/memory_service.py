"""JAX's coordination service as a dictionary, for processes that are threads."""

from __future__ import annotations

import threading

import jax


class MemoryService:
    """JAX's key-value store, as far as it is used.

    Attributes:
        values: what is stored.
        error: error of every call; None while the service is there.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.error: Exception | None = None
        self._changed = threading.Condition()

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        with self._changed:
            self._check()
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        with self._changed:
            self._check()
            if self._changed.wait_for(lambda: key in self.values, timeout_in_ms / 1000):
                return self.values[key]
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out: {key}")

    def key_value_try_get_bytes(self, key: str) -> bytes:
        with self._changed:
            self._check()
            if key in self.values:
                return self.values[key]
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")

    def key_value_dir_get_bytes(self, key: str) -> list[tuple[str, bytes]]:
        with self._changed:
            self._check()
            return [each for each in self.values.items() if each[0].startswith(key)]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self._check()
            for each in [*self.values]:
                if each == key or each.startswith(f"{key}/"):
                    del self.values[each]

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
