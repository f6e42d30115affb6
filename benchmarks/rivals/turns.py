"""A driver's side of taking turns: a line "go" per round on the standard input, a line of JSON in reply.

Run by the rivals' own Python: imports nothing of fedprism."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class Turns:
    """Waits for turns and answers them. What anyone prints goes to the standard error from here on."""

    def __init__(self) -> None:
        self._reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._started = 0.0

    def wait(self) -> bool:
        """Block until the next turn and start its clock; False when there is none."""
        go = sys.stdin.readline().strip() == "go"
        self._started = time.perf_counter()
        return go

    def done(self, **facts: Any) -> None:
        """Tell the seconds since the turn began, and facts of the round."""
        seconds = time.perf_counter() - self._started
        self._reply.write(json.dumps({"seconds": seconds, **facts}) + "\n")
        self._reply.flush()
