"""The exception tree.

::

    AdaCheckError
    ├── RecorderError    the Recorder is absent, doubled, or cannot tell what its update consumes
    ├── MismatchError    the state that was asked for is not the state that was saved
    ├── LineageError     a step, or a step that it builds on, is not there
    ├── IntegrityError   stored bits are not the bits that were saved
    ├── ReplicaError     replicas that are declared equal are not
    ├── FormatError      a file is not what this version of the library can read
    └── StorageError     the place to write to cannot be written

Every message says what was expected, what was found, where, and what to do.
"""


class AdaCheckError(Exception):
    """Base class of every error that this library raises on purpose."""


class RecorderError(AdaCheckError):
    """The recorder is absent, appears twice, or its update cannot be tied to the state."""


class MismatchError(AdaCheckError):
    """Abstract state and saved state differ in leaf paths, shapes or kinds of data type."""


class LineageError(AdaCheckError):
    """A step cannot be reproduced, because it or a step that it builds on is missing."""


class IntegrityError(AdaCheckError):
    """Stored or restored bits differ from the bits that were saved."""


class ReplicaError(AdaCheckError):
    """Devices that are declared to hold the same bits hold different ones; nothing was saved."""


class FormatError(AdaCheckError):
    """A file is missing, truncated, or written in a format that cannot be read here."""


class StorageError(AdaCheckError):
    """The checkpoint root cannot be written."""
