"""What readers of files share: errors of one line, progress, numbers in text, arrays in .npz."""

import contextlib
import hashlib
import math
import os
import sys
import time
import zipfile

import numpy as np


def printable(text, most=2000):
    """One line of printable characters, whatever a file or a server says; a long one is cut."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


class DataError(ValueError):
    """Data that is missing or wrong: one line naming the place, the fault and the way out."""

    def __init__(self, text):
        super().__init__(printable(text))


class Refused(DataError):
    """Data that would fill the disk or leave its folder: to fetch it again would not help."""


def say(text, end="\n"):
    """A line on stderr; on a terminal it takes the place of one that ended with "\\r"."""
    clear = "\033[K" if sys.stderr.isatty() else ""
    print(f"data: {printable(text)}{clear}", end=end, file=sys.stderr, flush=True)


class Progress:
    """A line with the share done and the time left: in place on a terminal, else every 10 s."""

    def __init__(self, label, total, done=0):
        self.label, self.total, self.first = label, total, done
        self.started = self.shown = time.monotonic()

    def show(self, done):
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if self.total and now - self.shown > (0.5 if terminal else 10):
            self.shown = now
            left = (now - self.started) * (self.total - done) / max(done - self.first, 1)
            text = f"{self.label}: {done / self.total:.0%}, {left:.0f} s left"
            say(text, end="\r" if terminal and done < self.total else "\n")


def fingerprint(array):
    """63 bits, an int64, that tell the contents of two arrays apart."""
    return int.from_bytes(hashlib.blake2b(array.tobytes(), digest_size=8).digest(), "little") >> 1


# ------------------------------------------------------------------------------- numbers in text
TENS = np.array([float(10**k) for k in range(23)])  # all that float64 holds exactly


def token_ends(text):
    """Offsets just past each blank-separated token of `text`, which ends with a blank."""
    gap = np.frombuffer(text, np.uint8) <= 32
    return np.flatnonzero(gap[1:] & ~gap[:-1]) + 1


def read_numbers(text, ends=None):
    """Every number in `text` (blank-separated, and a blank at the end), as float64.

    All digits of a number as one integer, divided by the power of ten that its dot says: the
    correctly rounded value up to 15 digits, several times faster than strtod. Exponents, NaN and
    longer numbers go through numpy's own parser; what that cannot read is a ValueError.
    """
    ends = token_ends(text) if ends is None else ends
    last = b"".join(text[-64:].split()[-1:])
    if last in (b".", b"+", b"-", b"+.", b"-."):  # at the end, numpy takes these for 0
        raise ValueError(f"unmatched data: {last.decode()}")
    if b".-" in text or b".+" in text:
        raise ValueError("unmatched data: a sign after a dot")
    dots = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("."))
    token = np.searchsorted(ends, dots)
    with contextlib.suppress(ValueError):
        digits = np.fromstring(text.replace(b".", b""), np.int64, sep=" ")
        places = np.zeros(len(ends), np.int64)
        places[token] = ends[token] - dots - 1
        one_each = len(digits) == len(ends) and (np.diff(token) > 0).all()
        exact = digits.max(initial=0) < 1e15 and digits.min(initial=0) > -1e15
        if one_each and exact and places.max(initial=0) < len(TENS):
            return digits / TENS[places]
    numbers = np.fromstring(text, sep=" ")
    if len(numbers) != len(ends):
        raise ValueError("two numbers without a blank between them")
    return numbers


def read_table(text, width):
    """The numbers in `text`, as rows of `width` of them, each in a line of its own."""
    ends, lines = token_ends(text), np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
    in_line = np.diff(np.searchsorted(ends, lines, "right"), prepend=0)
    if not np.isin(in_line, (0, width)).all():
        raise ValueError(f"a line has not {width} numbers")
    return read_numbers(text, ends).reshape(-1, width)


def unix_text(data):
    """Text of a file without its byte-order mark, and with \\n at the end of every line."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data


def bad_line(text, first=1, columns=None):
    """What is wrong with the first line that is not of finite numbers, `columns` if given."""
    for number, line in enumerate(text.split(b"\n"), first):
        tokens = line.split()
        try:
            fine = all(math.isfinite(float(t)) for t in tokens)
        except ValueError:
            fine = False
        if not fine or (columns and tokens and len(tokens) != columns):
            return f"line {number}: {line.strip()!r} is not {columns or 'all'} numbers"
    return f"line {first}: no numbers in it"


# ------------------------------------------------------------------------------- arrays in files
def check_room(size, name):
    """An error, before the memory is full, if an array of this size is more than it holds."""
    if hasattr(os, "sysconf"):  # not on Windows
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if 2 * size > have:
            need, have = (f"{n / 2**30:.1f} GiB" for n in (size, have))
            raise DataError(
                f"{name}: takes {need} of memory, and there are {have}: give it in parts"
            )


def npy_header(file, size, name):
    """Shape and dtype of a .npy file, whose `size` in bytes must be what its header promises."""
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0}
        read[2, 0] = np.lib.format.read_array_header_2_0
        shape, _, dtype = read[version](file)
    except Exception as e:  # whatever a damaged header leads to
        raise DataError(f"{name}: not a .npy array ({e})") from None
    if dtype.hasobject:
        raise DataError(f"{name}: holds Python objects, which are never unpickled: save numbers")
    if (want := file.tell() + math.prod(shape) * dtype.itemsize) != size:
        fault = f"its header promises {dtype}{shape}, {want} bytes, but it has {size}"
        raise DataError(f"{name}: {fault}: it is damaged or cut")
    return shape, dtype


def npz_headers(path):
    """For each array of an .npz file its shape, dtype and how many times its file expands."""
    headers = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                with archive.open(info) as file:
                    header = npy_header(file, info.file_size, f"{path}, array {name!r}")
                headers[name] = (*header, info.file_size / max(info.compress_size, 1))
    except DataError:
        raise
    except Exception as e:
        raise DataError(f"{path}: not a whole .npz file ({e})") from None
    return headers


def read_npz(path, *names):
    """The arrays of an .npz file, nothing unpickled, once its headers say that there is room."""
    headers = npz_headers(path)
    wanted = [name for name in headers if not names or name in names]
    total = sum(math.prod(headers[n][0]) * headers[n][1].itemsize for n in wanted)
    check_room(total, path)
    try:
        with np.load(path, allow_pickle=False) as f:
            return {name: f[name] for name in wanted}
    except Exception as e:
        raise DataError(f"{path}: damaged ({e})") from None
