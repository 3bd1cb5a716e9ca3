"""Runs CUDA code on the CPU: a library with the functions of the CUDA driver, for tests without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

HEADER = Path(__file__).with_name("cuda.h")

#: What `cuModuleLoadData` takes for machine code.
IMAGE = b"emulated"

#: No operation may be made of two, as hybridpar's own options say for a GPU.
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-shared", "-fPIC")


def emulated_driver(source: Path, kernels: Iterable[str], folder: Path, *flags: str) -> Path:
    """A library that stands for libcuda and holds some kernels of a source file; skips where there is no compiler.

    Args:
        source: CUDA C.
        kernels: Names of its kernels.
        folder: Where to put the library.
        flags: For the compiler.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("running CUDA code without a GPU takes a C++ compiler")
    main, made = folder / "main.cpp", folder / "driver.so"
    includes = "".join(f'#include "{path}"\n' for path in (HEADER, source))
    main.write_text(includes + "".join(f"REGISTER({kernel})\n" for kernel in kernels))
    subprocess.run([compiler, *FLAGS, *flags, str(main), "-o", str(made)], check=True)
    return made
