"""Trains a model as stages on lanes and workers, times replicas; a model that is not cut is one stage.

Every worker trains its own stages. It may hold the whole model, which `collect` makes whole again on all workers, or
with `own_only` nothing but its stages. What is optimised, saved and evaluated is always the model, under its own names,
whatever the layout.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridpar.comm.world import World
from hybridpar.compress.policy import agree_on_policy
from hybridpar.errors import ScheduleError, SyncError
from hybridpar.lanes import Lane, Lanes
from hybridpar.models.deferred import replace_tensors
from hybridpar.models.state_dicts import extra_states, load_values
from hybridpar.pipeline.borders import BorderTable
from hybridpar.pipeline.executor import Executor
from hybridpar.pipeline.local_stage import AfterStep, LocalStage, MakeGradients, OptimizerStep
from hybridpar.pipeline.stage_module import (
    StageModule,
    WholeModel,
    check_stages,
    consumers_of,
    module_of,
)
from hybridpar.pipeline.stage_run import Mailbox, RandomKeys, StageRun, key_random_operations
from hybridpar.pipeline.step import PipelineOptions as PipelineOptions
from hybridpar.sync.batchnorm import require_separate_statistics
from hybridpar.sync.stage_gradients import StageGradients, SyncLanes, open_sync_lanes

if TYPE_CHECKING:
    from hybridpar.comm.transport import Grid, MessagePart
    from hybridpar.compress.nodes import NodeWorlds
    from hybridpar.sync.figures import LayerBytes

Loss = Callable[[Any, Any], Tensor]


class PipelineEngine:
    """Trains a model as stages on lanes and workers, times replicas.

    With one worker all stages are lanes of its device.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[StageModule],
        world: World,
        lanes: Lanes,
        loss: Loss,
        optimizer: Callable[[nn.Module], OptimizerStep | None],
        options: PipelineOptions,
        micro_batches: int,
        *,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        after_step: Callable[[nn.Module], AfterStep] | None = None,
        make_gradients: MakeGradients = StageGradients,
    ) -> None:
        check_stages(stages)
        if options.sync.pool_batch_norm and (options.layout.replicas > 1 or micro_batches > 1):
            require_separate_statistics(model)
        self.is_whole = isinstance(stages[0], WholeModel)
        self._context = context
        self._make_gradients = make_gradients
        self.model = model
        self.options = options
        self.micro_batches = micro_batches
        self.world = world
        self._lanes = lanes
        self._all_stages = list(stages)
        #: Number of random operations of every stage that has any.
        self.random_stages: dict[int, int] = {}
        layout = options.layout
        if layout.stages != len(stages) or layout.workers != world.size:
            raise ScheduleError(
                f"{layout.stages} stages are placed on {layout.workers} workers; here are {len(stages)}, and the job "
                f"has {world.size}",
                "Every stage has a lane of a worker in each replica, and every worker runs stages of one replica.",
                "Use the layout of the plan that the stages were made from, and start as many workers.",
            )
        pairs: set[tuple[int, int]] = set()
        for mode in (False, True) if options.own_only else (True,):
            self.use_graphs(training=mode)  # with `own_only` evaluation, too, goes through the pipeline
            for stage in stages:
                for target in consumers_of(stages, stage.index):
                    pairs |= {(stage.index, target), (target, stage.index)}
        names = dict(model.named_parameters())
        policy = agree_on_policy(options.sync.codec, names, world)
        options = self.options = replace(options, sync=replace(options.sync, codec=policy))
        # How many cores a host has is its own affair.
        shared = replace(options, threads=1)
        names_of_all = [_names(stage) for stage in stages]
        if world.size > 1:
            from hybridpar.comm.replicate import replicate

            replicate(model, world, agree=(shared, micro_batches, names_of_all), compare_only=options.own_only)
        self._share_extra_states([model] if world.is_main else [])
        # Beside those of the gradients, what each lane sums and hands round has a group of its own.
        groups = options.sync_lanes + layout.lanes_each * (options.sync.sync_batch_norm + options.sync.shard_optimizer)
        # A whole model's replicas are all workers, who have groups to sum on already.
        self.grid: Grid | None = None
        if world.size > 1 and not self.is_whole:
            from hybridpar.comm.transport import Grid

            self.grid = Grid(world, layout, pairs, lanes=groups)
        self.position = 0 if self.grid is None else self.grid.position
        self.replica, self.replicas = layout.replica_of(world.rank), layout.replicas
        #: Of this worker's replica.
        self._layout = layout.replica(self.replica)
        self.stages: dict[int, LocalStage] = {}
        self._nodes: NodeWorlds | None = None
        try:
            self._open(loss, optimizer, after_step)
        except BaseException:
            self._release()
            raise

    def _open(
        self,
        loss: Loss,
        optimizer: Callable[[nn.Module], OptimizerStep | None],
        after_step: Callable[[nn.Module], AfterStep] | None,
    ) -> None:
        options, lanes, layout = self.options, self._lanes, self._layout
        replicas = self.world if self.grid is None else self.grid.replica_world
        local = [index for index in range(layout.stages) if layout.home(index) == self.position]
        if options.own_only and replicas.size > 1:
            from hybridpar.comm.replicate import broadcast_state

            with replicas.named_errors("broadcasting the initial stages"):
                for index in local:
                    broadcast_state(module_of(self._all_stages[index]), 0, replicas)
        synced = options.sync.sync_batch_norm and replicas.size > 1
        sharded = options.sync.shard_optimizer and replicas.size > 1
        # A grid has as many groups as lanes and BatchNorm need; the world of a whole model has what it was made with.
        sum_lanes = len(replicas.lane_groups) - synced - sharded if self.is_whole else options.sync_lanes
        if (synced or sharded) and sum_lanes < 1:
            user = "BatchNorm over replicas" if synced else "the parameters that replicas hand round"
            raise SyncError(
                f"no group is left for {user}",
                "Each has a group of its own, beside those of the gradients.",
                f"Make the world with more: World.join(lanes={1 + synced + sharded}).",
            )
        # A part of a job cannot be divided further.
        if options.sync.uses_nodes and self.world.size == self.world.job_size > 1:
            from hybridpar.compress.nodes import NodeWorlds

            self._nodes = NodeWorlds.open(self.world, options.layout.columns, sum_lanes)
        self.forwards = [self._forward(stage, stage.index in local) for stage in self._all_stages]
        self.borders = BorderTable(self._all_stages, self.forwards, options, loss, self._context)
        compute: dict[int, Lane] = {
            lane: lanes.caller if self.is_whole else lanes.open(f"compute {lane}", threads=options.threads)
            for lane in sorted({layout.lane_of[index] for index in local})
        }
        # Lanes run beside each other, so each adds its BatchNorm moments on a group of its own.
        spare = replicas.lane_groups[sum_lanes:]
        norms = dict(zip(compute, spare, strict=False)) if synced else {}
        shards = dict(zip(compute, spare[len(norms) :], strict=False)) if sharded else {}
        sync_lanes: SyncLanes = open_sync_lanes(replicas, lanes, len(spare)) if replicas.size > 1 else []
        apart = not options.layout.is_equal
        mailbox = Mailbox()
        # A whole model draws from torch's generators, as in any loop.
        first = self.replica * self.micro_batches
        keys = None if self.is_whole else RandomKeys(options.seed, lanes.device, first, options.compile)
        for index in local:
            stage, lane = self._all_stages[index], compute[layout.lane_of[index]]
            if apart and self.grid is not None and index != local[0]:
                replicas = self.grid.world_of(index)
                sync_lanes = (
                    open_sync_lanes(replicas, lanes, name=f"sync of stage {index}") if replicas.size > 1 else []
                )
            run = StageRun(
                stage,
                consumers_of(self._all_stages, index),
                mailbox,
                forward=self.forwards[index],
                loss=loss if index == layout.stages - 1 else None,
                recompute=index in options.recompute,
                overlaps=self.micro_batches > 1,
                keys=keys,
                context=self._context,
            )
            self.stages[index] = LocalStage(
                run,
                lane,
                lanes,
                replicas,
                sync_lanes,
                options.sync,
                self.micro_batches,
                optimizer(module_of(stage)),
                norms.get(layout.lane_of[index]),
                shards.get(layout.lane_of[index]),
                self._nodes,
                after_step(module_of(stage)) if after_step is not None else None,
                self._make_gradients,
            )
        #: Runs the steps, and knows how many there were.
        self.executor = Executor(
            self.stages,
            self.borders,
            self.grid,
            self.world,
            None if apart else replicas,
            lanes,
            mailbox,
            self.micro_batches,
            options,
            sync_lanes=max(1, len(sync_lanes)),
            sums_losses=callable(getattr(loss, "count", None)),
        )

    # ----------------------------------------------------------- between steps

    def wait(self) -> None:
        """Wait until every step that was issued is done."""
        self.executor.wait()

    @property
    def peak_saved_bytes(self) -> int:
        """Bytes of activations that this worker's stages have kept for their backward passes at most."""
        facts = self.borders.first
        if facts is None:
            return 0
        return sum(facts.saved_bytes[index] * stage.run.peak_in_flight for index, stage in self.stages.items())

    def layer_bytes(self) -> list[LayerBytes]:
        """What each parameter is sent as, of all stages; empty where gradients are added as they are. A collective."""
        from hybridpar.sync.figures import layer_bytes

        self.wait()  # the step under way uses the same process group
        sent = ChainMap(*(reducer.bytes_by_parameter() for reducer in self.executor.reducers))
        parts: list[Any] = self.world.gather(dict(sent))
        return layer_bytes(self.model, ChainMap(*parts))

    def collect(self) -> None:
        """Make the model whole on every worker: stages are copied from where they are trained. A collective.

        With `own_only` it stays in parts.
        """
        self.wait()
        ranks = self.options.layout.rows[0]
        sources = [(module_of(stage), ranks[stage.index][0]) for stage in self._all_stages]
        self._share_extra_states(module for module, source in sources if source == self.world.rank)
        if not self.is_spread:
            return
        from hybridpar.comm.replicate import broadcast_state

        with self.world.named_errors("collecting the model"):
            for module, source in sources:
                broadcast_state(module, source, self.world)

    def _share_extra_states(self, modules: Iterable[nn.Module]) -> None:
        """Give every worker the extra states of these modules of this worker; a collective."""
        if self.world.size > 1 and extra_states(self.model):
            local_states = {name: state for module in modules for name, state in extra_states(module).items()}
            every: list[Any] = self.world.gather(local_states)
            for states in every:
                load_values(self.model, states)

    @property
    def is_spread(self) -> bool:
        """Whether every worker holds the whole model, and trains a part of it."""
        return self.options.layout.positions > 1 and not self.options.own_only

    def leave_out(self) -> None:
        """Put what only other workers train on the meta device: the values that it has here are old ones."""
        if not self.is_spread:
            return
        local, others = (
            {
                id(tensor)
                for stage in self._all_stages
                if (stage.index in self.stages) == is_local
                for tensor in chain(module_of(stage).parameters(), module_of(stage).buffers())
            }
            for is_local in (True, False)
        )
        gone = others - local
        replace_tensors(self.model, lambda _, tensor: tensor.detach().to("meta") if id(tensor) in gone else None)

    def gather_on_main(self, value: Any) -> list[Any] | None:
        """Something of every position, on rank 0; None elsewhere. A collective."""
        if self.grid is None:
            return [value]
        return self.world.gather_on_main(value, self.options.layout.ranks[0])

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run on the same layout needs to add in the same order: the orders of buckets. A collective."""
        self.wait()
        orders = {
            str(index): stage.reducer.state_dict() for index, stage in self.stages.items() if stage.reducer is not None
        }
        return {"orders": orders}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, where it fits; what does not, or is missing, begins anew."""
        orders = state.get("orders", {})
        for index, stage in self.stages.items():
            if stage.reducer is not None:
                stage.reducer.load_state_dict(orders.get(str(index), {}))
                stage.reducer.follow_trainable()

    def close(self) -> None:
        """Wait for the step that may still run, and release hooks and the grid. Safe to call twice.

        Lanes are their owner's to close; where that was done before, nothing runs.
        """
        try:
            if not self._lanes.closed and not self.executor.is_stopped:
                self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        for stage in self.stages.values():
            stage.detach()
        if self._nodes is not None:
            self._nodes.close()
        if self.grid is not None:
            self.grid.close()
            self.grid = None

    def use_graphs(self, *, training: bool) -> None:
        """Let all stages compute what the model computes in training, or in evaluation."""
        for stage in self._all_stages:
            stage.use_graph(training)

    @torch.no_grad()
    def evaluate(self, inputs: Any) -> Any:
        """The model's output where each worker holds its own stages only; `use_graphs` comes before.

        A collective of the workers of a replica: the last stage's returns the output, those of others None.
        """
        layout, values, result = self._layout, self.executor.name_inputs(inputs), None
        parts = {} if self.grid is None else self.borders.evaluated(values)
        for stage in self._all_stages:
            result = None
            if layout.home(stage.index) == self.position:
                module = module_of(stage)
                result = module(*(values[border.name] for border in stage.inputs))
                made = zip((border.name for border in stage.outputs), result, strict=True) if stage.outputs else ()
                values.update(made)
            if self.grid is not None:
                self._hand_on(stage, values, parts, self.grid)
        return result

    def _hand_on(
        self, stage: StageModule, values: dict[str, Tensor], parts: Mapping[str, MessagePart], grid: Grid
    ) -> None:
        """In evaluation: send what a stage has made to the workers that need it, or receive it."""
        layout = self._layout
        home = layout.home(stage.index)
        wanted: dict[int, dict[str, None]] = {}
        for target, names in consumers_of(self._all_stages, stage.index).items():
            if layout.home(target) != home:
                wanted.setdefault(layout.home(target), {}).update(dict.fromkeys(names))
        with self.world.named_errors("evaluating"):
            for target, needed in sorted(wanted.items()):
                if home == self.position:
                    grid.senders[target].send([values[name] for name in needed], [parts[name] for name in needed])
                elif target == self.position:
                    received = grid.receivers[home].receive([parts[name] for name in needed])
                    values.update(zip(needed, received, strict=True))

    def _forward(self, stage: StageModule, is_local: bool) -> Callable[..., Any]:
        module: Any = module_of(stage)
        if self.is_whole:
            return torch.compile(module) if self.options.compile else module
        compiled = self.options.compile and is_local
        if count := key_random_operations(module.graph, module, compiled=compiled):
            module.recompile()
            self.random_stages[stage.index] = count
        return torch.compile(module) if compiled else module


def _names(stage: StageModule) -> tuple[list[str], list[str], list[str]]:
    """Of all that a stage holds, takes and returns."""
    inputs, outputs = ([border.name for border in side] for side in (stage.inputs, stage.outputs))
    return list(module_of(stage).state_dict()), inputs, outputs
