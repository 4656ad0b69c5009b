"""Headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
# Nothing of the browser's own traffic; in a container there is neither a sandbox nor much shared memory.
OPTIONS = [
    '--headless=new', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--no-first-run', '--disable-background-networking',
    '--disable-component-update', '--disable-sync', '--disable-default-apps', '--remote-debugging-port=0', '--remote-allow-origins=*',
]  # fmt: skip


class Browser:
    """One page of a browser of its own. Use as a context."""

    def __init__(self, profile: Path):
        self._profile = profile
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self.requested: list[str] = []  # addresses of everything that the page asked for
        self.complaints: list[str] = []  # errors in its console, and scripts' exceptions

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        self._process = subprocess.Popen(
            [CHROMIUM, *OPTIONS, f'--user-data-dir={self._profile}', 'about:blank'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        port_file = self._profile / 'DevToolsActivePort'
        wait_for(lambda: port_file.exists() and port_file.read_text().count('\n'), 60, 'the browser')
        self._loop.run_until_complete(self._connect(port_file.read_text().split()[0]))
        for domain in ('Page', 'Runtime', 'Network', 'Log'):
            self.command(f'{domain}.enable')
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._session.close())
        self._loop.close()
        self._process.terminate()
        self._process.wait(30)

    async def _connect(self, port: str) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.get(f'http://127.0.0.1:{port}/json') as answer:
            target = next(target for target in await answer.json() if target['type'] == 'page')
        self._socket = await self._session.ws_connect(target['webSocketDebuggerUrl'], max_msg_size=1 << 28)

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(asyncio.wait_for(self._command(method, parameters), 120))

    async def _command(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({'id': self._number, 'method': method, 'params': parameters})
        while True:
            message = json.loads((await self._socket.receive()).data)
            if message.get('id') == self._number:
                assert 'error' not in message, (method, message['error'])
                return message['result']
            self._note(message.get('method'), message.get('params', {}))

    def _note(self, event: str | None, content: dict[str, Any]) -> None:
        if event == 'Network.requestWillBeSent':
            self.requested.append(content['request']['url'])
        elif event == 'Runtime.exceptionThrown':
            self.complaints.append(str(content['exceptionDetails']))
        elif event == 'Log.entryAdded' and content['entry']['level'] == 'error':
            self.complaints.append(f'{content["entry"]["text"]} {content["entry"].get("url", "")}')

    def look(self, url: str, width_px: int = 1280, dark: bool = False) -> None:
        """Open a page in a window of this width."""
        self.command('Emulation.setDeviceMetricsOverride', width=width_px, height=900, deviceScaleFactor=1, mobile=False)
        self.command('Emulation.setEmulatedMedia', features=[{'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}])
        self.command('Page.navigate', url=url)

    def script(self, expression: str) -> Any:
        """Value of a JavaScript expression, waited for where it is a promise."""
        result = self.command('Runtime.evaluate', expression=expression, awaitPromise=True, returnByValue=True)
        assert 'exceptionDetails' not in result, (expression, result['exceptionDetails'])
        return result['result'].get('value')

    def until(self, expression: str, limit_sec: float = 30) -> Any:
        """Wait until a JavaScript expression is true, and return it."""
        return wait_for(lambda: self.script(expression), limit_sec, expression)

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of an element."""
        place = self.script(
            f'(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: "center"}}); '
            'const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()'
        )
        for kind in ('mousePressed', 'mouseReleased'):
            self.command('Input.dispatchMouseEvent', type=kind, x=place[0], y=place[1], button='left', clickCount=1)

    def fill(self, selector: str, text: str) -> None:
        """Type into a field in place of what is there."""
        self.click(selector)
        self.script(f'document.querySelector({json.dumps(selector)}).select()')
        self.command('Input.insertText', text=text)
        self.script('document.activeElement.blur()')

    def fetched(self, url: str) -> bytes:
        """What the page gets from an address."""
        return base64.b64decode(
            self.script(
                f'fetch({json.dumps(url)}).then(a => a.arrayBuffer()).then(b => btoa(Array.from(new Uint8Array(b), c => String.fromCharCode(c)).join("")))'
            )
        )

    def screenshot(self, path: Path) -> None:
        """A PNG of the whole page."""
        size = self.command('Page.getLayoutMetrics')['cssContentSize']
        clip = {'x': 0, 'y': 0, 'width': size['width'], 'height': size['height'], 'scale': 1}
        path.write_bytes(base64.b64decode(self.command('Page.captureScreenshot', captureBeyondViewport=True, clip=clip)['data']))


def wait_for(condition: Any, limit_sec: float, what: str) -> Any:
    """Ask again and again until the answer is true, and return it."""
    end = time.monotonic() + limit_sec
    while not (answer := condition()):
        assert time.monotonic() < end, f'{limit_sec:g} s have passed: {what}'
        time.sleep(0.1)
    return answer
