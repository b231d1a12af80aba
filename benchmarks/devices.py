"""Check which GPUs a rank sees, and that the two usual ways to find a rank's GPU return its own.

    python benchmarks/devices.py               # a rank per GPU, with nccl, half a minute, a table at the end
    python benchmarks/devices.py --quick       # the same size. Without GPUs, two ranks on the CPU, with gloo

The results are right or wrong. The checks cover a rank's devices, its cores, and collectives of tensors on the GPU and
of Python objects. Further checks cover an asynchronous checkpoint of `torch.distributed.checkpoint`, and a new process
group after the first. The tests use simulated GPUs. This script needs real ones, and two or more for `devices="all"`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import gpus, machine

HEAD = ["Gang(devices=...)", "rank", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "device", "cores", "what is wrong"]


def look(folder: str) -> dict[str, Any]:
    """Return one rank's view of its devices, and its errors."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from flytekitplugins.daskpytorch import current_rank

    rank = current_rank()
    wrong = []
    on_gpu = rank.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # as most scripts begin
        if torch.cuda.current_device() != rank.device.index:
            wrong.append("LOCAL_RANK is another GPU's")
    number = torch.tensor(float(rank.rank + 1), device=rank.device)
    dist.all_reduce(number)
    expected = rank.world_size * (rank.world_size + 1) / 2
    if number.item() != expected:
        wrong.append(f"the ranks' sum on {rank.device} is {number.item()}, not {expected}")
    identity = str(torch.cuda.get_device_properties(rank.device).uuid) if on_gpu else str(rank.rank)
    identities: list[str] = [""] * rank.world_size
    dist.all_gather_object(identities, identity)
    if len(set(identities)) != rank.world_size:
        wrong.append("two ranks have the same GPU")
    state = {"weight": torch.full((1000,), 3.0, device=rank.device)}
    dcp.async_save(state, checkpoint_id=f"{folder}/checkpoint").result()  # type: ignore[union-attr]
    state["weight"].zero_()
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    if state["weight"].sum().item() != 3000.0:
        wrong.append("the asynchronous checkpoint is not what was saved")
    dist.destroy_process_group()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    dist.all_reduce(number)
    if number.item() != expected * rank.world_size:
        wrong.append("the group that was formed again adds wrongly")
    return {
        "rank": rank.rank,
        "LOCAL_RANK": os.environ["LOCAL_RANK"],
        "CUDA_VISIBLE_DEVICES": os.environ["CUDA_VISIBLE_DEVICES"],
        "device": f"{rank.device} ({torch.cuda.get_device_name(rank.device)})" if on_gpu else "cpu",
        "cores": ranges(sorted(os.sched_getaffinity(0))),
        "what is wrong": "; ".join(wrong) or "nothing",
    }


def ranges(numbers: list[int]) -> str:
    """Return numbers as ranges: 0, 1, 2 and 8 become "0-2, 8"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in found)


def main() -> None:
    """Form both kinds of gangs, and print the ranks' views."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="accepted for `gpu.py`; leaves nothing out")
    parser.parse_args()
    from distributed import Client, LocalCluster

    from flytekitplugins.daskpytorch import Gang, dispatch

    found = gpus()
    print(machine(), f"\n\n| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}", sep="\n")
    is_wrong = False
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        for devices in ("own", "all"):
            gang = Gang(
                devices=devices,
                backend="nccl" if found else "gloo",
                ranks_per_worker=len(found) or 2,
                max_restarts=0,
            )
            Path(folder, devices).mkdir()
            for view in dispatch.run(client, look, f"{folder}/{devices}", gang=gang).result():
                print(f"| {devices} | {' | '.join(str(view[name]) for name in HEAD[1:])} |", flush=True)
                is_wrong |= view["what is wrong"] != "nothing"
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
