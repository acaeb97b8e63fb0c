"""The manifest file, which makes a saved step exist: names, reading, writing.

It is written last, after every byte that it speaks of, and it carries a checksum of itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from adacheck_jax.errors import FormatError, IntegrityError, unreadable
from adacheck_jax.format import manifest_json
from adacheck_jax.format.manifest import Manifest
from adacheck_jax.store.storage.interface import NotPlainError, Stamp
from adacheck_jax.store.storage.location import AnyPath, at

DIRECTORY = "adacheck"
"""Name of our folder inside an item's directory."""
NAME = "manifest.json"
FILE = f"{DIRECTORY}/{NAME}"


def update_file(platform: str) -> str:
    """Path of a platform's update program, relative to a base's item directory."""
    return f"{DIRECTORY}/update.{platform}.stablehlo"


def read_other(path: AnyPath, digest: str | None, remedy: str = "Restore another step.") -> bytes:
    """Reads a file of a base that its manifest names, by its SHA-256; None for any bytes.

    Raises:
        IntegrityError: there is none, or it has other bytes; its text ends with the remedy.
        StorageError: the file cannot be read now.
    """
    found, cause = "other bytes", None
    try:
        data = at(path).read()
        if digest in (None, hashlib.sha256(data).hexdigest()):
            return data
    except OSError as error:
        if refused := unreadable(path, error):
            raise refused from error
        found, cause = f"none ({error.strerror})", error
    # The cause tells a step that is being deleted.
    raise IntegrityError(
        f"{path}: expected the file that was written with the base, found {found}. {remedy}"
    ) from cause


def read(item_directory: AnyPath) -> Manifest:
    """Reads the manifest of an item directory.

    Raises:
        FormatError: there is no manifest, or the file is not a manifest.
        IntegrityError: the manifest does not match its checksum.
        StorageError: the file cannot be read now.
    """
    return read_file(item_directory / FILE)


def read_file(path: AnyPath) -> Manifest:
    """Reads a manifest from its own path; raises as :func:`read` does."""
    try:
        data = at(path).read(stop=manifest_json.MAX_MANIFEST_BYTES + 1)
    except NotPlainError:
        raise
    except OSError as error:
        raise unreadable(path, error) or FormatError(
            f"{path}: expected the manifest of a step saved by AdaCheckHandler, found none "
            f"({error.strerror}). A step that stock Orbax saved is read with "
            "ocp.StandardCheckpointer; a step that lost its manifest cannot be verified. If its "
            "deletion was cut off, the next run's saves remove the rest; if a copy was, copy again."
        ) from error
    return manifest_json.decode(data, where=str(path))


def remembering() -> Callable[[AnyPath], Manifest]:
    """A :func:`read_file` that reads of files which are hard links to each other the first.

    For a look at many steps: each of them has links to the manifests of those before it.
    """
    known: dict[Any, Manifest] = {}

    def read(path: AnyPath) -> Manifest:
        place = at(path)
        if place.looks_cost:  # to ask for the identity is to read
            return read_file(path)
        try:  # in a view of a store no value becomes another one
            stamp = place.stamp if place.on_file_system else place
        except OSError:
            return read_file(path)  # for its error
        if stamp not in known:
            known[stamp] = read_file(path)
        return known[stamp]

    return read


def write(
    item_directory: AnyPath, manifest: Manifest, claim: Stamp | None = None
) -> tuple[Manifest, Stamp]:
    """Writes the manifest; the caller makes it durable.

    Args:
        item_directory: the step's item directory.
        manifest: the manifest.
        claim: identity of a claim in its place, the only value that it may replace.

    Returns:
        The manifest as a reader has it, and the identity of its file.

    Raises:
        FormatError: readers would refuse it.
        FileExistsError: the claim is not there any more.
    """
    data, made = manifest_json.sealed(manifest, where=str(item_directory / FILE))
    return made, at(item_directory / FILE).write(data, replacing=claim)
