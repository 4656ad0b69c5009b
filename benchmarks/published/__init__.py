"""Published tables of throughput and cost, worked out again cell by cell; only what the sources print is written down, the rest is reckoned."""

from __future__ import annotations

from benchmarks.published.anchors import ANCHORS
from benchmarks.published.anyscale import TABLE_2, TABLE_3, TABLE_4
from benchmarks.published.aws import AWS
from benchmarks.published.cells import PublishedTable
from benchmarks.published.mosaicml import POST, TWO_PHASE
from benchmarks.published.salad import SALAD

TABLES: dict[str, PublishedTable] = {table.name: table for table in (POST, TWO_PHASE, TABLE_2, TABLE_3, TABLE_4, SALAD, AWS, ANCHORS)}
