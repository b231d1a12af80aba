"""Build the image, measure it, and run it as a node of Kubernetes would: as user 1000, on a read-only root.

Needs root, and Debian's packages buildah and runc; where Docker Hub cannot be reached, debootstrap, too. Takes five
minutes where PyPI is near. Of the disk under --storage it needs 25 GB while the packages' layer is written, which is
there four times then, and 7 GB afterwards: layers that make a second build quick. Remove the folder to be rid of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = REPOSITORY / "Dockerfile"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
REGISTRY = "https://registry-1.docker.io/v2/"
SUITE = "bookworm"
STAND_IN = f"localhost/stand-in:{SUITE}"
FOR_GPUS = ("cuda", "nvidia", "torch/lib/*cuda*", "triton")
"""Packages and files that a torch without CUDA has not."""
COMPILED = """
import torch
assert torch.compile(lambda x: torch.sin(x) + 1)(torch.zeros(8)).sum() == 8
"""
GANG = """pyflyte run workflows/pet_names.py pet_names --hp '{"epochs": 1, "batch_size": 1024}' --num_names 3"""
CHECKS = {
    "what is writable": "awk '$4 ~ /^rw/ {print $2}' /proc/mounts | xargs; if touch /root/x; then exit 1; fi",
    "versions agree": "pip check",
    "the task's command": "pyflyte-execute --help",
    "the scheduler's command": "dask-scheduler --version",
    "the workers' command": "dask-worker --version",
    "the doctor": "python -m flytekitplugins.daskpytorch",
    "torch.compile": f"python -c '{COMPILED}'",
    "a workflow": GANG,
}


def missing(*, with_stand_in: bool = True) -> list[str]:
    """What this machine has not."""
    tools = ["buildah", "runc", *(["debootstrap"] if with_stand_in else [])]
    return ["root's rights"] * (os.geteuid() != 0) + [tool for tool in tools if shutil.which(tool) is None]


def docker_hub_answers() -> bool:
    """Whether base images can be had."""
    try:
        urllib.request.urlopen(REGISTRY, timeout=5)
    except urllib.error.HTTPError as error:
        return error.code == 401  # it wants a token, which buildah then asks for
    except OSError:
        return False
    return True


def bases(given: Sequence[str]) -> list[str]:
    """The images that the Dockerfile starts from, with these build arguments."""
    text = DOCKERFILE.read_text()
    known = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE)) | dict(each.split("=", 1) for each in given)
    named = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    expanded = {re.sub(r"\$\{(\w+)\}", lambda found: known[found[1]], each) for each in named}
    return sorted(each for each in expanded if ":" in each)  # the others are stages


@dataclass(frozen=True, kw_only=True)
class Buildah:
    """Buildah with images and layers of its own in a folder."""

    storage: Path

    def __call__(self, command: str, *words: str, shows: bool = False) -> str:
        places = ["--root", str(self.storage / "storage"), "--runroot", str(self.storage / "run")]
        names = self.storage / "registries.conf"
        names.write_text('unqualified-search-registries = ["docker.io"]\n')  # as Docker reads them
        temporary = self.storage / "tmp"  # each layer twice, until it is committed
        temporary.mkdir(exist_ok=True)
        done = subprocess.run(
            ["buildah", *places, "--storage-driver", "overlay", command, *words],
            env={**os.environ, "CONTAINERS_REGISTRIES_CONF": str(names), "TMPDIR": str(temporary)},
            stdout=None if shows else subprocess.PIPE,
            text=True,
            check=True,
        )
        return (done.stdout or "").strip()

    def make_stand_in(self) -> None:
        """Debian's base system as an image."""
        if STAND_IN in self("images", "--format", "{{.Name}}:{{.Tag}}"):
            return
        root = self.storage / SUITE
        subprocess.run(["debootstrap", "--variant=minbase", SUITE, str(root)], check=True)  # from its own mirror
        for waste in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(root / waste)
        container = self("from", "scratch")
        self("add", "--quiet", container, str(root), "/")
        self("commit", "--quiet", "--rm", container, STAND_IN)
        shutil.rmtree(root)

    def build(self, tag: str, arguments: Sequence[str]) -> None:
        """Build the Dockerfile; its steps trust the certificates that this machine trusts."""
        words = ["--isolation", "chroot", "--layers", "--pull=false", "--tag", tag]
        if CERTIFICATES.exists():
            pip = self.storage / "pip.conf"
            pip.write_text("[global]\ncert = /etc/host-certificates.crt\n")
            words += ["--volume", f"{pip}:/etc/pip.conf:ro"]
            words += ["--volume", f"{CERTIFICATES}:/etc/host-certificates.crt:ro"]
        for each in arguments:
            words += ["--build-arg", each]
        self("build", *words, "--file", str(DOCKERFILE), str(REPOSITORY), shows=True)

    @contextlib.contextmanager
    def stood_in_for(self, names: Sequence[str]) -> Iterator[None]:
        """Let Debian's base system have the names of images that cannot be had, while others are built on them."""
        self.make_stand_in()
        tags = [f"localhost/{each}" for each in names]
        self("tag", STAND_IN, *tags)
        try:
            yield
        finally:
            self("rmi", *tags)

    def inspect(self, tag: str) -> dict[str, Any]:
        """What the image says of itself."""
        found: dict[str, Any] = json.loads(self("inspect", "--type", "image", tag))["OCIv1"]
        return found

    def layers(self, tag: str) -> list[tuple[int, str]]:
        """Bytes of each layer's files, uncompressed, and the step that made it."""
        found = self.inspect(tag)
        steps = [each.get("created_by", "") for each in found["history"] if not each.get("empty_layer")]
        known = json.loads((self.storage / "storage/overlay-layers/layers.json").read_text())
        sizes = {each.get("diff-digest"): each.get("diff-size") for each in known}
        return [(sizes[digest], step) for digest, step in zip(found["rootfs"]["diff_ids"], steps, strict=True)]

    @contextlib.contextmanager
    def mounted(self, tag: str) -> Iterator[Path]:
        """The image's files."""
        container = self("from", "--pull=false", tag)
        try:
            yield Path(self("mount", container))
        finally:
            self("rm", container)


