"""Description of a training for displays and trackers: id, inputs, shape, usage and pace. Runs in the driver."""

import dataclasses
import functools
import os
import re
import shlex
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flytekitplugins.daskpytorch.process.streams import without_secrets
from flytekitplugins.daskpytorch.protocol.function import arguments_of, name_of
from flytekitplugins.daskpytorch.protocol.host import Execution
from flytekitplugins.daskpytorch.protocol.journal import Shape, Training
from flytekitplugins.daskpytorch.protocol.script import Script
from flytekitplugins.daskpytorch.records import LogRecord, RankUsage

MAX_CONFIG_ITEMS = 20
"""Longer lists and dictionaries are represented by their length."""
MAX_TEXT = 500
MAX_ID = 120
LINK_VARIABLE = "FLYTE_EXECUTION_URL"
MAX_RANKS = 8
"""Ranks, from 0 on, whose usage is drawn in Decks and sent to trackers."""
GIB = float(1 << 30)
LABELS = {
    "cpu_cores": "CPU (cores)",
    "memory_gib": "memory (GiB)",
    "gpu_memory_gib": "GPU memory (GiB)",
    "gpu_percent": "GPU utilization (%)",
}
"""Titles of charts and columns, by the names that `amounts` returns."""
HELD_OUT = re.compile(
    r"^(held_?out|val|valid|validation|eval|evaluation|test|dev)[_/.-]|[_/.-](held_?out|val|valid|test|eval)$"
)
WINDOW = 10.0
"""Seconds over which `Pace` averages. Longer if two reports are further apart."""
MIN_DISTANCE = WINDOW / 100


def of_task(name: str, execution: str | None, inputs: Mapping[str, Any]) -> Training:
    return _training(name, _id(name.rpartition(".")[2], run_id(execution, "")), inputs)


def of_call(
    function: Callable[..., Any], key: str, execution: Execution, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Training:
    if isinstance(function, Script):
        inputs = {"arguments": shlex.join(function.args)}
    else:
        inputs = arguments_of(function, args, kwargs)
    return _training(name_of(function), _id(key, run_id(execution.name, "")), inputs)


def of_model(function: Callable[..., Any], group: str, index: int, experiment: Any) -> Training:
    training = _training(name_of(function), f"{group}-{index}", inputs_of(experiment))
    return dataclasses.replace(training, group=group, index=index)


def group_of(key: str, execution: Execution) -> str:
    return _id(key, run_id(execution.name, ""))


def _training(name: str, id_: str, inputs: Mapping[str, Any]) -> Training:
    return Training(name=name, id=id_, inputs=plain_inputs(inputs), link=os.environ.get(LINK_VARIABLE))


def _id(what: str, run: str) -> str:
    return re.sub(r"[^\w.-]+", "-", f"{what}-{run}".strip("-"), flags=re.ASCII)[-MAX_ID:].lstrip("-.")


def run_id(execution: str | None, task: str) -> str:
    """Return an id for a tracker's run, the same in all attempts of a Flyte task.

    A job runner's pod is named by execution, node and attempt (`f3a-n0-1-runner`), and the id is this name without the
    attempt. In other processes, the id consists of execution and task. Without an execution, the id is random.
    """
    attempt = os.environ.get("FLYTE_ATTEMPT_NUMBER")
    if attempt is not None:
        pod = re.fullmatch(rf"(.+)-{re.escape(attempt)}(-runner)?", os.environ.get("HOSTNAME", ""))
        if pod and execution and pod[1].startswith(execution):
            return pod[1]
    if not execution or execution == "local":
        return os.urandom(4).hex()
    return re.sub(r"[^\w-]", "-", f"{execution}-{task}")[:120]


def fields_of(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if hasattr(value, each.name)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return dict(value._asdict())
    return dict(value) if callable(getattr(type(value), "model_copy", None)) else None


def inputs_of(experiment: Any) -> dict[str, Any]:
    fields = fields_of(experiment)
    return {"experiment": experiment} if fields is None else {str(name): value for name, value in fields.items()}


def row_of(first: Mapping[str, Any], **others: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row. A value has its group before its name, such as `metric.`, if there is a column of the same name."""
    row = dict(first)
    for group, values in others.items():
        row |= {f"{group}.{name}" if name in row else name: value for name, value in values.items()}
    return row


def run_config(training: Training, shape: Shape) -> dict[str, Any]:
    gang = {
        "world_size": shape.world_size,
        "num_workers": len(shape.nodes),
        "backend": shape.backend,
        "hosts": ", ".join(node.host for node in shape.nodes),
        "gpus": ", ".join(gpu for node in shape.nodes for gpu in node.gpu_names),
    }
    return {**training.inputs, **{f"gang/{name}": value for name, value in gang.items()}}


def size_of(shape: Shape) -> str:
    num_hosts = len({node.host for node in shape.nodes})
    parts = [count(len(shape.nodes), "worker")] if len(shape.nodes) > 1 else []
    parts += [count(num_hosts, "host")] if num_hosts > 1 else []
    ranks = count(shape.world_size, "rank")
    return f"{ranks} on {', '.join(parts)}" if parts else ranks


def count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def plain_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs for trackers and Decks as plain values, without secrets.

    The fields of a dataclass take the place of the dataclass.
    """
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


@functools.lru_cache(200)
def is_held_out(metric: str) -> bool:
    return HELD_OUT.search(metric) is not None


def amounts(usage: RankUsage) -> dict[str, float]:
    found = {"cpu_cores": usage.cpu, "memory_gib": usage.memory / GIB}
    if usage.gpu_memory is not None:
        found["gpu_memory_gib"] = usage.gpu_memory / GIB
    if usage.gpu_utilization is not None:
        found["gpu_percent"] = 100 * usage.gpu_utilization
    return found


# ---- Pace: one computation for the terminal, the Deck's figures, charts and tables


class Pace:
    def __init__(self) -> None:
        self._reports: deque[tuple[float, int]] = deque()

    def add(self, moment: float, num_steps: int) -> None:
        reports = self._reports
        if reports and num_steps < reports[-1][1]:
            reports.clear()
        if len(reports) > 1 and reports[-1][0] - reports[-2][0] < MIN_DISTANCE:
            reports.pop()
        reports.append((max(moment, reports[-1][0]) if reports else moment, num_steps))
        while len(reports) > 2 and reports[1][0] <= moment - WINDOW:
            reports.popleft()

    @property
    def per_second(self) -> float | None:
        """None before the second report."""
        if not self._reports or self._reports[-1][0] <= self._reports[0][0]:
            return None
        (begin, before), (end, after) = self._reports[0], self._reports[-1]
        return (after - before) / (end - begin)

    def clear(self) -> None:
        self._reports.clear()


def num_done(record: LogRecord) -> int:
    return record.step if record.num_steps is None else min(record.step + 1, record.num_steps)


def seconds_left(record: LogRecord, per_second: float | None) -> float | None:
    """None if the number of remaining steps or the pace is unknown."""
    if not record.num_steps or not per_second:
        return None
    return max(0.0, (record.num_steps - num_done(record)) / per_second)
