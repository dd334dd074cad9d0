"""Decides whether an agent can be led, by the epoch that it says it obeys."""

from __future__ import annotations

from catenary_scheduler.agents.epoch_claims import ClaimDecision, EpochClaim, EpochClaims
from catenary_scheduler.rpc.peer_quarantine import PeerQuarantine
from catenary_scheduler.storage.clock import now_ns
from catenary_scheduler.storage.lease import Lease
from catenary_scheduler.storage.write_behind import WriteBehind
from catenary_services.domain.groups import EPOCH_FIELD
from catenary_services.errors import CatenaryError, InvalidInput, InvalidMessage, StaleEpoch
from catenary_services.security.identity import Role


class EpochFence:
    """Judges the epochs that agents claim to obey, during one term of a leader.

    Args:
        lease: The lease of this leader, with its epoch.
        peer_quarantine: Hears of agents whose claim cannot be true.
        raises: Raises our epoch when a claim is to be followed.
    """

    def __init__(self, lease: Lease, peer_quarantine: PeerQuarantine, raises: WriteBehind) -> None:
        self._claims = EpochClaims()
        self._lease = lease
        self._peer_quarantine = peer_quarantine
        self._raises = raises

    def refusal_of(self, claim: EpochClaim) -> CatenaryError | None:
        """Returns the error for an agent that cannot be led at this epoch; None if it can be led.

        A claim that is to be followed makes our own epoch go beyond it soon. An agent whose claim
        cannot be true is put in quarantine for a while.
        """
        epoch = self._lease.epoch
        decision = self._claims.judge(claim, epoch, self._lease.token, now_ns())
        if decision is ClaimDecision.OBEYS:
            return None
        if decision is ClaimDecision.LIE:
            why = f"it says that it obeys {claim.epoch}; ours is {epoch}"
            lie = InvalidMessage("AgentHello", "epoch", why)
            self._peer_quarantine.accuse(Role.AGENT, claim.agent, lie, at_once=True)
            return InvalidInput(EPOCH_FIELD, f"{claim.epoch} cannot be true here; forget it")
        if decision is ClaimDecision.FOLLOW:
            self._raises.go_beyond(claim.epoch, shared=bool(claim.leader))
        return StaleEpoch(f"{claim.agent} obeys epoch {claim.epoch}, not yet ours")
