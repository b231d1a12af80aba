"""Reads the `.wandb` file of an offline run: log records as LevelDB has them, a message of Weights & Biases in each."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

FILE_HEADER_BYTES = 7
BLOCK_BYTES = 32 * 1024
FRAGMENT_HEADER = struct.Struct("<IHB")
"""Checksum, length of the payload, and which part of a record it is."""
FULL, LAST = 1, 4


def read_records(path: Path) -> Iterator[Record]:
    """The records of a run, in order."""
    data, position, payload = path.read_bytes(), FILE_HEADER_BYTES, b""
    while position + FRAGMENT_HEADER.size <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < FRAGMENT_HEADER.size:
            position += left_in_block  # padding
            continue
        _, length, part = FRAGMENT_HEADER.unpack_from(data, position)
        position += FRAGMENT_HEADER.size
        payload += data[position : position + length]
        position += length
        if part in (FULL, LAST):
            yield Record.FromString(payload)
            payload = b""
    assert not payload, f"{path} ends within a record"


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
