"""Places with round-trip times between them, from the RIPE Atlas anchors of Europe.

The data set has only the times from four monitors to every anchor. The time between two anchors is
estimated from both medians and the distance, as in the server-chain paper:
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
    """A RIPE Atlas anchor: a place in the network; coordinates are in degrees."""

    name: str
    median_rtt_ms: float
    """Median round-trip time to the monitors."""
    latitude: float
    longitude: float


def read_anchors(path: Path) -> list[NetworkAnchor]:
    """Returns the anchors of a file with the columns of `ripe_anchors_eu.csv`.

    Raises:
        InvalidInput: The file cannot be read or has other columns.
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
    """Returns the round-trip time between two anchors in milliseconds; 0 from one to itself."""
    if first == second:
        return 0.0
    medians = first.median_rtt_ms + second.median_rtt_ms
    return _MEDIAN_SHARE * medians + _MS_PER_KM * distance_km(first, second)


def distance_km(first: NetworkAnchor, second: NetworkAnchor) -> float:
    """Returns the great-circle distance between two anchors in km (haversine formula)."""
    here, there = radians(first.latitude), radians(second.latitude)
    north = sin((there - here) / 2)
    east = sin(radians(second.longitude - first.longitude) / 2)
    half = north * north + cos(here) * cos(there) * east * east
    return 2 * _EARTH_RADIUS_KM * asin(sqrt(half))
