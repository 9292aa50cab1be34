"""How late the event loop is."""

from __future__ import annotations

import asyncio
import time

from minisgl.metrics.lag import LoopLag
from minisgl.metrics.meters import Meter


def test_a_blocked_event_loop_shows() -> None:
    meter = Meter("pause")

    async def run() -> None:
        lag = LoopLag(meter, lambda: True)
        lag.start()
        await asyncio.sleep(0)
        time.sleep(0.08)  # the pause that must be seen
        while not meter.count:
            await asyncio.sleep(0)
        lag.stop()
        seen = meter.count
        await asyncio.sleep(0.03)
        assert meter.count == seen

    asyncio.run(run())
    assert meter.reading().longest_s > 0.06
