"""A communication hook that gives DistributedDataParallel any codec.

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(*ddp_hook("onebit:warmup=100", model))

DDP calls the hook once per bucket, from autograd, while backward still computes. On a CPU the exchange runs on a thread
with connections of its own: a chain of collectives that is started from callbacks can come in another order on each
worker, and then hangs. On a GPU it runs on a stream of its own, issued from the thread that calls.

DDP does not say whether a step counts. So a step is settled when the next one begins: where a gradient was not finite,
no parameter's residual changes, as a loss scaler skips the whole step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hybridpar.comm.group import TorchGroup, timeout_of
from hybridpar.comm.world import World
from hybridpar.compress.codec import Codec
from hybridpar.compress.coders import BucketExchange, ParameterCoders
from hybridpar.compress.exchange import Traffic
from hybridpar.compress.nodes import NodeWorlds
from hybridpar.compress.policy import Policy, read_policy
from hybridpar.errors import CheckpointError, SyncError, UsageError, check

_log = logging.getLogger(__name__)

#: `torch.distributed.GradBucket`, which torch's stubs do not have.
GradBucket = Any
Hook = Callable[["CodecState", GradBucket], "torch.futures.Future[Tensor]"]


def ddp_hook(
    codec: str | Codec | Policy,
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
    hierarchical: bool = False,
) -> tuple[CodecState, Hook]:
    """State and hook for `DistributedDataParallel.register_comm_hook`; a collective of all workers of the group.

    Args:
        codec: How gradients are sent: a codec, a policy, or the text of one, such as `powersgd:rank=2`; `auto` is for
            hybridpar's own training alone.
        model: The model inside of DDP, whose parameters' names state is kept under.
        group: The process group that DDP was given; None for the default one. Its time-out holds here as well.
        seed: For what codecs draw at random; equal on all workers.
        hierarchical: Add in full precision inside a node and use the codec between nodes alone, where there are several
            nodes and one of them has several workers; elsewhere this changes nothing.

    Raises:
        UsageError: The codec is unknown, or the workers do not agree on it.
    """
    state = CodecState(codec, model, group=group, seed=seed, hierarchical=hierarchical)
    return state, CodecState.exchange


class CodecState(ParameterCoders):
    """What the hook keeps between steps. `close` it, or use it as a context, before process groups are destroyed."""

    def __init__(
        self,
        codec: str | Codec | Policy,
        model: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        hierarchical: bool = False,
    ) -> None:
        policy = read_policy(codec) if isinstance(codec, str) else codec
        policy = policy if isinstance(policy, Policy) else Policy.of(policy)
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        policy.check(self._names.values())
        self._exchanges: dict[tuple[str, ...], BucketExchange] = {}
        self._finite: list[Tensor] = []  # of the step under way, for each bucket
        self._used: list[BucketExchange] = []
        #: Bytes of the step under way, or of the last one.
        self.traffic = Traffic()
        world = world_of(group, model)
        self._group = world.lane_groups[0]
        answers = self._group.gather(f"{policy}, seed {seed}{', hierarchical' if hierarchical else ''}")
        table = "; ".join(f"worker {rank}: {text}" for rank, text in enumerate(answers))
        alike = len(set(answers)) == 1
        check(alike, f"the workers do not agree: {table}", "One codec is used by all.", "Start all alike.")
        everybody = [range(world.size)]
        nodes = NodeWorlds.open(world, everybody, 1) if hierarchical else None
        super().__init__(policy, world, seed, nodes, average=True)
        # Those with whom this worker exchanges by the codec, where it is not alone, and its node.
        self._across, self._inside = (world.open_groups(everybody)[0], None) if nodes is None else nodes.groups(0)
        #: What `fits` compares, of all workers.
        self._layouts = self._group.gather([*self._ranks, self._node_sizes])
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(
            1, "codec", torch.set_num_threads, (torch.get_num_threads(),)
        )
        self._streams: dict[torch.device, Any] = {}

    # ------------------------------------------------------------------ a step

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Exchange a bucket that DDP hands over."""
        if self._thread is None:
            raise UsageError(
                "the hook of a state that is closed",
                "Its thread and process groups are gone.",
                "Close it after the last backward pass, or register a new hook with a new DDP.",
            )
        flat: Tensor = bucket.buffer().detach()  # with create_graph, gradients have histories
        parameters: list[Tensor] = bucket.parameters()
        types = ["sparse"] if flat.is_sparse else [str(parameter.dtype) for parameter in parameters]
        wrong = [kind for kind in types if kind != "torch.float32"]
        if wrong:
            raise UsageError(
                f"gradients of type {wrong[0]}",
                "Codecs take dense float32 gradients.",
                "Keep the parameters in float32 (autocast leaves them there), and build layers with sparse=False.",
            )
        if bucket.index() == 0:
            self.settle()
            self.traffic = Traffic()
        exchange = self._exchange_of(parameters)
        self.traffic += exchange.traffic
        self._used.append(exchange)

        def run() -> Tensor:
            try:
                exchange.add(flat, self._across or self._group, self._inside)
            except RuntimeError as error:
                raise SyncError(
                    f"worker {self._group.rank} stopped while exchanging gradients: {error}",
                    "Every worker takes part in every exchange.",
                    "Look at the first worker that failed, and start all of them again.",
                ) from error
            # Not finite on one worker is not finite on all of them, so all conclude the same.
            self._finite.append(torch.isfinite(flat.sum()))
            return flat

        return self._on_stream(run, flat.device) if flat.is_cuda else _on_thread(run, self._thread)

    def settle(self) -> None:
        """The step that was exchanged last is over: its residuals count if all of it arrived, and is finite."""
        arrived = len(self._finite) == len(self._used)
        for exchange in self._used if arrived and all(self._finite) else ():
            exchange.commit()
        self.rollback()

    def rollback(self) -> None:
        """Forget what the last step left: to be called where the loop skips it for a reason of its own."""
        self._used, self._finite = [], []

    # ------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the codec, its state by parameter, and the worker's place. Settles the last step.

        It is this worker's own: each saves what `state_dict` returned there, or one of them what `gather_state_dicts`
        did.
        """
        self.settle()
        return super().state_dict()

    def gather_state_dicts(self) -> list[dict[str, Any]]:
        """The states of all workers, by rank, on worker 0, and nothing on the others; a collective.

        For writing one file. Tensors are on the CPU.
        """
        mine = tree_map_only(Tensor, Tensor.cpu, self.state_dict())
        return self._group.gather_on_first(mine, range(self._group.size)) or []

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Restore what `state_dict` returned on this worker, or on all workers of the run that is resumed.

        With the states of all workers there may be more or fewer of them now, or nodes of other sizes: then codecs
        begin anew, and what had not been sent is dropped with a warning.
        """
        if not isinstance(state, Mapping):
            if not state:
                raise CheckpointError(
                    "an empty list of states",
                    "gather_state_dicts gives those of all workers on worker 0 alone.",
                    "Give its list to all workers.",
                )
            saved, state = state, state[0]
            if [[part["rank"], part["workers"], part["nodes"]] for part in saved] == self._layouts:
                state = saved[self._group.rank]
            else:  # all workers see the same, so all begin anew
                _log.warning("what codec %s has not sent is dropped: the workers are others now", state["codec"])
                state = {**state, "parameters": {}, "leaders": {}}
        elif not self.fits(state):
            raise CheckpointError(
                f"the state of {_worker_text(state['rank'], state['workers'], state['nodes'])}, and this is "
                f"{_worker_text(*self._ranks, self._node_sizes)}",
                "Each worker keeps what it did not send.",
                "Give each worker the state that it saved, or start without them.",
            )
        if state["codec"] != str(self.policy):
            raise CheckpointError(
                f"the state is that of codec {state['codec']!r}, and {str(self.policy)!r} is used",
                "What a codec keeps means nothing to another one.",
                "Use the same codec, or start without its state.",
            )
        self._load(state)
        self._exchanges = {}

    def close(self) -> None:
        """End the thread and process groups. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)
            if self._nodes is not None:
                self._nodes.close()
            elif self._across is not None:
                self._across.close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy is closed and empty: a DDP that is copied, or read from a file, calls no hook."""
        return {"_thread": None, "_used": [], "_finite": []}

    def __enter__(self) -> CodecState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----------------------------------------------------------------- helpers

    def _exchange_of(self, parameters: Sequence[Tensor]) -> BucketExchange:
        """DDP cuts its buckets anew after the first step, so coders are kept by parameter and exchanges by bucket."""
        names = tuple(map(self._name, parameters))
        if names not in self._exchanges:
            self._exchanges[names] = self.exchange_of(names, parameters)
        return self._exchanges[names]

    def _name(self, parameter: Tensor) -> str:
        check(
            parameter in self._names,
            f"DDP trains a parameter of shape {tuple(parameter.shape)} that the model given to the hook lacks",
            "State is kept under the parameters' names.",
            "Give the model that DDP was given.",
        )
        return self._names[parameter]

    def _on_stream(self, run: Callable[[], Tensor], device: torch.device) -> torch.futures.Future[Tensor]:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device])
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            future.set_result(run())  # notes the stream, so that who waits does so on the device
        return future


