"""A process is cheaper to fork once its memory lies in huge pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flytekitplugins.daskpytorch.node import hugepages

MAPS = """\
55d0c0000000-55d0c0001000 r--p 00000000 fe:00 123 /usr/bin/python3
55d0c0100000-55d0c0800000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
7f0000300000-7f0000500000 rw-p 00000000 00:00 0
7f0001000000-7f0001400000 rw-s 00000000 00:01 9 /dev/shm/ring
7f0002000000-7f0002400000 rw-p 00100000 fe:00 77 /usr/lib/libtorch.so
7f0003000000-7f0003400000 r--p 00000000 00:00 0
7ffd00000000-7ffd00400000 rw-p 00000000 00:00 0                          [stack]
"""
PROGRAM = """
from pathlib import Path
from flytekitplugins.daskpytorch.node import hugepages
held = [bytes(1000) for _ in range(64_000)]
sizes = lambda: [int(l.split()[1]) for l in Path("/proc/self/smaps_rollup").read_text().splitlines() if "AnonHuge" in l]
before = sizes()[0]
list(hugepages.collapse_memory())
print(sizes()[0] - before, sum(map(sum, held)))
"""


def test_only_whole_huge_pages_of_private_memory_without_a_file() -> None:
    assert list(hugepages._own_memory(MAPS)) == [(0x55D0C0200000, 3 << 21), (0x7F0000000000, 1 << 21)]


def test_memory_moves_into_huge_pages_and_keeps_its_content() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("no huge pages on this kernel")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    grown, total = map(int, done.stdout.split())
    if not grown:
        pytest.skip("this kernel moves nothing into huge pages (it is older than 6.1, or has no room)")
    assert total == 0
    assert grown > 32 << 10  # kB: half of what the program holds
