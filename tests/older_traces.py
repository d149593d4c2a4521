"""Traces as older recorders have written them, made from those of now."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import xxhash

from torchrepro.trace.format import SCHEMAS, SEALED, as_bytes
from torchrepro.trace.reader import Trace

if TYPE_CHECKING:
    from pathlib import Path

STEP = "step, first, records, bytes, digest, parameters, gradients, random, finished"
ORDERS = {"meta": "key", "statistics": "record, position"}


def rewrite(path: Path, version: int) -> Path:
    """Make a trace of now one of an older format, with the same content."""
    trace = Trace(path)
    rows = {step: trace.records(step) for step in trace.steps}
    trace.close()
    now = path.rename(path.with_suffix(".now"))
    with closing(sqlite3.connect(path)) as file:
        file.executescript(f"{SCHEMAS[version]} attach '{now}' as now;")
        for table in ("meta", "site", "argument", "thread", "loss", "statistics", "tensor"):
            file.execute(f"insert into {table} select * from now.{table}")
        file.execute(f"insert into step select {STEP} from now.step")
        file.execute("update meta set value = ? where key = 'format'", (str(version),))
        for step, records in rows.items():
            its = [(one.thread, one.site, one.argument, one.inputs, one.outputs) for one in records]
            ids = [(one.id, step) for one in records]
            file.executemany(
                "insert into record values (?, ?, ?, ?, ?, ?, ?)",
                [(*numbers, *row) for numbers, row in zip(ids, its, strict=True)],
            )
            digest = xxhash.xxh3_128_digest(as_bytes(its))
            file.execute("update step set digest = ? where step = ?", (digest, step))
        for table in SEALED[version]:
            order = ORDERS.get(table, "rowid")
            found = file.execute(f"select * from {table} order by {order}").fetchall()
            seal = xxhash.xxh3_128_digest(as_bytes(found))
            file.execute("insert into seal values (?, ?)", (table, seal))
        file.commit()
    now.unlink()
    return path