def _on_thread(run: Callable[[], Tensor], thread: ThreadPoolExecutor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()

    def work() -> None:
        try:
            future.set_result(run())
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]

    thread.submit(work)
    engine: Any = torch.autograd.Variable._execution_engine
    with contextlib.suppress(RuntimeError):  # outside of backward, as in `DistributedDataParallel.join`
        engine.queue_callback(future.wait)  # before DDP waits, which would hide the error's type
    return future.then(torch.futures.Future.wait)  # DDP takes an exception that was set for the value


CodecState.exchange.__annotations__ = {}  # DDP compares them with its own types, and ours are text


def _worker_text(rank: int, workers: int, nodes: Sequence[int]) -> str:
    on_nodes = f" on nodes of {', '.join(map(str, nodes))} workers" if nodes else ""
    return f"worker {rank} of {workers}{on_nodes}"


def world_of(group: dist.ProcessGroup | None, model: nn.Module) -> World:
    """The workers of a process group that train a model; of the default one where it is None."""
    control, members = TorchGroup(group), dist.get_process_group_ranks(group or dist.group.WORLD)
    return World(
        *(control.rank, control.size, next(model.parameters()).device, timeout_of(group)),
        lane_groups=[control],
        control=control,
        transport=control.transport,
        share_memory=False,
        members=tuple(members),
        job_size=dist.get_world_size(),
    )
