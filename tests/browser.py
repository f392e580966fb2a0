"""Headless Chromium for tests of pages, driven by chromedriver's HTTP interface."""

import base64
import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def missing():
    """Which program there is not, or nothing."""
    return ", ".join(name for name in ("chromium", "chromedriver") if not shutil.which(name))


class Browser:
    """One window of a browser."""

    def __init__(self, port, options):
        self.base = f"http://127.0.0.1:{port}/session"
        always = {"browserName": "chrome", "goog:chromeOptions": options}
        always["goog:loggingPrefs"] = {"browser": "ALL"}
        found = self.post("", capabilities={"alwaysMatch": always})
        self.base += "/" + found["sessionId"]

    def send(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        # No proxy, whatever the environment says: this is the same machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as e:
            raise RuntimeError(json.load(e)["value"]["message"]) from None

    def post(self, path, **body):
        return self.send("POST", path, body)

    def open(self, path):
        self.post("/url", url=Path(path).resolve().as_uri())

    def run(self, script, *args):
        """What the body of a function returns in the page, its promise awaited."""
        return self.post("/execute/sync", script=script, args=list(args))

    def act(self, *sources):
        """Input from sources (type, parameters, actions) at the same time."""
        named = [
            {"type": kind, "id": f"{kind} {parameters} {i}"}
            | {"parameters": parameters, "actions": actions}
            for i, (kind, parameters, actions) in enumerate(sources)
        ]
        self.post("/actions", actions=named)

    def drag(self, *ways, pointer="mouse"):
        """Press, move and let go, with a pointer for each way (x, y, dx, dy) in the window."""

        def strokes(x, y, dx, dy):
            move = {"type": "pointerMove", "duration": 50}
            yield move | {"x": x, "y": y}
            yield {"type": "pointerDown", "button": 0}
            yield move | {"x": x + dx, "y": y + dy}
            yield {"type": "pointerUp", "button": 0}

        self.act(*(("pointer", {"pointerType": pointer}, list(strokes(*way))) for way in ways))

    def press(self, *keys):
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.act(("key", {}, strokes))

    def scroll(self, x, y, by):
        turn = {"type": "scroll", "x": x, "y": y, "deltaX": 0, "deltaY": by, "duration": 0}
        self.act(("wheel", {}, [turn]))

    def emulate(self, command, **params):
        self.post("/goog/cdp/execute", cmd=f"Emulation.{command}", params=params)

    def resize(self, width, height, scale=1):
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.emulate("setDeviceMetricsOverride", **size)

    def prefer(self, scheme):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.emulate("setEmulatedMedia", features=[feature])

    def console(self):
        """What was logged since it was last asked for."""
        return [entry["message"] for entry in self.post("/se/log", type="browser")]

    def screenshot(self, path):
        Path(path).write_bytes(base64.b64decode(self.send("GET", "/screenshot")))


@contextlib.contextmanager
def chromium():
    """A Browser, for as long as the block lasts."""
    command = ["chromedriver", "--port=0"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = {"binary": shutil.which("chromium")}
        options["args"] = [*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,900"]
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            port = next(
                m[1] for line in driver.stdout if (m := re.search(r"on port (\d+)\.", line))
            )
            browser = Browser(port, options)
            try:
                yield browser
            finally:
                browser.send("DELETE", "")
        finally:
            driver.terminate()
            driver.wait()
