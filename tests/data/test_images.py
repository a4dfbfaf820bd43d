"""Images from idx files and tables: pixels, classes and scale; files that are broken or do not fit together are refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from data_files import data_spec, load_data
from raising import raises


def idx(numbers, dtype=0x08):
    """An idx file: dtype, shape, numbers."""
    numpy_dtype = {0x08: ">u1", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}[dtype]
    shape = np.array(numbers.shape, ">u4").tobytes()
    return bytes([0, 0, dtype, numbers.ndim]) + shape + numbers.astype(numpy_dtype).tobytes()


def scaled(image, divisor=255):
    return (image / divisor).astype(np.float32)


@pytest.fixture
def idx_files(tmp_path):
    """Forty images of 4 × 6 pixels and their classes."""
    images = np.random.default_rng(0).integers(0, 256, (40, 4, 6))
    images[0, 0, 0] = 255
    (tmp_path / "images").write_bytes(idx(images))
    (tmp_path / "labels").write_bytes(idx(np.arange(40) % 3))
    return images, {"path": str(tmp_path / "images"), "labels": str(tmp_path / "labels")}


@pytest.mark.parametrize("compressed", [False, True])
def test_images_come_from_idx_files(idx_files, compressed):
    images, paths = idx_files
    if compressed:
        for path in map(Path, paths.values()):
            path.write_bytes(gzip.compress(path.read_bytes()))
    corpus = load_data("images", **paths)
    assert corpus.fields == ("image", "label")
    assert (len(corpus.train), len(corpus.validation)) == (38, 2)
    assert corpus.labels() == ("0", "1", "2")
    labels = {image.tobytes(): label for rows in corpus.splits.values() for image, label in rows}
    assert labels == {scaled(image).tobytes(): str(i % 3) for i, image in enumerate(images)}
    for value in ("4 × 6 pixels", "255"):
        assert value in corpus.description
    unlabelled = load_data("images", path=paths["path"])
    assert unlabelled.fields == ("image",)
    train, validation = ({row[0].tobytes() for row in rows} for rows in (unlabelled.train, unlabelled.validation))
    assert not train & validation


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        (0x0C, ("1000000", "1000001", "-2147483648")),
        (0x0D, ("1000000", "1000001", "0.1")),
        (0x0E, ("1000000", "1000001", "0.30000001")),
    ],
)
def test_no_two_classes_of_an_idx_file_share_a_name(idx_files, dtype, numbers):
    _, paths = idx_files
    classes = np.array([float(numbers[i % 3]) for i in range(40)])
    Path(paths["labels"]).write_bytes(idx(classes, dtype))
    assert set(load_data("images", **paths).labels()) == set(numbers)


@pytest.mark.parametrize("label", ["first", "last", "none"])
def test_images_come_from_a_table(label, tmp_path):
    images = np.random.default_rng(0).integers(0, 17, (30, 9))
    cells = {"first": lambda i: [i % 2, *images[i]], "last": lambda i: [*images[i], i % 2], "none": lambda i: images[i]}
    header = [f"x{i}" for i in range(10 - (label == "none"))]
    lines = [",".join(map(str, row)) for row in (header, *(cells[label](i) for i in range(30)))]
    path = tmp_path / "p.csv"
    path.write_text("\n".join(lines) + "\n")
    corpus = load_data("images", path=str(path), label=label, max_value=16.0)
    assert corpus.fields == (("image",) if label == "none" else ("image", "label"))
    assert corpus.train[0][0].shape == (3, 3)
    read = sorted(row[0].tobytes() for rows in corpus.splits.values() for row in rows)
    assert read == sorted(scaled(image.reshape(3, 3), 16).tobytes() for image in images)
    wide = load_data("images", path=str(path), label=label, height=1)
    assert wide.train[0][0].shape == (1, 9)
    colored = load_data("images", path=str(path), label=label, channels=3, height=1)
    assert colored.train[0][0].shape == (3, 1, 3)


def test_validation_images_are_scaled_as_the_training_images(idx_files, tmp_path):
    images, paths = idx_files
    (tmp_path / "more").write_bytes(idx(images[:5] // 2))
    (tmp_path / "more-labels").write_bytes(idx(np.zeros(5)))
    more = {"validation": str(tmp_path / "more"), "validation_labels": str(tmp_path / "more-labels")}
    corpus = load_data("images", **paths, **more)
    assert (len(corpus.train), len(corpus.validation)) == (40, 5)
    assert np.array_equal(corpus.validation[0][0], scaled(images[0] // 2))


def test_another_table_is_scaled_as_the_training_images(tmp_path):
    for name, max_value in (("train", 17), ("dark", 5)):
        rows = np.random.default_rng(max_value).integers(0, max_value, (30, 17))
        (tmp_path / f"{name}.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    spec = data_spec("images", path=str(tmp_path / "train.csv"), validation=str(tmp_path / "dark.csv"))
    own, other = spec.load(), spec.load_file(str(tmp_path / "dark.csv"))
    assert all(np.array_equal(left[0], right[0]) for left, right in zip(own.validation, other.validation, strict=True))
    for value in ("dark.csv: 30 images", "4 × 4 pixels", "16"):
        assert value in other.description


def test_another_idx_file_is_read_if_no_classes_are_needed(idx_files, tmp_path):
    images, paths = idx_files
    (tmp_path / "more").write_bytes(idx(images[:5] // 2))
    unlabelled = data_spec("images", path=paths["path"])
    other = unlabelled.load_file(str(tmp_path / "more"))
    assert (other.fields, len(other.train)) == (("image",), 0)
    assert np.array_equal(other.validation[0][0], scaled(images[0] // 2))
    labelled = data_spec("images", **paths)
    assert len(labelled.load_file(paths["path"]).validation) == 40
    with raises("data.columns", tmp_path / "more", "test_labels"):
        labelled.load_file(str(tmp_path / "more"))
    (tmp_path / "wide").write_bytes(idx(np.zeros((5, 4, 7))))
    with raises("data.row", tmp_path / "wide", "4 × 7", "4 × 6"):
        unlabelled.load_file(str(tmp_path / "wide"))


HEAD = bytes([0, 0, 8, 3])
BROKEN = {
    "another format": (b"PK\3\4 and so on", "data.file", ["idx"]),
    "a short header": (HEAD + b"\0\0\0", "data.file", ["3 of the 12 bytes"]),
    "a huge shape": (HEAD + b"\xff" * 8 + b"\0\0\0\x09", "data.too-large", ["4294967295 × 4294967295 × 9"]),
    "no images": (HEAD + np.array((0, 4, 6), ">u4").tobytes(), "data.too-large", ["0 × 4 × 6"]),
    "one dimension": (idx(np.zeros(3)), "data.file", ["1 dimensions", "3 or 4"]),
    "few bytes": (HEAD + np.array((1, 4, 6), ">u4").tobytes() + b"12345", "data.file", ["5 of the 24 bytes"]),
    "more bytes": (idx(np.zeros((1, 2, 2))) + b"\0", "data.file", ["1 × 2 × 2"]),
    "NaN": (idx(np.full((1, 2, 2), np.nan), 0x0D), "data.row", ["nan", "row 1"]),
    "beyond float32": (idx(np.array([[[0.0]], [[1e39]]]), 0x0E), "data.row", ["1e+39", "row 2"]),
    "a broken gzip file": (gzip.compress(idx(np.zeros((9, 9, 9))))[:-9], "data.file", ["gzip"]),
    "a gzip bomb": (gzip.compress(idx(np.zeros((64, 512, 512)))), "data.too-large", []),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_idx_file_is_refused(name, tmp_path):
    content, code, values = BROKEN[name]
    path = tmp_path / "images-idx3-ubyte"
    path.write_bytes(content)
    with raises(code, path, *values):
        load_data("images", path=str(path))


def test_pixels_beyond_float32_are_refused_with_their_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("0,0,0,0,a\n0,0,0,1e39,b\n")
    with raises("data.row", path, "line 2 ", "1e+39"):
        load_data("images", path=str(path))
    path.write_text("".join(f"0,0,0,{i}e30,a\n" for i in range(9)))
    assert load_data("images", path=str(path)).train
    with raises("data.row", path, "image", "e+30"):
        load_data("images", path=str(path), max_value=1e-9)


def test_files_that_do_not_fit_together_are_refused(idx_files, tmp_path):
    images, paths = idx_files
    contents = {"other": idx(images[:, :3]), "same": idx(images), "few": idx(np.zeros(7))}
    contents |= {"p.csv": b"1,2,3,4,0\n1,2,3,4\n", "q.csv": b"1,2,3,0\n1,2,3,0\n"}
    contents |= {"r.csv": b"1,2,3,4,0\n1,2,x,4,0\n", "empty.csv": b"\n"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    path = {name: str(tmp_path / name) for name in (*contents, "none")}
    for settings, code, values in (
        (paths | {"labels": path["few"]}, "data.row", [path["few"], "7 classes", "40 images"]),
        (paths | {"validation": path["other"]}, "data.row", [path["other"], "3 × 6", "4 × 6"]),
        (paths | {"validation": path["same"]}, "data.columns", [path["same"], "no classes"]),
        (paths | {"test_labels": path["few"]}, "data.file", ["test_labels", path["few"]]),
        ({"path": path["none"]}, "data.file", [path["none"]]),
        ({"path": path["p.csv"]}, "data.row", ["p.csv, line 2 has 4 columns", "5"]),
        ({"path": path["q.csv"]}, "data.row", ["q.csv, line 1 has 3 numbers", "height"]),
        ({"path": path["r.csv"]}, "data.row", ["r.csv, line 2", "'x'"]),
        ({"path": path["p.csv"], "labels": path["few"]}, "data.columns", [path["p.csv"], path["few"], "last"]),
        ({"path": path["empty.csv"]}, "data.empty", [path["empty.csv"]]),
    ):
        with raises(code, *values):
            load_data("images", **settings)
