"""support/meshes.py and support/reading.py: numbers, meshes and clouds in files."""

import struct
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support import reading
from support.meshes import read_off, read_ply, surface_points
from support.reading import DataError

# ------------------------------------------------------------------------------- meshes
decimal = st.one_of(
    st.decimals(-(10**6), 10**6, places=6).map(str),
    st.integers(-(10**9), 10**9).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(
        ["5.", "-.5", "+3", "1e-3", "-0.0", "007.50", "123456789012345678901234567890"]
    ),
)


@given(st.lists(decimal, min_size=1))
def test_numbers_are_read_as_python_reads_them(tokens):
    text = " ".join(tokens).encode() + b"\n"
    assert reading.read_numbers(text).tolist() == [float(t) for t in tokens]


@given(
    st.lists(decimal),
    st.sampled_from(["x", "1.2.3", ".", "-", "1-2", "--1", "1,2", ".-5", "3.+1"]),
    st.lists(decimal),
)
@example([], ".-5", [])
def test_what_is_not_a_number_is_refused(before, wrong, after):
    with pytest.raises(ValueError, match=r"unmatched data|without a blank"):
        reading.read_numbers(" ".join([*before, wrong, *after]).encode() + b"\n")


@st.composite
def off_files(draw):
    """An OFF file in some dialect, with its vertices and its fanned triangles."""
    v = draw(
        st.lists(
            st.tuples(*[st.integers(-99, 99).map(lambda i: i / 8)] * 3), min_size=3, max_size=9
        )
    )
    sizes = draw(st.sampled_from([(3, 3), (4, 4), (3, 7), (2, 5)]))
    corner = st.integers(0, len(v) - 1)
    faces = draw(
        st.lists(st.lists(corner, min_size=sizes[0], max_size=sizes[1]), min_size=1, max_size=6)
    )
    blank, colour = draw(st.booleans()), draw(st.sampled_from(["", " 255 0 0", " 0.5 0.5 0.5 1"]))
    head = draw(
        st.sampled_from(["OFF\n", "OFF", "OFF ", "# made up\nOFF\n# counts\n", "\nOFF\n\n"])
    )
    kind = draw(st.sampled_from(["", "C", "N", "CN"]))
    more = {"": "", "C": " 255 0 0 255", "N": " 0 0 -1", "CN": " 0 .5 1 0.1 0.2 0.3"}[kind]
    lines = [" ".join(map(str, row)) + more for row in v]
    head = head.replace("OFF", f"{kind}OFF")
    lines += [" ".join(map(str, [len(f), *f])) + colour for f in faces]
    if draw(st.booleans()):
        lines = [f"  {line}\t # comment 1 2 3" for line in lines]
    counts = f"{len(v)} {len(faces)}{draw(st.sampled_from([' 0', '']))}\n"
    text = (
        head
        + counts
        + ("\n\n" if blank else "\n").join(lines)
        + draw(st.sampled_from(["", "\n", "\n\n \n"]))
    )
    text = text.replace("\n", draw(st.sampled_from(["\n", "\r\n", "\r"])))
    return (
        draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + text.encode(),
        v,
        [(f[0], *f[i : i + 2]) for f in faces for i in range(1, len(f) - 1)],
    )


@given(off_files())
def test_every_dialect_of_off_gives_the_same_mesh(file):
    text, vertices, triangles = file
    v, f = read_off(text, "some.off")
    assert v.tolist() == [list(row) for row in vertices]
    assert f.tolist() == [list(row) for row in triangles]


def test_surface_points_are_uniform_over_area():
    corners = np.array(
        [[[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[5, 0, 0], [8, 0, 0], [5, 0, 1]]], float
    )
    x = surface_points(corners[None], np.random.default_rng(0).random((1, 40000, 3)))[0]
    second = x[:, 0] > 4
    assert second.mean() == pytest.approx(0.75, abs=0.01)
    assert x[~second].mean(0) == pytest.approx(np.array([1 / 3, 1 / 3, 0]), abs=0.01)
    assert x[second].mean(0) == pytest.approx(np.array([6, 0, 1 / 3]), abs=0.02)
    assert (x[~second][:, :2].sum(1) <= 1 + 1e-12).all()
    assert np.cov(x[~second][:, :2].T) == pytest.approx(
        np.array([[2, -1], [-1, 2]]) / 36, abs=0.003
    )


@st.composite
def ply_meshes(draw):
    """A PLY mesh in some order of bytes, with its vertices and fanned triangles."""
    v = np.array(draw(st.lists(st.tuples(*[st.integers(-99, 99)] * 3), min_size=3, max_size=9))) / 8
    low, high = draw(st.sampled_from([(3, 3), (4, 4), (3, 6)]))
    corner = st.integers(0, len(v) - 1)
    faces = draw(st.lists(st.lists(corner, min_size=low, max_size=high), min_size=1, max_size=6))
    order, flag = draw(st.sampled_from(["", "<", ">"])), draw(st.booleans())
    kind = {"": "ascii", "<": "binary_little_endian", ">": "binary_big_endian"}[order]
    lines = ["ply", f"format {kind} 1.0", "element start 1", "property uchar unused"]
    lines += [f"element vertex {len(v)}", "property double x", "property short n"]
    lines += ["property float y", "property float z", f"element face {len(faces)}"]
    lines += ["property list uchar int vertex_indices"] + ["property float area"] * flag
    end = draw(st.sampled_from(["\n", "\r\n"]))
    head = (end.join([*lines, "end_header"]) + end).encode()
    if order == "":
        rows = ["7", *(f"{x} 5 {y} {z}" for x, y, z in v)]
        rows += [" ".join(map(str, [len(f), *f])) + " 1.5" * flag for f in faces]
        body = end.join(rows).encode()
    else:
        row = struct.Struct(f"{order}dhff")
        body = b"\x07" + b"".join(row.pack(x, 5, y, z) for x, y, z in v)
        for f in faces:
            body += struct.pack(f"{order}B{len(f)}i", len(f), *f)
            body += struct.pack(f"{order}f", 1.5) if flag else b""
    return head + body, v, [(f[0], *f[i : i + 2]) for f in faces for i in range(1, len(f) - 1)]


@given(ply_meshes())
def test_every_kind_of_ply_gives_the_same_mesh(file):
    data, vertices, triangles = file
    v, f = read_ply(data, "some.ply")
    np.testing.assert_array_equal(v, vertices)
    assert f.tolist() == [list(row) for row in triangles]


@given(ply_meshes().filter(lambda file: b"binary" in file[0]), st.floats(0, 1, exclude_max=True))
def test_a_binary_ply_cut_anywhere_is_refused(file, share):
    whole = file[0]
    with pytest.raises(DataError, match=r"^some\.ply, (line 1|offset)"):
        read_ply(whole[: int(share * len(whole))], "some.ply")


def test_progress_tells_the_time_left(monkeypatch, capsys):
    clock = iter([0.0, 5.0, 12.0, 30.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    bar = reading.Progress("a file", 200, done=100)
    bar.show(110)  # too early to say anything
    bar.show(140)
    bar.show(190)
    assert capsys.readouterr().err == "data: a file: 70%, 18 s left\ndata: a file: 95%, 3 s left\n"
