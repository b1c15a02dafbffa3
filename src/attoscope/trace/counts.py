"""What was fed: counted as batches are handed out, for the report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Documents and tokens of the batches so far, and what was cut or left out of them.

    `limit` is the longest sequence of tokens that is fed.
    """

    documents: int = 0
    tokens: int = 0
    truncated: int = 0
    dropped_tokens: int = 0
    empty: int = 0
    limit: int | None = None
    notes: list[str] = field(default_factory=list)

    def cut(self, dropped: int) -> None:
        """Note a document that lost tokens (none when 0)."""
        self.truncated += dropped > 0
        self.dropped_tokens += dropped
