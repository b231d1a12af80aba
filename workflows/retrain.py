"""Train the pet-names model on the newest names, and make it the champion if it is better, as a Flyte workflow.

Steps: prepare (read, check) -> train (with DDP on a Dask cluster) -> evaluate -> register -> promote or keep -> report

The first command runs the workflow on this machine, with the embedded list of names and a registry in your home
directory. The run takes a minute on two cores, and a few seconds if nothing changed since the last run. The second
command trains on the newest file of a folder, with a registry in a bucket:

    pyflyte run workflows/retrain.py retrain
    pyflyte run workflows/retrain.py retrain --data s3://bucket/names/ --registry s3://bucket/pet-names

Try a tiny training first:

    pyflyte run workflows/retrain.py retrain --registry /tmp/registry --hp '{"epochs": 1, "batch_size": 2048}'

The next command runs the workflow every day on a Flyte backend, on the names of the day. The environment variables at
registration become the launch plan's defaults. `pyflyte run workflows/retrain.py retrain_daily` runs the plan here:

    PET_NAMES_REGISTRY=s3://bucket/pet-names PET_NAMES_DATA='s3://bucket/names/{date}.csv' \
        PET_NAMES_SCHEDULE='0 4 * * *' PET_NAMES_EMAILS=team@example.org \
        pyflyte register --image registry/daskpytorch:tag --activate-launchplans workflows/retrain.py

Show the history, or make the previous champion (or any version) the champion again:

    python -m tasks.registry --registry s3://bucket/pet-names history
    python -m tasks.registry --registry s3://bucket/pet-names roll-back --reason 'complaints about the new names'

A run that fails or is killed at any moment leaves a complete champion, the old or the new one. If two runs overlap,
only one promotes its model, and the registry keeps both models.

`PET_NAMES_WORKERS` sets the number of Dask workers, and `DASKPYTORCH_PROFILE=gpu` gives each worker a GPU. Credentials
for buckets are those of s3fs: variables such as `AWS_ACCESS_KEY_ID`, a profile, or the pod's role.
"""

# ruff: noqa: ARG001 - the node that runs on failure must take all inputs of the workflow

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from flytekit import (
    Cache,
    CronSchedule,
    Deck,
    Email,
    HashMethod,
    LaunchPlan,
    Slack,
    WorkflowExecutionPhase,
    conditional,
    current_context,
    task,
    workflow,
)
from flytekit.types.error import FlyteError
from flytekit.types.file import FlyteFile, PythonPickledFile

from flytekitplugins.daskpytorch import DaskDDP, Gang, Wandb
from flytekitplugins.daskpytorch import report as pieces
from tasks import challenger, char_lstm
from tasks.challenger import CHAMPION, NAMES, SCRATCH, STATE, Champion, find_champion
from tasks.char_lstm import CharLSTM, Hyperparameters
from tasks.drift import Limits, character_counts, check, drift
from tasks.model_card import Comparison, DataFacts, ModelCard, git_version, plugin_version
from tasks.names import CleanNames, load_names, newest_uri, split_by_hash
from tasks.registry import Promotion, Registry
from workflows import resources

NUM_WORKERS = resources.number("PET_NAMES_WORKERS", 2)
SETTINGS = resources.SETTINGS | {"PET_NAMES_WORKERS": str(NUM_WORKERS)}
"""Environment variables of the tasks' pods, which import this file again."""
REGISTRY = os.environ.get("PET_NAMES_REGISTRY", "~/.pet-names/registry")
DATA = os.environ.get("PET_NAMES_DATA", "")
SCHEDULE = os.environ.get("PET_NAMES_SCHEDULE", "0 4 * * *")
NOW = datetime.fromtimestamp(0, UTC)
"""Default of the kick-off time. Flyte's scheduler fills in an input only if its type is a time."""
MARGIN = 0.001
"""Default margin in nats per character. Smaller differences are noise."""


def _content_hash(file: FlyteFile) -> str:
    return challenger.sha256(file.path)


