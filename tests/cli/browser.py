"""A headless Chromium to look at pages with, by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
"""Path of the browser; None if there is none."""


@dataclass
class Page:
    """One page in the browser, and all that it said and asked for.

    Attributes:
        console: messages on its console, and errors of its scripts.
        requests: URLs that it loaded.
    """

    socket: aiohttp.ClientWebSocketResponse
    session: str = ""
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: itertools.count(1000))
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    _loads: asyncio.Queue[None] = field(default_factory=asyncio.Queue)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol: of the page, or of the browser before it has one."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        own = {"sessionId": self.session} if self.session else {}
        await self.socket.send_json(message | own)
        return await asyncio.wait_for(self._answers[number], 60)

    async def listen(self) -> None:
        """Takes what the browser says, until it is closed."""
        async for each in self.socket:
            message = json.loads(each.data)
            if message.get("id") in self._answers:
                waiting = self._answers.pop(message["id"])
                if "error" in message:
                    waiting.set_exception(RuntimeError(str(message["error"])))
                else:
                    waiting.set_result(message["result"])
            self._take(message.get("method"), message.get("params", {}))

    def _take(self, method: str | None, said: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled":
            self.console.append(str([each.get("value") for each in said["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(said["exceptionDetails"].get("exception", said)))
        elif method == "Log.entryAdded":
            self.console.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loads.put_nowait(None)

    async def open(self, path: Path | str, width: int, height: int, scheme: str = "light") -> None:
        """Opens a file as a screen of some size shows it, in the light or dark scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=wanted)
        url = path if isinstance(path, str) else path.as_uri()
        await self.call("Page.navigate", url=url)
        await self.loaded()

    async def loaded(self) -> None:
        """Waits until the page has loaded (again)."""
        await asyncio.wait_for(self._loads.get(), 60)

    async def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    async def picture(self, path: Path) -> None:
        """Writes a PNG of the window."""
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.asynccontextmanager
async def _browser() -> AsyncIterator[Page]:
    assert CHROMIUM
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        quiet = ["--no-first-run", "--disable-extensions", "--disable-background-networking"]
        process = subprocess.Popen(
            [CHROMIUM, *arguments, *quiet, "--remote-debugging-port=0", f"--user-data-dir={home}"],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stderr
            told = next(line for line in process.stderr if "listening on" in line)
            address = told.split("listening on ")[1].strip()
            async with (
                aiohttp.ClientSession() as client,
                client.ws_connect(address, max_msg_size=0) as socket,
            ):
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                tab = await page.call("Target.createTarget", url="about:blank")
                target = {"targetId": tab["targetId"], "flatten": True}
                page.session = (await page.call("Target.attachToTarget", **target))["sessionId"]
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
                listening.cancel()
        finally:
            process.terminate()
            process.wait()


def look(visit: Callable[[Page], Awaitable[None]]) -> None:
    """Starts a browser, and does something with a page of it.

    Args:
        visit: what to do.
    """

    async def visited() -> None:
        async with _browser() as page:
            await visit(page)

    asyncio.run(visited())
