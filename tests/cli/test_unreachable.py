"""Commands end soon, with the reason, where an object store does not answer or refuses."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adacheck_jax.schemes import SCHEMES
from adacheck_jax.store.storage import kvstore
from adacheck_jax.store.storage.location import Location
from tests import processes

CREDENTIALS = ("GOOGLE_", "AWS_", "TENSORSTORE_")


def listed(url: str, tmp_path: Path, **variables: str) -> str:
    """What ``adacheck ls URL`` says at its end in a process without credentials."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(CREDENTIALS)}
    environment |= {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true", **variables}
    child = processes.forked("adacheck_jax.cli.main", "ls", url, environment=environment)
    said = child.ended(200)  # tensorstore's own patience is longer
    assert child.returncode == 2, said
    return said[said.index("adacheck: ") :]


@contextlib.contextmanager
def silent(*, listens: bool) -> Iterator[str]:
    """URL of a port at which connections are refused, or nobody ever answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


class Refusing(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(401, "Anonymous caller does not have storage.objects.get access")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_a_store_that_refuses_is_told_soon_and_so_are_missing_credentials(name, tmp_path, refusing):
    url, scheme = f"{name}://bucket/run", SCHEMES[name]
    with silent(listens=False) as endpoint:
        told = listed(url, tmp_path, **{"AWS_REGION": "us-east-1", scheme.endpoint: endpoint})
    assert told.startswith(f"adacheck: {url}: expected an object store that answers, found: ")
    assert "Could not connect to server" in told
    assert scheme.credentials in told
    told = listed(url, tmp_path, **{"AWS_REGION": "us-east-1", scheme.endpoint: refusing})
    assert "found: PERMISSION_DENIED" in told
    assert scheme.credentials in told


def test_a_store_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(kvstore, "_ANSWER_S", 0.05)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with silent(listens=True) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        for key in ("run", ""):
            with pytest.raises(OSError, match="no answer within"):
                Location(kvstore.KvStore("s3://bucket"), key).check_answers()
