"""Thirty servers that a download must survive: python tests/attack_servers.py prints what they got.

Each is a function (send, wait, number) that answers request `number`, counted from 0: send(bytes)
sends them, wait(seconds) sleeps unless all is over. tests/test_download.py runs all of them, too.
"""

import contextlib
import gzip
import io
import itertools
import socketserver
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support import download

LARGEST, PROGRESS, TIMEOUT, TRIES = 1 << 20, 1 << 16, 0.2, 2
EVIL = b"\x1b[2J\x1b]0;evil\x07\r"


def zipped(*members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in members:
            archive.writestr(name, body)
    return file.getvalue()


def reply(body=b"", *headers, status=b"200 OK", length=True):
    lines = [b"HTTP/1.1 " + status, *headers]
    if length:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body


def whole(body):
    return lambda send, wait, number: send(reply(body))


def says(*parts):
    """A server that sends these bytes and closes."""
    return lambda send, wait, number: send(b"".join(parts))


def endless(first, piece, seconds=0.0):
    """A server that sends `first`, then `piece` again and again."""

    def serve(send, wait, number):
        send(first)
        while True:
            send(piece)
            if seconds:
                wait(seconds)

    return serve


def alternate(send, wait, number):
    """More and less of a file by turns, from its beginning: progress that leads nowhere."""
    send(
        reply(length=False)[:-2] + b"Content-Length: 900000\r\n\r\n" + bytes((3 - number % 2) << 17)
    )


def one_byte(send, wait, number):
    """The next byte of a file, whatever is asked for."""
    part = b"Content-Range: bytes %d-899999/900000" % number
    head = (part, b"Content-Length: %d" % (900000 - number))
    send(reply(b"", *head, status=b"206 Partial Content", length=False) + b"x")


HEAD, CHUNKED = reply(length=False), reply(b"", b"Transfer-Encoding: chunked", length=False)
LONG = reply(b"", b"Content-Length: 900000", length=False)
BOMB = gzip.compress(bytes(200 << 20), 9)
SERVERS = {
    "closes at once": says(b""),
    "never answers": lambda send, wait, number: wait(60),
    "answers one byte": says(b"H"),
    "sends one byte of many": says(LONG, b"x"),
    "gives one byte at a time": one_byte,
    "sends nothing of many": says(LONG),
    "drips its status": endless(b"HTTP/1.1 2", b"0", 0.03),
    "drips headers": endless(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n", 0.03),
    "has endless headers": endless(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
    "has an endless header": endless(b"HTTP/1.1 200 OK\r\nA: ", b"b" * 1000),
    "continues for ever": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "drips its body": endless(LONG, b"x", 0.03),
    "has an endless body": endless(HEAD, b"x" * 9999),
    "has endless chunks": endless(CHUNKED, b"1f4\r\n" + b"x" * 500 + b"\r\n"),
    "drips the length of a chunk": endless(CHUNKED, b"0", 0.03),
    "has chunks of no length": says(CHUNKED, b"zz\r\nxxxxx\r\n"),
    "has an endless trailer": endless(CHUNKED + b"0\r\n", b"A: b\r\n"),
    "has a length of abc": says(reply(EVIL, b"Content-Length: abc", length=False)),
    "has a negative length": says(reply(EVIL, b"Content-Length: -5", length=False)),
    "promises 10^30 bytes": says(reply(EVIL, b"Content-Length: 1" + b"0" * 30, length=False)),
    "goes round": says(reply(b"", b"Location: /again", status=b"302 Found")),
    "sends us to a file": says(reply(b"", b"Location: file:///etc/passwd", status=b"302 Found")),
    "sends us to ftp": says(reply(b"", b"Location: ftp://127.0.0.1/x", status=b"301 Moved")),
    "sends us nowhere": says(reply(b"", b"Location: http://[::1", status=b"302 Found")),
    "has an endless redirect": endless(
        reply(b"", b"Location: /again", status=b"302 Found", length=False), b"x" * 9999
    ),
    "writes to the terminal in an error": says(reply(b"", status=b"500 " + EVIL[:-1])),
    "writes to the terminal in a refusal": says(reply(b"", status=b"404 " + EVIL[:-1] * 999)),
    "writes to the terminal in a status": says(EVIL * 3000, b"\r\n"),
    "says that all is there": says(reply(b"", status=b"416 Range")),
    "resumes elsewhere": says(
        reply(b"x" * 99999, b"Content-Range: bytes 7-99/100", status=b"206 Partial Content")
    ),
    "gives more and less": alternate,
    "is a page": whole(b"<html>" + EVIL),
    "sends a zip that leaves its folder": whole(zipped(("../evil" + "\x1b[2J", b"x"))),
    "sends a zip that fills the disk": whole(
        zipped(*((f"ModelNet10/chair/train/{k}.off", bytes(10 << 20)) for k in range(20)))
    ),
    "sends a bomb": whole(BOMB),
}


class Server(socketserver.ThreadingTCPServer):
    """Runs one of SERVERS, and counts requests."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, serve):
        super().__init__(("127.0.0.1", 0), None)
        self.serve, self.requests, self.over = serve, itertools.count(), threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def finish_request(self, request, address):
        number = next(self.requests)
        with contextlib.suppress(OSError):
            request.recv(1 << 16)
            self.serve(request.sendall, self._wait, number)

    def _wait(self, seconds):
        if self.over.wait(seconds):
            raise OSError

    def close(self):
        self.over.set()
        self.shutdown()
        self.server_close()


def attack(name, data="modelnet10"):
    """What a download from a hostile server leads to: exit code, words, requests, bytes."""
    server, said, started = Server(SERVERS[name]), io.StringIO(), time.monotonic()
    sources = {k: (*v[:2], LARGEST) for k, v in download.SOURCES.items()}
    small = {"SOURCES": sources, "TIMEOUT": TIMEOUT, "TRIES": TRIES, "PROGRESS": PROGRESS}
    with (
        tempfile.TemporaryDirectory() as root,
        mock.patch.multiple(download, **small),
        mock.patch.object(download.time, "sleep"),
        contextlib.redirect_stderr(said),
    ):
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        code = download.main([data, "--root", root, "--url", url])
        left = [path for path in Path(root).rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in left)
        whole = [path.name for path in left if path.suffix != ".part"]
    server.close()
    lines = said.getvalue().removesuffix("\n").split("\n")
    return {
        "code": code,
        "line": lines[-1],
        "printable": all(line.isprintable() for line in lines),
        "requests": next(server.requests),
        "bytes": size,
        "whole": whole,
        "seconds": time.monotonic() - started,
    }


def survived(result):
    """One printable line, nothing that looks whole, and an end to bytes, requests and time."""
    few = result["requests"] < 40 and result["bytes"] <= LARGEST + (1 << 16)
    line = result["printable"] and len(result["line"]) < 1000
    return result["code"] == 2 and line and few and not result["whole"]


def main():
    lost = 0
    for name in SERVERS:
        result = attack(name, "mnist" if name == "sends a bomb" else "modelnet10")
        lost += not survived(result)
        fate = "survived" if survived(result) else "LOST"
        print(f"{fate}  {name}: {result['seconds']:.1f} s, {result['requests']} requests")
        print(f"          {result['line'][:150]}")
    print(f"{len(SERVERS)} servers, {len(SERVERS) - lost} survived")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
