"""Files that appear whole or not at all, and folders that one process has to itself."""

import contextlib
import io
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None


def write_whole(path, save):
    """Let save(file) make the contents of `path`, which then change at once; a failure leaves none.

    The contents are made in memory first: a writer that hides why a disk refused, as torch.save
    does, never meets the disk.
    """
    path, contents = Path(path), io.BytesIO()
    save(contents)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as f:
            f.write(contents.getbuffer())
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except BaseException as e:  # also Ctrl-C: a part that stays would keep a full disk full
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(e, OSError) and e.filename is None:
            e.filename = str(path)  # a full disk does not say which file was too much for it
        raise


class Busy(RuntimeError):
    """Another process has the folder."""


@contextlib.contextmanager
def alone(folder):
    """Have `folder` to this process, or raise Busy; where the system has no locks, do nothing.

    The lock is on the folder itself, so there is no file that one process could remove while
    another holds it, and a killed process leaves nothing behind.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"{folder}: another process works there") from None
        yield
    finally:
        os.close(handle)
