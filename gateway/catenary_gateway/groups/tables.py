"""The models of all groups, and the addresses of their agents, each merged into one table."""

from __future__ import annotations

from collections.abc import Iterable

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2


class ModelTables:
    """The latest model table of every group."""

    def __init__(self) -> None:
        self._tables: dict[int, dict[tuple[str, str], scheduler_pb2.ServedModel]] = {}
        # Workers by model and group, for ready models only: looked up for every request.
        self._weights: dict[tuple[str, str], dict[int, int]] = {}

    def update(self, group: int, table: scheduler_pb2.ModelTable) -> None:
        self._tables[group] = {(each.name, each.version): each for each in table.models}
        self._weigh()

    def drop(self, group: int) -> None:
        """Removes the models of a group that has no leader."""
        self._tables.pop(group, None)
        self._weigh()

    def merged(self) -> scheduler_pb2.ModelTable:
        """Returns the models of all groups; a model is ready if one group has it ready."""
        found: dict[tuple[str, str], scheduler_pb2.ServedModel] = {}
        for _, table in sorted(self._tables.items()):
            for key, served in table.items():
                known = found.get(key)
                if known is None:
                    found[key] = scheduler_pb2.ServedModel()
                    found[key].CopyFrom(served)
                    continue
                workers = known.workers + served.workers
                if _rank(served) > _rank(known):
                    known.CopyFrom(served)
                known.workers = workers
        return scheduler_pb2.ModelTable(models=found.values())

    def weights(self, name: str, version: str, among: Iterable[int]) -> dict[int, int]:
        """Returns the number of workers by group, for those of `among` with a ready model."""
        weights = self._weights.get((name, version), {})
        return {group: weights[group] for group in among if group in weights}

    def knowing(self, name: str, version: str, among: Iterable[int]) -> list[int]:
        """Returns the groups of `among` that serve a model, or will once they can."""
        return [group for group in among if (name, version) in self._tables.get(group, {})]

    def _weigh(self) -> None:
        self._weights = {}
        for group, table in self._tables.items():
            for key, served in table.items():
                if served.ready:
                    self._weights.setdefault(key, {})[group] = max(1, served.workers)


class PeerDirectories:
    """The latest directory of every group."""

    def __init__(self) -> None:
        self._peers: dict[int, dict[str, common_pb2.Peer]] = {}
        self._latest: dict[str, int] = {}
        self._gateways: dict[int, int] = {}

    def update(self, group: int, directory: scheduler_pb2.Directory) -> None:
        before = self._peers.get(group, {})
        now = {peer.peer_id: peer for peer in directory.peers}
        for peer_id, peer in now.items():
            if before.get(peer_id) != peer:
                self._latest[peer_id] = group
        self._peers[group] = now
        self._gateways[group] = directory.gateways
        for peer_id in before.keys() - now.keys():
            if not any(peer_id in peers for peers in self._peers.values()):
                self._latest.pop(peer_id, None)

    def merged(self) -> scheduler_pb2.Directory:
        """Returns every peer once, in the version of the group that changed its entry last."""
        found: dict[str, common_pb2.Peer] = {}
        for group, peers in sorted(self._peers.items()):
            for peer_id, peer in peers.items():
                if peer_id not in found or self._latest.get(peer_id) == group:
                    found[peer_id] = peer
        # Every gateway connects to every group, but a new one is not connected to all of them yet.
        gateways = max(self._gateways.values(), default=0)
        return scheduler_pb2.Directory(peers=found.values(), gateways=gateways)


def _rank(served: scheduler_pb2.ServedModel) -> tuple[bool, bool]:
    """Returns the rank of a group's entry for a model: ready before deployed before known."""
    return served.ready, bool(served.inputs) or served.generates
