"""The shared memory that one request may name."""

from __future__ import annotations

from catenary_gateway.admission.request_pipeline import Caller
from catenary_gateway.inference import RegionSlice
from catenary_gateway.oip.shared_regions import SharedRegions
from catenary_services.errors import PayloadTooLarge


class CallerMemory:
    """The regions of a request's sender; implements `TensorMemory`.

    A converter may use it on a thread. What was read is not counted as held by the request yet, so
    its endpoint has to do that as soon as the converter is done.
    """

    def __init__(self, regions: SharedRegions, caller: Caller, most_bytes: int) -> None:
        self.read_bytes = 0
        """Bytes that were read, at most `most_bytes`."""
        self._regions = regions
        self._caller = caller
        self._most_bytes = most_bytes

    def check(self, place: RegionSlice, field: str) -> None:
        self._regions.check(self._owner, place, field)

    def read(self, place: RegionSlice, field: str) -> bytes:
        owner = self._owner
        self._regions.check(owner, place, field)
        self.read_bytes += place.size_bytes
        if self.read_bytes > self._most_bytes:
            raise PayloadTooLarge(f"the tensors have more than {self._most_bytes} bytes")
        return self._regions.read(owner, place, field)

    def write(self, place: RegionSlice, data: bytes, field: str) -> None:
        self._regions.write(self._owner, place, data, field)

    @property
    def _owner(self) -> str:
        return self._regions.require_offered(self._caller)
