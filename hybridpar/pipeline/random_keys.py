"""Random operations of stages, such as dropout, that do not depend on the order in which lanes run.

All threads of a process draw from torch's one generator, so masks would depend on the interleaving of stages, and a
forward pass that is run again for its activations would draw others. Here every random operation of a stage is keyed
by the seed, the step, the micro-batch and the operation's own name in the model's graph: the masks are the same for
any number of stages, lanes and workers, any schedule, and any recomputation.

On a CPU such an operation draws from a generator of its own, because the host may draw from torch's one at the same
time, for instance to augment the next batch, and neither must change what the other gets.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

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
        compiled: Stages are compiled. Such code draws from torch's one generator, so the host should not meanwhile.
    """

    seed: int
    device: torch.device
    first: int = 0
    compiled: bool = False

    @contextmanager
    def of(self, step: int, micro_batch: int) -> Iterator[None]:
        """Inside, random operations of stages on this thread belong to a micro-batch of a step.

        Args:
            step: Number of the step.
            micro_batch: Its number among those of this replica.
        """
        own = self.device.type == "cpu" and not self.compiled
        _local.key = (self.device, f"{self.seed}:{step}:{self.first + micro_batch}", own)
        _local.leave = None
        try:
            yield
        finally:
            leave_random()  # where the operation failed
            _local.key = None


@contextmanager
def numbers_of_its_own(device: torch.device, compiled: bool = False) -> Iterator[None]:
    """Inside, this thread draws random numbers of its own; those of other threads do not change.

    For example runs. On a CPU another thread may draw meanwhile, so torch's one generator is not even saved and put
    back.

    Args:
        device: What draws.
        compiled: Compiled code runs inside. It knows no generator but torch's one, which is then saved and put back.
    """
    if device.type == "cuda" or compiled:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    else:
        with _OwnGenerator(0):
            yield


def key_random_operations(graph: fx.Graph, modules: nn.Module, *, compiled: bool = False) -> int:
    """Surround every random operation of a graph by calls that seed it by its name; the caller recompiles.

    Args:
        graph: Edited in place.
        modules: Where the graph's modules are.
        compiled: Keep torch.compile out of the calls, which it would compile again for every micro-batch of every step.

    Returns:
        How many there are.
    """
    enter, leave = (torch.compiler.disable(one) if compiled else one for one in (enter_random, leave_random))  # type: ignore[no-untyped-call]
    count = 0
    for node in list(graph.nodes):
        if not _is_random(node, modules):
            continue
        count += 1
        if (before := node.prev).args == (node.name,):  # the stage has been in a pipeline before
            before.target, node.next.target = enter, leave
        else:
            with graph.inserting_before(node):
                graph.call_function(enter, (node.name,))
            with graph.inserting_after(node):
                graph.call_function(leave)
    return count


def enter_random(name: str) -> None:
    """Seed the generator for one operation. Does nothing where no micro-batch is known.

    Args:
        name: Of the operation.
    """
    key = getattr(_local, "key", None)
    if key is None:
        return
    device, text, own = key
    seed = zlib.crc32(f"{text}:{name}".encode())
    if own:
        mode = _OwnGenerator(seed)
        mode.__enter__()  # type: ignore[no-untyped-call]
        _local.leave = partial(mode.__exit__, None, None, None)
    elif device.type == "cuda":
        # One thread issues everything to a GPU, and its generator is advanced at the time of issue.
        _local.leave = partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
        torch.cuda.default_generators[device.index].manual_seed(seed)
    else:
        _lock.acquire()
        _local.leave = partial(_put_back, torch.get_rng_state())
        torch.default_generator.manual_seed(seed)


def leave_random() -> None:
    """End what `enter_random` began, if it did."""
    leave = getattr(_local, "leave", None)
    if leave is not None:
        _local.leave = None
        leave()


def _put_back(state: Tensor) -> None:
    torch.set_rng_state(state)
    _lock.release()


class _OwnGenerator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random operators of this thread draw from a generator of their own."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func(*args, **{**kwargs, "generator": self._generator})
        # This operator knows no generator but torch's one, such as `rand_like`.
        seed = int(torch.randint(1 << 62, (), generator=self._generator))
        with _lock, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return func(*args, **kwargs)


def _is_random(node: fx.Node, modules: nn.Module) -> bool:
    if node.meta.get("random"):  # it drew some in an example run
        return True
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
