"""Training: one loop around Accelerate, and the run folder it leaves.

Names are imported on first use, so that the command line can read configurations without importing
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wellposed.lazy import import_on_first_use

if TYPE_CHECKING:
    from wellposed.training.config import ConstrainOptions as ConstrainOptions
    from wellposed.training.config import ModelOptions as ModelOptions
    from wellposed.training.config import PenaltyOptions as PenaltyOptions
    from wellposed.training.config import RunConfig as RunConfig
    from wellposed.training.config import TrainOptions as TrainOptions
    from wellposed.training.config import config_difference as config_difference
    from wellposed.training.folder.durable_files import verify_final as verify_final
    from wellposed.training.folder.durable_files import verify_run_file as verify_run_file
    from wellposed.training.folder.result import RunResult as RunResult
    from wellposed.training.folder.result import read_metrics as read_metrics
    from wellposed.training.folder.result import read_result as read_result
    from wellposed.training.folder.result import result_schema as result_schema
    from wellposed.training.folder.run_folder import read_config as read_config
    from wellposed.training.loop.build import load_run_model as load_run_model
    from wellposed.training.loop.schedules import SCHEDULES as SCHEDULES
    from wellposed.training.loop.schedules import learning_rate as learning_rate
    from wellposed.training.loop.tracking import Tracking as Tracking
    from wellposed.training.loop.train import train as train
else:
    __getattr__, __dir__ = import_on_first_use(
        __name__,
        {
            "config": (
                "ConstrainOptions ModelOptions PenaltyOptions RunConfig TrainOptions "
                "config_difference"
            ),
            "folder.durable_files": "verify_final verify_run_file",
            "folder.result": "RunResult read_metrics read_result result_schema",
            "folder.run_folder": "read_config",
            "loop.build": "load_run_model",
            "loop.schedules": "SCHEDULES learning_rate",
            "loop.tracking": "Tracking",
            "loop.train": "train",
        },
    )
