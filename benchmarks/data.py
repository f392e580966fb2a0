"""How long the data takes: drawing sets, filling batches, reading meshes; and what that is beside.

python benchmarks/data.py [--root data]    prints the table and writes it into benchmarks/RESULTS.md

One thread. MNIST is read from --root if it is there (else images as dense as its own). The rival
reads OFF line by line in Python and then samples with our own code, so only parsing differs.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from report import machine, table, write_section

sys.path.insert(0, str(Path(__file__).parent.parent))
import data
from sets import AttentionField, DeepSetsField
from support import meshes


def seconds(*calls, repeat=7):
    """Shortest wall time of each call, in alternating order: what others do only adds to it."""
    times = [[] for _ in calls]
    for _ in range(repeat):
        for call, spent in zip(calls, times):
            start = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start)
    return [min(t) for t in times]


def mnist(root):
    """A split of 60,000 SpatialMNIST sets, and where its images come from."""
    try:
        images, labels = data.read_mnist(root, "train")
        origin = "MNIST"
    except data.DataError:
        rng = np.random.default_rng(0)
        images = (
            rng.integers(1, 256, (60000, 28, 28)) * (rng.random((60000, 28, 28)) < 0.19)
        ).astype(np.uint8)
        labels, origin = np.arange(60000) % 10, "random images as dense as MNIST"
    source = data.Flat(data.spatial_mnist(images), 1.0, 0.0)
    digits = tuple("0123456789")
    return data.Split(source, np.arange(len(labels)), labels, digits, 50), origin


def training_step(field, x, mask=None):
    """One evaluation of one block and its gradient: no step of training can be cheaper."""
    field(torch.tensor(0.5), x, mask).square().mean().backward()


def batch_rows(split):
    """Time of a batch beside the cheapest possible step of training on it."""
    clouds = np.random.default_rng(0).normal(size=(2000, 2048, 3)).astype(np.float32)
    stored = data.Solid(data.stored_cloud(clouds), False)
    shapes = data.Split(stored, np.arange(2000), np.zeros(2000, int), ("x",), 512)
    digits, solids = data.load().train, data.load(category="shapes").train
    cases = [
        ("SpatialMNIST, 128 × 50", split, 128, 50, AttentionField(2)),
        ("ModelNet, 128 × 512", shapes, 128, 512, AttentionField(3)),
        ("ModelNet, 64 × 1000 to classify", shapes, 64, 1000, DeepSetsField(256)),
        ("built-in digits, 128 × 50", digits, 128, 50, AttentionField(2)),
        ("built-in shapes, 128 × 512", solids, 128, 512, AttentionField(3)),
    ]
    for name, source, size, points, field in cases:
        epoch = data.batches(source, size, points=points)
        x = next(epoch).x
        x = torch.randn(*x.shape[:-1], 256) if isinstance(field, DeepSetsField) else x  # features
        filled, step = seconds(lambda e=epoch: next(e), lambda f=field, x=x: training_step(f, x))
        yield [f"batch: {name}", f"{1e3 * filled:.1f} ms", f"{filled / step:.1%} of a step"]


def write_mesh(path, faces, seed=0):
    """An OFF mesh as ModelNet's are: six decimals, triangles, half as many vertices as faces."""
    rng = np.random.default_rng(seed)
    v, f = rng.normal(size=(faces // 2, 3)) * 20, rng.integers(0, faces // 2, (faces, 3))
    rows = [f"{x:.6f} {y:.6f} {z:.6f}" for x, y, z in v] + [f"3 {a} {b} {c}" for a, b, c in f]
    path.write_text("\n".join(["OFF", f"{len(v)} {faces} 0", *rows, ""]))


def read_by_line(path):
    """The rival: one line at a time, as OFF is usually read."""
    with open(path) as lines:
        assert next(lines).strip() == "OFF"
        vertices, faces, _ = map(int, next(lines).split())
        v = [[float(c) for c in next(lines).split()] for _ in range(vertices)]
        f = [[int(c) for c in next(lines).split()[1:]] for _ in range(faces)]
    return np.array(v), np.array(f)


def sample(mesh, count=2048):
    v, f = mesh
    return meshes.surface_points(v.take(f, 0)[None], np.random.default_rng(0).random((1, count, 3)))


def mesh_rows(folder):
    """Reading and sampling OFF files of three sizes, against the rival."""
    for faces in (1000, 10000, 100000):
        path = folder / f"{faces}.off"
        write_mesh(path, faces)
        mesh = meshes.read_off(path.read_bytes(), path)
        assert all((a == b).all() for a, b in zip(mesh, read_by_line(path)))
        ours, theirs, both, rival, sampled = seconds(
            lambda p=path: meshes.read_off(p.read_bytes(), p),
            lambda p=path: read_by_line(p),
            lambda p=path: sample(meshes.read_off(p.read_bytes(), p)),
            lambda p=path: sample(read_by_line(p)),
            lambda m=mesh: sample(m),
        )
        for what, a, b in (("read", ours, theirs), ("read and sample", both, rival)):
            times = f"{b / a:.1f} times as fast as line by line ({1e3 * b:.1f} ms)"
            yield [f"{what} OFF, {faces} faces", f"{1e3 * a:.1f} ms", times]
        yield [f"2,048 points of {faces} faces once read", f"{1e3 * sampled:.1f} ms", ""]


def write_clouds(folder, count=10_000, points=2048):
    """A folder of binary PLY files."""
    head = f"ply\nformat binary_little_endian 1.0\nelement vertex {points}\nproperty float x\n"
    head = (head + "property float y\nproperty float z\nend_header\n").encode()
    rng = np.random.default_rng(0)
    for i in range(count):
        x = rng.normal(size=(points, 3)).astype("<f4")
        (folder / f"{i:05d}.ply").write_bytes(head + x.tobytes())


def write_ragged(path, count=4000, low=128, high=512):
    """Sets of very different sizes in one file, and as many of equal sizes beside it."""
    rng = np.random.default_rng(0)
    size = rng.integers(low, high + 1, count)
    points = rng.normal(size=(size.sum(), 3)).astype(np.float32)
    np.savez(path, points=points, set=np.repeat(np.arange(count), size))
    equal = path.with_name("equal.npz")
    np.savez(equal, x=rng.normal(size=(count, int(size.mean()), 3)).astype(np.float32))
    return str(path), str(equal)


def own_rows(folder):
    """Reading a folder of clouds; ragged batches against equal ones with as many points."""
    (folder / "clouds").mkdir()
    write_clouds(folder / "clouds")
    (spent,) = seconds(lambda: data.load(str(folder / "clouds")), repeat=1)
    yield ["a folder of 10,000 binary PLY files of 2,048 points", f"{spent:.1f} s", "at most 20 s"]
    ragged, equal = (data.load(path).train for path in write_ragged(folder / "ragged.npz"))
    a, b = (data.batches(split, 64) for split in (ragged, equal))
    drawn, rival = seconds(lambda: next(a), lambda: next(b), repeat=20)
    yield [
        "batch: own sets of 128 to 512 points, 64 sets",
        f"{1e3 * drawn:.1f} ms",
        f"equal sizes: {1e3 * rival:.1f} ms",
    ]
    batches = [batch for batch, _ in zip(data.batches(ragged, 32), range(4))]
    fields = {"deepsets": DeepSetsField(3), "attention": AttentionField(3)}
    for name, field in fields.items():
        ours = theirs = 0.0
        for batch in batches:
            n = round(batch.mask.sum().item() / 32)
            x = torch.randn(32, n, 3)
            one, other = seconds(
                lambda b=batch, f=field: training_step(f, b.x, b.mask),
                lambda x=x, f=field: training_step(f, x),
                repeat=3,
            )
            ours, theirs = ours + one, theirs + other
        yield [
            f"a step of {name} on ragged batches",
            f"{1e3 * ours / 4:.1f} ms",
            f"{ours / theirs:.2f} of equal sizes with as many points",
        ]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="data", help="folder with mnist/ (default: data)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    split, origin = mnist(args.root)
    everything = np.arange(len(split))
    (drawn,) = seconds(lambda: split.draw(everything))
    rows = [[f"60,000 sets of 50 points ({origin})", f"{drawn:.2f} s", "at most 5 s wanted"]]
    for name, options in (("digits", {}), ("shapes", {"category": "shapes"})):
        built_in = data.load(**options).train
        (spent,) = seconds(lambda s=built_in: s.draw(np.arange(2000)))
        sets = f"{2000 / spent:,.0f} sets/s"
        rows.append([f"built-in {name}, {built_in.points} points", sets, "thousands wanted"])
    rows += batch_rows(split)
    with tempfile.TemporaryDirectory() as folder:
        rows += mesh_rows(Path(folder))
        rows += own_rows(Path(folder))
    text = table(["data, one thread", "time", ""], rows)
    print(text)
    notes = (
        "Shortest of seven runs. A step is one evaluation of one block and its gradient on that "
        "batch, the least a training step can cost; one by likelihood takes 48 or more. The rival "
        "reads OFF line by line and samples with our code, which is most of the work on small "
        "meshes."
    )
    write_section("data", f"## Data\n\n{machine()} {notes}\n\n{text}")


if __name__ == "__main__":
    main()