NamesFile = FlyteFile["json"]
HashedNames = Annotated[NamesFile, HashMethod(_content_hash)]
HashedState = Annotated[PythonPickledFile, HashMethod(_content_hash)]
"""Inputs with equal content have the same key in Flyte's cache, wherever they came from and whenever they were read."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Starting point of a retraining."""

    data: DataFacts
    champion: str
    """Version of the champion for the comparison. Empty: no champion exists."""
    promotion: int
    """Number of the promotion that made this version the champion. 0: no champion exists."""
    start: str
    """Version whose weights the challenger starts from. Empty: random weights."""
    held_out: float
    """Fraction of the names on which neither the challenger, the champion nor their ancestors were trained."""


class Newest(NamedTuple):
    """Checked newest names, and the weights for the comparison and for the start."""

    names: HashedNames
    """File of the sorted names."""
    champion: HashedState
    """Weights of the champion. Empty if no champion exists."""
    start: HashedState
    """Initial weights. Empty: random weights."""
    origin: Origin


class Trained(NamedTuple):
    """Outputs of the training."""

    epoch_losses: list[float]
    """Cross-entropy of the next character on held-out names after each epoch, in nats."""
    model_state: HashedState
    wandb_url: str
    """Address of the run in Weights & Biases. Empty without a run there."""


class Registered(NamedTuple):
    """The challenger's version in the registry, and the decision about its promotion."""

    version: str
    promotes: bool
    why: str


class Retraining(NamedTuple):
    """The outputs of the workflow."""

    version: str
    """Version of the challenger. An earlier run's version if nothing changed since."""
    outcome: str
    """Result of the promotion, with its reason."""
    summary: str


@task(requests=resources.SMALL, environment=SETTINGS, retries=2)
def prepare(
    data: str, registry: str, start_from: str, hp: Hyperparameters, limits: Limits, kickoff_time: datetime
) -> Newest:
    """Read the newest names and the champion. Names that break the limits fail here, before any training."""
    _check_start(start_from)
    day = (datetime.now(UTC) if kickoff_time == NOW else kickoff_time.astimezone(UTC)).date()
    loaded = load_names(newest_uri(data, day))
    print(loaded.report)
    opened, folder = Registry(registry), Path(current_context().working_directory)
    opened.check()
    champion = find_champion(opened, folder / "champion")
    check(loaded, limits, champion.card.data if champion else None)
    _check_sides(loaded.names, hp)
    path = folder / NAMES
    path.write_text(json.dumps(sorted(loaded.names)))
    facts = _facts(loaded, day, challenger.sha256(path), champion)
    print(_describe(facts))
    origin = _origin(opened, facts, champion, hp, start_from)
    return Newest(
        names=NamesFile(path=str(path)),
        champion=_state_of(opened, origin.champion, folder / "champion"),
        start=_state_of(opened, origin.start, folder / "start"),
        origin=origin,
    )


@task(
    task_config=DaskDDP(
        scheduler=resources.SCHEDULER,
        workers=resources.workers(NUM_WORKERS),
        gang=Gang(start_timeout=600, max_restarts=3),
        wandb=Wandb(project="pet-names"),
    ),
    requests=resources.SMALL,
    environment=SETTINGS,
    retries=3,
    interruptible=True,
    cache=Cache(version="1"),
    enable_deck=True,
)
def train(names: NamesFile, start: PythonPickledFile, hp: Hyperparameters) -> Trained:
    """Train in all ranks and return the outputs of rank 0. On a day without changes, Flyte's cache has them."""
    training, held_out = (char_lstm.windows(side) for side in split_by_hash(_read(names), hp.held_out))
    result = char_lstm.train(training, held_out, hp, start=_load(start))
    path = Path(current_context().working_directory, STATE)
    torch.save(result.state_dict, path)
    return Trained(
        epoch_losses=[epoch.held_out_loss for epoch in result.epochs],
        model_state=PythonPickledFile(path=str(path)),
        wandb_url=_wandb_url(),
    )


