"""support/download.py: what arrives, whatever the server does."""

import gzip
import hashlib
import io
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import attack_servers
import numpy as np
import pytest
from samples import REPOSITORY, idx, make_mnist, make_modelnet, one_line, same, zip_tree

import data
from support import download, files, modelnet
from support.reading import DataError


class Handler(BaseHTTPRequestHandler):
    """Serves server.files; each request takes its fault from the front of server.faults."""

    def do_GET(self):
        server = self.server
        fault = server.faults.pop(0) if server.faults else None
        body = server.files.get(self.path.lstrip("/"))
        server.seen.append((self.path.lstrip("/"), self.headers.get("Range")))
        if body is None or fault == "busy":
            return self.send_error(404 if body is None else 503)
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        if start >= len(body) and start:
            return self.send_error(416)
        start = 0 if fault == "restart" else start
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        piece = body[start:]
        if fault == "corrupt":
            piece = piece[:-9] + bytes(9)
        if fault in ("truncate", "stall"):
            piece = piece[: len(piece) // 2]
        self.wfile.write(piece)
        self.wfile.flush()
        if fault == "stall":
            server.release.wait(10)
        return None

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.3)
    monkeypatch.setattr(download, "TRIES", 2)
    monkeypatch.setattr(download, "PROGRESS", 1000)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.files, server.faults, server.seen, server.release = {}, [], [], threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def mnist_server(server, tmp_path, monkeypatch):
    made = make_mnist(tmp_path / "origin")
    server.files = {f"{name}.gz": path.read_bytes() for name, path in made.items()}
    sums = {n: hashlib.md5(gzip.decompress(p.read_bytes())).hexdigest() for n, p in made.items()}
    monkeypatch.setattr(download, "MNIST", sums)
    return server


def run(server, root, *more):
    return download.main([*more, "--root", str(root), "--url", server.url])


def holds(path, body):
    return path.read_bytes() == body


def no_parts(root):
    return not list(root.rglob("*.part"))


def test_mnist_is_fetched_and_a_second_run_fetches_nothing(mnist_server, tmp_path, capsys):
    root = tmp_path / "data"
    assert run(mnist_server, root, "mnist") == 0
    assert len(mnist_server.seen) == 4
    assert same(data.load("mnist", root), data.load("mnist", tmp_path / "origin"))
    assert run(mnist_server, root, "mnist") == 0
    assert len(mnist_server.seen) == 4
    assert no_parts(root)
    assert "there and whole" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("faults", "requests"),
    [
        (["truncate"], [None, "half"]),
        (["stall"], [None, "half"]),
        (["truncate", "restart"], [None, "half"]),
        (["corrupt"], [None, None]),
        (["truncate", "corrupt"], [None, "half", None]),
        (["busy"], [None, None]),
        (["truncate", "truncate", "truncate", "stall"], 5),
    ],
)
def test_a_download_survives(mnist_server, tmp_path, monkeypatch, faults, requests):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    name = "train-images-idx3-ubyte.gz"
    mnist_server.faults = list(faults)
    assert run(mnist_server, tmp_path / "data", "mnist") == 0
    path = tmp_path / "data" / "mnist" / name
    assert holds(path, mnist_server.files[name])
    assert no_parts(tmp_path)
    ranges = [r for n, r in mnist_server.seen if n == name]
    if isinstance(requests, int):
        assert len(ranges) == requests
    else:
        half = f"bytes={len(mnist_server.files[name]) // 2}-"
        assert ranges == [half if r == "half" else r for r in requests]


