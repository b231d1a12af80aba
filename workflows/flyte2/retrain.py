"""Train the pet-names model again when there are new names, and publish it as the champion if it is better, on Flyte 2.

    schedule -> publish_names -> artifact `pet-names` -> trigger -> retrain -> artifact `pet-names-champion`, if better

Run both steps on this machine, with the embedded list of names (under a minute on two cores). The first command prints
the path of the champion's weights, from which the second starts:

    flyte run --local workflows/flyte2/retrain.py once --hp '{"epochs": 1, "batch_size": 2048}'
    flyte run --local workflows/flyte2/retrain.py once --hp '{"epochs": 2, "batch_size": 2048}' \
        --champion model_state.pt

On a Flyte 2 backend, deploy the schedule and the trigger. Environment variables at the deployment become defaults:

    PET_NAMES_IMAGE=registry/daskpytorch:tag PET_NAMES_DATA='s3://bucket/names/{date}.csv' \
        PET_NAMES_SCHEDULE='0 4 * * *' PET_NAMES_EMAILS=team@example.org \
        flyte deploy workflows/flyte2/retrain.py training

`publish_names` publishes a version of the artifact `pet-names`, named by its content, so the same names publish no new
version and start no training. The newest version of `pet-names-champion` is the champion. To go back to an earlier one,
publish its weights again by `flyte.remote.Artifact.create`. Local runs have no artifacts: `--champion` stands for it.

If two retrainings overlap, the one that ends last publishes last. `workflows/retrain.py`, for flytekit, has a registry
that lets only one of them promote its model.
"""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp

import flyte
import flyte.report
import torch
from flyte import artifacts, notify
from flyte.io import File
from flyte.models import ActionPhase
from flyte.remote import Artifact

from flytekitplugins.daskpytorch import report as pieces
from flyteplugins.daskpytorch import DaskDDP, Gang, WorkerGroup
from tasks import challenger, char_lstm
from tasks.char_lstm import CharLSTM, Hyperparameters
from tasks.drift import Limits, check
from tasks.model_card import Comparison
from tasks.names import load_names, newest_uri, split_by_hash

NUM_WORKERS = int(os.environ.get("PET_NAMES_WORKERS", "2"))
IMAGE = os.environ.get("PET_NAMES_IMAGE", "auto")
DATA = os.environ.get("PET_NAMES_DATA", "")
SCHEDULE = os.environ.get("PET_NAMES_SCHEDULE", "0 4 * * *")
EMAILS = [each.strip() for each in os.environ.get("PET_NAMES_EMAILS", "").split(",") if each.strip()]
SMALL = flyte.Resources(cpu=1, memory="2Gi")
SETTINGS = {"PET_NAMES_WORKERS": str(NUM_WORKERS), "PET_NAMES_IMAGE": IMAGE}
"""Environment variables of the tasks' pods, which import this file again."""
NAMES, CHAMPION = "pet-names", "pet-names-champion"
"""Names of the artifacts."""
NOW = datetime.fromtimestamp(0, UTC)
"""Default of the kick-off time, which the schedule fills in."""
ON_FAILURE = notify.Email(on_phase=ActionPhase.FAILED, recipients=EMAILS) if EMAILS else None

every_day = flyte.Trigger(
    name="every_day",
    description="Publish the names of the day",
    automation=flyte.Cron(SCHEDULE),
    inputs={"kickoff_time": flyte.TriggerTime, "data": DATA},
    notifications=ON_FAILURE,
)
on_new_names = flyte.Trigger(
    name="on_new_names",
    description="Train on a new version of the names",
    automation=flyte.OnArtifact(NAMES),
    inputs={"names": flyte.TriggeredArtifact},
    notifications=ON_FAILURE,
)

ranks = flyte.TaskEnvironment(
    "pet_names_ranks",
    image=IMAGE,
    resources=SMALL,
    env_vars=SETTINGS,
    plugin_config=DaskDDP(
        workers=WorkerGroup(number_of_workers=NUM_WORKERS, resources=SMALL),
        gang=Gang(start_timeout=600, max_restarts=3),
    ),
)
training = flyte.TaskEnvironment(
    "pet_names_retraining", image=IMAGE, resources=SMALL, env_vars=SETTINGS, depends_on=[ranks]
)


@training.task(triggers=every_day, retries=2, produces_artifacts=True)
def publish_names(data: str = DATA, kickoff_time: datetime = NOW, limits: Limits = Limits()) -> File:
    """Read and check the names of the day, and publish them. Names that break the limits fail here.

    Args:
        data: As for `workflows/retrain.py`: a file, a folder whose newest file is read, or a URI with `{date}`. Empty:
            the embedded list.
        kickoff_time: Time that decides the day of the names. The schedule fills it in. The default stands for now.
        limits: Limits on the names.
    """
    day = (datetime.now(UTC) if kickoff_time == NOW else kickoff_time.astimezone(UTC)).date()
    loaded = load_names(newest_uri(data, day))
    print(loaded.report)
    check(loaded, limits, None)
    path = Path(mkdtemp(), "names.json")
    path.write_text(json.dumps(sorted(loaded.names)))
    file = File.from_local_sync(path, hash_method=challenger.sha256(path))
    about = {"source": loaded.source, "day": str(day), "names": str(len(loaded.names))}
    return artifacts.new(file, artifacts.Metadata(name=NAMES, kind="data", attrs=about, version_from_content=True))


