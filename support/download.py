"""Download MNIST or ModelNet from servers that may be slow, broken or hostile.

A file appears only when it is whole and checked; what has arrived of it waits in a .part beside it,
from where the next attempt goes on. Every attempt ends: a server must send SLOWEST bytes a second,
a file has a largest size, and only a megabyte of progress makes up for failures.
"""

import argparse
import contextlib
import hashlib
import http.client
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from support import modelnet
from support.files import Busy, alone
from support.mnist import MNIST, read_bytes
from support.reading import DataError, Progress, Refused, printable, say

SOURCES = {  # address, files under --root, and bytes that none of them exceeds
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        [f"mnist/{name}.gz" for name in MNIST],
        1 << 26,
    ),
    "modelnet": ("https://modelnet.cs.princeton.edu/", ["ModelNet40.zip"], 1 << 32),
    "modelnet10": (
        "https://3dvision.princeton.edu/projects/2014/3DShapeNets/",
        ["ModelNet10.zip"],
        1 << 30,
    ),
}
NETWORK = (urllib.error.URLError, ConnectionError, TimeoutError, http.client.HTTPException)
TIMEOUT, TRIES = 30.0, 5  # seconds to wait for a server; failures before giving up
SLOWEST = 1000  # bytes a second, over each TIMEOUT
PROGRESS = 1 << 20  # new bytes after which failures are forgotten


def fetch(url, path, check, largest):
    """Download to `path`, which appears only when whole and `check(file)` raises no DataError."""
    part, failures, reached = path.with_name(path.name + ".part"), 0, 0
    while failures < TRIES:
        if failures:
            time.sleep(min(2 ** (failures - 1), 30))
        try:
            _transfer(url, part, largest)
            check(part)
            return os.replace(part, path)
        except Refused:
            part.unlink(missing_ok=True)
            raise
        except DataError as e:
            part.unlink(missing_ok=True)
            trouble = e
        except NETWORK as e:
            code = getattr(e, "code", None)
            trouble = f"the server answers {code}"
            if code is None:
                trouble = printable(f"{type(e).__name__}, {e}", 200)
            if code and 400 <= code < 500 and code not in (408, 429):
                raise DataError(f"{url}: {trouble}; name another address with --url") from None
        except OSError as e:
            raise DataError(f"{part}: {e.strerror}; once mended, run it again") from None
        except ValueError as e:  # of an address, perhaps one that the server sent us to
            raise DataError(f"{url}: {printable(e, 200)}; name another with --url") from None
        size, failures = part.stat().st_size if part.exists() else 0, failures + 1
        if size >= reached + PROGRESS:
            reached, failures = size, 0
    raise DataError(f"{url}: {trouble}, {TRIES} times; run the same command again to go on")


