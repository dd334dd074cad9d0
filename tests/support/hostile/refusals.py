"""A cluster with mutual TLS and API keys, and ways to try what it must refuse."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from catenary_protos.catenary.v1 import (
    admin_pb2_grpc,
    common_pb2,
    frame_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from catenary_services.control.connecting import connected
from catenary_services.errors import CatenaryError
from catenary_services.grpc.error_tables import grpc_code
from catenary_services.security.authority import CertificateAuthority, CertificateRequest
from catenary_services.security.identity import Identity, Role
from catenary_services.security.keys import add_key
from catenary_services.security.tls import ClientSecurity, ServerSecurity
from catenary_services.transport.hub import TransportHub
from catenary_services.transport.settings import TransportSecurity, TransportSettings, host_id
from certificates import Certificates
from cluster_harness import ROOT, RunningCluster, environment
from shared_helpers.control_streams import ScriptedEnd

SCHEDULER_NAME = "scheduler.main.catenary.internal"
_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 1 << 20)]
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """Something somebody tries, and the only answer it may get."""

    what: str
    run: Callable[[Scene], str]
    expected: str


@dataclass
class Scene:
    """The cluster, the keys of several callers, and an authority of strangers."""

    cluster: RunningCluster
    keys: Mapping[str, str]
    keys_file: Path
    folder: Path
    strangers: Certificates = field(init=False)

    def __post_init__(self) -> None:
        self.strangers = Certificates(self.folder / "strangers")

    @property
    def certs(self) -> Path:
        return self.cluster.data_dir / "certs"

    # ---- endpoints ----

    def http(
        self,
        path: str,
        *,
        key: str | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Returns the status of a request, POST if it has a body."""
        given = {"Content-Type": "application/json", **(headers or {})}
        if key is not None:
            given.setdefault("Authorization", f"Bearer {self.keys.get(key, key)}")
        request = urllib.request.Request(self.cluster.http + path, data=body, headers=given)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return str(answer.status)
        except urllib.error.HTTPError as error:
            return str(error.code)

    def endpoint(
        self, address: str, call: Callable[[grpc.Channel, Any], object], key: str = ""
    ) -> str:
        """Returns the status of a call at an endpoint, over gRPC."""
        metadata = (("authorization", f"Bearer {self.keys.get(key, key)}"),) if key else ()
        with grpc.insecure_channel(address, _UNLIMITED) as channel:
            return _status(lambda: call(channel, metadata))

    def admin(self, method: str, request: Any, key: str = "") -> str:
        """Returns the status of a call at the gateway's Admin port."""

        def call(channel: grpc.Channel, metadata: Any) -> object:
            rpc = getattr(admin_pb2_grpc.AdminStub(channel), method)
            return rpc(request, metadata=metadata, timeout=TIMEOUT_S)

        return self.endpoint(self.cluster.admin, call, key)

    # ---- inside ----

    def credentials(self, who: str, *, of: str = "us") -> grpc.ChannelCredentials | None:
        """Returns those of "role:name", of ours, of another cluster's or of strangers'."""
        trusted = (self.certs / "ca.pem").read_bytes()
        if not who:
            return grpc.ssl_channel_credentials(trusted)
        files = self.files(who, of)
        return grpc.ssl_channel_credentials(
            trusted, files["key_file"].read_bytes(), files["cert_file"].read_bytes()
        )

    def files(self, who: str, of: str = "us") -> dict[str, Path]:
        """Returns the certificate files of "role:name"; see `credentials`."""
        role, _, name = who.partition(":")
        if of == "strangers":
            return self.strangers.files(role, name)
        if of == "other cluster":
            return self._foreign(role, name)
        issued = CertificateAuthority(self.certs, "main").issue(
            CertificateRequest(Identity.of("main", role, name), ("localhost", "127.0.0.1"))
        )
        return {
            "cert_file": issued.cert_file,
            "key_file": issued.key_file,
            "ca_file": self.certs / "ca.pem",
        }

    def _foreign(self, role: str, name: str) -> dict[str, Path]:
        """A certificate of another cluster, signed by our own authority."""
        ours = x509.load_pem_x509_certificate((self.certs / "ca.pem").read_bytes())
        signer = serialization.load_pem_private_key((self.certs / "ca-key.pem").read_bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        uri = x509.UniformResourceIdentifier(f"spiffe://catenary/other/{role}/{name}")
        signed = (
            x509.CertificateBuilder(ours.subject, x509.Name([]), key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
            .sign(signer, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        certificate, private = self.folder / f"{name}.pem", self.folder / f"{name}-key.pem"
        certificate.write_bytes(signed.public_bytes(pem))
        private.write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return {"cert_file": certificate, "key_file": private, "ca_file": self.certs / "ca.pem"}

    def scheduler(
        self,
        who: str,
        call: Callable[[grpc.Channel, Any], object],
        *,
        of: str = "us",
        key: str = "",
        plain: bool = False,
    ) -> str:
        """Returns the status of a call at the scheduler with somebody's certificate."""
        address = f"127.0.0.1:{self.port('scheduler')}"
        options = [*_UNLIMITED, ("grpc.ssl_target_name_override", SCHEDULER_NAME)]
        metadata = (("authorization", f"Bearer {self.keys[key]}"),) if key else ()
        if plain:
            channel = grpc.insecure_channel(address)
        else:
            channel = grpc.secure_channel(address, self.credentials(who, of=of), options)
        with channel:
            return _status(lambda: call(channel, metadata))

    def session(self, who: str, role: Role, hello: Any, *, of: str = "us") -> str:
        """Returns the status of a control stream opened at the scheduler in a role with a hello.

        The scheduler is not asked where it takes such streams, as it would refuse to say.
        """
        return asyncio.run(self._session(who, role, hello, of))

    async def _session(self, who: str, role: Role, hello: Any, of: str) -> str:
        files = self.files(who, of) | {"ca_file": self.certs / "ca.pem"}
        security = ClientSecurity(**files, cluster="main")
        end = ScriptedEnd(scheduler_pb2.SchedulerToAgentMessages)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await connected(end.stream, "127.0.0.1", self.control_port, role, security)
                await end.write(hello)
                if await end.read() is not None:
                    return "OK"
        except CatenaryError as error:
            return grpc_code(error).name
        finally:
            end.stream.abort()
        assert end.error is not None
        return grpc_code(end.error).name

    @property
    def control_port(self) -> int:
        """Where the scheduler takes control streams, as it says to its gateway."""
        found: list[int] = []

        def call(channel: grpc.Channel, metadata: Any) -> object:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            asked = scheduler_pb2.GetControlEndpointRequest()
            found.append(stub.GetControlEndpoint(asked, metadata=metadata, timeout=TIMEOUT_S).port)
            return None

        assert self.scheduler("gateway:gateway-0", call) == "OK"
        return found[0]

    def port(self, process: str) -> int:
        """Returns the (only, or configured) port a child listens on."""
        child = psutil.Process(int(self.cluster.facts["pids"][process]))
        words = child.cmdline()
        if "--port" in words:
            return int(words[words.index("--port") + 1])
        found = {c.laddr.port for c in child.net_connections("tcp") if c.status == "LISTEN"}
        return int(min(found))

    def frames(self, who: str, target: str, *, of: str = "us", claim: str = "") -> str:
        """Connects to an agent's frame port with a certificate, sends a frame, and returns
        "closed" if the connection did not live, or "open".
        """
        files = self.files(who, of)
        client = ClientSecurity(**files, cluster="main")
        server = ServerSecurity(**files, cluster="main")
        settings = TransportSettings(("tcp",), security=TransportSecurity(server, client))
        return asyncio.run(self._send(claim or who.partition(":")[2], target, settings))

    async def _send(self, name: str, target: str, settings: TransportSettings) -> str:
        hub = TransportHub(name, settings)
        address = common_pb2.TransportAddress(
            transport="tcp", address=f"127.0.0.1:{self.port(target)}", host_id=host_id()
        )
        try:
            await hub.start(lambda frame: frame.release())
            hub.update_directory([common_pb2.Peer(peer_id=target, addresses=[address])])
            link = await hub.link_to(target, 5.0)
            # Agents ignore results, and hold none against their senders.
            header = frame_pb2.FrameHeader(kind=frame_pb2.FRAME_KIND_RESULT).SerializeToString()
            for _ in range(20):
                slot = await link.export(64, 1.0)
                await link.push(slot, header, 1.0)
                await asyncio.sleep(0.05)
                if link.closed:
                    return "closed"
            return "open"
        except CatenaryError:
            return "closed"
        finally:
            await hub.close()


def command(*words: str) -> str:
    """Returns "exit N" of a `catenaryd` command that says why in one line, "crash" if it does not."""
    done = subprocess.run(
        [sys.executable, "-m", "catenaryd", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=120,
        check=False,
    )
    return "crash" if "Traceback" in done.stderr else f"exit {done.returncode}"


def bomb(nbytes: int) -> bytes:
    """Returns a small body that unpacks to so many bytes."""
    return gzip.compress(b" " * nbytes)


def make_keys(
    file: Path, callers: Mapping[str, tuple[Iterable[str], Mapping[str, object]]]
) -> dict[str, str]:
    """Returns the key of each caller, written to `file`."""
    return {name: add_key(file, name, scopes, limits) for name, (scopes, limits) in callers.items()}


def _status(call: Callable[[], object]) -> str:
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"
