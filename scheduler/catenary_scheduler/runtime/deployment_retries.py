"""Retries the deployment of models that could not be deployed."""

from __future__ import annotations

import asyncio

from catenary_scheduler.agents.deployments import Deployments
from catenary_services.domain.ids import NANOSECONDS_PER_SECOND, Nanoseconds
from catenary_services.log import get_logger

_log = get_logger(__name__)
_PERIOD_NS = 5 * NANOSECONDS_PER_SECOND


class DeploymentRetries:
    """Retries failed deployments in one task at a time, as a large model takes long to read."""

    def __init__(self, deployments: Deployments) -> None:
        self._deployments = deployments
        self._next_ns: Nanoseconds = 0
        self._attempt: asyncio.Task[None] | None = None

    def tick(self, now: Nanoseconds) -> None:
        """Begins an attempt if one is due and none is running."""
        is_trying = self._attempt is not None and not self._attempt.done()
        if now >= self._next_ns and self._deployments.problems and not is_trying:
            self._next_ns = now + _PERIOD_NS
            self._attempt = asyncio.create_task(self._retry(), name="retry-deployments")

    def close(self) -> None:
        """Cancels the running attempt. Idempotent."""
        if self._attempt is not None:
            self._attempt.cancel()

    async def _retry(self) -> None:
        try:
            await self._deployments.retry()
        except Exception:
            _log.error("deployments_not_retried", exc_info=True)
