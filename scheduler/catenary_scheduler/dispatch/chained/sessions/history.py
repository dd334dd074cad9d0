"""Stories of requests and sessions that have ended.

A request keeps the changes of its own state and those of its sessions, each with what caused it, so
that they tell what happened to it and why. Once it is answered its story is kept here for a while.
"""

from __future__ import annotations

from catenary_scheduler.dispatch.chained.tracking import SequenceRequest, Session, StoryStep
from catenary_services.domain.ids import RequestId, SessionId

_ENDED_STORIES = 1024
"""Number of stories that are kept of requests that are answered, and of sessions nobody claimed."""


class SessionHistory:
    """Keeps the latest stories that have ended."""

    def __init__(self) -> None:
        self._ended: dict[RequestId | SessionId, list[StoryStep]] = {}

    def request_ended(self, sequence: SequenceRequest) -> None:
        """Keeps the story of a request that was answered."""
        self._keep(sequence.request, sequence.story)

    def session_ended(self, session: Session) -> None:
        """Keeps the story of a session that never had a request."""
        if session.story and session.story[0].session:
            self._keep(session.session_id, session.story)

    def story(self, key: RequestId | SessionId) -> list[StoryStep]:
        """Returns the story of a request or session that has ended; empty if it is not kept."""
        found = self._ended.get(key)
        if found is None and not isinstance(key, RequestId):
            # Sessions of requests are found in the stories of these.
            for story in self._ended.values():
                if any(step.session == key for step in story):
                    return story
        return found or []

    def _keep(self, key: RequestId | SessionId, story: list[StoryStep]) -> None:
        self._ended[key] = story
        if len(self._ended) > _ENDED_STORIES:
            del self._ended[next(iter(self._ended))]
