"""Counts of what became of the input rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Counts that add up: attempted = kept + all of dropped.

    Attributes:
        kept_in: kept rows by stream; a dataset that is one stream has the name ''.
        dropped: rows left out, by reason.
        notes: what was done to kept rows, such as `re-encoded: CMYK`.
        min_side_px: shortest side of any kept image, by stream.
        num_bytes: size of the shards.
        attempted_now: rows that this run of the command dealt with; the others were there already.
        remarks: lines for the end of the closing table.
    """

    attempted: int = 0
    kept_in: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    min_side_px: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0
    attempted_now: int = 0
    remarks: list[str] = field(default_factory=list)

    @property
    def kept(self) -> int:
        return self.kept_in.total()

    def keep(self, stream: str = '', side_px: int | None = None) -> None:
        self.attempted += 1
        self.kept_in[stream] += 1
        if side_px is not None:
            self.min_side_px[stream] = min(side_px, self.min_side_px.get(stream, side_px))

    def drop(self, reason: str) -> None:
        self.attempted += 1
        self.dropped[reason] += 1

    def add(self, other: Tally) -> None:
        self.attempted += other.attempted
        self.attempted_now += other.attempted_now
        self.num_bytes += other.num_bytes
        for mine, its in ((self.kept_in, other.kept_in), (self.dropped, other.dropped), (self.notes, other.notes)):
            mine.update(its)
        for stream, side_px in other.min_side_px.items():
            self.min_side_px[stream] = min(side_px, self.min_side_px.get(stream, side_px))

    def to_json(self) -> dict[str, Any]:
        """Return the fields that a part's marker keeps."""
        return {name: getattr(self, name) for name in ('attempted', 'kept_in', 'dropped', 'notes', 'min_side_px', 'num_bytes')}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Tally:
        counters = {name: Counter(content[name]) for name in ('kept_in', 'dropped', 'notes')}
        return cls(**{**content, **counters})
