"""Object stores by the scheme of their URLs: one table of all in which they differ here.

Up to tensorstore 0.1.86 and etils 1.15 there is none to add: Azure has no driver there, and a file
system of fsspec alone does not serve, since tensorstore opens packs and bases.

To add one: an entry; an extra of its name in ``pyproject.toml`` with its client, which ``dev`` has
too, beside a server; that server in ``SERVERS`` of ``tests/object_stores.py``, for the tests that
all stores pass; and a column of ``docs/guide/clusters.md``. Tensorstore must have a driver with
buckets, retries and conditional writes (:mod:`~adacheck_jax.store.storage.kvstore`), by which
:meth:`~adacheck_jax.store.storage.location.Location.spec` names packs and bases; and Orbax's
``epath`` must know the scheme.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Scheme:
    """One kind of object store.

    Attributes:
        driver: name of tensorstore's driver.
        client: package by which Orbax reaches it.
        raises: packages whose errors the client raises: they are of classes of their own.
        credentials: where its credentials come from, for messages.
        endpoint: environment variable that names another server.
        variables: environment variables that the driver does not read by itself, by the names of
            what they give in its specification.
        lists_spans: True if it lists the keys between any two; else those with one beginning.
        orbax_knows: True if Orbax knows by itself that nothing can be renamed there.
        orbax_reads: True if Orbax reads arrays there; else it takes the URL for a relative path.
    """

    driver: str
    client: str
    raises: frozenset[str]
    credentials: str
    endpoint: str
    variables: Mapping[str, str] = field(default_factory=dict)
    lists_spans: bool = True
    orbax_knows: bool = True
    orbax_reads: bool = True


SCHEMES: Mapping[str, Scheme] = {
    "gs": Scheme(
        "gcs",
        "gcsfs",
        frozenset({"aiohttp", "gcsfs"}),
        "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS",
        "TENSORSTORE_GCS_HTTP_URL",
    ),
    "s3": Scheme(
        "s3",
        "s3fs",
        frozenset({"aiobotocore", "aiohttp", "botocore"}),
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, of AWS_REGION",
        "AWS_ENDPOINT_URL",
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


def no_answer(named: object, found: str) -> str:
    """The message about an object store that does not answer, or refuses."""
    scheme = scheme_of(named)
    told = f" ({scheme.credentials}), or another server's {scheme.endpoint}" if scheme else ""
    return (
        f"{named}: expected an object store that answers, found: {found}. Look after the network, "
        f"the URL and the credentials{told}."
    )
