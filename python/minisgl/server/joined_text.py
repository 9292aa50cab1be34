"""A text that grows piece by piece.

Invariants: a piece is copied when the whole is asked for, not when it comes: `+=` on an attribute copies all of the
text each time, and the event loop waits for that.
"""

from __future__ import annotations


class JoinedText:
    """False while it is empty."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def __str__(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""
