"""What trackers are told of a training: its name in all of its attempts, its inputs, its shape. Runs in the driver."""

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flytekitplugins.daskpytorch.process.streams import without_secrets
from flytekitplugins.daskpytorch.protocol.code import name_of
from flytekitplugins.daskpytorch.protocol.host import Execution
from flytekitplugins.daskpytorch.protocol.observer import Shape, Training

MAX_CONFIG_ITEMS = 20
"""Longer lists among a task's inputs go to the run's configuration as their lengths."""
MAX_TEXT = 500
"""Characters of an input."""
MAX_ID = 120
LINK_VARIABLE = "FLYTE_EXECUTION_URL"


def of_task(name: str, execution: str | None, inputs: Mapping[str, Any]) -> Training:
    """That of a task whose function runs in the ranks."""
    short = name.rpartition(".")[2]
    return _training(name, _id(short, run_id(execution, "")), inputs)


def of_call(
    function: Callable[..., Any], key: str, execution: Execution, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Training:
    """That of one `dispatch.run`; the key tells it from the task's others."""
    called = getattr(function, "_task_function", function)  # of a Flyte task
    try:
        inputs: Mapping[str, Any] = inspect.signature(called).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # of something that has no signature, such as a few builtins
        inputs = kwargs
    return _training(name_of(function), _id(key, run_id(execution.name, "")), inputs)


def of_model(function: Callable[..., Any], group: str, index: int, experiment: Any) -> Training:
    """That of one of many models."""
    training = _training(name_of(function), f"{group}-{index}", inputs_of(experiment))
    return dataclasses.replace(training, group=group, index=index)


def group_of(key: str, execution: Execution) -> str:
    """What holds the models of one `dispatch.map` together, whose keys begin so."""
    return _id(key, run_id(execution.name, ""))


def _training(name: str, id_: str, inputs: Mapping[str, Any]) -> Training:
    return Training(name=name, id=id_, inputs=plain_inputs(inputs), link=os.environ.get(LINK_VARIABLE))


def _id(what: str, run: str) -> str:
    return re.sub(r"[^\w.-]+", "-", f"{what}-{run}".strip("-"), flags=re.ASCII)[-MAX_ID:].lstrip("-.")


def run_id(execution: str | None, task: str) -> str:
    """An id that all attempts of one node share.

    The job-runner's pod is named after execution, node and attempt (`f3a-n0-1-runner`): the attempt goes. Elsewhere
    the execution and the task make the id; without an execution each run is new.
    """
    attempt = os.environ.get("FLYTE_ATTEMPT_NUMBER")
    if attempt is not None:
        pod = re.fullmatch(rf"(.+)-{re.escape(attempt)}(-runner)?", os.environ.get("HOSTNAME", ""))
        if pod and execution and pod[1].startswith(execution):
            return pod[1]
    if not execution or execution == "local":
        return os.urandom(4).hex()
    return re.sub(r"[^\w-]", "-", f"{execution}-{task}")[:120]


def inputs_of(experiment: Any) -> Mapping[str, Any]:
    """What a model's configuration has of its experiment: a dictionary's items, a dataclass's fields, or itself."""
    if isinstance(experiment, Mapping):
        return {str(name): value for name, value in experiment.items()}
    is_shown = dataclasses.is_dataclass(experiment) or isinstance(experiment, (str, int, float))
    return {"experiment": experiment if is_shown else repr(experiment)}


def run_config(inputs: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """The run's configuration: a task's inputs, and the gang's shape."""
    return {**plain_inputs(inputs), "gang": gang_config(shape)}


def gang_config(shape: Shape) -> dict[str, Any]:
    """What a configuration has of a gang."""
    return {
        "world_size": shape.world_size,
        "num_workers": len(shape.nodes),
        "backend": shape.backend,
        "hosts": [node.host for node in shape.nodes],
        "gpus": [gpu for node in shape.nodes for gpu in node.gpu_names],
    }


def size_of(shape: Shape) -> str:
    """Return how many ranks a gang has, and on how many workers and hosts where these are several."""
    num_hosts = len({node.host for node in shape.nodes})
    parts = [_count(len(shape.nodes), "worker")] if len(shape.nodes) > 1 else []
    parts += [_count(num_hosts, "host")] if num_hosts > 1 else []
    ranks = _count(shape.world_size, "rank")
    return f"{ranks} on {', '.join(parts)}" if parts else ranks


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def plain_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs as trackers and Decks show them: numbers, texts, dataclasses as dictionaries; no secrets."""
    shown: dict[str, Any] = {}
    for name, value in without_secrets(dict(inputs)).items():
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, os.PathLike)):  # a FlyteFile is both
            shown |= plain_inputs({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        elif isinstance(value, (int, float, bool, type(None))):
            shown[name] = value
        elif isinstance(value, (list, tuple, dict, set)) and len(value) > MAX_CONFIG_ITEMS:
            shown[f"num_{name}"] = len(value)
        else:
            shown[name] = text if len(text := str(value)) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
    return shown
