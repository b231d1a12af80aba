"""The command `daskpytorch run` runs a script in ranks as `torchrun` does, and ends with the exit code of its rank."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch.__main__ import main
from processes import Cluster, nothing_left_behind, run_program, running, until

RUN = (sys.executable, "-m", "flytekitplugins.daskpytorch", "run")
TRAIN = """
    import os
    import sys
    import time
    from pathlib import Path

    import torch.distributed as dist
    from flytekitplugins.daskpytorch import current_rank

    how, *_ = [*sys.argv[1:], "plain"]
    dist.init_process_group("gloo")
    rank = current_rank()
    first = (rank.checkpoint.load() or {"step": 0})["step"] + 1
    for step in range(first, 6):
        if how == "die" and first == 1 and step == 3 and rank.rank == 1:
            while not any(kept.step == 2 for kept in rank.checkpoint.list()):
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        if how == "wait" and step == 3 and not Path("go").exists():
            Path("waiting").touch()
            while not rank.should_stop():
                time.sleep(0.05)
            break
        dist.barrier()
        rank.log({"loss": 1.0 / step}, step=step)
        rank.checkpoint.save({"step": step}, step=step)
    if rank.is_main:
        sizes = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")]
        print("from", first, *sizes, flush=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the script."""
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command with these words to its exit code, and return its output."""
    done = run_program([*RUN[1:], *words], cwd=Path.cwd())
    assert done.returncode == code, done.stderr
    return done


def test_ranks_train_on_this_node_and_start_again_from_their_checkpoint(folder: Path) -> None:
    with nothing_left_behind():
        done = run("--standalone", "--nproc_per_node=2", "--checkpoints", "kept", "--log_dir=logs", "train.py", "die")
    assert "[rank 0] from 3 0 2 2\n" in done.stdout  # so that `| tee train.log` has it, as with torchrun
    assert "torchrun's option --standalone has no effect here" in done.stderr
    assert "torchrun's option --log-dir has no effect here" in done.stderr
    assert "starting 2 ranks" in done.stderr
    assert "starting 2 ranks" not in done.stdout


def test_a_run_that_a_signal_has_ended_goes_on_by_the_same_command(folder: Path) -> None:
    words = ("--nproc", "2", "--checkpoints", "kept", "train.py", "wait")
    with nothing_left_behind():
        with running([*RUN[1:], *words], cwd=folder, log=folder / "said") as command:
            until((folder / "waiting").exists, "the third step")
            command.send_signal(signal.SIGTERM)
            assert command.wait() == 128 + signal.SIGTERM
        (folder / "go").touch()
        again = run(*words)
    assert "[rank 0] from 3 0 2 2" in again.stdout


HEEDS = """
    import os, signal, sys, time
    from pathlib import Path

    how, rank = sys.argv[1], os.environ["RANK"]
    if how == "handler":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Path(f"waiting-{rank}").touch()
    try:
        time.sleep(600)
    except (KeyboardInterrupt, SystemExit):
        if how == "ignore" and rank == "1":
            raise
        time.sleep(0.5 if rank == "0" else 0)  # the other rank has ended
        Path(f"best-{rank}").write_text("0.9")
"""


@pytest.mark.parametrize(
    ("order", "how", "told"), [(signal.SIGINT, "ignore", {0}), (signal.SIGTERM, "handler", {0, 1})]
)
def test_a_program_handles_the_commands_signal_itself(
    folder: Path, order: signal.Signals, how: str, told: set[int]
) -> None:
    (folder / "heeds.py").write_text(textwrap.dedent(HEEDS))
    words = [*RUN[1:], "--nproc", "2", "--max-restarts", "0", "heeds.py", how]
    with nothing_left_behind(), running(words, cwd=folder, log=folder / "said") as command:
        until(lambda: all((folder / f"waiting-{rank}").exists() for rank in (0, 1)), "the program")
        command.send_signal(order)
        assert command.wait() == 128 + order
    assert {path.name for path in folder.glob("best-*")} == {f"best-{rank}" for rank in told}


def test_a_reader_of_the_output_may_leave(folder: Path) -> None:
    """As with `daskpytorch run train.py | head`."""
    (folder / "writes.py").write_text("for number in range(100_000): print(number)")
    command = subprocess.Popen([*RUN, "writes.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert command.stdout is not None
    assert command.stdout.readline() == "[rank 0] 0\n"
    command.stdout.close()
    _, said = command.communicate(timeout=200)
    assert command.returncode == 0, said
    assert "BrokenPipe" not in said


WRITES = r"""
import sys

sys.stdout.reconfigure(encoding="utf-8")
print("50 %|\u2588")
print(sys.flags.optimize, sys.flags.dev_mode, sys.warnoptions)
"""


def test_options_of_the_interpreter_reach_the_ranks_whose_output_comes_escaped_and_in_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one file for output and messages, which cannot take all characters."""
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    (folder / "writes.py").write_text(WRITES)
    words = [sys.executable, "-O", "-X", "dev", "-W", "ignore:nothing", *RUN[1:], "--nproc", "1", "writes.py"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=200)
    flags = "[rank 0] 1 True ['default', 'ignore:nothing']\n"
    told = ("starting 1 rank", "[rank 0] 50 %|\\u2588\n", flags, "done after")
    places = [done.stdout.index(text) for text in told]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("rank == '0' or sys.exit(7)", 7, "rank 1 of 2 failed"),
        pytest.param("rank == '0' or sys.exit(-1)", 255, "exit code 255", marks=pytest.mark.slow),
        ("rank == '0' or os.kill(os.getpid(), 9)", 128 + signal.SIGKILL, "SIGKILL"),
        ("os._exit(0)", 0, ""),
        ("atexit.register(os._exit, 5)", 5, "exit code 5"),
        ("threading.Thread(target=time.sleep, args=(600,), name='uploader').start()", 1, "'uploader'"),
    ],
)
def test_the_exit_code_is_that_of_the_guilty_ranks_process_and_what_has_ended_is_not_trained_again(
    folder: Path, end: str, code: int, said: str
) -> None:
    (folder / "ends.py").write_text(
        textwrap.dedent(f"""
            import atexit, os, sys, threading, time
            from flytekitplugins.daskpytorch.process import ending

            ending.NOTICE_AFTER, ending.MAX_WAIT = 0.5, 1.0
            rank = os.environ["RANK"]
            open(f"ran-{{rank}}", "a").write("once")
            while not os.path.exists("ran-0") or not os.path.exists("ran-1"):
                time.sleep(0.01)
            {end}
        """)
    )
    done = run("--nproc", "2", *(["--max-restarts", "0"] if "rank ==" in end else []), "ends.py", code=code)
    assert said in done.stdout + done.stderr
    assert [(folder / f"ran-{rank}").read_text() for rank in (0, 1)] == ["once", "once"]


@pytest.mark.slow  # test_libraries_integration.py has Fabric in each kind of gang
def test_a_program_for_fabrics_own_command_forms_its_group_as_by_that_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning.fabric")
    monkeypatch.setenv("LT_CLI_USED", "1")  # set by Fabric's command
    total = "Fabric().all_reduce(torch.ones(1), reduce_op='sum')"
    (folder / "fabrics.py").write_text(f"import torch; from lightning.fabric import Fabric; print(int({total}))")
    assert "[rank 1] 2\n" in run("--nproc", "2", "fabrics.py").stdout


def test_ranks_train_on_one_of_two_dask_workers(cluster: Cluster) -> None:
    done = run("--scheduler", cluster.address, "--workers", "1", "--nproc", "2", "train.py")
    assert "from 1 0 2 2" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.py"], "No such file or directory"),
        (["-m", "nowhere"], "no module 'nowhere'"),
        (["notes.txt"], "SyntaxError"),
        (["."], "Is a directory"),
        (["--max-restarts", "-1", "train.py"], "max_restarts"),
        (["--nproc", "0", "train.py"], "a whole number from 1"),
        (["--env", "LR", "train.py"], "must be NAME=VALUE"),
        (["--hang-timeout", "soon", "train.py"], "must be auto, none or seconds"),
        (["--gpus", "2", "train.py"], "No such option"),
        (["train.pyc"], "null bytes"),
        ([], "Missing argument 'PROGRAM'"),
    ],
)
def test_bad_input_is_refused_at_once(
    folder: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "notes.txt").write_text("buy milk")
    (folder / "train.pyc").write_bytes(b"\0\1\2")
    assert main(["run", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--", "--x"], ["--x", "--", "y"]])
def test_a_script_has_the_arguments_that_torchrun_gives_it(folder: Path, words: list[str]) -> None:
    (folder / "other.py").write_text("import sys; open('given', 'w').write(str(sys.argv[1:]))")
    run("other.py", *words)
    ours = (folder / "given").read_text()
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "other.py", *words], check=True, timeout=200)
    assert ours == (folder / "given").read_text()


FORMS = """
    from datetime import timedelta

    import dask
    import distributed
    import torch
    import torch.distributed as dist

    was_formed = dist.is_initialized()
    dist.init_process_group("gloo", timeout=timedelta(seconds=77))
    total = torch.ones(1)
    dist.all_reduce(total)
    timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.seconds
    print(was_formed, int(total), timeout, distributed.OWN, dask.OWN, flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("way", [pytest.param(["--nproc=2"], marks=pytest.mark.slow), ["--workers=2"]])
def test_a_script_forms_its_own_group_beside_modules_with_names_of_libraries(folder: Path, way: list[str]) -> None:
    (folder / "forms.py").write_text(textwrap.dedent(FORMS))
    for name in ("click", "dask", "distributed", "flyte", "flytekit", "packaging", "pdb", "psutil", "rich", "wrapt"):
        (folder / f"{name}.py").write_text("OWN = True")
    done = subprocess.run([*RUN, *way, "forms.py"], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] False 2 77 True True" for rank in range(2)]


PREPARES = """
    import sys

    import torch.distributed as dist

    assert not dist.is_initialized()
    if sys.argv[1:] == ["forms"]:
        dist.init_process_group("gloo")
        dist.barrier()
"""
TRAINS_BESIDE = """
    import torch
    import torch.distributed as dist
    from flytekitplugins.daskpytorch import Gang, dispatch, run_script

    def train():
        run_script("prepares.py")
        total = torch.ones(1)
        dist.all_reduce(total)
        run_script("prepares.py", "forms")
        dist.all_reduce(total)
        return int(total)

    if __name__ == "__main__":
        print(dispatch.run(None, train, gang=Gang(ranks_per_worker=2)).result())
"""


def test_a_function_has_its_group_again_after_a_script_that_formed_none(folder: Path) -> None:
    (folder / "prepares.py").write_text(textwrap.dedent(PREPARES))
    (folder / "trains.py").write_text(textwrap.dedent(TRAINS_BESIDE))
    done = run_program(["trains.py"], cwd=folder)
    assert (done.returncode, done.stdout.strip()) == (0, "[4, 4]"), done.stderr