def test_a_download_that_stays_corrupt_leaves_nothing_and_exits_2(
    mnist_server, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    mnist_server.faults = ["corrupt"] * 9
    assert run(mnist_server, tmp_path / "data", "mnist") == 2
    assert list((tmp_path / "data" / "mnist").iterdir()) == []
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "train-images-idx3-ubyte.gz" in error
    assert "gzip" in error


def test_wrong_contents_in_a_valid_gzip_are_caught_by_their_checksum(
    mnist_server, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    mnist_server.files["train-labels-idx1-ubyte.gz"] = gzip.compress(idx(np.arange(40) % 9))
    assert run(mnist_server, tmp_path / "data", "mnist") == 2
    assert "md5" in capsys.readouterr().err
    assert sorted(p.name for p in (tmp_path / "data" / "mnist").iterdir()) == [
        "train-images-idx3-ubyte.gz"
    ]


def test_what_has_arrived_is_taken_up_by_the_next_run(mnist_server, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    name = "train-images-idx3-ubyte.gz"
    mnist_server.faults = ["truncate", "busy", "busy"]
    assert run(mnist_server, tmp_path / "data", "mnist") == 2
    part = tmp_path / "data" / "mnist" / f"{name}.part"
    half = len(mnist_server.files[name]) // 2
    assert part.stat().st_size == half
    assert not part.with_suffix("").exists()
    assert run(mnist_server, tmp_path / "data", "mnist") == 0
    assert mnist_server.seen[3] == (name, f"bytes={half}-")


@pytest.mark.parametrize("left", ["all", "too much", "something else"])
def test_a_part_that_is_whole_or_too_long_or_wrong_does_no_harm(
    mnist_server, tmp_path, monkeypatch, left
):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    name = "train-images-idx3-ubyte.gz"
    body = mnist_server.files[name]
    part = tmp_path / "data" / "mnist" / f"{name}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes({"all": body, "too much": body + body, "something else": b"<html>" * 9}[left])
    assert run(mnist_server, tmp_path / "data", "mnist") == 0
    assert holds(part.with_suffix(""), body)


def test_a_damaged_file_under_the_final_name_is_replaced(mnist_server, tmp_path):
    assert run(mnist_server, tmp_path / "data", "mnist") == 0
    path = tmp_path / "data" / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-4])
    assert run(mnist_server, tmp_path / "data", "mnist") == 0
    assert holds(path, mnist_server.files[path.name])
    assert len(mnist_server.seen) == 5


def test_a_missing_file_is_not_asked_for_twice(mnist_server, tmp_path, capsys):
    mnist_server.files.clear()
    assert run(mnist_server, tmp_path / "data", "mnist") == 2
    assert len(mnist_server.seen) == 1
    assert "404" in capsys.readouterr().err


def test_no_server_at_all_exits_2_with_the_address(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    assert download.main(["mnist", "--root", str(tmp_path), "--url", url]) == 2
    assert url in capsys.readouterr().err


def test_an_address_that_is_none_exits_2(tmp_path, capsys):
    assert download.main(["mnist", "--root", str(tmp_path), "--url", "somewhere"]) == 2
    assert "somewhere" in capsys.readouterr().err.splitlines()[-1]


def test_a_second_download_into_the_same_folder_is_refused_while_one_runs(
    mnist_server, tmp_path, capsys
):
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    with files.alone(tmp_path / "data" / "mnist"):
        assert run(mnist_server, tmp_path / "data", "mnist") == 2
    assert "another process works there" in capsys.readouterr().err
    assert not mnist_server.seen
    assert run(mnist_server, tmp_path / "data", "mnist") == 0


def test_a_full_disk_while_downloading_is_one_clear_error(
    mnist_server, tmp_path, monkeypatch, capsys
):
    def full(url, part, largest):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "_transfer", full)
    assert run(mnist_server, tmp_path / "data", "mnist") == 2
    assert "No space left" in capsys.readouterr().err.splitlines()[-1]
    assert download.main(["mnist", "--root", "/dev/null/x", "--url", mnist_server.url]) == 2


def test_modelnet_is_fetched_and_unpacked_on_request(server, tmp_path):
    origin, root = make_modelnet(tmp_path / "origin"), tmp_path / "data"
    server.files["ModelNet40.zip"] = zip_tree(origin).read_bytes()
    assert run(server, root, "modelnet") == 0
    assert [p.name for p in root.iterdir()] == ["ModelNet40.zip"]
    assert run(server, root, "modelnet", "--unpack") == 0
    assert run(server, root, "modelnet", "--unpack") == 0
    assert sorted(p.name for p in root.iterdir()) == ["ModelNet40", "ModelNet40.zip"]
    assert len(server.seen) == 1
    mesh = "ModelNet40/table/test/table_0008.off"
    assert holds((root / mesh), (origin / mesh).read_bytes())


def test_an_evil_zip_is_not_kept(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    evil = io.BytesIO()
    with zipfile.ZipFile(evil, "w") as z:
        z.writestr("../evil", b"")
    server.files["ModelNet10.zip"] = evil.getvalue()
    assert run(server, tmp_path / "data", "modelnet10", "--unpack") == 2
    assert "'../evil'" in capsys.readouterr().err
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_unpacking_onto_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    path = zip_tree(make_modelnet(tmp_path))
    (tmp_path / "ModelNet40").rename(tmp_path / "elsewhere")

    def full(self, folder):
        (folder / "ModelNet40").mkdir(parents=True)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "extractall", full)
    with pytest.raises(DataError) as error:
        modelnet.unpack(path, tmp_path / "ModelNet40")
    one_line(error, path, "No space left")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ModelNet40.zip", "elsewhere"]


def test_ctrl_c_exits_130_and_the_next_run_goes_on(server, tmp_path):
    server.files["ModelNet40.zip"] = body = zip_tree(
        make_modelnet(tmp_path / "origin")
    ).read_bytes()
    server.faults = ["stall"]
    command = [sys.executable, "data.py", "modelnet", "--root", str(tmp_path), "--url", server.url]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # if ignored, as behind &
    )
    part = tmp_path / "ModelNet40.zip.part"
    while not (part.exists() and part.stat().st_size == len(body) // 2):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert "Traceback" not in error
    assert "again" in error.splitlines()[-1]
    assert not (tmp_path / "ModelNet40.zip").exists()
    assert run(server, tmp_path, "modelnet") == 0
    assert holds((tmp_path / "ModelNet40.zip"), body)
    assert server.seen[-1] == ("ModelNet40.zip", f"bytes={len(body) // 2}-")


def test_help_names_every_option_with_its_default_and_wrong_usage_exits_2(capsys):
    with pytest.raises(SystemExit) as done:
        download.parse(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    for part in ("--root", "(default: data)", "--url", "--unpack"):
        assert part in text
    for wrong in (["imagenet"], [], ["mnist", "--unpack"]):
        with pytest.raises(SystemExit) as done:
            download.parse(wrong)
        assert done.value.code == 2


# ------------------------------------------------------------------------------- hostile servers
@pytest.mark.parametrize("name", attack_servers.SERVERS)
def test_a_download_ends_in_one_printable_line_if_the_server(name):
    result = attack_servers.attack(name, "mnist" if name == "sends a bomb" else "modelnet10")
    assert attack_servers.survived(result), result
    if name in ("sends a bomb", "has an endless body", "sends a zip that fills the disk"):
        assert result["requests"] == 1  # not read a second time
    if "drip" in name or "never" in name or "for ever" in name:
        assert "fewer than 1000 bytes a second" in result["line"]


@pytest.mark.parametrize("name", [name for name in attack_servers.SERVERS if "never" in name])
def test_silence_is_said_alike_if_the_socket_notices_it_first(name, monkeypatch):
    monkeypatch.setattr(download.Watch, "_look", lambda watch: watch.over.wait())
    assert "fewer than 1000 bytes a second" in attack_servers.attack(name)["line"]


def test_a_length_that_is_no_number_does_not_keep_a_good_file_out(tmp_path, monkeypatch):
    body = zip_tree(make_modelnet(tmp_path / "origin")).read_bytes()
    head = attack_servers.reply(b"", b"Content-Length: abc", length=False)
    monkeypatch.setitem(attack_servers.SERVERS, "good", attack_servers.says(head, body))
    result = attack_servers.attack("good")
    assert (result["code"], result["whole"]) == (0, ["ModelNet10.zip"])


def test_a_zip_is_limited_in_all_and_not_only_by_member(tmp_path):
    path = tmp_path / "ModelNet40.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for k in range(20):
            z.writestr(f"ModelNet40/chair/train/{k}.off", bytes(10**6))
    for act in (
        lambda: modelnet.unpack(path, tmp_path / "ModelNet40"),
        lambda: modelnet.open_zip(path),
    ):
        with pytest.raises(DataError) as error:
            act()
        one_line(error, path, "refused", "20000000 bytes")
    assert [p.name for p in tmp_path.iterdir()] == ["ModelNet40.zip"]
