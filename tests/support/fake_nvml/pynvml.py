"""nvidia-ml-py with functions that answer about GPUs that a test describes, in place of those that ask the driver.

The variable FAKE_NVML has a file's path. The file has JSON: for each GPU's UUID, answers by key. A missing key means
that the GPU does not have the value. The UUID "*" stands for the driver itself.
"""

import json
import os
import sys
import time
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_found = PathFinder.find_spec("pynvml", [place for place in sys.path if Path(place) != Path(__file__).parent])
assert _found is not None
_spec = spec_from_file_location("real_pynvml", str(_found.origin))
assert _spec is not None
assert _spec.loader is not None
sys.modules["real_pynvml"] = real = module_from_spec(_spec)  # nvidia-ml-py looks there for its own name
_spec.loader.exec_module(real)
globals().update({name: value for name, value in vars(real).items() if name.startswith("NVML")})

num_inits = 0
"""Number of initialisations in this process."""


def _described(uuid: str) -> dict[str, int]:
    gpus: dict[str, dict[str, int]] = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    if uuid not in gpus:
        raise real.NVMLError(real.NVML_ERROR_NOT_FOUND)
    return gpus[uuid]


def _answers(uuid: str) -> dict[str, int]:
    while "hangs" in (answers := _described(uuid)):
        time.sleep(0.01)
    if (code := answers.get("code")) is not None:
        raise real.NVMLError(code)
    return answers


def _answer(uuid: str, key: str) -> int:
    answers = _answers(uuid)
    if key not in answers:
        raise real.NVMLError(real.NVML_ERROR_NOT_SUPPORTED)
    return answers[key]


def nvmlInit() -> None:
    global num_inits
    num_inits += 1
    _answers("*")


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    _answers("*")
    _answers(uuid)
    return uuid


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle: str) -> str:
    return f"GPU-{_answer(handle, 'whole')}"


def nvmlDeviceGetMemoryInfo(handle: str, version: object = None) -> Any:
    return SimpleNamespace(used=_answer(handle, "used"), total=_answer(handle, "total"))


def nvmlDeviceGetUtilizationRates(handle: str) -> Any:
    return SimpleNamespace(gpu=_answer(handle, "busy"))


def nvmlDeviceGetTotalEccErrors(handle: str, kind: int, counter: int) -> int:
    assert (kind, counter) == (real.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, real.NVML_VOLATILE_ECC)
    return _answer(handle, "ecc")


def nvmlDeviceGetRemappedRows(handle: str) -> tuple[int, int, int, int]:
    return 7, 7, _answer(handle, "remap_pending"), _answer(handle, "remap_failed")


def nvmlDeviceGetFieldValues(handle: str, fields: list[int]) -> list[Any]:
    assert fields == [real.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    asked = _answers(handle).get("recovery")
    code = real.NVML_ERROR_NOT_SUPPORTED if asked is None else real.NVML_SUCCESS
    return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=asked or 0))]
