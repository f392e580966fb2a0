"""How fast the page of sets opens and turns, in headless Chromium.

python benchmarks/viewer.py    prints the table and writes it into benchmarks/RESULTS.md

20 clouds of 4,096 points, all in sight. To open: from the start of navigation to the first frame
that is drawn. To turn: frames of the browser in which all clouds were drawn anew, one move of the
pointer for each.
"""

import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from report import machine, table, write_section

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import browser

from support import viewer

TURN = """
const canvas = document.querySelector("canvas"), frames = arguments[0], plain = draw;
const frame = () => new Promise(requestAnimationFrame);
const move = (type, x) =>
  canvas.dispatchEvent(new PointerEvent(type, { pointerId: 1, clientX: x }));
let draws = 0, now;
draw = (...cell) => { draws++; plain(...cell); };
canvas.setPointerCapture = () => {}; // there is no real pointer
move("pointerdown", 0);
const begun = await frame();
for (let k = 1; k <= frames; k++) { move("pointermove", 3 * k); now = await frame(); }
await frame();
return [1000 * frames / (now - begun), draws];"""
OPENED = "return performance.getEntriesByName('drawn')[0].startTime / 1000"


def measure(window, path, clouds, frames=150):
    """Seconds to open, and frames per second while turning."""
    window.open(path)
    opened = window.run(f"await new Promise(requestAnimationFrame); {OPENED}")
    rate, draws = window.run(TURN, frames)
    if draws != frames * clouds:
        raise RuntimeError(f"{draws} clouds were drawn in {frames} frames: not {clouds} in each")
    return opened, rate


def main(repeats=5):
    clouds = np.random.default_rng(0).standard_normal((20, 4096, 3))
    rows = []
    with tempfile.TemporaryDirectory() as folder, browser.chromium() as window:
        path = Path(folder) / "view.html"
        viewer.write(path, clouds, title="20 clouds of 4,096 points")
        for width, height, scale in ((1280, 900, 1), (1920, 1200, 1), (1280, 900, 2)):
            window.resize(width, height, scale)
            found = [measure(window, path, len(clouds)) for _ in range(repeats)]
            opened, rate = (statistics.median(values) for values in zip(*found))
            rows.append([f"{width} × {height}, {scale}×", f"{opened:.2f}", f"{rate:.0f}"])
        size = f"{path.stat().st_size / 1e6:.2f} MB"
    head = ["window, pixel ratio", "opens, s", "turning, frames per second"]
    text = f"## The page of sets\n\n20 clouds of 4,096 points ({size}), headless Chromium, no GPU. "
    text += f"{machine()}\n\n{table(head, rows)}"
    print(text)
    write_section("viewer", text)


if __name__ == "__main__":
    main()