def _transfer(url, part, largest):
    """Append what is missing to `part`, or write it anew if the server cannot resume."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with Watch() as watch:
        try:
            reply = watch.opener().open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as e:
            if e.code != 416:
                raise
            return  # nothing comes after `have`: the file is whole, or not this one; see the check
        with reply:
            if not (reply.headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
                have = 0
            total = None if reply.length is None else have + reply.length
            if (total or 0) > largest:
                raise Refused(f"{url}: {total} bytes are more than the {largest} it may have")
            bar = Progress(url, total, have)
            with open(part, "ab" if have else "wb") as f:
                while piece := watch.read(reply):
                    f.write(piece)
                    f.flush()  # so that even a killed download can be taken up
                    have += len(piece)
                    bar.show(have)
                    if have > largest:
                        raise Refused(f"{url}: more than the {largest} bytes it may have")
    if total is not None and have < total:
        raise ConnectionError(f"connection closed at byte {have} of {total}")


class Watch:
    """Shuts the connections of a transfer when too few bytes come: also in headers and chunks.

    A timeout of a socket begins anew with every byte, so a server could hold us for ever.
    """

    def __init__(self):
        self.sockets, self.bytes, self.slow, self.over = [], 0, False, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, kind, error, trace):
        self.over.set()
        self.thread.join()
        for s in self.sockets:
            s.close()
        slow = self.slow or kind is TimeoutError  # the socket's own may come first
        if slow and (kind is None or issubclass(kind, NETWORK)):
            raise TimeoutError(f"fewer than {SLOWEST} bytes a second") from None

    def _look(self):
        before = 0
        while not self.over.wait(TIMEOUT):
            if self.bytes - before < SLOWEST * TIMEOUT:
                self.slow = True
                for s in self.sockets:
                    with contextlib.suppress(OSError):  # it is closed already
                        s.shutdown(socket.SHUT_RDWR)
            before = self.bytes

    def read(self, reply):
        """Some bytes of the body, none at its end."""
        try:
            piece = reply.read1(1 << 16)
        except TimeoutError:
            raise
        except OSError as e:
            raise ConnectionError(str(e)) from None
        self.bytes += len(piece)
        return piece

    def opener(self):
        """For http and https only, with redirects and proxies; its connections are watched."""
        watch = self

        class Plain(http.client.HTTPConnection):
            def connect(self):
                super().connect()
                watch.sockets.append(self.sock.dup())  # to shut it shuts ours, TLS or not

        class Secure(http.client.HTTPSConnection, Plain):
            pass

        class Http(urllib.request.HTTPHandler):
            def http_open(self, request):
                return self.do_open(Plain, request)

        class Https(urllib.request.HTTPSHandler):
            def https_open(self, request):
                return self.do_open(Secure, request)

        class Redirect(urllib.request.HTTPRedirectHandler):
            def redirect_request(self, request, reply, *more):
                reply.close()  # else urllib reads its body, however long
                return super().redirect_request(request, reply, *more)

        opener = urllib.request.OpenerDirector()
        errors = (urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPErrorProcessor)
        others = (urllib.request.ProxyHandler, urllib.request.UnknownHandler)
        for handler in (Http, Https, Redirect, *errors, *others):
            opener.add_handler(handler())
        return opener


def check_mnist(path):
    """Raise a DataError unless a file has the published contents, however compressed."""
    want = MNIST[path.name.removesuffix(".part").removesuffix(".gz")]
    if (got := hashlib.md5(read_bytes(path)).hexdigest()) != want:
        raise DataError(f"{path}: md5 of the contents is {got}, not {want}")


def download(args):
    """Fetch what is missing or damaged of `args.data`."""
    base, files, largest = SOURCES[args.data]
    base, check = args.url or base, check_mnist if args.data == "mnist" else modelnet.check_zip
    paths = [Path(args.root) / file for file in files]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    with alone(paths[0].parent):
        for path in paths:
            try:
                whole = path.exists() and check(path) is None
            except DataError as e:
                say(f"{e}; fetching it again")
                whole = False
            if not whole:
                url = f"{base.rstrip('/')}/{path.name}"
                say(f"{url} → {path}")
                fetch(url, path, check, largest)
            say(f"{path} is there and whole")
            if args.unpack and not (folder := path.with_suffix("")).exists():
                modelnet.unpack(path, folder)
                say(f"{folder} is unpacked")


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description="Download data: MNIST (12 MB), ModelNet40 (2 GB) or ModelNet10 (0.5 GB). "
        "Run it again to go on with what is missing.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("data", choices=SOURCES, help="what to download")
    parser.add_argument("--root", default="data", help="folder to download into")
    parser.add_argument("--url", help="address of the folder with the files; None: the publisher's")
    unpack = "unpack ModelNet's zip, though it can be read as it is"
    parser.add_argument("--unpack", action="store_true", help=unpack)
    args = parser.parse_args(argv)
    if args.unpack and args.data == "mnist":
        parser.error("--unpack is for ModelNet: MNIST is read as it comes")
    return args


def main(argv=None):
    """Exit code of the command line: 0 done, 2 wrong usage or data, 130 interrupted."""
    args = parse(argv)
    try:
        download(args)
    except (ValueError, OSError, Busy) as e:
        say(e)
        return 2
    except KeyboardInterrupt:
        say("interrupted; run the same command again to go on")
        return 130
    return 0
