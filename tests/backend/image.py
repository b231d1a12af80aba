"""Build the image with Docker, and run it as a node of Kubernetes would: as user 1000, on a read-only root.

Takes minutes, and gigabytes of disk. `docker history` says how large the layers are.
"""

import argparse
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
COMPILED = """
import torch
assert torch.compile(lambda x: torch.sin(x) + 1)(torch.zeros(8)).sum() == 8
"""
GANG = """pyflyte run workflows/pet_names.py pet_names --hp '{"epochs": 1, "batch_size": 1024}' --num_names 3"""
CHECKS = {
    "the user": 'test "$(id -u):$(id -g)" = 1000:1000',
    "what is writable": "awk '$4 ~ /^rw/ {print $2}' /proc/mounts | xargs; if touch /root/x; then exit 1; fi",
    "versions agree": "pip check",
    "the task's command": "pyflyte-execute --help",
    "the scheduler's command": "dask-scheduler --version",
    "the workers' command": "dask-worker --version",
    "the doctor": "daskpytorch doctor",
    "torch.compile": f"python -c '{COMPILED}'",
    "a workflow": GANG,
}
NODE = ("--read-only", "--tmpfs", "/tmp:exec", "--network", "none", "--cap-drop", "ALL", "--env", "WANDB_MODE=offline")


def is_docker_there() -> bool:
    """Return True if Docker's daemon answers."""
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False).returncode == 0
    except FileNotFoundError:
        return False


def main() -> int:
    """Do what the command line asks for; 1 if something does not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default="localhost/daskpytorch:v1", help="(default: %(default)s)")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="the Dockerfile's")
    args = parser.parse_args()
    build_args = [f"--build-arg={each}" for each in args.build_arg]
    subprocess.run(["docker", "build", "--tag", args.tag, *build_args, str(REPOSITORY)], check=True)
    failed = []
    for what, command in CHECKS.items():
        in_image = ["docker", "run", "--rm", *NODE, args.tag, "bash", "-euc", command]
        done = subprocess.run(in_image, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(f"\n== {what}: {'failed' if done.returncode else 'ok'}\n{done.stdout[-5000:]}")
        failed += [what] * bool(done.returncode)
    print(f"\n{len(CHECKS) - len(failed)} of {len(CHECKS)} ran as user 1000 on a read-only root")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
