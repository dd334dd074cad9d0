"""Rounds of starting every server, checking it, and loading it."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.peers.checks import NotServingError, WrongAnswerError, answer_bytes
from benchmarks.peers.load import GENERATORS, Load, LoadFailedError, Outcome
from benchmarks.peers.processes import ServerProcesses
from benchmarks.peers.record import Cell
from benchmarks.peers.requests import Request
from benchmarks.peers.servers import OURS, PEERS, Protocol, Site, environment_of
from benchmarks.peers.workloads import CONNECTIONS, Workload

_WARM_UP_S = 0.3
_FEWEST = 20
_MIB = 2**20

Key = tuple[str, str, Protocol, int]
"""Server, model, protocol and connections of a cell."""


@dataclass(frozen=True, slots=True)
class Options:
    """The servers that are measured, and the way they are."""

    peers: tuple[str, ...]
    rounds: int
    seed: int
    seconds: float
    generators: dict[Protocol, str]
    connections: dict[str, tuple[int, ...]] = field(default_factory=lambda: dict(CONNECTIONS))


@dataclass(frozen=True, slots=True)
class Measured:
    """A load's outcome, and the CPU time that the server used for an answer."""

    outcome: Outcome
    cpu_ms: float


@dataclass(slots=True)
class Found:
    """The measurements of all rounds so far."""

    cells: dict[Key, list[Measured]] = field(default_factory=dict)
    memory_mb: dict[str, list[float]] = field(default_factory=dict)
    forms: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """The reason for leaving out a server, which could not be measured."""

    def leave_out(self, peer: str, why: str) -> None:
        """Forgets what was measured of a server."""
        self.failures[peer] = why
        self.memory_mb.pop(peer, None)
        self.cells = {key: each for key, each in self.cells.items() if key[0] != peer}

    def all_cells(self) -> Iterator[Cell]:
        """Yields a cell for every server, model, protocol and number of connections."""
        for (peer, model, protocol, connections), rounds in sorted(self.cells.items()):
            outcomes = [each.outcome for each in rounds]
            yield Cell(
                peer=peer,
                model=model,
                protocol=protocol,
                connections=connections,
                answers=tuple(each.answers for each in outcomes),
                failed=tuple(each.failed for each in outcomes),
                rates=tuple((each.answers - each.failed) / each.seconds for each in outcomes),
                p50_ms=tuple(each.p50_ms for each in outcomes),
                p99_ms=tuple(each.p99_ms for each in outcomes),
                cpu_ms=tuple(each.cpu_ms for each in rounds),
            )


class Running:
    """A server that has been started, to be checked and loaded.

    Raises:
        NotServingError: It cannot be started.
    """

    def __init__(self, name: str, site: Site, options: Options) -> None:
        self._site = site
        self._options = options
        self._requests: dict[tuple[str, Protocol], tuple[Request, range]] = {}
        log = site.folder / "output.log"
        try:
            command = PEERS[name].start(site, environment_of(name))
            self.processes = ServerProcesses(command.words, command.environment, log)
        except OSError as error:
            raise NotServingError(f"it cannot be started: {error}") from None
        self._forms = PEERS[name].forms

    def check(self) -> dict[str, str]:
        """Waits until every model answers rightly; returns the form of requests by protocol.

        Raises:
            NotServing: It does not answer in time.
            WrongAnswer: It answers something else than ONNX Runtime.
        """
        forms: dict[str, str] = {}
        for workload in self._site.models:
            for protocol, form in self._forms.items():
                request, port = form(workload), self._site.ports[protocol]
                sizes = answer_bytes(self.processes, protocol, port, workload, request)
                self._requests[workload.name, protocol] = request, sizes
                forms[protocol] = request.form
        return forms

    def measured(self, model: str, protocol: Protocol, connections: int) -> Measured:
        """Returns the outcome of one cell; what goes before it warms up and finds the rate.

        Raises:
            LoadFailedError: The generator failed.
        """
        request, sizes = self._requests[model, protocol]
        play = GENERATORS[self._options.generators[protocol]]
        port = self._site.ports[protocol]
        load = Load(protocol, port, request, connections, 0, _WARM_UP_S, sizes)
        first = play(replace(load, count=max(_FEWEST, 2 * connections)))
        warm = first
        if first.seconds < _WARM_UP_S:
            warm = play(replace(load, count=count_for(first, connections, _WARM_UP_S)))
        seconds = self._options.seconds
        load = replace(load, count=count_for(warm, connections, seconds), seconds=seconds)
        processes = self.processes.all()
        before = self.processes.cpu_ns(processes)
        outcome = play(load)
        spent = self.processes.cpu_ns(processes) - before
        return Measured(outcome, spent / 1e6 / outcome.answers)


def count_for(outcome: Outcome, connections: int, seconds: float) -> int:
    """Returns how many requests take a time at the rate of an outcome, as many on each connection.

    h2load deals them out to connections before it starts.
    """
    each = round(outcome.answers / outcome.seconds * seconds / connections)
    return max(each, -(-_FEWEST // connections)) * connections


def orders(names: Sequence[str], rounds: int, seed: int) -> list[list[str]]:
    """Returns the servers in an order of its own for every round."""
    source = random.Random(seed)
    return [source.sample(list(names), len(names)) for _ in range(rounds)]


def measure(
    options: Options, repository: Path, models: Sequence[Workload], say: Callable[[str], None]
) -> Found:
    """Returns what all rounds measure, one server running at a time.

    A server that cannot be measured is left out from then on, and its reason is kept; without
    Catenary there is nothing to compare.

    Raises:
        NotServingError: Catenary does not answer.
        WrongAnswerError: Catenary answers something else than ONNX Runtime.
        LoadFailedError: A generator could not load Catenary.
    """
    found = Found()
    source = random.Random(options.seed)
    for number, order in enumerate(orders(options.peers, options.rounds, options.seed), 1):
        for name in order:
            if name in found.failures:
                continue
            say(f"round {number}: {PEERS[name].title}")
            # A short path: servers make sockets in it.
            with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as folder:
                site = Site(Path(folder), repository, models)
                try:
                    _one(name, site, options, found, source)
                except (NotServingError, WrongAnswerError, LoadFailedError) as error:
                    if name == OURS:
                        raise
                    say(f"{PEERS[name].title} is left out: {error}")
                    found.leave_out(name, str(error).splitlines()[0])
    return found


def _one(name: str, site: Site, options: Options, found: Found, source: random.Random) -> None:
    running = Running(name, site, options)
    try:
        found.forms[name] = running.check()
        running.processes.wait_until_idle()
        keys: list[Key] = [
            (name, model.name, protocol, connections)
            for model in site.models
            for protocol in PEERS[name].forms
            for connections in options.connections[model.name]
        ]
        for key in source.sample(keys, len(keys)):
            measured = running.measured(*key[1:])
            found.cells.setdefault(key, []).append(measured)
        memory_mb = running.processes.memory_bytes() / _MIB
        found.memory_mb.setdefault(name, []).append(memory_mb)
    finally:
        running.processes.stop()
