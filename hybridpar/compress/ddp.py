"""Why: whoever trains with DistributedDataParallel should get the codecs without giving up the loop.

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(*ddp_hook("onebit:warmup=100"))

DDP calls the hook once per bucket, from autograd, while backward still computes. On a CPU the exchange runs on a thread
with a process group of its own: a chain of collectives that is started from callbacks can come in another order on each
worker, and then hangs. On a GPU it runs on a stream of its own, issued from the thread that calls.

DDP does not say whether a step counts. So a step is settled when the next one begins: where a gradient was not finite,
every parameter's residual is put back, as a loss scaler skips the whole step.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridpar.compress.codec import Codec, Coder, TensorSpec
from hybridpar.compress.exchange import Exchange, Traffic
from hybridpar.compress.group import TorchGroup
from hybridpar.compress.kernels import prepare
from hybridpar.compress.text import bind, format_codec, parse_codec
from hybridpar.errors import CheckpointError, UsageError

#: `torch.distributed.GradBucket`, which torch's stubs do not have.
GradBucket = Any
Hook = Callable[["CodecState", GradBucket], "torch.futures.Future[Tensor]"]


def ddp_hook(
    codec: str | Codec,
    model: nn.Module | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    lanes: int = 1,
    seed: int = 0,
    timeout: float = 120.0,
) -> tuple[CodecState, Hook]:
    """State and hook for `DistributedDataParallel.register_comm_hook`; a collective of all workers of the job.

    Args:
        codec: What gradients travel as: a codec or its text, such as `onebit` or `powersgd:rank=2`.
        model: The model inside of DDP, whose parameters' names state is kept under. Without it they are numbered in
            the order in which DDP first hands them over, which is the same for the same model.
        group: The process group that DDP was given; None for the default one.
        lanes: Exchanges that may be under way at one time, each with a process group of its own.
        seed: For what codecs draw at random; equal on all workers.
        timeout: Seconds after which a silent worker is an error.

    Raises:
        UsageError: The codec is unknown, or the workers do not agree on it.
    """
    state = CodecState(codec, model, group=group, lanes=lanes, seed=seed, timeout=timeout)
    return state, _hook


class CodecState:
    """What the hook keeps between steps. `close` it, or use it as a context, before process groups are destroyed.

    Args:
        See `ddp_hook`.
    """

    def __init__(
        self,
        codec: str | Codec,
        model: nn.Module | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        lanes: int = 1,
        seed: int = 0,
        timeout: float = 120.0,
    ) -> None:
        self.codec = parse_codec(codec) if isinstance(codec, str) else codec
        self._names: dict[Tensor, str] = {}
        if model is not None:
            self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._named_by_model = model is not None
        self._seed = seed
        self._coders: dict[str, Coder] = {}
        self._exchanges: dict[tuple[str, ...], Exchange] = {}
        self._saved: dict[str, Any] = {}
        self._finite: list[Tensor] = []  # of the step under way, one per bucket
        self._used: list[Exchange] = []
        #: Bytes of the step under way, or of the last one.
        self.traffic = Traffic()
        if dist.get_backend(group) != "nccl":
            prepare(self.codec)
        ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
        _require_agreement(format_codec(self.codec), seed, lanes, group)
        limit = datetime.timedelta(seconds=timeout)
        self._groups: list[Any] = [dist.new_group(ranks, timeout=limit) for _ in range(lanes)]
        threads = torch.get_num_threads()
        self._threads = [
            ThreadPoolExecutor(1, f"codec-{lane}", torch.set_num_threads, (threads,)) for lane in range(lanes)
        ]
        self._streams: dict[torch.device, list[torch.cuda.Stream]] = {}

    # ------------------------------------------------------------------ a step

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Exchange a bucket that DDP hands over.

        Returns:
            The bucket's buffer, which then holds the mean over the workers.

        Raises:
            UsageError: Gradients are not dense float32.
        """
        flat: Tensor = bucket.buffer()
        if flat.dtype != torch.float32 or flat.is_sparse:
            raise UsageError(
                f"gradients of type {flat.dtype}",
                "Codecs take dense float32 gradients.",
                "Keep the parameters in float32 (autocast leaves them there).",
            )
        if bucket.index() == 0:
            self.settle()
        exchange = self._exchange_of(bucket)
        self.traffic += exchange.traffic
        self._used.append(exchange)
        parts = flat.split([parameter.numel() for parameter in bucket.parameters()])  # type: ignore[no-untyped-call]
        lane = bucket.index() % len(self._groups)

        def run() -> Tensor:
            exchange.run(TorchGroup(self._groups[lane]), parts, parts)
            # Not finite on one worker is not finite on all of them, so all conclude the same.
            self._finite.append(torch.isfinite(flat.sum()))
            return flat

        if flat.device.type == "cuda":
            return self._on_stream(run, flat.device, lane)
        return self._on_thread(run, lane)

    def settle(self) -> None:
        """The step that was exchanged last is over: keep its residuals, or put them back if it was not finite."""
        if all(bool(finite) for finite in self._finite):
            for exchange in self._used:
                exchange.commit()
        else:
            for exchange in self._used:
                exchange.rollback()
        self._used, self._finite, self.traffic = [], [], Traffic()

    def rollback(self) -> None:
        """Put back what the last step left: to be called where the loop skips it for a reason of its own."""
        self._finite = [torch.tensor(False)]
        self.settle()

    def set_rate(self, learning_rate: float) -> None:
        """Say which learning rate the coming steps use, for error feedback with `rescale`."""
        for exchange in self._exchanges.values():
            exchange.rescale(learning_rate)

    # ------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the codec, and its state by parameter, the worker's own. Settles the last step."""
        self.settle()
        return {
            "codec": format_codec(self.codec),
            "parameters": {name: one.state_dict() for name, one in self._coders.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on this worker.

        Raises:
            CheckpointError: The state is that of another codec, or of another number of workers.
        """
        if state["codec"] != format_codec(self.codec):
            raise CheckpointError(
                f"the state is that of codec {state['codec']!r}, and {format_codec(self.codec)!r} is used",
                "What a codec keeps means nothing to another one.",
                "Use the same codec, or start without its state.",
            )
        self._saved = dict(state["parameters"])
        for name, coder in self._coders.items():
            if name in self._saved:
                coder.load_state_dict(self._saved.pop(name))

    def close(self) -> None:
        """End threads and process groups. Safe to call twice."""
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        groups, self._groups = self._groups, []
        if dist.is_initialized():
            for group in groups:
                dist.destroy_process_group(group)

    def __enter__(self) -> CodecState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ----------------------------------------------------------------- helpers

    def _exchange_of(self, bucket: GradBucket) -> Exchange:
        """DDP cuts its buckets anew after the first step, so coders are kept by parameter and exchanges by bucket."""
        names = tuple(self._name(parameter) for parameter in bucket.parameters())
        if names not in self._exchanges:
            coders = [self._coder(name, one) for name, one in zip(names, bucket.parameters(), strict=True)]
            self._exchanges[names] = Exchange(coders)
        return self._exchanges[names]

    def _coder(self, name: str, parameter: Tensor) -> Coder:
        if name not in self._coders:
            group = self._groups[0]
            spec = TensorSpec(
                name,
                tuple(parameter.shape),
                dist.get_rank(group),
                dist.get_world_size(group),
                self._seed,
                parameter.device,
            )
            self._coders[name] = coder = bind(self.codec, spec)
            if name in self._saved:
                coder.load_state_dict(self._saved.pop(name))
        return self._coders[name]

    def _name(self, parameter: Tensor) -> str:
        if parameter not in self._names:
            if self._named_by_model:
                raise UsageError(
                    f"DDP trains a parameter of shape {tuple(parameter.shape)} that the model given to the hook lacks",
                    "State is kept under the parameters' names.",
                    "Give the model that DDP was given, or none.",
                )
            self._names[parameter] = f"parameter-{len(self._names)}"
        return self._names[parameter]

    def _on_thread(self, run: Callable[[], Tensor], lane: int) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()

        def work() -> None:
            try:
                future.set_result(run())
            except Exception as error:  # handed to whoever waits for the bucket
                future.set_exception(error)  # type: ignore[arg-type]

        self._threads[lane].submit(work)
        return future

    def _on_stream(self, run: Callable[[], Tensor], device: torch.device, lane: int) -> torch.futures.Future[Tensor]:
        if device not in self._streams:
            new: Any = torch.cuda.Stream
            self._streams[device] = [new(device) for _ in self._groups]
        streams = self._streams[device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device])
        streams[lane].wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(streams[lane]):
            future.set_result(run())  # notes the stream, so that who waits does so on the device
        return future


def _hook(state: CodecState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return state.exchange(bucket)


_hook.__annotations__ = {}  # DDP compares them with its own types, and ours are text


def _require_agreement(text: str, seed: int, lanes: int, group: dist.ProcessGroup | None) -> None:
    """All workers use the same codec; a collective.

    Raises:
        UsageError: They do not.
    """
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (text, seed, lanes), group=group)
    if len(set(answers)) > 1:
        table = "; ".join(
            f"worker {rank}: {codec}, seed {own}, {count} lane(s)" for rank, (codec, own, count) in enumerate(answers)
        )
        raise UsageError(f"the workers do not agree: {table}", "One codec is used by all.", "Start all alike.")
