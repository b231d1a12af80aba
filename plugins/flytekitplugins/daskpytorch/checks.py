"""Checks of users' values, with one error that names all problems, and of optional dependencies.

Imports little, since every rank and agent loads it.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, Literal

MAX_COUNT = 1_000_000
MAX_SECONDS = 1_209_600
"""Two weeks. Some system calls count milliseconds in 32 bits, which overflow after 24 days."""
MAX_SHOWN = 200
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and surrogates, which UTF-8 cannot encode."""
KEY_PATTERN = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
WORDS = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*")
"""Words of a chunk of a metric's name, such as `F1` and `Score` of `F1Score`."""
LOW, HIGH = (
    re.compile(rf"(?i)(train|val|valid|test|eval|avg|mean|top\d)?({words})\d*")
    for words in (
        "loss|losses|error|errors|err|perplexity|ppl|nll|bce|mse|mae|rmse|cer|wer|fid|lpips|bpb|bpc",
        "accuracy|precision|recall|acc|f1|auc|auroc|bleu|rouge|iou|miou|dice|ap|map|r2|psnr|ssim|ndcg|reward",
    )
)
"""Words in metrics' names for which low, or high, values are good."""
UNDONE = frozenset(
    ("neg", "negative", "minus", "no", "non", "free", "drop", "gap", "diff", "delta", "improvement", "reduction")
)
UNSTABLE = re.compile(r"/\.{0,2}(/|$)|\\|\?versionId=")
"""Parts of a path that libraries or servers of object stores change, or read otherwise."""
STABLE = "without '//', '.', '..', a backslash or '?versionId=' in its path"
A_URI = "a folder or an fsspec URL such as s3://bucket/prefix"

Rule = Callable[[Any], str | None]
"""Returns None if a value is allowed, else a text that names the allowed values."""


class Problems:
    """Collects the invalid values of a config or call, so that one error can name them all.

    `values` has them as attributes. A dotted name in `rules`, such as `gang.key`, is a nested attribute.
    """

    def __init__(self, owner: str, values: object, rules: Mapping[str, Rule] | None = None) -> None:
        self._owner = owner
        self._values = values
        self.found: list[str] = []
        for name, rule in (rules or {}).items():
            self.check(name, rule)

    def check(self, name: str, rule: Rule) -> None:
        try:
            value = attrgetter(name)(self._values)
        except AttributeError:  # of a nested value that its own rule refuses, or that is None
            return
        if (allowed := rule(value)) is not None:
            self.found.append(f"{self._owner}({name}={shown(value)}): must be {allowed}")

    def unless(self, ok: bool, name: str, allowed: str) -> None:
        """Note a problem with the attribute `name` unless `ok`, for conditions that involve several values."""
        self.check(name, must_be(allowed, lambda _: ok))

    def raise_any(self) -> None:
        if self.found:
            raise ValueError("; ".join(self.found))


def shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # raised by the value's class, or by Python for thousands of digits
        return f"<a {type(value).__name__} that cannot be written: {type(error).__name__}>"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


# ---- Rules


def must_be(words: str, *tests: Callable[[Any], bool]) -> Rule:
    """Return a rule that allows values which pass at least one test. `words` names the allowed values in errors."""
    return lambda value: None if any(test(value) for test in tests) else words


def optional(rule: Rule) -> Rule:
    def words(value: Any) -> str | None:
        if value is None or (others := rule(value)) is None:
            return None
        return f"None, {others}" if " or " in others else f"None or {others}"

    return words


def left_out(reason: str) -> Rule:
    return must_be(f"left out{reason}", lambda value: value is None)


def auto_or(rule: Rule) -> Rule:
    return lambda value: None if is_auto(value) or (words := rule(value)) is None else f"'auto' or {words}"


def whole(least: int, most: int = MAX_COUNT) -> Rule:
    return must_be(f"a whole number from {least} to {most}", lambda value: is_whole(value, least, most))


def one_of(*words: str) -> Rule:
    return must_be(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words)


def instance_of(kind: type) -> Rule:
    return must_be(f"a {kind.__name__}", lambda value: isinstance(value, kind))


def text(words: str = "a text without control characters") -> Rule:
    return must_be(words, is_text)


def path_or(text: str) -> Rule:
    """Return a rule that allows path objects and non-blank texts."""
    return must_be(text, lambda value: isinstance(value, os.PathLike) or is_text(value))


def tuple_of(items: str, test: Callable[[Any], bool]) -> Rule:
    return must_be(f"a tuple of {items}", lambda value: isinstance(value, (tuple, list)) and all(map(test, value)))


