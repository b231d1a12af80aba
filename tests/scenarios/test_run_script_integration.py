"""Scripts and modules run in a gang's ranks as `torchrun` runs them, and their folder travels to other machines."""

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from distributed import Client

from flytekitplugins.daskpytorch import dispatch, run_module, run_script
from flytekitplugins.daskpytorch.protocol import script as script_module
from flytekitplugins.daskpytorch.protocol.code import Project
from flytekitplugins.daskpytorch.protocol.script import module_of, script_of
from gangs import on_this_machine
from processes import nothing_left_behind

TRAIN = """
    import argparse
    import json
    import os
    import sys
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from models import net


    class Point:
        def __init__(self, x):
            self.x = x


    class Points(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return Point(index)


    def first(points):
        return points[0]


    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument("--code", type=int, default=0)
        parser.add_argument("out", type=Path)
        given = parser.parse_args()
        dist.init_process_group("gloo")
        size = torch.ones(1)
        dist.all_reduce(size)
        how = dict(num_workers=1, collate_fn=first)
        for method in ("spawn", "forkserver"):
            points = list(torch.utils.data.DataLoader(Points(), multiprocessing_context=method, **how))
        torch.save(points, given.out / f"{dist.get_rank()}.pt")
        seen = {
            "argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__, "folder": os.getcwd(),
            "size": size.item(), "points": [type(point).__module__ for point in points], "net": net.NAME,
            "spec": __spec__ and __spec__.name, "main": sys.modules["__main__"].Point is Point,
            "conf": (Path(__file__).parent / "conf" / "main.yaml").read_text(), "rank": os.environ["RANK"],
        }
        (given.out / f"{dist.get_rank()}.json").write_text(json.dumps(seen))
        dist.destroy_process_group()
        sys.exit(given.code)


    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which has a script in a folder with a package, data and what git ignores."""
    files = {
        "tools/train.py": TRAIN,
        "tools/models/__init__.py": "",
        "tools/models/net.py": "NAME = 'small'",
        "tools/conf/main.yaml": "lr: 0.1",
        "tools/.gitignore": "runs/\n*.ckpt\n!best.ckpt\n",
        "tools/runs/events.txt": "1",
        "tools/last.ckpt": "1",
        "tools/best.ckpt": "1",
        ".gitignore": "/tools/notes.txt\n",
        "tools/notes.txt": "1",
        "out/.keep": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def seen_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(1200)  # ranks and loaders import torch: 30 s, 134 s on a busy machine
@pytest.mark.slow
@pytest.mark.parametrize("is_module", [False, True])
def test_a_program_sees_what_it_sees_under_torchrun(project: Path, *, is_module: bool) -> None:
    words = ["-m", "train"] if is_module else ["tools/train.py"]
    if is_module:
        os.chdir("tools")
    (project / "theirs").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    subprocess.run([*command, str(project / "theirs")], check=True)
    (project / "out").mkdir(exist_ok=True)
    with nothing_left_behind():
        made = module_of("train", project / "out") if is_module else script_of("tools/train.py", project / "out")
        assert on_this_machine(made).result() == [None, None]
    ours, theirs = seen_in(project / "out"), seen_in(project / "theirs")
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.pop("argv")[:-1] == other.pop("argv")[:-1]
        assert mine == other
        assert mine["points"] == ["__main__"] * 2


LEAVES = """
    import concurrent.futures
    import csv
    import threading
    import time
    from pathlib import Path


    def touch_later(name):
        time.sleep(0.3)
        Path(name).touch()


    rows = open("rows.csv", "w")
    csv.writer(rows).writerows([number] for number in range(101))
    threading.Thread(target=touch_later, args=("thread",)).start()
    concurrent.futures.ThreadPoolExecutor(1).submit(touch_later, "executor")
    KEPT = concurrent.futures.ThreadPoolExecutor(1)
    KEPT.submit(int)
"""


def what_is_left_by(script: str) -> tuple[int, set[str]]:
    """Run the script, and return the number of rows and the names of files that it has left."""
    run_script(script)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # the rank goes on
        names = pool.submit(lambda: {path.name for path in Path().iterdir()}).result()
    return len(Path("rows.csv").read_text().splitlines()), names & {"thread", "executor"}


def test_run_script_returns_after_what_python_does_at_the_scripts_end(project: Path) -> None:
    (project / "leaves.py").write_text(textwrap.dedent(LEAVES))
    [left] = on_this_machine(what_is_left_by, "leaves.py", num_ranks=1).result()
    assert left == (101, {"thread", "executor"})


def test_a_module_runs_in_the_drivers_folder_and_on_other_machines_in_a_copy(
    client: Client, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project / "tools")
    for place in ("here", "elsewhere"):
        if place == "elsewhere":
            monkeypatch.setattr("flytekitplugins.daskpytorch.protocol.code.running_kernel", lambda: "another machine")
        assert dispatch.run(client, run_module, "train", project / "out").result() == [None, None]
        [seen, _] = seen_in(project / "out")
        assert (seen["path"] == str(project / "tools"), seen["spec"]) == (place == "here", "train")
        assert seen["path"] == str(Path(seen["file"]).parent)
        assert (seen["folder"] == str(project / "tools")) == (place == "here")


def test_what_git_ignores_does_not_travel(project: Path) -> None:
    sent = Project()
    sent.add_script(script_of("tools/train.py"))
    assert set(sent.files) == {"train.py", "models/__init__.py", "models/net.py", "conf/main.yaml", "best.ckpt"}
    for name in ("data/raw/new.txt", "inner/module.py"):
        (project / "tools" / name).parent.mkdir(parents=True)
        (project / "tools" / name).touch()
    subprocess.run(["git", "init", "-q", str(project / "tools/inner")], check=True)  # as a submodule
    sent.add_script(script_of("tools/train.py"))
    assert {"data/raw/new.txt", "inner/module.py"} < set(sent.files)  # neither added nor ignored
    assert sent.folders() == [str(project / "tools")]


def test_without_a_repository_all_visible_files_travel_and_a_scripts_own_win_over_the_drivers(project: Path) -> None:
    shutil.rmtree(project / ".git")
    (project / "tools/.env").write_text("KEY=secret")
    sent = Project(files={"models/net.py": project / "tools/notes.txt"}, roots={project})
    sent.add_script(script_of("tools/train.py"))
    assert {"best.ckpt", "last.ckpt", "runs/events.txt", "notes.txt"} < set(sent.files)
    assert ".env" not in sent.files
    assert sent.files["models/net.py"] == project / "tools/models/net.py"
    assert sent.folders()[0] == str(project / "tools")


def test_an_installed_program_runs_and_not_the_drivers_own(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = tmp_path / "site-packages" / "ex" / "train.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("import sys; open(sys.argv[1], 'w').write(__file__)")
    driver = ModuleType("__main__")
    driver.__file__ = str(project / "tools/train.py")
    monkeypatch.setitem(sys.modules, "__main__", driver)
    assert on_this_machine(script_of(installed, tmp_path / "seen")).result() == [None, None]
    assert (tmp_path / "seen").read_text() == str(installed)


def test_a_second_run_in_a_process_starts_afresh(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, argv, path = sys.modules["__main__"], sys.argv[:], sys.path[:]
    (project / "count.py").write_text(
        "import neighbour, sys\nsys.argv[1:] == ['a'] or sys.exit(2)\nprint(neighbour.NAME)"
    )
    for name in ("first", "second"):
        (project / "neighbour.py").write_text(f"NAME = {name!r}; open('{name}', 'w')")
        os.utime(project / "neighbour.py", (1, 1) if name == "first" else (2, 2))
        run_script("count.py", "a")
    assert (project / "second").exists()
    assert (sys.modules["__main__"], sys.argv, sys.path) == (main, argv, path)
    with pytest.raises(SystemExit):
        run_module("count")


def test_a_module_that_is_not_there_is_refused(project: Path) -> None:
    for name in ("nowhere", "nowhere.train", "torch.nowhere"):
        with pytest.raises(ModuleNotFoundError, match=f"'{name}' that can be run, in {project} or on sys.path"):
            module_of(name)
    assert module_of("torch.distributed.run").file is not None
    (project / "package").mkdir()
    for name in ("__init__", "__main__"):
        (project / f"package/{name}.py").touch()
    assert module_of("package").file == str(project / "package/__main__.py")
    with pytest.raises(ModuleNotFoundError, match="models"):
        module_of("tools.models")
    assert script_module.as_script(run_module, ("torch.distributed.run",))[1] == ()
