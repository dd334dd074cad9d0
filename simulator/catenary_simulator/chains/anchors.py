"""Places with round-trip times between them: the RIPE Atlas anchors of Europe.

The data set has only the times from four monitors to every anchor; between two anchors they are
made up of both medians and the distance, as the server-chain paper's authors do:
0.3 med_i + 0.3 med_j + 0.01 ms per km of great circle.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from math import asin, cos, radians, sin, sqrt
from pathlib import Path

from catenary_services.errors import InvalidInput

_MEDIAN_SHARE = 0.3
_MS_PER_KM = 0.01
_EARTH_RADIUS_KM = 6371.0


@dataclass(frozen=True, slots=True)
class NetworkAnchor:
    """A place in the network."""

    name: str
    median_rtt_ms: float
    """To the monitors."""
    latitude: float
    longitude: float


def read_anchors(path: Path) -> list[NetworkAnchor]:
    """Returns the anchors of a file with the columns of `ripe_anchors_eu.csv`.

    Raises:
        InvalidInput: If the file is not there or has other columns.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [
                NetworkAnchor(
                    line["anchor_id"],
                    float(line["rtt_median_ms"]),
                    float(line["latitude"]),
                    float(line["longitude"]),
                )
                for line in csv.DictReader(file)
            ]
    except (OSError, KeyError, ValueError) as error:
        raise InvalidInput("anchors", f"{path}: {error!r}") from None


def rtt_ms(first: NetworkAnchor, second: NetworkAnchor) -> float:
    """Returns the round-trip time between two anchors; 0 from one to itself."""
    if first == second:
        return 0.0
    medians = first.median_rtt_ms + second.median_rtt_ms
    return _MEDIAN_SHARE * medians + _MS_PER_KM * distance_km(first, second)


def distance_km(first: NetworkAnchor, second: NetworkAnchor) -> float:
    """Returns the length of the great circle between two anchors (haversine formula)."""
    here, there = radians(first.latitude), radians(second.latitude)
    north = sin((there - here) / 2)
    east = sin(radians(second.longitude - first.longitude) / 2)
    half = north * north + cos(here) * cos(there) * east * east
    return 2 * _EARTH_RADIUS_KM * asin(sqrt(half))