@task(requests=resources.SMALL, retries=2, cache=Cache(version="1"))
def evaluate(
    names: NamesFile, champion: PythonPickledFile, challenger_state: PythonPickledFile, held_out: float
) -> Comparison:
    """Evaluate challenger and champion on names that neither was trained on, beside a bigram model."""
    training, judged = split_by_hash(_read(names), held_out)
    windows = char_lstm.windows(judged)
    found = char_lstm.evaluate(CharLSTM.from_state_dict(_load(challenger_state)), windows)
    state = _load(champion)
    before = char_lstm.evaluate(CharLSTM.from_state_dict(state), windows) if state else None
    return Comparison(
        loss=found.loss,
        accuracy=found.accuracy,
        champion_loss=before.loss if before else None,
        champion_accuracy=before.accuracy if before else None,
        bigram_loss=char_lstm.bigram_loss(char_lstm.windows(training), windows),
        num_held_out=len(set(judged)),
    )


@task(requests=resources.SMALL, retries=2)
def register(
    registry: str,
    names: NamesFile,
    model_state: PythonPickledFile,
    start_from: str,
    hp: Hyperparameters,
    origin: Origin,
    comparison: Comparison,
    wandb_url: str,
    margin: float,
) -> Registered:
    """Add the challenger to the registry with its model card, and decide whether to promote it."""
    opened = Registry(registry)
    files = {STATE: Path(model_state.download()), NAMES: Path(names.download())}
    card = ModelCard(
        data=origin.data,
        hp=asdict(hp),
        start_from=start_from,
        start=origin.start,
        champion=origin.champion,
        comparison=comparison,
        held_out=origin.held_out,
        state_sha256=challenger.sha256(files[STATE]),
        plugin_version=plugin_version(),
        git_version=git_version(),
        registered_version=os.environ.get("FLYTE_INTERNAL_TASK_VERSION", ""),
        execution=current_context().execution_id.name,
        wandb_url=wandb_url,
    )
    version = challenger.add(opened, files, card)
    verdict = challenger.judge(opened, version, comparison, margin)
    return Registered(version=version, promotes=verdict.promotes, why=verdict.why)


@task(requests=resources.SMALL, retries=2)
def promote(registry: str, version: str, why: str, origin: Origin) -> str:
    """Make the challenger the champion, unless another version was promoted since the comparison."""
    return challenger.promote(Registry(registry), version, why, instead_of=origin.promotion)


@task(requests=resources.SMALL, retries=2)
def keep(why: str) -> str:
    """Leave the champion unchanged, and return the reason."""
    return f"not promoted: {why}"


@task(requests=resources.SMALL, retries=2, enable_deck=True)
def report(registry: str, version: str, outcome: str, epoch_losses: list[float], comparison: Comparison) -> str:
    """Print the result of the retraining in a line, and show it in a Deck."""
    opened = Registry(registry)
    history = opened.history()
    text = f"{version} {outcome}; {_named(history[-1] if history else None)}"
    curves = {"challenger": [(float(epoch), loss) for epoch, loss in enumerate(epoch_losses, 1)]}
    if comparison.champion_loss is not None:
        curves["champion"] = [(epoch, comparison.champion_loss) for epoch, _ in curves["challenger"]]
    card = ModelCard.from_dict(opened.card(version))
    Deck("Retraining", _page(text, version, card, history, curves, comparison))
    print(text)
    return text


@task(requests=resources.SMALL, retries=2)
def say_what_failed(
    data: str,
    registry: str,
    start_from: str,
    hp: Hyperparameters,
    margin: float,
    limits: Limits,
    kickoff_time: datetime,
    err: FlyteError | None = None,
) -> None:
    """Print the failure and the current champion. The registry stays unchanged."""
    # `err.failed_node_id` is the node of this task, both locally and on a backend.
    what = err.message if err is not None else "see the nodes before this one"
    print(f"the retraining has failed: {what}")
    print(f"in the registry {registry} {_champion_in(registry)}")