@dataclass(frozen=True, kw_only=True)
class Node:
    """Runs commands in the image as Kubernetes does with `readOnlyRootFilesystem`, and a /tmp to write to."""

    root: Path
    config: Mapping[str, Any]
    """The image's."""

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run it as the image's user, without rights, devices, or a network but the loopback interface."""
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["runc", "spec"], cwd=folder, check=True)
            spec = Path(folder, "config.json")
            hosts = Path(folder, "hosts")
            hosts.write_text("127.0.0.1 localhost pod\n")
            spec.write_text(json.dumps(self._spec(json.loads(spec.read_text()), command, hosts)))
            return subprocess.run(
                ["runc", "run", f"daskpytorch-{os.getpid()}"],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )

    def _spec(self, spec: dict[str, Any], command: str, hosts: Path) -> dict[str, Any]:
        user, group = map(int, self.config["User"].split(":"))
        process = {
            "terminal": False,
            "user": {"uid": user, "gid": group},
            "args": ["bash", "-euc", command],
            "env": [*self.config["Env"], "WANDB_MODE=offline"],
            "cwd": self.config["WorkingDir"],
            "capabilities": {},
            "rlimits": [],
        }
        mounts = [
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]},
            {"destination": "/etc/hosts", "type": "bind", "source": str(hosts), "options": ["bind", "ro"]},
        ]
        return spec | {
            "hostname": "pod",
            "root": {"path": str(self.root), "readonly": True},
            "process": spec["process"] | process,
            "mounts": [*spec["mounts"], *mounts],
        }


def report(buildah: Buildah, tag: str, root: Path) -> None:
    """Say how large it is, and where."""
    layers = buildah.layers(tag)
    print(f"\n{tag}: {sum(size for size, _ in layers) / 1e6:,.0f} MB, uncompressed, of which")
    for size, step in layers:
        print(f"{size / 1e6:10,.1f} MB  {' '.join(step.removeprefix('/bin/sh -c ').split())[:100]}")
    [packages] = root.glob("opt/venv/lib/python3*/site-packages")
    for_gpus = [each for pattern in FOR_GPUS for each in packages.glob(pattern)]
    print(f"{size_of(*for_gpus):10,} MB  of that are for GPUs alone: {', '.join(FOR_GPUS)}")
    print("\nthe largest folders of packages")
    for path in sorted(packages.iterdir(), key=size_of, reverse=True)[:12]:
        print(f"{size_of(path):10,} MB  {path.name}")


def size_of(*paths: Path) -> int:
    """Of files and folders, in MB."""
    if not paths:
        return 0
    done = subprocess.run(["du", "-scB1000000", *paths], capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1].split()[0])


def checked(node: Node) -> bool:
    """Whether all commands run."""
    failed = []
    for what, command in CHECKS.items():
        done = node.run(command)
        how, num_characters = ("failed", 5000) if done.returncode else ("ok", 600)
        print(f"\n== {what}: {how}\n{done.stdout[-num_characters:]}")
        failed += [what] * (how == "failed")
    print(f"\n{len(CHECKS) - len(failed)} of {len(CHECKS)} ran as {node.config['User']} on a read-only root")
    return not failed


def main() -> int:
    """Do what the command line asks for; 1 if something does not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--storage", type=Path, default=Path("/var/tmp/daskpytorch-image"), help="(default: %(default)s)"
    )
    parser.add_argument("--tag", default="localhost/daskpytorch:v1", help="(default: %(default)s)")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="the Dockerfile's")
    parser.add_argument("--no-build", action="store_true", help="measure and run what is there")
    args = parser.parse_args()
    is_real = args.no_build or docker_hub_answers()
    if lacking := missing(with_stand_in=not is_real):
        parser.error(f"this needs {', '.join(lacking)}")
    args.storage.mkdir(parents=True, exist_ok=True)
    buildah, wanted = Buildah(storage=args.storage), bases(args.build_arg)
    if not args.no_build:
        print(
            f"{' and '.join(wanted)}: {'as they are' if is_real else f'Debian {SUITE} stands in for them'}", flush=True
        )
        with contextlib.nullcontext() if is_real else buildah.stood_in_for(wanted):
            buildah.build(args.tag, args.build_arg)
    with buildah.mounted(args.tag) as root:
        report(buildah, args.tag, root)
        return 0 if checked(Node(root=root, config=buildah.inspect(args.tag)["config"])) else 1


if __name__ == "__main__":
    sys.exit(main())
