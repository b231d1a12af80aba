"""Public names that are the same for flytekit and for Flyte 2, for type checkers, editors and the site's reference.

Nothing imports this module at run time: it would import torch and Dask. `__init__` reads it.
"""

# ruff: noqa: PLC0414 - with `as`, type checkers take an imported name for one of this module

from flytekitplugins.daskpytorch.context import RankContext as RankContext
from flytekitplugins.daskpytorch.context import current_rank as current_rank
from flytekitplugins.daskpytorch.dask.cluster import current_client as current_client
from flytekitplugins.daskpytorch.display.mlflow import MLflow as MLflow
from flytekitplugins.daskpytorch.display.open_telemetry import OpenTelemetry as OpenTelemetry
from flytekitplugins.daskpytorch.display.tensorboard import TensorBoard as TensorBoard
from flytekitplugins.daskpytorch.errors import GangError as GangError
from flytekitplugins.daskpytorch.errors import GangHungError as GangHungError
from flytekitplugins.daskpytorch.errors import GangStartError as GangStartError
from flytekitplugins.daskpytorch.errors import PreemptedError as PreemptedError
from flytekitplugins.daskpytorch.errors import StoppedEarlyError as StoppedEarlyError
from flytekitplugins.daskpytorch.errors import WorkerLostError as WorkerLostError
from flytekitplugins.daskpytorch.protocol.host import url_to_fs as url_to_fs
from flytekitplugins.daskpytorch.protocol.journal import Shape as Shape
from flytekitplugins.daskpytorch.protocol.journal import Training as Training
from flytekitplugins.daskpytorch.protocol.observer import Observer as Observer
from flytekitplugins.daskpytorch.protocol.observer import RankObserver as RankObserver
from flytekitplugins.daskpytorch.protocol.script import run_module as run_module
from flytekitplugins.daskpytorch.protocol.script import run_script as run_script
from flytekitplugins.daskpytorch.records import Goodput as Goodput
from flytekitplugins.daskpytorch.records import Histogram as Histogram
from flytekitplugins.daskpytorch.records import LogRecord as LogRecord
from flytekitplugins.daskpytorch.records import Picture as Picture
from flytekitplugins.daskpytorch.records import RankUsage as RankUsage
from flytekitplugins.daskpytorch.records import SavedCheckpoint as SavedCheckpoint
from flytekitplugins.daskpytorch.settings import EarlyStopping as EarlyStopping
from flytekitplugins.daskpytorch.settings import Evaluate as Evaluate
from flytekitplugins.daskpytorch.settings import Gang as Gang
from flytekitplugins.daskpytorch.settings import Keep as Keep
from flytekitplugins.daskpytorch.settings import Profile as Profile
from flytekitplugins.daskpytorch.settings import Wandb as Wandb
from flytekitplugins.daskpytorch.task.config import StrictInputs as StrictInputs
