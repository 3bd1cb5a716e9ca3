"""Why: dropout must not depend on which lane happened to come first.

All threads of a process draw from torch's one generator, so masks would depend on the interleaving of stages, and a
forward pass that is run again for its activations would draw others. Here every random operation of a stage is keyed
by the seed, the step, the micro-batch and the operation's own name in the model's graph: the masks are the same for
any number of stages, lanes and workers, any schedule, and any recomputation.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

_lock = threading.Lock()
_local = threading.local()

#: Operations without a module that draw random numbers, by the name of the function or method.
_FUNCTIONS = {
    "alpha_dropout",
    "bernoulli",
    "bernoulli_",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "dropout_",
    "feature_alpha_dropout",
    "feature_dropout",
    "gumbel_softmax",
    "multinomial",
    "normal",
    "normal_",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "rrelu",
    "rrelu_",
    "scaled_dot_product_attention",
    "stochastic_depth",
    "uniform_",
}


@dataclass(frozen=True)
class RandomKeys:
    """The key of the random operations of a replica.

    Attributes:
        seed: Equal on all workers.
        device: Whose generator is seeded.
        first: Number of the replica's first micro-batch among those of all replicas.
    """

    seed: int
    device: torch.device
    first: int = 0

    @contextmanager
    def of(self, step: int, micro_batch: int) -> Iterator[None]:
        """Inside, random operations of stages on this thread belong to a micro-batch of a step."""
        _local.key = (self.device, f"{self.seed}:{step}:{self.first + micro_batch}")
        try:
            yield
        finally:
            if getattr(_local, "state", None) is not None:
                leave_random()  # the operation failed
            _local.key = None


def key_random_operations(graph: fx.Graph, modules: nn.Module) -> int:
    """Surround every random operation of a graph by calls that seed it by its name; the caller recompiles.

    Args:
        graph: Edited in place.
        modules: Where the graph's modules are.

    Returns:
        How many there are.
    """
    count = 0
    for node in list(graph.nodes):
        if not _is_random(node, modules):
            continue
        count += 1
        if node.prev.target is not enter_random:  # else the stage has been in a pipeline before
            with graph.inserting_before(node):
                graph.call_function(enter_random, (node.name,))
            with graph.inserting_after(node):
                graph.call_function(leave_random)
    return count


def enter_random(name: str) -> None:
    """Seed the generator for one operation. Does nothing where no micro-batch is known."""
    key = getattr(_local, "key", None)
    if key is None:
        return
    device, text = key
    seed = zlib.crc32(f"{text}:{name}".encode())
    if device.type == "cuda":
        # One thread issues everything to a GPU, and its generator is advanced at the time of issue.
        _local.state = torch.cuda.get_rng_state(device)
        torch.cuda.default_generators[device.index].manual_seed(seed)
        return
    _lock.acquire()  # the CPU's generator is shared by all lanes
    _local.state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)


def leave_random() -> None:
    """Give the generator its own state back."""
    key = getattr(_local, "key", None)
    if key is None:
        return
    if key[0].type == "cuda":
        torch.cuda.set_rng_state(_local.state, key[0])
        _local.state = None
        return
    torch.set_rng_state(_local.state)
    _local.state = None
    _lock.release()


def _is_random(node: fx.Node, modules: nn.Module) -> bool:
    if node.op == "call_module":
        return any(_draws(module) for module in modules.get_submodule(str(node.target)).modules())
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("call_function", "call_method") and name in _FUNCTIONS


def _draws(module: Any) -> bool:
    """Whether a module's forward pass may draw random numbers: dropout, or something that holds a dropout rate."""
    if isinstance(module, nn.RReLU | nn.modules.dropout._DropoutNd | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return True
    rate = getattr(module, "dropout", None)
    return isinstance(rate, float) and rate > 0
