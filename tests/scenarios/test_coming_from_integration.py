"""The code blocks of docs/coming_from.md run in a gang."""

import json
import re
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import distributed
import pytest

from flytekitplugins.daskpytorch.node import fork_client
from pages import REPOSITORY
from processes import nothing_left_behind

PAGE = (REPOSITORY / "docs" / "coming_from.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[1:]}


def programs(title: str) -> tuple[str, str]:
    """A section's program before and after what its block says."""
    [block] = re.findall(r"^```diff\n(.*?)^```$", SECTIONS[title], re.MULTILINE | re.DOTALL)
    lines = block.splitlines()
    assert all(line[:1] in ("-", "+", " ") for line in lines)
    before, after = ("\n".join(line[1:] for line in lines if line[0] != drop) + "\n" for drop in "+-")
    return before, after


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers in this process, so that all gangs have one fork server."""
    with nothing_left_behind():
        fork_client.shutdown()
        monkeypatch.setattr(fork_client, "_imported_ahead", ["torch._dynamo"])  # once, and not by each optimizer
        import_module("flytekitplugins.daskpytorch.dispatch")  # needs the class itself
        in_process = partial(distributed.Client, processes=False, dashboard_address=None)
        monkeypatch.setattr(distributed, "Client", in_process)
        yield
        fork_client.shutdown()


def changed(title: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program afterwards, imported."""
    (folder / f"{name}.py").write_text(programs(title)[1])
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    return import_module(name)


def as_script(module: ModuleType) -> Any:
    """Run what the program does as a script."""
    source = Path(str(module.__file__)).read_text()
    block = source.partition('if __name__ == "__main__":\n')[2]
    exec(compile("if True:\n" + block, str(module.__file__), "exec"), vars(module))


def test_every_block_is_a_program_before_and_after() -> None:
    *others, beside = SECTIONS
    with_blocks = [title for title in others if title != "torchrun"]  # which has commands alone
    assert PAGE.count("```diff\n") == len(with_blocks) == 3
    assert PAGE.count("```") == 8
    assert beside == "Beside Flyte 2's ClusteredTaskEnvironment and Monarch"
    for title in with_blocks:
        for program in programs(title):
            compile(program, title, "exec")


def test_statements_about_flyte_2s_own_environment_are_true() -> None:
    clustered = pytest.importorskip("flyte.clustered")
    made = clustered.ClusteredTaskEnvironment("e", replicas=2, nproc_per_node=4)
    assert (made.runtime, made.failure_policy.max_restarts) == (clustered.TorchRun(), 0)
    assert not made.failure_policy.restart_on_host_maintenance
    with pytest.raises(ValueError, match="nproc_per_node must be 1"):
        clustered.ClusteredTaskEnvironment("e", replicas=2, nproc_per_node=4, runtime=clustered.JaxRun())


@pytest.mark.usefixtures("here")
def test_what_they_make_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elastic = changed("kfpytorch's Elastic", "from_elastic", tmp_path, monkeypatch)
    assert elastic.train(learning_rate=0.1) == 3.0  # 1 + 2: only two ranks of one gang have it
    capsys.readouterr()
    as_script(changed("Ray Train", "from_ray", tmp_path, monkeypatch))
    assert capsys.readouterr().out == "[4, 4]\n"  # of 8 batches, each rank sees half
    as_script(changed("dask-pytorch-ddp", "from_dask_pytorch_ddp", tmp_path, monkeypatch))
    files = [tmp_path / "results" / f"rank-{rank}" / f"epoch-{epoch}.json" for rank in range(2) for epoch in range(2)]
    assert [json.loads(file.read_text()) for file in files] == [{"epoch": 0, "ranks": 2}, {"epoch": 1, "ranks": 2}] * 2