@workflow(on_failure=say_what_failed)
def retrain(
    data: str = DATA,
    registry: str = REGISTRY,
    start_from: str = CHAMPION,
    hp: Hyperparameters = Hyperparameters(),
    margin: float = MARGIN,
    limits: Limits = Limits(),
    kickoff_time: datetime = NOW,
) -> Retraining:
    """Train a challenger on the newest names, and make it the champion if it is better.

    Args:
        data: A JSON list of names or a CSV file with a column of names (a path, https:// or s3://). A `{date}` in the
            name becomes the day of the kick-off time in UTC. A folder or prefix stands for its newest file. Empty: the
            embedded list.
        registry: The folder or s3://bucket/prefix of the models and their promotions.
        start_from: Initial weights of the challenger: `champion` (random weights while no champion exists), or
            `scratch`.
        hp: Hyper-parameters, as a JSON object of the fields of `Hyperparameters`. The seed does not change which names
            are held out.
        margin: Least improvement over the champion's loss, in nats per character.
        limits: Limits on the names, as a JSON object of the fields of `Limits`.
        kickoff_time: Time that decides the day of the names. The scheduler fills it in. The default stands for now.
    """
    newest = prepare(
        data=data, registry=registry, start_from=start_from, hp=hp, limits=limits, kickoff_time=kickoff_time
    )
    trained = train(names=newest.names, start=newest.start, hp=hp)
    comparison = evaluate(
        names=newest.names,
        champion=newest.champion,
        challenger_state=trained.model_state,
        held_out=newest.origin.held_out,
    )
    registered = register(
        registry=registry,
        names=newest.names,
        model_state=trained.model_state,
        start_from=start_from,
        hp=hp,
        origin=newest.origin,
        comparison=comparison,
        wandb_url=trained.wandb_url,
        margin=margin,
    )
    outcome = (
        conditional("is_better")
        .if_(registered.promotes.is_true())
        .then(promote(registry=registry, version=registered.version, why=registered.why, origin=newest.origin))
        .else_()
        .then(keep(why=registered.why))
    )
    summary = report(
        registry=registry,
        version=registered.version,
        outcome=outcome,
        epoch_losses=trained.epoch_losses,
        comparison=comparison,
    )
    return Retraining(version=registered.version, outcome=outcome, summary=summary)


def _recipients(variable: str) -> list[str]:
    return [address.strip() for address in os.environ.get(variable, "").split(",") if address.strip()]


def _notifications() -> list[Email | Slack]:
    """Return Flyte's notifications about a retraining that failed, timed out or was aborted."""
    phases = [WorkflowExecutionPhase.FAILED, WorkflowExecutionPhase.TIMED_OUT, WorkflowExecutionPhase.ABORTED]
    kinds = {Email: "PET_NAMES_EMAILS", Slack: "PET_NAMES_SLACK_EMAILS"}
    return [
        kind(phases=phases, recipients_email=recipients)
        for kind, variable in kinds.items()
        if (recipients := _recipients(variable))
    ]


retrain_daily = LaunchPlan.get_or_create(
    workflow=retrain,
    name="retrain_daily",
    schedule=CronSchedule(schedule=SCHEDULE, kickoff_time_input_arg="kickoff_time"),
    notifications=_notifications(),
)
"""Launch plan that runs every day at 04:00 UTC, or as PET_NAMES_SCHEDULE says."""


def _check_sides(names: list[str], hp: Hyperparameters) -> None:
    """Raise a `ValueError` if no name would be held out, or a rank would have no sample."""
    training, held_out = split_by_hash(names, hp.held_out)
    num_samples = len(char_lstm.windows(training)) if training else 0
    if num_samples < NUM_WORKERS or not held_out:
        raise ValueError(
            f"of {len(set(names))} different names held_out={hp.held_out} leaves {num_samples} training samples for "
            f"{NUM_WORKERS} ranks, and {len(held_out)} names to judge by; give more names or another hp.held_out"
        )


def _check_start(start_from: str) -> None:
    if start_from not in (CHAMPION, SCRATCH):
        raise ValueError(f"start_from={start_from!r}: must be {CHAMPION!r} or {SCRATCH!r}")


