"""Each rank of a gang has log files by the names of `torchrun --log-dir`, beside its lines in the driver's log."""

import sys
from pathlib import Path

import pytest
import torch
from distributed import Client

from flytekitplugins.daskpytorch import Gang, GangError, current_rank, dispatch

pytestmark = pytest.mark.timeout(300)


def gathered() -> float:
    """The sum over a formed gang."""
    import torch.distributed as dist

    total = torch.tensor(10.0 ** current_rank().rank)
    dist.all_reduce(total)
    return total.item()


def fail_once() -> float:
    """Rank 0 fails in the first attempt, after its checkpoint is written; so there is a second."""
    rank = current_rank()
    began = rank.checkpoint.load()
    total = gathered()
    print(f"rank {rank.rank} has {total:g}")
    print(f"warning of rank {rank.rank}", file=sys.stderr)
    rank.checkpoint.save({"step": 1}, 1)
    if rank.is_main and began is None:
        rank.checkpoint.flush()
        raise OSError("once")
    return total


def fail() -> None:
    """A rank leaves its last words."""
    print("last words")
    sys.stdout.flush()
    raise ValueError("bad data")


def files_in(folder: Path) -> dict[str, str]:
    [gang] = folder.iterdir()
    return {str(file.relative_to(gang)): file.read_text() for file in sorted(gang.rglob("*.log"))}


def test_each_rank_and_attempt_has_files_of_both_streams_on_its_worker(
    client: Client, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gang = Gang(log_dir=str(tmp_path / "logs"), checkpoint_uri=str(tmp_path / "kept"))
    assert list(dispatch.run(client, fail_once, gang=gang).result()) == [11.0, 11.0]
    found = files_in(tmp_path / "logs")
    names = [f"attempt_{n}/{rank}/{stream}.log" for n in (0, 1) for rank in (0, 1) for stream in ("stderr", "stdout")]
    assert sorted(found) == names
    for rank in (0, 1):
        assert found[f"attempt_1/{rank}/stdout.log"] == f"rank {rank} has 11\n"
        assert f"warning of rank {rank}\n" in found[f"attempt_1/{rank}/stderr.log"]
    shown = capfd.readouterr()
    assert "[rank 1] rank 1 has 11" in shown.out + shown.err
    assert "[rank 1] warning of rank 1" in shown.out + shown.err


def test_the_error_has_the_last_lines_of_both_streams_and_says_where_the_files_are(
    client: Client, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="bad data") as caught:
        dispatch.run(client, fail, gang=Gang(log_dir=str(tmp_path))).result()
    blame = caught.value.__cause__
    assert isinstance(blame, GangError)
    assert "last words" in blame.log_tail
    [gang] = tmp_path.iterdir()
    assert f"and in {gang / 'attempt_0' / str(blame.rank)} on its host" in str(blame)
