"""Options of a training run, in the groups that `hybridpar train --help` shows.

They are frozen dataclasses: Python users fill them in, and the command line is made from them.
"""

from hybridpar.config.data import DataConfig, ModelConfig
from hybridpar.config.optimizer import OptimizerConfig
from hybridpar.config.sync import SyncConfig
from hybridpar.config.train import PipelineConfig, TrainConfig

__all__ = [
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "SyncConfig",
    "TrainConfig",
]