def _facts(loaded: CleanNames, day: date, fingerprint: str, champion: Champion | None) -> DataFacts:
    """Return the facts about the names for the model card."""
    distinct, characters = set(loaded.names), character_counts(loaded.names)
    return DataFacts(
        source=loaded.source,
        day=str(day),
        fingerprint=fingerprint,
        num_names=len(loaded.names),
        num_distinct=len(distinct),
        num_new=len(distinct - champion.names) if champion else len(distinct),
        drift=drift(characters, champion.card.data.characters) if champion else None,
        characters=characters,
    )


def _origin(
    registry: Registry, facts: DataFacts, champion: Champion | None, hp: Hyperparameters, start_from: str
) -> Origin:
    """Return the challenger's starting point. If nothing changed since an earlier training, return that one's."""
    start = champion.version if champion and start_from == CHAMPION else ""
    trained = challenger.find_trained(registry, facts.fingerprint, asdict(hp), start_from)
    cards = [card for card in (champion.card if champion else None, trained) if card is not None]
    return Origin(
        data=facts,
        champion=champion.version if champion else "",
        promotion=champion.promotion.number if champion else 0,
        start=trained.start if trained else start,
        held_out=min([hp.held_out, *(card.held_out for card in cards)]),
    )


def _state_of(registry: Registry, version: str, folder: Path) -> PythonPickledFile:
    """Return the file of a version's weights. Without a version, return a file without weights."""
    folder.mkdir(exist_ok=True)
    path = folder / STATE
    if version:
        path = registry.fetch(version, STATE, folder)
    else:
        torch.save({}, path)
    return PythonPickledFile(path=str(path))


def _read(names: FlyteFile) -> list[str]:
    return list(json.loads(Path(names.download()).read_text()))


def _load(state: PythonPickledFile) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(state.download(), map_location="cpu", weights_only=True)
    return loaded


def _wandb_url() -> str:
    """Return the address of this rank's online run in Weights & Biases. Empty without a run."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    return "" if run is None or run.offline or run.disabled else str(run.url or "")


def _describe(facts: DataFacts) -> str:
    text = f"{facts.num_names:,} names of {facts.day}, {facts.num_new:,} of the different ones new to the champion"
    return text if facts.drift is None else f"{text}; the characters have moved by {facts.drift:.4f}"


def _page(
    text: str,
    version: str,
    card: ModelCard,
    history: list[Promotion],
    curves: dict[str, list[tuple[float, float]]],
    comparison: Comparison,
) -> str:
    header = ("", "version", "instead of", "since", "why")
    promotions = pieces.table(header, [_row(promotion) for promotion in reversed(history)])
    return pieces.page(
        pieces.status("done", f"Retraining: {version}", tone="good"),
        pieces.text(text),
        pieces.section(
            "Is it better?",
            pieces.grid(
                pieces.card(f"On {comparison.num_held_out:,} held-out names", _compare(comparison)),
                pieces.line_chart(
                    "held-out loss (nats per character)",
                    curves,
                    "epoch",
                    best={"challenger": "min"},
                    dashed=["champion"],
                ),
            ),
        ),
        pieces.section(f"Model card of {version}", card.html()),
        pieces.section("Champions", pieces.card("", promotions)),
    )


def _compare(comparison: Comparison) -> str:
    rows: list[tuple[str, float | None, float | None]] = [
        ("challenger", comparison.loss, comparison.accuracy),
        ("champion", comparison.champion_loss, comparison.champion_accuracy),
        ("bigram model", comparison.bigram_loss, None),
    ]
    header = ("", "loss (nats per character)", "accuracy")
    return pieces.table(header, [(name, _number(loss), _number(accuracy)) for name, loss, accuracy in rows])


def _champion_in(registry: str) -> str:
    """Return the champion in words, or the registry's error if it cannot be read."""
    try:
        return _named(Registry(registry).champion())
    except Exception as error:
        return f"it cannot be said who is the champion ({type(error).__name__}: {error})"


def _named(champion: Promotion | None) -> str:
    if champion is None:
        return "there is no champion yet"
    return f"the champion is {champion.version} (promotion {champion.number})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _row(promotion: Promotion) -> tuple[object, ...]:
    return promotion.number, promotion.version, promotion.previous or "", promotion.at, promotion.reason
