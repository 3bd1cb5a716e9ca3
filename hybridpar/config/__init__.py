"""Options of a training run, in the groups that `hybridpar train --help` shows.

They are frozen dataclasses: Python users fill them in, and the command line is made from them.
"""

from hybridpar.config.data import DataConfig as DataConfig
from hybridpar.config.data import ModelConfig as ModelConfig
from hybridpar.config.optimizer import OptimizerConfig as OptimizerConfig
from hybridpar.config.sync import SyncConfig as SyncConfig
from hybridpar.config.train import PipelineConfig as PipelineConfig
from hybridpar.config.train import TrainConfig as TrainConfig
