"""Files of one mesh or cloud: OFF, OBJ, PLY, PCD; and points on the surface of triangles.

Each reader takes the bytes of a file, and its name for errors; it gives points or vertices and
triangles, None of a cloud.

Shapes: vertices `(V, 3)`, triangles `(F, 3)`, corners `(..., F, 3, 3)`; one cloud `(m, 3)`.
"""

import re

import numpy as np

from support.reading import DataError, bad_line, read_numbers, token_ends, unix_text


def weighted_choice(cdf, u):
    """For each row of cdf (B, m), which ends at 1, the indices (B, n) where it first exceeds u."""
    row = np.arange(len(cdf))[:, None]
    found = np.searchsorted((cdf + row).ravel(), (u + row).ravel(), "right")
    return found.reshape(u.shape) - row * cdf.shape[1]


# ------------------------------------------------------------------------------- meshes
def read_off(data, name):
    """Vertices (V, 3) and triangles (F, 3) of an OFF mesh; polygons are fanned from a corner.

    Normals (NOFF) and colours (COFF) of vertices are skipped.
    """
    data = re.sub(rb"#[^\n]*", b"", unix_text(data)) + b"\n"
    head = re.match(rb"\s*(C?N?)OFF\s*(\d{1,18})[ \t]+(\d{1,18})(?:[ \t]+\d+)?[ \t]*\n", data)
    if not head:
        raise DataError(f"{name}, line 1: not an OFF mesh: it begins with {data[:20]!r}")
    vertices, faces, start = int(head[2]), int(head[3]), head.end()
    if not vertices or not faces:
        raise DataError(f"{name}, line {data.count(10, 0, start)}: the mesh has no faces")
    first = data[start:].lstrip()  # colours are three or four numbers
    width = max(len(first[: first.find(b"\n")].split()), 3) if head[1] else 3
    v, cut = _vertices(data, start, vertices, width, name)
    f = _equal_faces(data[cut:], faces, vertices)
    if f is None:
        f = _any_faces(data[cut:], faces, vertices, name, data.count(10, 0, cut) + 1)
    return v, f


def _vertices(data, start, vertices, width, name):
    """The first three of `width` numbers for each vertex (V, 3), and where in `data` they end."""
    ends = token_ends(data[start - 1 :]) + start - 1
    if len(ends) < width * vertices:
        line = data.rstrip().count(10) + 1
        got = len(ends) // width
        raise DataError(f"{name}, line {line}: ends after {got} of {vertices} vertices")
    cut = int(ends[width * vertices - 1])
    if rest := data[cut : data.index(b"\n", cut)].strip():  # numbers are missing or too many
        line = data.count(10, 0, cut) + 1
        fault = f"{rest[:20]!r} after the last of {width} × {vertices} numbers"
        raise DataError(f"{name}, line {line}: {fault}")
    try:
        v = read_numbers(data[start : cut + 1], ends[: width * vertices] - start)
    except ValueError:
        v = np.array([np.nan])
    if not np.isfinite(v).all():
        raise DataError(f"{name}, {bad_line(data[start:cut], data.count(10, 0, start) + 1)}")
    return v.reshape(-1, width)[:, :3], cut


def _equal_faces(text, faces, vertices):
    """Triangles of a block whose faces all have the same number of corners, None of any other."""
    try:
        size, *corners = np.fromstring(text, np.int64, sep=" ").reshape(faces, -1).T
    except ValueError:
        return None
    low, high = np.min(corners, initial=0), np.max(corners, initial=0)
    if len(corners) < 3 or (size != len(corners)).any() or low < 0 or high >= vertices:
        return None
    fan = [(corners[0], corners[k], corners[k + 1]) for k in range(1, len(corners) - 1)]
    return np.stack([np.stack(triangle, -1) for triangle in fan], 1).reshape(-1, 3)


