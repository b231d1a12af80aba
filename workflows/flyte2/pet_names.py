"""Invent pet names with an LSTM that two ranks train together, with Flyte 2's SDK.

Steps: names -> train (with DDP on a Dask cluster) -> evaluate and sample -> report

The model and its training are those of workflows/pet_names.py, which is for flytekit. Run the workflow on this machine,
with the embedded list of names (under a minute on two cores):

    flyte run --local workflows/flyte2/pet_names.py pet_names

Try a tiny training first, or train on your own list (a JSON list, or a CSV file with a column of names):

    flyte run --local workflows/flyte2/pet_names.py pet_names --hp '{"epochs": 1, "batch_size": 2048}' --num_names 5
    flyte run --local workflows/flyte2/pet_names.py pet_names --data s3://bucket/names.csv --hp '{"epochs": 3}'

Run the workflow on a Flyte 2 backend with the Dask operator. PET_NAMES_IMAGE names an image that has this package with
its extra `flyte2`:

    flyte run workflows/flyte2/pet_names.py pet_names

Training saves a checkpoint after each epoch. If a worker is lost or a rank fails, the gang restarts from the newest
checkpoint, up to three times. The task's next attempt also resumes from the newest checkpoint.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import flyte
import flyte.report
import torch
from flyte.io import File

from flyteplugins.daskpytorch import DaskDDP, Gang, WorkerGroup
from tasks import char_lstm
from tasks.char_lstm import CharLSTM, Hyperparameters
from tasks.names import load_names, split_by_name
from tasks.quality import Quality, page

NUM_WORKERS = int(os.environ.get("PET_NAMES_WORKERS", "2"))
IMAGE = os.environ.get("PET_NAMES_IMAGE", "auto")
SMALL = flyte.Resources(cpu=1, memory="2Gi")
SETTINGS = {"PET_NAMES_WORKERS": str(NUM_WORKERS), "PET_NAMES_IMAGE": IMAGE}
"""Environment variables of the tasks' pods, which import this file again."""

training = flyte.TaskEnvironment(
    "pet_names_training",
    image=IMAGE,
    resources=SMALL,
    env_vars=SETTINGS,
    plugin_config=DaskDDP(
        workers=WorkerGroup(number_of_workers=NUM_WORKERS, resources=SMALL),
        gang=Gang(start_timeout=600, max_restarts=3),
    ),
)
env = flyte.TaskEnvironment("pet_names", image=IMAGE, resources=SMALL, env_vars=SETTINGS, depends_on=[training])


@dataclass
class Trained:
    """Metrics of the training."""

    epoch_losses: list[float]
    """Cross-entropy of the next character on held-out names after each epoch, in nats."""
    epoch_accuracies: list[float]
    """Share of held-out characters that the model ranks first, after each epoch, from 0 to 1."""


@env.task
def prepare(data: str, hp: Hyperparameters) -> File:
    """Load and clean the names. Inputs that cannot be trained on fail here, before any cluster starts."""
    loaded = load_names(data)
    print(loaded.report)
    part, _ = split_by_name(loaded.names, hp.held_out, hp.seed)
    if (num_samples := len(char_lstm.windows(part))) < NUM_WORKERS:
        raise ValueError(f"{num_samples} training samples are fewer than the {NUM_WORKERS} ranks; give more names")
    path = Path(mkdtemp(), "names.json")
    path.write_text(json.dumps(loaded.names))
    return File.from_local_sync(path)


@training.task(retries=2, report=True)
def train(names: File, hp: Hyperparameters) -> tuple[Trained, File]:
    """Train in all ranks. The task returns the outputs of rank 0."""
    part, held_out = split_by_name(_read(names), hp.held_out, hp.seed)
    result = char_lstm.train(char_lstm.windows(part), char_lstm.windows(held_out), hp)
    path = Path(mkdtemp(), "model_state.pt")
    torch.save(result.state_dict, path)
    trained = Trained(
        epoch_losses=[epoch.held_out_loss for epoch in result.epochs],
        epoch_accuracies=[epoch.held_out_accuracy for epoch in result.epochs],
    )
    return trained, File.from_local_sync(path)


@env.task
def evaluate(names: File, hp: Hyperparameters, model_state: File) -> Quality:
    """Evaluate the received weights, beside a bigram model fitted on the same training names."""
    part, held_out = (char_lstm.windows(half) for half in split_by_name(_read(names), hp.held_out, hp.seed))
    found = char_lstm.evaluate(_load(model_state), held_out)
    return Quality(loss=found.loss, accuracy=found.accuracy, bigram_loss=char_lstm.bigram_loss(part, held_out))


@env.task
def sample(names: File, hp: Hyperparameters, model_state: File, num_names: int) -> list[str]:
    """Return invented names, none of which is in the list of names."""
    return char_lstm.sample_names(_load(model_state), num_names, exclude=_read(names), seed=hp.seed)


@env.task(report=True, entrypoint=True)
def pet_names(
    data: str = "", hp: Hyperparameters = Hyperparameters(), num_names: int = 20
) -> tuple[list[float], File, list[str]]:
    """Train on a list of names, invent new names, and return the losses, the weights and the invented names.

    Args:
        data: A JSON list of names or a CSV file with a column of names (a path, https:// or s3://). Empty: the embedded
            list.
        hp: Hyper-parameters, as a JSON object of the fields of `Hyperparameters`.
        num_names: Number of names to invent.
    """
    if num_names < 0:
        raise ValueError(f"num_names={num_names}: must be a whole number from 0 up")
    names = prepare(data=data, hp=hp)
    trained, model_state = train(names=names, hp=hp)
    quality = evaluate(names=names, hp=hp, model_state=model_state)
    invented = sample(names=names, hp=hp, model_state=model_state, num_names=num_names)
    flyte.report.replace(page(trained.epoch_losses, trained.epoch_accuracies, quality, invented))
    print(quality.verdict())
    print(f"new names: {', '.join(invented)}")
    return trained.epoch_losses, model_state, invented


def _read(names: File) -> list[str]:
    return list(json.loads(Path(names.download_sync()).read_text()))


def _load(model_state: File) -> CharLSTM:
    return CharLSTM.from_state_dict(torch.load(model_state.download_sync(), map_location="cpu", weights_only=True))
