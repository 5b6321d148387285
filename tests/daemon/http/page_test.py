#!/usr/bin/env python3
"""Looks at the status page in a real headless Chromium, over a real daemon that clients work with.

It must show live data, light and dark, on wide and narrow screens, without an error on the console,
without a request to anywhere else, and run nothing that a client named. --shots DIR keeps pictures.
Without a Chromium it says so and exits with 77.
"""

import argparse
import base64
import fcntl
import html
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.parse

SKIPPED = 77
TOKEN = "page-test-token-0123456789"
WAIT_S = 60


class Browser:
    """Speaks the DevTools protocol over the pipe of a Chromium of its own."""

    def __init__(self, program: str, profile: str) -> None:
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()

        def pipes() -> None:  # Chromium reads descriptor 3 and writes 4
            os.dup2(to_read, 13)
            os.dup2(to_write, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        self._process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", f"--user-data-dir={profile}",
             "--remote-debugging-pipe", "about:blank"],
            preexec_fn=pipes, close_fds=False, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self._left = b""
        self._next = 0
        self._session = None
        self.events: list[dict] = []

    def _read(self) -> dict:
        while b"\0" not in self._left:
            more = os.read(self._in, 1 << 16)
            if not more:
                raise SystemExit("Chromium has ended")
            self._left += more
        text, _, self._left = self._left.partition(b"\0")
        return json.loads(text)

    def call(self, method: str, **params: object) -> dict:
        self._next += 1
        message = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._next:
                if "error" in reply:
                    raise SystemExit(f"{method}: {reply['error']}")
                return reply["result"]
            if "method" in reply:
                self.events.append(reply)

    def open_page(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def value(self, expression: str) -> object:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise SystemExit(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Checks:
    def __init__(self) -> None:
        self.failed: list[str] = []
        self.passed = 0

    def that(self, what: str, holds: bool, seen: object = "") -> None:
        if holds:
            self.passed += 1
        else:
            self.failed.append(f"{what}: {seen}")


def look(browser: Browser, url: str, width: int, height: int, dark: bool) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=1, mobile=width < 600)
    browser.call("Emulation.setEmulatedMedia", features=[
        {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
    browser.call("Page.navigate", url=url)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if browser.value("document.readyState === 'complete' && typeof $ === 'function' && "
                         "$('state') !== null && $('state').textContent.startsWith('live')"):
            return
        time.sleep(0.2)
    raise SystemExit(f"the page never got live: {browser.value('document.body.innerText')}")


def shoot(browser: Browser, file: pathlib.Path, width: int, last: str) -> None:
    """Keeps the page down to the end of the section `last`."""
    height = browser.value(f"Math.ceil($('{last}').getBoundingClientRect().bottom + scrollY) + 10")
    picture = browser.call("Page.captureScreenshot", format="png",
                           clip={"x": 0, "y": 0, "width": width, "height": height, "scale": 1},
                           captureBeyondViewport=True)
    file.write_bytes(base64.b64decode(picture["data"]))


def shoot_top(browser: Browser, file: pathlib.Path, prefixctl: str, socket: str) -> None:
    """Keeps a picture of `prefixctl top` as a terminal of 118 columns shows it."""
    columns = 118
    ours, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    top = subprocess.Popen([prefixctl, "--socket", socket, "top", "--all-tenants", "--once"],
                           stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    said = b""
    try:
        while more := os.read(ours, 1 << 16):
            said += more
    except OSError:  # as Linux ends a terminal that nobody has open
        pass
    top.wait()
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode()).replace("\r", "").strip("\n")
    page = ("<body style='margin:0;background:#16181d'><pre style='margin:0;padding:14px;display:inline-block;"
            "color:#dcdfe4;font:13px/1.35 DejaVu Sans Mono,monospace'>" + html.escape(text) + "</pre>")
    browser.call("Page.navigate", url="data:text/html;charset=utf-8," + urllib.parse.quote(page))
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and not browser.value(
            "document.readyState === 'complete' && document.querySelector('pre') !== null"):
        time.sleep(0.1)
    size = browser.value("(r => [r.width, r.height])(document.querySelector('pre').getBoundingClientRect())")
    picture = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                           clip={"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1})
    file.write_bytes(base64.b64decode(picture["data"]))


def check_page(browser: Browser, checks: Checks, width: int, dark: bool, attacked: bool) -> None:
    shown = str(browser.value("document.body.innerText"))
    for word in ("Tokens not prefilled again", "supply contract 2026", "legal", "llama-3.2-1b",
                 "Prefill time saved", "p99", "host memory", "retrieved", "not_found",
                 "no-such-model"):
        checks.that(f"the page shows '{word}'", word in shown)
    checks.that("what a client named is shown as text", not attacked or "<img src=x onerror=" in shown)
    checks.that("nothing of it became an element",
                browser.value("document.images.length + document.scripts.length") == 1)
    checks.that("nothing of it ran", browser.value("window.evil === undefined"))
    checks.that("NaN and undefined are nowhere", not any(
        word in shown for word in ("NaN", "undefined", "[object", "Infinity")), shown)
    checks.that("there is a plot", bool(browser.value("document.querySelectorAll('svg path').length")))
    checks.that("the page is no wider than the screen",
                browser.value("document.documentElement.scrollWidth") <= width,
                browser.value("document.documentElement.scrollWidth"))
    background = str(browser.value("getComputedStyle(document.body).backgroundColor"))
    bright = sum(int(part) for part in background[4:-1].split(",")) > 384
    checks.that("the scheme is followed", bright != dark, background)
    count = "$('tiles').innerText"
    before = browser.value(count)
    deadline = time.monotonic() + WAIT_S
    while browser.value(count) == before and time.monotonic() < deadline:
        time.sleep(0.2)
    checks.that("the figures go on", browser.value(count) != before)


def check_events(browser: Browser, checks: Checks, url: str) -> None:
    host = urllib.parse.urlsplit(url).netloc
    requests = [e["params"]["request"]["url"] for e in browser.events
                if e["method"] == "Network.requestWillBeSent"]
    checks.that("requests were seen", len(requests) > 3, requests)
    for asked in requests:
        parts = urllib.parse.urlsplit(asked)
        checks.that("nothing is asked elsewhere", parts.netloc == host or parts.scheme == "data", asked)
    for event in browser.events:
        params = event["params"]
        if event["method"] == "Runtime.exceptionThrown":
            checks.that("no exception", False, params["exceptionDetails"])
        if event["method"] == "Runtime.consoleAPICalled":
            checks.that("nothing on the console", params["type"] not in ("error", "warning"), params)
        if event["method"] == "Log.entryAdded":
            checks.that("no error in the log", params["entry"]["level"] != "error", params["entry"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefixd", required=True)
    parser.add_argument("--feed", required=True, help="page_feed")
    parser.add_argument("--shots", type=pathlib.Path, help="write status-*.png there, of clients that mean no harm")
    parser.add_argument("--prefixctl", help="with --shots, its `top` on a picture, too")
    parser.add_argument("--seconds", type=float, default=12, help="let clients work so long first")
    args = parser.parse_args()
    program = next(filter(None, map(shutil.which, (
        "chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        print("skipped: there is no Chromium (apt-get install chromium)")
        return SKIPPED

    checks = Checks()
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="prefixd-", ignore_cleanup_errors=True) as folder:
        token = pathlib.Path(folder) / "token"
        token.write_text(TOKEN + "\n")
        token.chmod(0o600)
        socket = f"{folder}/s"
        daemon = subprocess.Popen(
            [args.prefixd, "--dir", f"{folder}/store", "--socket", socket, "--http", "127.0.0.1:0",
             "--http-token-file", token, "--host-tier-mib", "64", "--min-free-mib", "0"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        feed = browser = None
        try:
            ready = daemon.stdout.readline()
            url = next(word for word in ready.split() if word.startswith("http://")) + "/"
            feed = subprocess.Popen([args.feed, f"unix:{socket}", *(["glossary"] if args.shots else [])],
                                    stdout=subprocess.PIPE, text=True)
            if feed.stdout.readline() != "feeding\n":
                raise SystemExit("the clients do not work")
            time.sleep(args.seconds)
            browser = Browser(program, f"{folder}/profile")
            browser.open_page()

            # Without a token: totals, the way to say it, and no name.
            look(browser, url, 1120, 900, dark=False)
            shown = str(browser.value("document.body.innerText"))
            checks.that("who has no token is told how", "enter it" in shown)
            checks.that("and sees no name", "legal" not in shown and "contract" not in shown, shown)

            if args.shots and args.prefixctl:
                shoot_top(browser, args.shots / "top.png", args.prefixctl, socket)

            browser.call("Network.setExtraHTTPHeaders", headers={"Authorization": f"Bearer {TOKEN}"})
            for name, width, height, dark in (("light", 1120, 1000, False), ("dark", 1120, 1000, True),
                                              ("narrow", 400, 1000, True)):
                look(browser, url, width, height, dark)
                check_page(browser, checks, width, dark, attacked=not args.shots)
                if args.shots:
                    args.shots.mkdir(parents=True, exist_ok=True)
                    shoot(browser, args.shots / f"status-{name}.png", width,
                          "tierbar" if name == "narrow" else "prefixes-card")
            check_events(browser, checks, url)

            # When the daemon has gone the page says so.
            feed.kill()
            daemon.terminate()
            daemon.wait()
            deadline = time.monotonic() + WAIT_S
            while time.monotonic() < deadline and browser.value("$('trouble').hidden"):
                time.sleep(0.2)
            checks.that("a daemon that has gone is told", "does not answer" in str(
                browser.value("$('trouble').innerText")))
        finally:
            for process in (feed, daemon):
                if process is not None and process.poll() is None:
                    process.kill()
                    process.wait()
            if browser is not None:
                browser.close()
    for line in checks.failed:
        print("FAILED:", line)
    print(f"{checks.passed} checks hold, {len(checks.failed)} do not")
    return 1 if checks.failed or checks.passed < 30 else 0


if __name__ == "__main__":
    sys.exit(main())
