"""The manifest file, which makes a saved step exist: names, reading, writing.

It is written last, after every byte that it speaks of, and it carries a checksum of itself.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from pathlib import Path

from adacheck_jax.errors import FormatError, unreadable
from adacheck_jax.format import durable, manifest_json
from adacheck_jax.format.manifest import Manifest

DIRECTORY = "adacheck"
"""Name of our folder inside an item's directory."""
NAME = "manifest.json"
FILE = f"{DIRECTORY}/{NAME}"


def update_file(platform: str) -> str:
    """Path of a platform's update program, relative to a base's item directory."""
    return f"{DIRECTORY}/update.{platform}.stablehlo"


def read(item_directory: Path) -> Manifest:
    """Reads the manifest of an item directory.

    Raises:
        FormatError: there is no manifest, or the file is not a manifest.
        IntegrityError: the manifest does not match its checksum.
        StorageError: the file cannot be read now.
    """
    return read_file(item_directory / FILE)


def read_file(path: Path) -> Manifest:
    """Reads a manifest from its own path; raises as :func:`read` does."""
    try:
        data = _read_file(path)
    except OSError as error:
        if refused := unreadable(path, error):
            raise refused from error
        raise FormatError(
            f"{path}: expected the manifest of a step saved by AdaCheckHandler, found none "
            f"({error.strerror}). A step that stock Orbax saved is read with "
            "ocp.StandardCheckpointer; a step that lost its manifest cannot be verified."
        ) from error
    return manifest_json.decode(data, where=str(path))


def stamp(item_directory: Path) -> tuple[int, int, int]:
    """Inode, size and time of change of a manifest file: equal if it is still the same file.

    Raises:
        OSError: there is no manifest.
    """
    found = os.stat(item_directory / FILE, follow_symlinks=False)
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def _read_file(path: Path) -> bytes:
    """Bytes of a manifest: a plain file in a plain folder, and not too large."""
    if path.parent.is_symlink():
        raise not_plain(path.parent, "a symbolic link")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise not_plain(path, "a symbolic link") from error
        raise
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise not_plain(path, "no file")
        if status.st_size > manifest_json.MAX_MANIFEST_BYTES:
            raise FormatError(
                f"{path}: expected a manifest of at most {manifest_json.MAX_MANIFEST_BYTES} bytes, "
                f"found {status.st_size}. The file is not a manifest; restore another step."
            )
        return file.read(status.st_size)


def not_plain(path: Path, found: str) -> FormatError:
    """Error for an entry of a step's directory that is neither a file nor a directory."""
    return FormatError(
        f"{path}: expected plain files and directories in a step's directory, found {found}, which "
        "is not followed: it may lead anywhere. Put what it stands for in its place, or restore "
        "another step."
    )


def refuse_links(directory: Path) -> None:
    """Refuses symbolic links, pipes and devices anywhere below a step's item directory.

    No save writes such entries: one that is there leads to other files. The directory itself and
    those above it may be links: they are the user's.

    Raises:
        FormatError: names the first such entry.
    """
    waiting = [os.fspath(directory)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as found:
                for each in found:
                    if each.is_dir(follow_symlinks=False):
                        waiting.append(each.path)
                    elif not each.is_file(follow_symlinks=False):
                        kind = "a symbolic link" if each.is_symlink() else "a pipe or a device"
                        raise not_plain(Path(each.path), kind)
        except OSError:  # it is missing or being deleted, which reading it will report
            continue


def write(item_directory: Path, manifest: Manifest) -> Manifest:
    """Writes the manifest; the caller makes it durable.

    Returns:
        The manifest with its checksum.

    Raises:
        FormatError: it is larger than readers accept.
    """
    data, checksum = manifest_json.encoded(manifest)
    manifest_json.check_counts(data, str(item_directory / FILE))
    path = item_directory / FILE
    durable.place(path, data)
    return dataclasses.replace(manifest, checksum=checksum)
