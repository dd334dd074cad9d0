"""Peers as a scheduler's directory lists them."""

from __future__ import annotations

from catenary_protos.catenary.v1 import common_pb2
from catenary_services.transport.hub import TransportHub


def peer_of(peer_id: str, hub: TransportHub, incarnation: int = 1) -> common_pb2.Peer:
    addresses = [
        common_pb2.TransportAddress(transport=a.transport, address=a.address, host_id=a.host_id)
        for a in hub.addresses
    ]
    return common_pb2.Peer(peer_id=peer_id, incarnation=incarnation, addresses=addresses)
