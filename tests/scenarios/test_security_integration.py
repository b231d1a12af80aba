"""Data from outside runs no code, and secrets appear nowhere."""

import ast
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from flytekitplugins.daskpytorch.data import S3ImageFolder
from flytekitplugins.daskpytorch.display.training import plain_inputs
from flytekitplugins.daskpytorch.protocol.host import AgentOrder
from flytekitplugins.daskpytorch.sweep.sweep import SweepDisplay
from pages import REPOSITORY
from processes import SCRIPTS, nothing_left_behind, run_program
from told import To

SOURCES = [path for folder in ("plugins", "tasks", "workflows") for path in sorted((REPOSITORY / folder).rglob("*.py"))]
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "AWS_ACCESS_KEY_ID": "AKIASENTINEL0000",
    "AWS_SECRET_ACCESS_KEY": "sentinel-of-the-secret-key",
    "AWS_SESSION_TOKEN": "sentinel-of-the-session-token",
    "_FSEC_GROUP_KEY": "sentinel-of-flytes-secret",
}
TASK = """
from dataclasses import dataclass

from flytekit import task, workflow
from flytekitplugins.daskpytorch import SpawnDDP, Wandb, current_rank


@dataclass
class Access:
    bucket: str
    secret: str


@task(task_config=SpawnDDP(nproc=2, wandb=Wandb(project="p", mode="offline")), enable_deck=True)
def train(access: Access, fail: bool) -> int:
    current_rank().log({"loss": 1.0})
    if fail and current_rank().is_main:
        raise RuntimeError("no such bucket")
    return current_rank().world_size
"""


# ---- Pickles


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


READERS = {"torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads"}


def test_states_are_read_as_weights_only_and_pickles_only_where_a_comment_says_whose_they_are() -> None:
    num_seen = 0
    for path in SOURCES:
        lines = path.read_text().splitlines()
        for name, call in calls(path):
            if name not in READERS:
                continue
            num_seen += 1
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if name == "torch.load" and keywords.get("weights_only") == "True":
                continue
            beside = "\n".join(lines[max(0, call.lineno - 3) : call.end_lineno])
            known = r"our own|gang's own|of this gang|this gang's driver|are trusted with|two lines above"
            assert re.search(known, beside), f"{path}:{call.lineno}: {name} of what may be somebody else's"
    assert num_seen >= 12


# ---- Sockets


@pytest.mark.parametrize("host", ["flytekit", pytest.param("flyte", marks=pytest.mark.slow)])
def test_all_that_a_local_run_listens_at_is_the_loopback(host: str, tmp_path: Path) -> None:
    if host == "flyte":
        pytest.importorskip("flyteplugins.dask")
    program = shutil.copy(REPOSITORY / "tests/support/listening.py", tmp_path)
    with nothing_left_behind():
        done = run_program([Path(program), host], cwd=tmp_path, env={"DASKPYTORCH_CHECKPOINTS": ""})
    found = {each["task"]: each["at"] for each in map(json.loads, done.stdout.splitlines())}
    assert set(found) == {"spawn_ddp", "dask_ddp", "dask_cluster"}, done.stderr
    assert all(found.values())
    assert [at for task in found.values() for at in task if not at.startswith("127.0.0.1:")] == []


# ---- Secrets


def test_what_may_be_printed_shows_no_secret() -> None:
    folder = S3ImageFolder.__new__(S3ImageFolder)
    order = AgentOrder(worker="w", driver=("h", 1), token=b"sentinel")
    shown = f"{order!r} {folder!r}"
    assert "sentinel" not in shown
    assert SECRETS["WANDB_API_KEY"] not in shown


def test_an_error_of_the_bucket_names_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    options = {"key": "AKIASENTINEL0000", "secret": "sentinel-secret", "token": "sentinel-token"}
    place = {"endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises(OSError, match=r"bucket") as failure:
        S3ImageFolder("bucket", "dogs", storage_options=options | place, num_retries=0)
    chain = [error for error in (failure.value, failure.value.__cause__) if error is not None]
    assert not any(secret in f"{error} {error!r}" for error in chain for secret in options.values())


def test_an_experiments_secret_is_not_in_the_log_of_many_models() -> None:
    text = io.StringIO()
    board = SweepDisplay(1, Console(file=text, width=160, highlight=False))
    To(board.line(0, {"api_key": "sentinel", "lr": 1, "data": [{"password": "sentinel"}]})).ended(OSError("gone"))
    assert "model 0 {'api_key': '(hidden)', 'lr'" in text.getvalue()
    assert "sentinel" not in text.getvalue()


def test_hyper_parameters_that_only_sound_like_secrets_are_shown() -> None:
    given = {"num_tokens": 3, "pad_token": "<pad>", "tokenizer": "bpe", "key_dim": 64, "keys": 8}
    assert plain_inputs(given).items() >= given.items()


@pytest.mark.parametrize("fail", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_leaves_no_secret_in_its_log_deck_or_weights_and_biases(
    fail: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "training.py").write_text(TASK)
    for name in [name for name in os.environ if name.startswith(("AWS_", "WANDB_"))]:
        monkeypatch.delenv(name)
    command = [SCRIPTS / "pyflyte", "run", "training.py", "train"]
    command += [
        "--access",
        '{"bucket": "visible", "secret": "sentinel-of-the-input"}',
        "--fail" if fail else "--no-fail",
    ]
    with nothing_left_behind():
        done = run_program(command, cwd=tmp_path, env={**SECRETS, "HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    said = done.stdout + done.stderr
    assert ("no such bucket" in said) == fail, said
    left = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    runs = [name for name in left if name.endswith(".wandb")]
    decks = [name for name in left if name.endswith("deck.html")]
    assert runs
    assert fail or decks  # flytekit makes none of a local run that fails
    assert any(b"visible" in left[name] for name in runs)
    assert not any(b"sentinel" in left[name] for name in runs)  # that of the input neither
    for secret in SECRETS.values():
        assert secret not in said
        assert [name for name, content in left.items() if secret.encode() in content] == []
