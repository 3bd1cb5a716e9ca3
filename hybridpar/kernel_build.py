"""Why: kernels are compiled for the CPU they run on, once, and later starts need neither compiler nor TVM.

Kernels are defined in source files of their own, each with a function `define(writer)` that returns functions of TIR by
name, written out or made by a schedule of `writer.tvm`. They are compiled to one object file by a child process, as
`import tvm` takes seconds and brings threads of its own. apache-tvm-ffi-orcjit loads that from memory, without linker
or compiler.

The file is kept in the user's cache (`hybridpar.kernel_cache`). Its name says what it was made from: the sources, TVM's
version, the CPU with its features. Where nothing can be built one line is logged, and callers use their fallback.
`HYBRIDPAR_KERNELS=off` says that from the start.

This is the only module that imports TVM.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridpar.kernel_cache import TIMEOUT, KernelsUnavailable, cache_path, cached, wanted

_log = logging.getLogger(__name__)

_session: Any = None
_loading = threading.Lock()

Function = Callable[..., Any]


def load_kernels(name: str, sources: Sequence[Path]) -> dict[str, Function] | None:
    """The functions that source files define, built if that has not been done on this machine.

    It is no collective: each process loads for itself, and the first one of a machine builds.

    Args:
        name: What they are called in the cache and in messages.
        sources: The files that define them.

    Returns:
        Functions by name; they release the GIL while they run. None where they are switched off or cannot be had,
        which is logged in one line.
    """
    if not wanted():
        _log.info("%s kernels are switched off by HYBRIDPAR_KERNELS", name)
        return None
    try:
        content = cached(kernel_path(name, sources), lambda directory: _built(directory, sources))
        names = json.loads(content[: content.index(b"\n")])
        return _functions(content[content.index(b"\n") + 1 :], names)
    except (KernelsUnavailable, ImportError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        _log.warning("%s kernels cannot be had, slower torch code is used: %s", name, reason[-1])
        return None


def kernel_path(name: str, sources: Sequence[Path]) -> Path:
    """The cache file of some kernels on this machine."""
    own = [Path(__file__), Path(__file__).with_name("kernel_writer.py")]
    made_from = {
        "sources": [hashlib.sha256(path.read_bytes()).hexdigest() for path in (*own, *sources)],
        "tvm": [_version("apache-tvm"), _version("apache-tvm-ffi"), _version("apache-tvm-ffi-orcjit")],
        "device": _cpu(),
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
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in wanted_keys:
                found.setdefault(key.strip(), " ".join(sorted(value.split())))
    return [platform.system(), platform.machine(), *(f"{key}={found[key]}" for key in sorted(found))]


def _built(directory: Path, sources: Sequence[Path]) -> bytes:
    """Compile in a child process."""
    made = directory / "kernels.o"
    command = [sys.executable, "-m", __name__, str(made), *map(str, sources)]
    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TVM_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(f"building took more than {TIMEOUT:.0f} s") from error
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        raise KernelsUnavailable(f"building failed: {reason[-1]}")
    return made.read_bytes()


def _functions(image: bytes, names: Sequence[str]) -> dict[str, Function]:
    """Load an object file that lies in memory."""
    global _session
    import tvm_ffi_orcjit

    with _loading:
        if _session is None:
            # Plain C objects need no platform, and the kernels fit in the smallest slab.
            _session = tvm_ffi_orcjit.ExecutionSession(orc_rt=None, slab_size=4 << 20)
        # Looking for a C++ runtime would start a compiler; these objects use none.
        module = _session.load_module(image, keep_module_alive=True, cxx="-")
    return {name: module[name] for name in names}


# ---------------------------------------------------------------------------------------------------- the child process


def _compile(out: Path, sources: Sequence[Path]) -> None:
    """Compile source files to an object file behind a line that names the functions."""
    import tvm
    from tvm.script import ir_builder  # noqa: F401 - the writer reaches it as tvm.script.ir_builder
    from tvm.target import codegen
    from tvm.tirx.script.builder import ir  # noqa: F401 - and this one as tvm.tirx.script.builder.ir

    from hybridpar.kernel_writer import Writer

    functions: dict[str, Any] = {}
    for source in sources:
        spec = importlib.util.spec_from_file_location(source.stem, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        functions |= module.define(Writer(tvm))
    _register_pipeline(tvm)
    target = tvm.target.Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), **_features()})
    executable = tvm.compile(tvm.IRModule(functions), target=target, tir_pipeline="hybridpar")
    image = out.with_suffix(".image.o")
    executable.mod.write_to_file(str(image), "o")
    out.write_bytes(json.dumps(sorted(functions)).encode() + b"\n" + image.read_bytes())


def _features() -> dict[str, list[str]]:
    """What LLVM would conclude from the CPU's model, but the system does not offer, as in some virtual machines."""
    flags = next((entry for entry in _cpu() if entry.startswith("flags=")), "").partition("=")[2].split()
    if not flags:
        return {}
    named = {"avx": "avx", "avx2": "avx2", "fma": "fma", "bmi2": "bmi2", "avx512f": "avx512f", "avx512bw": "avx512bw"}
    named |= {"avx512vl": "avx512vl", "avx512dq": "avx512dq"}
    missing = [f"-{feature}" for feature, flag in named.items() if flag not in flags]
    return {"mattr": missing} if missing else {}


def _register_pipeline(tvm: Any) -> None:
    """TVM's default passes, but arrays in scope `local` stay on the stack.

    Otherwise each becomes a call of TVM's allocator, which also keeps LLVM from holding them in registers.
    """
    pipelines = tvm.tirx.compilation_pipeline.PIPELINE_MAP

    def pipeline() -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
        passes, host, device = pipelines["s_tir"]()
        mark = tvm.tirx.transform.prim_func_pass(
            lambda function, _module, _context: function.with_body(_on_stack(tvm, function.body)), opt_level=0
        )
        return passes, lambda: tvm.ir.transform.Sequential([mark, host()]), device

    pipelines["hybridpar"] = pipeline


def _on_stack(tvm: Any, node: Any) -> Any:
    """A statement whose local arrays are marked; there is no mutator of statements in Python."""
    kinds = tvm.tirx.stmt

    def inside(one: Any) -> Any:
        return None if one is None else _on_stack(tvm, one)

    if isinstance(node, kinds.SeqStmt):
        return kinds.SeqStmt([inside(one) for one in node.seq])
    if isinstance(node, kinds.For):
        body = inside(node.body)
        return kinds.For(
            node.loop_var, node.min, node.extent, node.kind, body, node.thread_binding, node.annotations, node.step
        )
    if isinstance(node, kinds.AttrStmt):
        return kinds.AttrStmt(node.node, node.attr_key, node.value, inside(node.body))
    if isinstance(node, kinds.IfThenElse):
        return kinds.IfThenElse(node.condition, inside(node.then_case), inside(node.else_case))
    if isinstance(node, kinds.AllocBuffer) and node.buffer.scope() == "local":
        marks = {**dict(node.annotations or {}), "disable_lower_builtin": tvm.tirx.const(1, "bool")}
        return kinds.AllocBuffer(node.buffer, marks)
    return node


if __name__ == "__main__":
    _compile(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