def _any_faces(text, faces, vertices, name, line):
    """Triangles of a block of any polygons, with or without colours, one to a line."""
    triangles, seen = [], 0
    for number, row in enumerate(text.split(b"\n"), line):
        if not (row := row.split()):
            continue
        line, seen, place = number, seen + 1, f"{name}, line {number}"
        if seen > faces:
            raise DataError(f"{place}: more than the {faces} faces of the header")
        try:
            size = int(row[0])
            corner = [int(c) for c in row[1 : 1 + size]]
        except ValueError:
            size = -1
        if size < 0:
            raise DataError(f"{place}: {b' '.join(row)!r} is not a face")
        if len(corner) < size:
            raise DataError(f"{place}: ends after {len(corner)} of {size} corners")
        if wrong := [c for c in corner if not 0 <= c < vertices]:
            raise DataError(f"{place}: vertex {wrong[0]} of {vertices} is not there")
        triangles += [(corner[0], *corner[i : i + 2]) for i in range(1, size - 1)]
    if seen < faces:
        raise DataError(f"{name}, line {line}: ends after {seen} of {faces} faces")
    return np.array(triangles, np.int64).reshape(-1, 3)


def surface_points(corners, u, name="mesh"):
    """Points (B, n, 3) uniform on triangles `corners` (B, F, 3, 3), from uniforms u (B, n, 3)."""
    planes = np.ascontiguousarray(corners.transpose(2, 3, 0, 1))  # far faster than rows of three
    with np.errstate(over="ignore", invalid="ignore"):
        (x, y, z), (r, s, t) = planes[1:] - planes[0]
        area = np.sqrt((y * t - z * s) ** 2 + (z * r - x * t) ** 2 + (x * s - y * r) ** 2)
        total = area.sum(-1)
    if not ((total > 0) & np.isfinite(total)).all():
        raise DataError(f"{name}: its surface has no area, or one too large to compute")
    cdf = np.cumsum(area, -1, dtype=np.float64)
    face = weighted_choice(cdf / cdf[:, -1:], u[..., 0])
    p, q = u[..., 1], u[..., 2]
    beyond = p + q > 1  # the half of the parallelogram outside the triangle is turned into it
    p, q = np.where(beyond, 1 - p, p), np.where(beyond, 1 - q, q)
    mine = corners[np.arange(len(face))[:, None], face]  # (B, n, 3, 3)
    return np.einsum("bnk,bnki->bni", np.stack([1 - p - q, p, q], -1), mine)


# ------------------------------------------------------------------------------- OBJ
def read_obj(data, name):
    """Vertices (V, 3) and triangles (F, 3) of a Wavefront OBJ; None if it has no faces."""
    vertices, triangles = [], []
    for number, line in enumerate(unix_text(data).split(b"\n"), 1):
        kind, *words = line.partition(b"#")[0].split() or [b""]
        try:
            if kind == b"v":
                vertices.append([float(word) for word in words[:3]])
            elif kind == b"f":
                corner = [int(word.partition(b"/")[0]) for word in words]
                corner = [c - 1 if c > 0 else len(vertices) + c for c in corner]  # −1: the last
                triangles += [(corner[0], *corner[i : i + 2]) for i in range(1, len(corner) - 1)]
        except ValueError:
            raise DataError(f"{name}, line {number}: {line[:40]!r} is not numbers") from None
        if kind == b"v" and len(vertices[-1]) < 3:
            raise DataError(f"{name}, line {number}: {line[:40]!r} is not x, y, z")
    if not vertices:
        raise DataError(f"{name}, line 1: not an OBJ mesh: no line begins with v")
    return np.array(vertices), check_triangles(triangles, len(vertices), name)


def check_triangles(triangles, vertices, name):
    """Triangles (F, 3) as an array, None if there are none; every corner must be a vertex."""
    f = np.array(triangles, np.int64).reshape(-1, 3)
    if (wrong := f[(f < 0) | (f >= vertices)]).size:
        raise DataError(f"{name}: vertex {wrong[0]} of {vertices} in a face is not there")
    return f if len(f) else None


# ------------------------------------------------------------------------------- PLY
TYPES = {"char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4"}
TYPES |= {"float": "f4", "double": "f8", "int8": "i1", "uint8": "u1", "int16": "i2"}
TYPES |= {"uint16": "u2", "int32": "i4", "uint32": "u4", "float32": "f4", "float64": "f8"}
ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}


