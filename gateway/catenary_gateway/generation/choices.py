"""Several answers to one request, read as they come.

Each is a session of its own. They succeed or fail together: the first error ends all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from catenary_gateway.generation.plane import GenerationStream
from catenary_gateway.generation.request import AnswerChunk


class ChoiceStreams:
    """The answers to one request, a context manager around the loop that reads them.

    Leaving it early gives all of them up.
    """

    def __init__(self, streams: Sequence[GenerationStream]) -> None:
        """Reads `streams`, one at least: those to the first prompt first, and so on."""
        self.streams = streams

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts, each counted once."""
        return sum(stream.request.charged_prompt_tokens for stream in self.streams)

    @property
    def cached_tokens(self) -> int:
        """Number of these that were not computed, because sessions before had cached them."""
        return sum(each.cached_tokens for each in self.streams if not each.request.choice)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens generated so far, in all answers."""
        return sum(stream.completion_tokens for stream in self.streams)

    async def pieces(self) -> AsyncGenerator[tuple[int, AnswerChunk], None]:
        """Yields the pieces of all answers as they come, each with the index of its answer.

        Raises:
            CatenaryError: The first error of any answer.
        """
        if len(self.streams) == 1:
            while (piece := await self.streams[0].next()) is not None:
                yield 0, piece
            return
        reads = {
            asyncio.ensure_future(stream.next()): index for index, stream in enumerate(self.streams)
        }
        try:
            while reads:
                done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
                for read in sorted(done, key=reads.__getitem__):
                    index, piece = reads.pop(read), read.result()
                    if piece is not None:
                        yield index, piece
                        reads[asyncio.ensure_future(self.streams[index].next())] = index
        finally:
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)

    def __enter__(self) -> ChoiceStreams:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in self.streams:
            stream.__exit__(kind, error, trace)
