"""Reads the `.wandb` file of an offline run: log records as LevelDB has them, a message of Weights & Biases in each."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

MAGIC = b":W&B"
FILE_HEADER_BYTES = 7
BLOCK_BYTES = 32 * 1024
FRAGMENT_HEADER = struct.Struct("<IHB")
"""CRC-32 of what follows the length, length of the payload, and which part of a record it is."""
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_records(path: Path) -> Iterator[Record]:
    """The records of a run, in order."""
    data = path.read_bytes()
    assert data.startswith(MAGIC), f"{path} is not a .wandb file"
    position = FILE_HEADER_BYTES
    fragments: list[bytes] = []  # the first may have no payload, where a block has just room for its header
    while position + FRAGMENT_HEADER.size <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < FRAGMENT_HEADER.size:
            position += left_in_block  # padding
            continue
        checksum, length, part = FRAGMENT_HEADER.unpack_from(data, position)
        end = position + FRAGMENT_HEADER.size + length
        part_and_payload = data[position + FRAGMENT_HEADER.size - 1 : end]
        assert zlib.crc32(part_and_payload) == checksum, f"{path} is damaged at byte {position}"
        assert part in (FULL, FIRST, MIDDLE, LAST)
        assert bool(fragments) == (part in (MIDDLE, LAST))
        fragments.append(part_and_payload[1:])
        position = end
        if part in (FULL, LAST):
            yield Record.FromString(b"".join(fragments))
            fragments = []
    assert not fragments, f"{path} ends within a record"


def read_run(path: Path) -> dict[str, Any]:
    """What a test asks of a run: its id, project, name, tags, notes, configuration, history, summary and exit code."""
    run: dict[str, Any] = {"runs": 0, "config": {}, "history": [], "summary": {}, "exit_code": None}
    for record in read_records(path):
        match record.WhichOneof("record_type"):
            case "run":
                run["runs"] += 1
                run["id"], run["project"] = record.run.run_id, record.run.project
                run["name"], run["notes"] = record.run.display_name, record.run.notes
                run["group"], run["tags"] = record.run.run_group, list(record.run.tags)
                run["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            case "config":  # that was added to the run's while it went on
                run["config"] |= {item.key: json.loads(item.value_json) for item in record.config.update}
            case "history":
                items = record.history.item
                run["history"].append(
                    {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
                )
            case "summary":
                run["summary"] |= {item.key: json.loads(item.value_json) for item in record.summary.update}
            case "exit":
                run["exit_code"] = record.exit.exit_code
    run["config"].pop("_wandb", None)
    return run