@ranks.task(retries=3, report=True)
def train(names: File, start: File | None, hp: Hyperparameters) -> File:
    """Train a challenger in all ranks, from the champion's weights if there is a champion."""
    sides = (char_lstm.windows(side) for side in split_by_hash(_read(names), hp.held_out))
    result = char_lstm.train(*sides, hp, start=_load(start))
    path = Path(mkdtemp(), "model_state.pt")
    torch.save(result.state_dict, path)
    return File.from_local_sync(path)


@training.task(retries=2)
def judge(names: File, model_state: File, champion: File | None, held_out: float) -> Comparison:
    """Evaluate challenger and champion on names that neither was trained on, beside a bigram model."""
    fitted, judged = split_by_hash(_read(names), held_out)
    windows = char_lstm.windows(judged)
    found = char_lstm.evaluate(CharLSTM.from_state_dict(_load(model_state)), windows)
    before = char_lstm.evaluate(CharLSTM.from_state_dict(_load(champion)), windows) if champion else None
    return Comparison(
        loss=found.loss,
        accuracy=found.accuracy,
        champion_loss=before.loss if before else None,
        champion_accuracy=before.accuracy if before else None,
        bigram_loss=char_lstm.bigram_loss(char_lstm.windows(fitted), windows),
        num_held_out=len(set(judged)),
    )


@training.task(triggers=on_new_names, report=True, produces_artifacts=True)
def retrain(
    names: File, champion: File | None = None, hp: Hyperparameters = Hyperparameters(), margin: float = 0.001
) -> File:
    """Train on the names, and return the champion's weights: the new model's if it is better by the margin.

    Args:
        names: The names, as `publish_names` publishes them. The trigger fills them in.
        champion: Weights of the model to beat. None: the newest version of the artifact, if there is one.
        hp: Hyper-parameters, as a JSON object of the fields of `Hyperparameters`.
        margin: Least improvement over the champion's loss, in nats per character.
    """
    champion = champion or _published_champion()
    model_state = train(names=names, start=champion, hp=hp)
    compared = judge(names=names, model_state=model_state, champion=champion, held_out=hp.held_out)
    is_better = compared.gain is None or compared.gain > margin
    text = _verdict(compared, margin, is_better=is_better)
    print(text)
    flyte.report.replace(pieces.page(pieces.status("done", "Retraining", tone="good"), pieces.text(text)))
    if champion is not None and not is_better:
        return champion
    about = {"held_out_loss": f"{compared.loss:.4f}", "held_out_names": str(compared.num_held_out)}
    made = artifacts.Metadata.create_model_metadata(
        name=CHAMPION, description=text, framework="pytorch", architecture="LSTM", serial_format="torch", attrs=about
    )
    return artifacts.new(model_state, made)


@training.task(entrypoint=True)
def once(
    data: str = DATA, champion: File | None = None, hp: Hyperparameters = Hyperparameters(), margin: float = 0.001
) -> File:
    """Publish the names of today and train on them, without schedule and trigger. The arguments are those of both."""
    return retrain(names=publish_names(data=data), champion=champion, hp=hp, margin=margin)


def _published_champion() -> File | None:
    """Return the weights of the newest version of the champion's artifact. None in local runs, and before the first."""
    if flyte.ctx().mode == "local":
        return None
    newest = next(iter(Artifact.listall(name=CHAMPION, limit=1)), None)  # newest first
    return None if newest is None else File(path=newest.pb2.spec.value.scalar.blob.uri)


def _verdict(compared: Comparison, margin: float, *, is_better: bool) -> str:
    loss = f"{compared.loss:.4f} nats per character on {compared.num_held_out:,} held-out names"
    if compared.champion_loss is None:
        return f"the first champion: {loss}, a bigram model {compared.bigram_loss:.4f}"
    outcome = "the new champion" if is_better else f"not promoted, since not better by more than {margin}"
    return f"{outcome}: {loss}, the champion before {compared.champion_loss:.4f}"


def _read(names: File) -> list[str]:
    return list(json.loads(Path(names.download_sync()).read_text()))


def _load(state: File | None) -> dict[str, torch.Tensor]:
    """Return the weights. Empty without a file, for random ones."""
    if state is None:
        return {}
    loaded: dict[str, torch.Tensor] = torch.load(state.download_sync(), map_location="cpu", weights_only=True)
    return loaded
