"""The library of C kernels: built on first use by the system's compiler into the user's cache folder, and loaded."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch

from manyheads.errors import UsageError

SOURCES = tuple(Path(__file__).parent / name for name in ("products.h", "products.c", "step.c"))
FLAGS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fopenmp")
SECONDS = 120  # for the compiler
VARIANT = "MANYHEADS_KERNELS"  # names a variant; without it, the best that the processor has
VARIANTS = ("plain", "avx2", "avx512")  # as in products.c
NO_KERNELS = "torch"  # as a variant: products are computed by torch


class Library:
    """The functions of products.c and step.c, with the variant that they use."""

    def __init__(self, path: Path, variant: str | None) -> None:
        library = ctypes.CDLL(str(path))
        number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
        self.linear = library.linear
        self.linear.argtypes = (
            number, number, pointer, pointer, pointer, pointer, size, size, size, number, pointer, number,
        )  # fmt: skip
        self.dequantize = library.dequantize
        self.dequantize.argtypes = (number, pointer, pointer, size, size, number)
        self.run_step = library.run_step
        self.run_step.argtypes = (pointer, size, ctypes.c_char_p, number, number)
        self.linear.restype = self.dequantize.restype = self.run_step.restype = None
        best = int(library.best_variant())
        self.variants = VARIANTS[: best + 1]
        if variant is not None and variant not in self.variants:
            names = ", ".join((*self.variants, NO_KERNELS))
            raise UsageError(f"{VARIANT} is {variant!r}, expected one of {names} on this processor")
        self.variant = best if variant is None else VARIANTS.index(variant)


def kernels() -> Library | None:
    """The kernels; None if there is no compiler, or if the environment asks for torch."""
    return load_library(os.environ.get(VARIANT) or None)


@cache
def load_library(variant: str | None) -> Library | None:
    if variant == NO_KERNELS:
        return None
    try:
        return Library(built_library(), variant)
    except OSError as error:
        reason = error.strerror or str(error)
    except subprocess.SubprocessError as error:
        reason = f"the compiler failed ({type(error).__name__})"
    warnings.warn(f"products with quantized weights are computed by torch, slowly: {reason}", stacklevel=2)
    return None


def built_library() -> Path:
    """The path of the built library. Processes that build it at once each write a file of their own and rename it."""
    folder = cache_folder()
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))), None)
    made_from = (*map(Path.read_bytes, SOURCES), *map(str.encode, (*FLAGS, platform.machine())))
    name = hashlib.sha256(b"\0".join(made_from)).hexdigest()[:16]
    path = folder / f"kernels-{name}.so"
    if path.exists():
        check_owner(path)
        return path
    if compiler is None:
        raise FileNotFoundError(0, "no C compiler was found (cc, gcc or clang)")
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        built = Path(draft) / "kernels.so"
        compile_source(compiler, built)
        built.replace(path)
    return path


def compile_source(compiler: str, path: Path) -> None:
    """Compiles the kernels; without OpenMP, and so for one thread, if the compiler has none."""
    for flags in (FLAGS, FLAGS[:-1]):
        command = [compiler, *flags, "-o", str(path), *(str(source) for source in SOURCES[1:]), "-lm"]
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
        if done.returncode == 0:
            return
    done.check_returncode()


def cache_folder() -> Path:
    """The folder of built kernels, which only this user can write, as its files are executed."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (base if base.is_absolute() else Path.home() / ".cache") / "manyheads" / "kernels"
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
        check_owner(path)
    return folder


def check_owner(path: Path) -> None:
    """Raises if another user than this one could have written a file, or could write to a folder."""
    status = path.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or path.is_symlink():
        raise PermissionError(0, f"others can write to {path}")


def num_threads() -> int:
    """The threads of torch; one in a forked process, where those of OpenMP do not exist."""
    return 1 if FORKED else torch.get_num_threads()


FORKED: list[bool] = []
os.register_at_fork(after_in_child=lambda: FORKED.append(True))


def work_size(vectors: int, size: int, threads: int) -> int:
    """Bytes that a product needs, aligned: for its quantized vectors, or for four dequantized rows per thread."""
    quantized = vectors * (24 + size + size // 32 * 8)
    return -(-max(quantized, threads * 4 * size * 4) // 64) * 64
