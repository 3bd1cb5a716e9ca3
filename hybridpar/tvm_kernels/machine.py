"""What this CPU is: its fingerprint, vectors and registers; and what GPUs have, from which follows which tiles fit.

Where there is a GPU its own figures are read; those of H100, H200 and A100 are built in, from NVIDIA's data sheets, so
that candidates can be compiled on a machine without one.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import re
from dataclasses import dataclass

import torch

from hybridpar.codegen.build import cpu_info
from hybridpar.machine.devices import cpu_name


def cpu_features() -> frozenset[str]:
    """The instruction sets of the CPU, as Linux names them; empty where they are not known."""
    return frozenset((cpu_info().get("flags") or cpu_info().get("Features", "")).split())


@functools.cache
def cpu_fingerprint() -> str:
    """The CPU's name and eight digits over its instruction sets, which differ between kinds of CPU.

    Records of kernels hold for one fingerprint.
    """
    digest = hashlib.sha256(" ".join(sorted(cpu_features())).encode()).hexdigest()[:8]
    return f"{cpu_name()} {digest}"


@dataclass(frozen=True)
class Machine:
    """A CPU as the search sees it.

    Attributes:
        lanes: Float32 values in a vector register.
        registers: Vector registers.
        bfloat16: Whether an instruction rounds float32 to it (AVX512_BF16).
    """

    lanes: int
    registers: int
    bfloat16: bool = False


@functools.cache
def this_machine() -> Machine:
    """The CPU that this process runs on."""
    flags = cpu_features()
    if platform.machine() in ("aarch64", "arm64"):
        lanes, registers = 4, 32
    elif "avx512f" in flags:
        lanes, registers = 16, 32
    else:
        lanes, registers = 8 if "avx" in flags else 4, 16
    return Machine(lanes, registers, "avx512_bf16" in flags)


@dataclass(frozen=True)
class Gpu:
    """A GPU as the search sees it.

    Attributes:
        name: As torch has it.
        architecture: As in `sm_90`.
        processors: Streaming multiprocessors (SM).
        shared_bytes: Shared memory of an SM.
        registers: 32-bit registers of an SM.
        threads: That an SM holds at a time.
        blocks: That an SM holds at a time.
    """

    name: str
    architecture: str
    processors: int
    shared_bytes: int
    registers: int = 65536
    threads: int = 2048
    blocks: int = 32

    @property
    def fingerprint(self) -> str:
        """Name and architecture, by which records tell kinds of GPU apart."""
        return f"{self.name} {self.architecture}"


#: GPUs that need not be there, by name: SXM modules.
KNOWN = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", "sm_80", 108, 164 << 10),
    "h100": Gpu("NVIDIA H100 80GB HBM3", "sm_90", 132, 228 << 10),
    "h200": Gpu("NVIDIA H200", "sm_90", 132, 228 << 10),
}

_FINGERPRINT = re.compile(r".+ sm_\d+[a-z]?")


def is_gpu(fingerprint: str) -> bool:
    """Whether a record's device is a GPU."""
    return _FINGERPRINT.fullmatch(fingerprint) is not None


def gpu_of(fingerprint: str) -> Gpu:
    """The GPU of a record's device."""
    known = {gpu.fingerprint: gpu for gpu in KNOWN.values()}
    return known.get(fingerprint) or gpu_at(torch.cuda.current_device())


@functools.cache
def gpu_at(index: int) -> Gpu:
    """Figures of a GPU of this machine."""
    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        properties.name,
        f"sm_{properties.major}{properties.minor}",
        properties.multi_processor_count,
        getattr(properties, "shared_memory_per_multiprocessor", KNOWN["a100"].shared_bytes),
        threads=properties.max_threads_per_multi_processor,
    )
