"""Builds kernels for this CPU with TVM, once, and loads them without TVM or a compiler.

Kernels are defined in source files of their own, each with a function `define(writer)` that returns functions of TIR by
name, read from TVMScript (`hybridpar.codegen.tir_script`) or written out, for CUDA by a schedule of `writer.tvm`. They
are compiled to one object file by a child process of `hybridpar.codegen.compile_pool`, as `import tvm` takes seconds
and starts threads. apache-tvm-ffi-orcjit loads the file from memory, without linker or compiler.

The file is kept in the user's cache (`hybridpar.codegen.cache`). Its name is a hash of what it was made from: sources,
TVM's version, the CPU with its features. Where nothing can be built, one line is logged and callers use their fallback.
`HYBRIDPAR_KERNELS=off` says that from the start.

No other module imports TVM, but for `tir_script` in the process that compiles.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridpar.codegen.cache import KernelsUnavailable, cache_path, cached_all, load_or_warn
from hybridpar.codegen.compile_pool import Builder, Built, Request

#: What TVM calls the passes of `_register_pipeline`.
_PIPELINE = "hybridpar"

Function = Callable[..., Any]


def load_kernels(
    name: str, sources: Sequence[Path], imported: Sequence[Path] = (), arguments: Sequence[dict[str, Any]] = ({},)
) -> dict[str, Function] | None:
    """The functions that source files define with each of some arguments, built if this machine has not built them.

    It is no collective: each process loads for itself, and the first one of a machine builds.
    """

    def load() -> dict[str, Function]:
        requests = [(kernel_path(name, [*sources, *imported], **given), Request(sources, given)) for given in arguments]
        functions: dict[str, Function] = {}
        with Builder() as builder:
            for built in contents_of(requests, builder):
                if isinstance(built, KernelsUnavailable):
                    raise built
                functions |= session().load(built)
        return functions

    return load_or_warn(f"{name} kernels", load)


def kernel_path(name: str, sources: Sequence[Path], **arguments: Any) -> Path:
    """The cache file of some kernels on this machine, made with these arguments of `define`."""
    words = [Path(__file__).with_name(name) for name in ("build.py", "tir_writer.py", "tir_script.py")]
    made_from = {
        "sources": [hashlib.sha256(path.read_bytes()).hexdigest() for path in (*words, *sources)],
        "tvm": [_version("apache-tvm"), _version("apache-tvm-ffi"), _version("apache-tvm-ffi-orcjit")],
        "device": _cpu(),
        "arguments": arguments,
    }
    return cache_path(name, made_from, ".o")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise KernelsUnavailable(f"{distribution} is not installed") from error


def _cpu() -> list[str]:
    """What code may depend on: architecture, model and features."""
    if sys.byteorder != "little":
        raise KernelsUnavailable("kernels are written for little-endian machines")
    wanted_keys = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    described = [f"{key}={value}" for key, value in sorted(cpu_info().items()) if key in wanted_keys]
    return [platform.system(), platform.machine(), *described]


@functools.cache
def cpu_info() -> dict[str, str]:
    """What Linux says of the first CPU, by its names; the words of each value are sorted. Empty on other systems."""
    info: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), " ".join(sorted(value.split())))
    return info


def contents_of(files: Sequence[tuple[Path, Request]], builder: Builder) -> list[Built | KernelsUnavailable]:
    """The contents of cache files; those that are not there are built together, each by its request."""

    def build(missing: Sequence[int]) -> Iterator[tuple[int, bytes | KernelsUnavailable]]:
        futures = {index: builder.submit(files[index][1]) for index in missing}
        for index, future in futures.items():
            try:
                built = future.result()
                yield index, json.dumps(built.names).encode() + b"\n" + built.image
            except KernelsUnavailable as error:
                yield index, error

    return [_parted(content) for content in cached_all([path for path, _ in files], build)]


def _parted(content: bytes | KernelsUnavailable) -> Built | KernelsUnavailable:
    """What a cache file holds: names of functions in the first line, then the object file."""
    if isinstance(content, KernelsUnavailable):
        return content
    line, _, image = content.partition(b"\n")
    return Built(tuple(json.loads(line)), image)


class Session:
    """Object files that were loaded from memory; machine code is unloaded with the last of a session's functions.

    Names need to be unique in a file only.
    """

    def __init__(self) -> None:
        import tvm_ffi_orcjit

        # Plain C objects need no platform, and kernels are small, so the slab that is set aside is too.
        self._session = tvm_ffi_orcjit.ExecutionSession(orc_rt=None, slab_size=4 << 20)
        self._loading = threading.Lock()

    def load(self, built: Built, keep: bool = True) -> dict[str, Function]:
        """Load an object file."""
        with self._loading:
            # Looking for a C++ runtime would start a compiler; these objects use none.
            module = self._session.load_module(built.image, keep_module_alive=keep, cxx="-")
        return {name: module[name] for name in built.names}


@functools.cache
def session() -> Session:
    """The session of what stays loaded until the process ends."""
    return Session()


# ---------------------------------------------------------------------------------------------------- the child process


def _serve(parent: Connection[Any, Any]) -> None:
    """Compile what is asked for, one request after the other, until there is no more.

    The first message says that TVM is loaded. Each answer is what was built, or why nothing was.
    """
    # TVM imports torch where it is there, for tensors of its that are never seen here, which takes most of the time.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    import tvm
    from tvm.script import ir_builder  # noqa: F401 - the writer reaches it as tvm.script.ir_builder
    from tvm.target import codegen
    from tvm.tirx.script.builder import ir  # noqa: F401 - and this one as tvm.tirx.script.builder.ir

    from hybridpar.codegen.cuda_source import source_of
    from hybridpar.codegen.tir_writer import Writer

    _register_pipeline(tvm)
    cuda = tvm.target.Target(
        {"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024, "thread_warp_size": 32}, host={"kind": "llvm"}
    )
    target = tvm.target.Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), **_features()})
    parent.send("ready")
    while True:
        try:
            request = parent.recv()
        except EOFError:
            return
        try:
            # TVM keeps what is half written per thread, and would go on with it after an error.
            with ThreadPoolExecutor(1) as fresh:
                functions = fresh.submit(_defined, Writer(tvm), request).result()
            if request.target == "cuda":
                image = source_of(tvm, functions, cuda).encode()
            else:
                image = _object_file(tvm.compile(tvm.IRModule(functions), target=target, tir_pipeline=_PIPELINE).mod)
            parent.send(Built(tuple(sorted(functions)), image))
        except Exception as error:
            reason = str(error).strip().splitlines() or [""]
            parent.send(f"{type(error).__name__}: {reason[-1]}")


def _object_file(module: Any) -> bytes:
    with tempfile.TemporaryDirectory(prefix="hybridpar-") as aside:
        file = Path(aside, "kernels.o")
        module.write_to_file(str(file), "o")
        return file.read_bytes()


def _defined(writer: Any, request: Request) -> dict[str, Any]:
    """The functions that are asked for."""
    functions: dict[str, Any] = {}
    for source in request.sources:
        functions |= _imported(source).define(writer, **request.arguments)
    return functions


@functools.cache
def _imported(source: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kernels_of_{source.stem}", source)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{source} is no Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there for their module
    spec.loader.exec_module(module)
    return module


def _features() -> dict[str, list[str]]:
    """What LLVM concludes wrongly from the CPU's model, as in virtual machines that do not offer all of it."""
    flags = cpu_info().get("flags", "").split()
    if not flags:
        return {}
    features = ("avx", "avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq")
    differing = [f"-{feature}" for feature in features if feature not in flags]
    # Of a CPU whose model is not what it has it concludes too little, and this one instruction has no substitute.
    differing += ["+avx512bf16"] if {"avx512f", "avx512_bf16"} <= {*flags} else []
    return {"mattr": differing} if differing else {}


def _register_pipeline(tvm: Any) -> None:
    """The few passes that code without blocks, schedules and storage to lower needs; TVM's others take time alone.

    `LowerTVMBuiltin` is not among them: it makes each array a call of an allocator, which keeps LLVM from holding it in
    registers.
    """
    tirx = tvm.tirx.transform
    passes = [tirx.UnrollLoop(), tirx.FlattenBuffer(), tirx.StmtSimplify(), tirx.VerifyMemory()]
    passes += [tirx.AnnotateEntryFunc(), tirx.SplitHostDevice(), tirx.MakePackedAPI()]
    pipeline = tvm.ir.transform.Sequential(passes), tirx.LowerIntrin, tirx.LowerIntrin
    tvm.tirx.compilation_pipeline.register_tir_pipeline(_PIPELINE, lambda: pipeline)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
