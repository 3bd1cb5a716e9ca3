"""`hybridpar train` on one worker: joins the others, opens the run, and trains.

Every worker runs the same program; rank 0 alone writes files (except for its peers' parts of a checkpoint) and prints.
"""

from __future__ import annotations

import contextlib
import os

from hybridpar.comm.flight import FLIGHT
from hybridpar.comm.world import World
from hybridpar.config import TrainConfig
from hybridpar.errors import HybridparError
from hybridpar.machine.launch import in_job, record_failure
from hybridpar.observe.loggers import logger_names
from hybridpar.observe.progress import Progress, open_progress
from hybridpar.planner.resolve import join_workers
from hybridpar.run.closing import say_finished
from hybridpar.run.data import with_images_of_model
from hybridpar.run.directory import before_the_start, recall_options
from hybridpar.run.loop import train
from hybridpar.run.opening import begin, open_run
from hybridpar.run.part import Job
from hybridpar.run.worker import describe_worker, tune_worker


def run_training(config: TrainConfig, model_name: str) -> int:
    """Train on this worker until the run is finished or interrupted."""
    config.check()
    asked, problem = config, None
    try:
        config, changes = recall_options(asked, model_name)
        config.check()
        if os.environ.get("RANK", "0") == "0":
            logger_names(config.log)
    except HybridparError as error:
        if not in_job():
            raise
        # Raised once the workers have joined, as they were asked to: another host may have no such run.
        config, problem, changes = asked, error, ()
    with contextlib.ExitStack() as job:
        try:
            if config.parameter_servers is not None:
                from hybridpar.run.served_trainer import join_servers

                world: World | None = join_servers(config, job)
            else:
                world = join_workers(config)
            if world is None:  # this was a server
                return 0
            job.callback(world.close)

            def decided() -> tuple[TrainConfig, tuple[str, ...]]:
                if problem is not None:
                    raise problem
                return config, tuple(changes)

            config, changes = world.from_main(decided)
            config = with_images_of_model(config, model_name)
            tune_worker(config, world if config.parameter_servers is None else World(device=world.device))
            with open_progress() if world.is_main else Progress() as progress:
                asked_for = Job(
                    config=config,
                    model_name=model_name,
                    world=world,
                    progress=progress,
                    notes=[*describe_worker(config), *changes],
                )
                with before_the_start():
                    run = open_run(asked_for)
                with run.trainer:
                    with before_the_start():
                        has_steps = begin(run)
                    code = train(run) if has_steps else say_finished(run)
            FLIGHT.close()  # after an error it stays, for `hybridpar doctor --hang`
            return code
        except BaseException as error:
            record_failure(error, debug=config.debug)  # before the peers notice that this worker is gone
            raise
