"""The names of what a scheduler may be told to do, for configurations: nothing else of it comes with them."""

from __future__ import annotations

from typing import Literal

CachePolicy = Literal["lru", "lfu", "naive"]
SchedulePolicy = Literal["fcfs", "lpm", "srpf"]