def read_ply(data, name, wanted=None):
    """Columns `wanted` (V, d) of the vertices of a PLY, and triangles (F, 3), None of a cloud."""
    elements, order, at = _ply_header(data, name)
    rows, faces = None, ()
    if order == "":
        data, at = _all_numbers(data[at:], name), 0
    for kind, count, properties in elements:
        read = _binary_element if order else _text_element
        try:
            columns, at = read(data, at, order, count, properties)
        except EOFError as e:
            fault = f"ends after {e} of {count} elements {kind!r}"
            raise DataError(f"{name}, offset {len(data)}: {fault}; it is cut or damaged") from None
        except ValueError as e:  # a name that comes twice
            raise DataError(f"{name}, element {kind!r}: {e}") from None
        if kind == "vertex":
            rows = _columns(columns, wanted or ("x", "y", "z"), name)
        if kind == "face":
            lists = columns.get("vertex_indices", columns.get("vertex_index", ()))
            faces = [(c[0], *c[i : i + 2]) for c in lists for i in range(1, len(c) - 1)]
            if isinstance(lists, np.ndarray) and lists.shape[1] == 3:
                faces = lists
    if rows is None:
        raise DataError(f"{name}: no element 'vertex' in it, so no points")
    return rows, check_triangles(faces, len(rows), name)


def _columns(columns, wanted, name):
    """The wanted columns, side by side (V, d)."""
    for w in wanted:
        if w not in columns or isinstance(columns[w], list) or columns[w].ndim != 1:
            raise DataError(f"{name}: no column {w!r}: there are {', '.join(columns)}")
    return np.stack([columns[w] for w in wanted], -1)


def _all_numbers(text, name):
    text = unix_text(text) + b"\n"
    try:
        return read_numbers(text)
    except ValueError:
        raise DataError(f"{name}, after the header, {bad_line(text)}") from None


def _ply_header(data, name):
    """Elements (name, count, [(property, type, type of its length)]), byte order, end of header."""
    end = data.find(b"end_header", 0, 1 << 16)
    if not data.startswith(b"ply") or end < 0:
        raise DataError(f"{name}, line 1: not a PLY file, or one without end_header")
    elements, order = [], None
    for number, line in enumerate(unix_text(data[:end]).decode("latin-1").split("\n"), 1):
        try:
            match line.split():
                case ["format", how, *_]:
                    order = ORDERS[how]
                case ["element", kind, count]:
                    elements.append((kind, int(count), []))
                case ["property", "list", length, of, what]:
                    elements[-1][2].append((what, TYPES[of], TYPES[length]))
                case ["property", of, what]:
                    elements[-1][2].append((what, TYPES[of], None))
                case ["element" | "property", *_]:
                    raise ValueError
        except (ValueError, KeyError, IndexError):
            raise DataError(f"{name}, line {number}: {line[:40]!r} is no line of a PLY") from None
    if order is None or any(count < 0 for _, count, _ in elements):
        raise DataError(f"{name}: its header has no format, or a negative count")
    return elements, order, end + (12 if data[3:5] == b"\r\n" else 11)


def _binary_element(data, at, order, count, properties):
    """The columns of `count` rows of a binary PLY, by name, and where they end."""
    lists = [what for what, _, length in properties if length]
    first = _binary_row(data, at, order, properties)[0] if lists and count else {}
    kind = []  # of a row, if all lists are as long as those of the first, which is common
    for what, of, length in properties:
        kind += [(f"length of {what}", order + length)] if length else []
        kind += [(what, order + of, np.shape(first.get(what, 0)))]
    kind = np.dtype(kind)
    if not lists or at + count * kind.itemsize <= len(data):
        rows = _rows(data, at, kind, count)
        if all((rows[f"length of {what}"] == len(first[what])).all() for what in lists if count):
            return {what: rows[what] for what, *_ in properties}, at + count * kind.itemsize
    table = []
    for done in range(count):
        try:
            row, at = _binary_row(data, at, order, properties)
        except EOFError:
            raise EOFError(done) from None
        table.append(row)
    columns = {what: [row[what] for row in table] for what, *_ in properties}
    return {what: rows if what in lists else np.array(rows) for what, rows in columns.items()}, at


