"""What Weights & Biases' own client wrote, read back from its files."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records(file: Path) -> Iterator[Any]:
    """Read the records of a .wandb file: a log of protobufs in blocks, as LevelDB writes them."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = file.read_bytes(), 7, b""  # after a header of 7 bytes
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no room for a header: the rest of the block is zeros
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if place + 7 + length > len(data):  # the client is still writing it
            return
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a full one, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def mirrored(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    """Return what a .wandb file says of the config, the history and the run itself."""
    deadline = time.monotonic() + 20  # the client's process writes the end after `finish` returns
    while not any(record.HasField("exit") for record in records(file)):
        assert time.monotonic() < deadline, "the client did not finish its file"
        time.sleep(0.05)
    config, history, run = {}, [], None
    for record in records(file):
        if record.HasField("run"):
            run = record.run
            config |= {u.key: json.loads(u.value_json) for u in run.config.update}
        elif record.HasField("history"):
            items = record.history.item
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
            history.append({k: v for k, v in row.items() if k not in ("_runtime", "_timestamp")})
    return config, history, run