@functools.lru_cache(1000)
def direction_of(metric: str) -> Literal["min", "max"] | None:
    """Return `min` if a metric's name means that low values are good, `max` for high values. None: unknown."""
    chunks = re.findall(r"[A-Za-z0-9]+", metric)
    words = [*chunks, *(word for chunk in chunks for word in WORDS.findall(chunk))]
    is_low, is_high = (any(map(pattern.fullmatch, words)) for pattern in (LOW, HIGH))
    if is_low == is_high or not UNDONE.isdisjoint(map(str.lower, words)):
        return None
    return "min" if is_low else "max"


def check_direction(problems: Problems, metric: object, mode: object) -> None:
    """Note a problem if neither `mode` nor the metric's name tells whether low or high values are good."""
    is_known = mode is not None or not is_text(metric) or direction_of(str(metric)) is not None
    ways = "mode='min' if low values are good, or mode='max' if high values are good"
    problems.unless(is_known, "metric", f"given with {ways}: the name does not tell")


def uri(value: object) -> str | None:
    """Rule for storage: a folder or an fsspec URL that all ranks can open."""
    if not is_text(value):
        return A_URI
    protocol, separator, rest = str(value).partition("://")
    if not separator:  # a bucket's URL that lacks a slash is no folder's name
        return A_URI if re.match(r"(s3a?|gc?s|abfss?|az)(:|//)", protocol) else None
    from fsspec.registry import known_implementations, registry

    if protocol == "memory" or not rest.strip("/") or protocol not in {*registry, *known_implementations}:
        return f"{A_URI}, which every rank can reach" if protocol == "memory" else A_URI
    if not has_stable_path(value):
        return f"{A_URI}, {STABLE}"
    package = known_implementations.get(protocol, {}).get("class", "fsspec").partition(".")[0]
    if protocol in registry or is_installed(package):
        return None
    return f"a URL whose package is installed: {known_implementations[protocol].get('err', package)}"


# ---- Tests of one value


def is_whole(value: object, least: int, most: int = MAX_COUNT) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_seconds(value: object, least: float = 0.0) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and least <= value <= MAX_SECONDS and value > 0  # type: ignore[operator]


def is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and CONTROL_CHARACTERS.search(value) is None


def has_stable_path(value: object) -> bool:
    """Return True for a folder, and for a URL whose path all libraries and servers read alike."""
    protocol, is_url, path = str(value).partition("://")
    return not is_url or protocol == "file" or UNSTABLE.search(path.rstrip("/")) is None


COUNT = whole(1)
SECONDS = must_be(f"seconds above 0 and at most {MAX_SECONDS}", is_seconds)
MODE = optional(one_of("min", "max"))
BOOLEAN = must_be("True or False", lambda value: isinstance(value, bool))
KEY = must_be(
    "up to 100 of the characters A-Z, a-z, 0-9, '_', '.' and '-', without '.' or '-' at the beginning",
    lambda value: isinstance(value, str) and KEY_PATTERN.fullmatch(value) is not None,
)
"""Rule for texts that become a part of a path, such as a gang's key and a sweep's name."""


# ---- Optional dependencies


DISTRIBUTION = "flytekitplugins-daskpytorch"
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "dataframe": ("pandas", "pyarrow"),
    "debug": ("debugpy",),
    "flyte2": ("flyte", "flyteplugins.dask"),
    "lightning": ("lightning",),
    "mlflow": ("mlflow", "PIL"),
    "opentelemetry": ("opentelemetry.metrics",),
    "pictures": ("PIL",),
    "s3": ("botocore", "obstore", "PIL", "torchvision"),
    "sweep": ("pandas",),
    "tensorboard": ("tensorboard",),
    "transformers": ("accelerate", "transformers"),
    "wandb": ("wandb", "PIL"),
}
"""Importable packages that each extra of this package installs."""


def require_extra(extra: str, what: str) -> None:
    """Raise `ImportError` unless an extra's packages are installed. Imports none of them. `what` needs the extra."""
    if missing := [package for package in PACKAGES[extra] if not is_installed(package)]:
        raise ImportError(
            f"{what} needs {', '.join(missing)}, not installed for {sys.executable}: "
            f"pip install '{DISTRIBUTION}[{extra}]', here and where the ranks run",
            name=missing[0],
        )


def is_installed(package: str) -> bool:
    """Return True if a package can be imported. A folder of its name without code, such as `wandb/`, does not count."""
    try:
        spec = find_spec(package)
    except ModuleNotFoundError:  # of the package around it
        return False
    return spec is not None and spec.origin is not None


def require_flytekit(what: str) -> None:
    """Raise `ImportError` without flytekit, which `what` needs and which has no release for Python 3.13 and newer."""
    if not (is_installed("flytekit") and is_installed("flytekitplugins.dask")):
        raise ImportError(
            f"{what} needs flytekit, not installed for {sys.executable}: pip install '{DISTRIBUTION}'. Flytekit has no "
            f"release for Python 3.13 and newer: there take Flyte 2's flyteplugins.daskpytorch, by "
            f"pip install '{DISTRIBUTION}[flyte2]'",
            name="flytekit",
        )