def _rows(data, at, kind, count):
    if at + count * kind.itemsize > len(data):
        raise EOFError((len(data) - at) // kind.itemsize)
    return np.frombuffer(data, kind, count, at) if kind.itemsize else np.empty(count, kind)


def _binary_row(data, at, order, properties):
    """One row of a binary PLY, by name, and where it ends."""
    row = {}
    for what, of, length in properties:
        count = 1
        if length:
            (count,) = _rows(data, at, np.dtype(order + length), 1)
            at += np.dtype(length).itemsize
        row[what] = _rows(data, at, np.dtype(order + of), max(int(count), 0))
        at += row[what].nbytes
        row[what] = row[what] if length else row[what][0]
    return row, at


def _text_element(numbers, at, order, count, properties):
    """The columns of `count` rows of an ASCII PLY, by name, and where they end."""
    if not any(length for *_, length in properties):
        width = len(properties)
        if at + count * width > len(numbers):
            raise EOFError((len(numbers) - at) // width)
        table = numbers[at : at + count * width].reshape(count, width)
        return {what: table[:, k] for k, (what, *_) in enumerate(properties)}, at + table.size
    columns = {what: [] for what, *_ in properties}
    for done in range(count):
        for what, _, length in properties:
            size = 1
            if length and at < len(numbers):
                size, at = int(max(numbers[at], 0)), at + 1
            if at + size > len(numbers):
                raise EOFError(done)
            row = numbers[at : at + size]
            columns[what].append(row.astype(np.int64) if length else row[0])
            at += size
    return {
        what: v if length else np.array(v)
        for (what, _, length), v in zip(properties, columns.values())
    }, at


# ------------------------------------------------------------------------------- PCD
def read_pcd(data, name, wanted=None):
    """Columns `wanted` (V, d) of the points of a PCD that exist (not NaN), and None."""
    head = re.search(rb"^DATA[ \t]+(\w+)[ \t]*(\r\n|\n|\r)", data[: 1 << 16], re.MULTILINE)
    if not head:
        raise DataError(f"{name}, line 1: not a PCD file, or one without a line DATA")
    kind, count = _pcd_header(data[: head.start()], name)
    if head[1] == b"ascii":
        numbers = _all_numbers(data[head.end() :], name)
        kind = np.dtype([(f, "f8", kind[f].shape) for f in kind.names])
        data, start = numbers.tobytes(), 0
    elif head[1] == b"binary":
        start = head.end()
    else:
        how = head[1].decode("latin-1")
        raise DataError(f"{name}: DATA {how} is not read: save it as binary or ascii")
    try:
        rows = _rows(data, start, kind, count)
    except EOFError as e:
        fault = f"ends after {e} of {count} points; it is cut or damaged"
        raise DataError(f"{name}, offset {len(data)}: {fault}") from None
    columns = {f: rows[f][:, 0] for f in kind.names}
    points = _columns(columns, wanted or ("x", "y", "z"), name)
    return points[~np.isnan(points).any(-1)], None


def _pcd_header(head, name):
    """The dtype of a point of a PCD, and how many there are."""
    lines = unix_text(head).decode("latin-1").split("\n")
    entries = {words[0]: words[1:] for words in map(str.split, lines) if words}
    try:
        fields, count = entries["FIELDS"], int(entries["POINTS"][0])
        types = [k.lower() + s for k, s in zip(entries["TYPE"], entries["SIZE"], strict=True)]
        repeats = [int(c) for c in entries.get("COUNT", ["1"] * len(fields))]
        kind = [(f, "<" + t, (r,)) for f, t, r in zip(fields, types, repeats, strict=True)]
        if count < 0 or min(repeats) < 1 or not set(types) <= set(TYPES.values()) | {"i8", "u8"}:
            raise ValueError
        return np.dtype(kind), count
    except (KeyError, ValueError, IndexError, TypeError):
        raise DataError(f"{name}: FIELDS, TYPE, SIZE or POINTS of its header are wrong") from None
