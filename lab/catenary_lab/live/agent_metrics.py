"""Reads counters from the metrics pages of a live run's agents."""

from __future__ import annotations

import aiohttp

from catenary_services.errors import Unavailable

BUSY_SECONDS = "catenary_device_busy_seconds_total"
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)


async def counter_at(port: int, metric: str) -> float:
    """Returns a counter's value, over all its labels, of the process with this metrics port.

    Raises:
        Unavailable: The page is not to be had.
    """
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as session,
            session.get(f"http://127.0.0.1:{port}/metrics") as response,
        ):
            page = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"an agent's metrics are not to be had: {error!r}") from None
    lines = (line for line in page.splitlines() if line.startswith((f"{metric}{{", f"{metric} ")))
    return sum(float(line.rpartition(" ")[2]) for line in lines)
