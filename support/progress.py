"""What a person sees while waiting: lines on stderr, and one every half minute of anything long."""

import contextlib
import os
import sys
import threading
import time

SECONDS = 30  # without a line, after which `pulse` says what is going on


class Now:
    """What this process is doing, since when, and when it last said something."""

    what, since, said = None, 0.0, 0.0


def say(text, end="\n"):
    """A line on stderr, of the first process only; on a terminal it replaces a progress line."""
    Now.said = time.monotonic()
    if os.environ.get("RANK", "0") == "0":
        clear = "\033[K" if sys.stderr.isatty() else ""
        print(f"{text}{clear}", end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def doing(what, since=None):
    """Name what goes on in this block, for `pulse`."""
    before = Now.what, Now.since
    Now.what, Now.since = what, time.monotonic() if since is None else since
    try:
        yield
    finally:
        Now.what, Now.since = before


def watch(what, items, total=None):
    """The items, with their number done and the time left for `pulse`."""
    total, began = len(items) if total is None else total, time.monotonic()
    for done, item in enumerate(items):
        left = (time.monotonic() - began) / done * (total - done) if done else 0.0
        text = f"{what}, {done} of {total} done" + (f", {duration(left)} left" if done else "")
        with doing(text, began):
            yield item


def overdue(now):
    """The line to say at this time, or None: something has taken long, and nobody has said so."""
    if Now.what is None or now - max(Now.said, Now.since) < SECONDS:
        return None
    return f"{Now.what}; {duration(now - Now.since)} so far"


@contextlib.contextmanager
def pulse():
    """Say what takes so long, from a thread of its own, while this block runs."""
    done = threading.Event()

    def beat():
        while not done.wait(1.0):
            if line := overdue(time.monotonic()):
                say(line)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def duration(seconds):
    """Seconds as a person says them."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172800 else f"{seconds / 86400:.0f} days"
