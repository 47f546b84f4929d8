"""A ready training loop, which ``anabranch train`` runs on every rank, and its events.

It adds evaluation, checkpoints, callbacks and figures to a ``Pipeline``, with which a loop of your
own takes five lines.
"""

from anabranch.training.adaptation import Looks as Looks
from anabranch.training.events import Callback as Callback
from anabranch.training.events import CheckpointEvent as CheckpointEvent
from anabranch.training.events import EndEvent as EndEvent
from anabranch.training.events import EvaluationEvent as EvaluationEvent
from anabranch.training.events import Event as Event
from anabranch.training.events import LookEvent as LookEvent
from anabranch.training.events import PlanEvent as PlanEvent
from anabranch.training.events import StepEvent as StepEvent
from anabranch.training.loggers import Csv as Csv
from anabranch.training.loggers import JsonLines as JsonLines
from anabranch.training.loggers import MLflow as MLflow
from anabranch.training.loggers import TensorBoard as TensorBoard
from anabranch.training.loggers import WeightsAndBiases as WeightsAndBiases
from anabranch.training.loop import train as train
from anabranch.training.loop import train_async as train_async
from anabranch.training.save_every import KEPT as KEPT
from anabranch.training.save_every import SaveEvery as SaveEvery
from anabranch.training.save_every import require_place as require_place
