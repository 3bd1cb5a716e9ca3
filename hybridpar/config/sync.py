"""How workers exchange gradients: the options, and what `--sync` stands for."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import tyro

from hybridpar.errors import UsageError, check, counted
from hybridpar.spec import AT_LEAST_0, AT_LEAST_1, BELOW_1, POSITIVE, Options, Spec, Unnamed, between

#: Outer steps from which on a run is long enough for much outer momentum; with fewer it overshoots.
LONG_RUN = 200

#: Part of the run that `onebit-sgd` trains in full precision before it compresses: 24 of 309 hours of speech in the
#: paper.
WARM_PART = 0.08

#: Learning rate of `onebit-sgd` where `--lr` is not given. AdaGrad and late gradients need a lower rate: at that of
#: plain SGD, late ones cost ResNet-18 on digits ten points of accuracy (trainings.csv).
ONEBIT_RATE = 1e-2


class Sync(Options):
    """What `--sync` may be."""


class Exchange(Sync):
    """What all have by which replicas meet without servers.

    Attributes:
        lanes: Lanes that gradients are sent on: CUDA streams, or threads with a process group each.
        bucket: Size of the buckets that gradients are sent in, in MiB.
        hierarchy: With several nodes of several workers: add in full precision inside a node, and use the codec of
            `--compress` between nodes only.
    """

    lanes: Annotated[int, between(1, 8)] = 2
    bucket: Annotated[float, POSITIVE] = 8.0
    hierarchy: bool = True

    @property
    def bucket_bytes(self) -> int:
        """`bucket` in bytes, at least one."""
        return max(1, int(self.bucket * 2**20))


class AllReduce(Exchange, choice="allreduce"):
    """`allreduce`: the gradients of every step are summed.

    Attributes:
        late: Send gradients while the next ones are computed, and apply them late: by a step (`delay`), or by half a
            batch (`half`).
    """

    late: Literal["off", "delay", "half"] = "off"


class OneBit(AllReduce, choice="onebit-sgd"):
    """`onebit-sgd`: 1-bit SGD, AdaGrad, momentum at owners of stripes (Seide et al. 2014).

    Attributes:
        warm: First steps in full precision; None: 8 % of the run.
    """

    warm: Annotated[int | None, AT_LEAST_0] = None

    def warm_steps(self, total: int | None) -> int:
        """Number of first steps in full precision, of so many in all."""
        if self.warm is not None:
            return self.warm
        if total is None:
            raise UsageError(
                "--sync onebit-sgd without a number of first steps",
                f"It spends {WARM_PART:.0%} of the run in full precision, and how long the run is is not known.",
                "Give total_steps to the Trainer, or write onebit-sgd:warm=STEPS.",
            )
        return math.ceil(WARM_PART * total)


class Local(Exchange, choice="local"):
    """`local:H`: workers train alone for H steps, then take the plain mean of their parameters.

    Attributes:
        every: H, the steps from one exchange to the next.
    """

    every: Annotated[int, Unnamed("H"), AT_LEAST_1]


class Outer(Local, choice="outer"):
    """`outer:H,opt=nesterov,...`: workers train alone for H steps, then make an outer step of their progress.

    Attributes:
        opt: What is made of the workers' progress since the last exchange: their `mean`, or Nesterov momentum of it
            (`nesterov`, as DiLoCo).
        lr: Learning rate of the outer step; None: 1, and 0.7 with `nesterov`.
        momentum: Of `nesterov`; None: 0.9 where the run has 200 outer steps or more, else 0.5.
        qsr: Let H grow as the learning rate falls, to (this x peak rate / rate)^2 where that is more than H.
        fragments: Parts of the parameters that are exchanged one after the other, each once in H steps.
        delay: Steps that an exchange may take while training goes on; less than H / fragments.
    """

    opt: Literal["mean", "nesterov"] = "mean"
    lr: Annotated[float | None, POSITIVE] = None
    momentum: Annotated[float | None, BELOW_1] = None
    qsr: Annotated[float | None, POSITIVE] = None
    fragments: Annotated[int, AT_LEAST_1] = 1
    delay: Annotated[int, AT_LEAST_0] = 0

    def __post_init__(self) -> None:
        every, parts = self.every, self.fragments
        given = f"--sync outer:{every}"
        check(parts <= every, f"{given}: fragments={parts}", f"It must be from 1 to {every}, the steps.")
        fits = f"It must be less than H / fragments, here {every} / {parts}."
        check(self.delay < max(1, every // parts), f"{given}: delay={self.delay}", fits)
        if self.opt == "mean" and self.momentum:
            what = f"{given}: momentum={self.momentum:g} with opt=mean"
            raise UsageError(what, "A mean has no momentum.", "Use opt=nesterov.")

    def rates(self, outer_steps: int | None) -> tuple[float, float]:
        """Learning rate and momentum of the outer step."""
        if self.opt == "mean":
            return 1.0 if self.lr is None else self.lr, 0.0
        usual = 0.9 if outer_steps is not None and outer_steps >= LONG_RUN else 0.5
        return 0.7 if self.lr is None else self.lr, usual if self.momentum is None else self.momentum


class ParameterServers(Sync, choice="ps"):
    """`ps`: gradients go to parameter servers, which wait for all workers.

    Attributes:
        waits_for_all: Whether every update takes a gradient of each worker.
        servers: Server processes beside the workers; with 0 every worker hosts one shard.
        pull: Number format of the parameters that workers get.
    """

    waits_for_all: ClassVar[bool] = True
    servers: Annotated[int, AT_LEAST_0] = 1
    pull: Literal["fp32", "fp16"] = "fp32"

    def split_count(self, workers: int) -> int:
        """N of n-softsync, in which an update takes floor(workers / N) gradients: here one of each worker."""
        return 1


class AsyncServers(ParameterServers, choice="ps-async"):
    """`ps-async`: the servers wait for no worker.

    Attributes:
        staleness: Weight of a gradient computed on parameters of T updates ago: 1 (`none`), 1/T (`inverse`), or 1/N
            (`mean`), N being the mean staleness to expect.
        max_staleness: Most pushes that a worker may be ahead of the slowest before it waits; None: no limit.
    """

    waits_for_all: ClassVar[bool] = False
    staleness: Literal["none", "inverse", "mean"] = "inverse"
    max_staleness: Annotated[int | None, AT_LEAST_0] = None

    def split_count(self, workers: int) -> int:
        """The number of workers: an update takes one gradient."""
        return workers


class SoftSync(AsyncServers, choice="softsync"):
    """`softsync:N`: the servers wait for W/N of W workers.

    Attributes:
        split: N; with 1 an update takes as many gradients as there are workers.
    """

    split: Annotated[int, Unnamed("N"), AT_LEAST_1]

    def split_count(self, workers: int) -> int:
        """N of `softsync:N`."""
        if self.split > workers:
            raise UsageError(
                f"--sync softsync:{self.split} with {counted(workers, 'worker')}",
                f"N of softsync:N is a whole number from 1 to the number of workers, here 1 to {workers}.",
                f"softsync:1 waits for as many gradients as there are workers, softsync:{workers} for one.",
            )
        return self.split


#: Names of the codecs in `hybridpar.compress.codecs`; the command line refuses others before torch is loaded.
CODECS = (
    *("bf16", "fp16", "grandk_mn", "hylo", "none", "nuqsgd", "onebit", "onebit_sgd", "powersgd", "qsgd", "qsgd_mn"),
    *("qsgd_mn_ms", "qsgd_mn_ts", "signsgd", "terngrad", "topk", "twobit"),
)


class SyncConfig(Options):
    """How workers exchange gradients.

    Attributes:
        sync: Replicas meet by `allreduce`, `onebit-sgd`, `outer:H,opt=nesterov`, `local:H`, or at servers:
            `ps:servers=2`, `ps-async`, `softsync:N`. Without servers: `lanes=2`, `bucket=8` (MiB), `hierarchy=off`.
        compress: Codec of gradients between replicas: `none`, `fp16`, `onebit`, `qsgd_mn:bits=4`, `powersgd:rank=2`,
            ...; rules such as `layer4.* -> powersgd; *.weight -> onebit`; or `auto`, which measures. Anything but
            `none` changes the result.
        batch_norm: BatchNorm statistics. `pooled`: running statistics of the whole batch; `sync`: also normalise over
            all replicas; `local`: per replica, averaged at checkpoints; `frozen`: normalise by those that the model
            has, and keep them.
        guard: `--no-guard`: take also steps in which a gradient is not finite; by default all workers skip them.
        shard_optimizer: Divide the optimizer's state among the replicas, each of which updates a part of the parameters
            and hands it round: the same result in less memory, for another half of the traffic.
    """

    sync: Annotated[str, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = "allreduce"
    compress: str = "none"
    batch_norm: Literal["pooled", "local", "sync", "frozen"] = "pooled"
    guard: bool = True
    shard_optimizer: bool = False

    sync_mode = Spec("sync", Sync)

    @property
    def exchange(self) -> Exchange:
        """How replicas meet without servers; with servers, what holds for the workers that share a host."""
        return self.sync_mode if isinstance(self.sync_mode, Exchange) else Exchange()

    @property
    def is_onebit(self) -> bool:
        """Whether this is the recipe `onebit-sgd`."""
        return isinstance(self.sync_mode, OneBit)

    @property
    def late(self) -> Literal["off", "delay", "half"]:
        """By how much gradients are applied late."""
        return self.sync_mode.late if isinstance(self.sync_mode, AllReduce) else "off"

    @property
    def outer(self) -> Outer | None:
        """The outer loop of `outer:H`, or of `local:H`, which is one with the plain mean; None otherwise."""
        if isinstance(self.sync_mode, Outer):
            return self.sync_mode
        return Outer(every=self.sync_mode.every) if isinstance(self.sync_mode, Local) else None

    @property
    def parameter_servers(self) -> ParameterServers | None:
        """The parameter servers that gradients go to; None otherwise."""
        return self.sync_mode if isinstance(self.sync_mode, ParameterServers) else None

    @property
    def chooses(self) -> bool:
        """Whether codecs are measured and chosen (`--compress auto`)."""
        return self.compress.strip() == "auto"
