"""The line by which a machine joins: where the cluster is, a token, and whom to trust.

    catenary://10.0.0.5:8006?token=k3x9w2ab.4f6g...&ca=sha256:5e1d...

The pin is the SHA-256 of the public key of the cluster's authority (its SubjectPublicKeyInfo, as
kubeadm's discovery hash), so that the joiner knows the right cluster before it has a certificate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from catenary_services.addresses import check_reachable, host_port, split_host_port
from catenary_services.errors import InvalidInput

SCHEME = "catenary"
JOIN_PORT = 8006
"""Port of the enrolment service, unless the host says otherwise."""
LONGEST_LINE = 1024
TOKEN = re.compile(r"[a-z0-9]{8}\.[a-z0-9]{32}")
_PIN = re.compile(r"sha256:([0-9a-f]{64})")
_FIELD = "join line"


@dataclass(frozen=True, slots=True)
class JoinLine:
    """The parts of a join line."""

    host: str
    port: int
    authority_digest: bytes
    """SHA-256 of the public key of the cluster's authority."""
    token: str = ""
    """Empty for a machine that has certificates."""

    @property
    def address(self) -> str:
        """The address of the enrolment service, "host:port"."""
        return host_port(self.host, self.port)

    def __str__(self) -> str:
        """Returns the line as it is printed; it holds the token."""
        token = f"token={self.token}&" if self.token else ""
        return f"{SCHEME}://{self.address}?{token}ca=sha256:{self.authority_digest.hex()}"


def parse_join_line(text: str) -> JoinLine:
    """Returns the parts of a join line.

    Raises:
        InvalidInput: The text is none; the message does not repeat the token.
    """
    text = text.strip()
    if len(text) > LONGEST_LINE or not text.isascii() or not text.isprintable():
        raise InvalidInput(_FIELD, "is too long, or has characters that no join line has")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise InvalidInput(_FIELD, "is no address") from None
    if parts.scheme != SCHEME or parts.path not in ("", "/") or parts.fragment:
        raise InvalidInput(
            _FIELD, f"must be {SCHEME}://HOST:PORT?token=...&ca=sha256:..., as the host printed it"
        )
    host, port = _address(parts.netloc)
    try:
        fields = parse_qsl(
            parts.query, keep_blank_values=True, strict_parsing=True, max_num_fields=4
        )
    except ValueError:
        raise InvalidInput(_FIELD, "has no token and no ca=sha256:... behind the '?'") from None
    values = dict(fields)
    if len(values) != len(fields) or not values.keys() <= {"token", "ca"}:
        raise InvalidInput(_FIELD, "has other fields than one token and one ca")
    pin = _PIN.fullmatch(values.get("ca", ""))
    if pin is None:
        raise InvalidInput(_FIELD, "lacks ca=sha256: and 64 hexadecimal digits, the cluster's pin")
    token = values.get("token", "")
    if token and TOKEN.fullmatch(token) is None:
        raise InvalidInput(_FIELD, "has a token of another form; was all of the line copied?")
    return JoinLine(host, port, bytes.fromhex(pin[1]), token)


def _address(netloc: str) -> tuple[str, int]:
    """Returns host and port of "host", "host:port", "[v6]" or "[v6]:port".

    Raises:
        InvalidInput: The text has another form; it is not repeated, for a damaged line may have its
            token there.
    """
    has_port = re.search(r":[0-9]+$", netloc) is not None
    try:
        return split_host_port(netloc if has_port else f"{netloc}:{JOIN_PORT}")
    except InvalidInput:
        raise InvalidInput(_FIELD, "names no HOST:PORT, with an IPv6 address in brackets") from None


def join_line_for(advertised: str, port: int, digest: bytes, token: str) -> JoinLine:
    """Returns the line that leads other machines to this one.

    Raises:
        InvalidInput: The address leads no other machine here.
    """
    return JoinLine(check_reachable("advertise", advertised), port, digest, token)
