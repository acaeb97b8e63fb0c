"""Object stores by the scheme of their URLs: one table of all in which they differ here.

To add one: an entry, an extra in ``pyproject.toml`` with its client, a server in
``tests/object_stores.py`` with a fixture in ``tests/conftest.py``, and a class in
``tests/store/test_storage.py``, for the tests that all stores pass. Tensorstore must have a driver
with buckets, retries and conditional writes (:mod:`~adacheck_jax.store.storage.kvstore`), since it
opens packs and bases by :meth:`~adacheck_jax.store.storage.location.Location.spec`; and Orbax's
``epath`` must know the scheme. Up to tensorstore 0.1.86 and etils 1.15 that leaves none to add.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

from adacheck_jax.errors import StorageError


@dataclass(frozen=True, slots=True)
class Scheme:
    """One kind of object store.

    Attributes:
        driver: name of tensorstore's driver.
        client: package by which Orbax reaches it; :func:`adacheck_jax.errors.is_refusal` knows the
            packages whose errors that raises.
        credentials: where its credentials come from, for messages.
        variables: environment variables that the driver does not read by itself, by the names of
            what they give in its specification.
        lists_spans: True if it lists the keys between any two; else those with one beginning.
        orbax_knows: True if Orbax knows by itself that nothing can be renamed there.
        orbax_reads: True if Orbax reads arrays there; else it takes the URL for a relative path.
    """

    driver: str
    client: str
    credentials: str
    variables: Mapping[str, str] = field(default_factory=dict)
    lists_spans: bool = True
    orbax_knows: bool = True
    orbax_reads: bool = True


SCHEMES: Mapping[str, Scheme] = {
    "gs": Scheme(
        "gcs",
        "gcsfs",
        "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS",
    ),
    "s3": Scheme(
        "s3",
        "s3fs",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; AWS_REGION and AWS_ENDPOINT_URL name it",
        variables={"endpoint": "AWS_ENDPOINT_URL", "aws_region": "AWS_REGION"},
        lists_spans=False,
        orbax_knows=False,
        orbax_reads=False,
    ),
}
"""The object stores that roots may lie in; each has an extra of its name."""


def scheme_of(named: object) -> Scheme | None:
    """The object store that a path or a URL names; None for another place."""
    scheme, mark, _ = str(named).partition("://")
    return SCHEMES.get(scheme) if mark else None


def shown(rest: str) -> str:
    """All URLs that may be given, for messages: ``gs://rest or s3://rest``."""
    return " or ".join(f"{each}://{rest}" for each in SCHEMES)


def expect_client(named: object) -> None:
    """Looks for the package by which Orbax reaches the object store of a URL; nothing elsewhere.

    Raises:
        StorageError: it is not installed; the message names the extra that has it.
    """
    scheme = scheme_of(named)
    if scheme is not None and importlib.util.find_spec(scheme.client) is None:
        raise StorageError(
            f"{named}: expected the package {scheme.client}, by which Orbax reaches it, found none."
            f" Nothing was made or read; install adacheck-jax[{str(named).partition(':')[0]}]."
        )


def no_answer(named: object, found: str) -> str:
    """The message about an object store that does not answer, or refuses."""
    scheme = scheme_of(named)
    credentials = f" ({scheme.credentials})" if scheme else ""
    return (
        f"{named}: expected an object store that answers, found: {found}. Look after the network, "
        f"the URL and the credentials{credentials}."
    )
