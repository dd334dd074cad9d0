from __future__ import annotations

import datetime as dt
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from catenary_services.errors import InvalidInput
from catenary_services.security.authority import CertificateAuthority, CertificateRequest
from catenary_services.security.identity import Identity
from catenary_services.security.x509 import read_certificates

AGENT = Identity.of("main", "agent", "agent-0")
GATEWAY = Identity.of("main", "gateway", "gateway-0")


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    made = CertificateAuthority(tmp_path, "main")
    assert made.ensure()
    return made


def names(certificate: x509.Certificate) -> list[str]:
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(name.value) for name in found.value]


def test_a_certificate_says_who_it_is_for_and_no_more(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    issued = authority.issue(CertificateRequest(AGENT, ("gpu.example.org", "10.0.0.7")))
    [certificate] = read_certificates(issued.cert_file)
    assert names(certificate) == [
        "spiffe://catenary/main/agent/agent-0",
        "agent.main.catenary.internal",
        "agent-0.peer.main.catenary.internal",
        "agent-0",
        "gpu.example.org",
        "10.0.0.7",
    ]
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert isinstance(key.curve, ec.SECP256R1)
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical
    assert not basic.value.ca
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.digital_signature
    assert not usage.key_cert_sign
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(purposes) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    life = certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)
    assert dt.timedelta(days=29) < life <= dt.timedelta(days=30)
    for file in (issued.key_file, tmp_path / "ca-key.pem"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_authority_signs_processes_and_no_other_authority(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    [certificate] = read_certificates(tmp_path / "ca.pem")
    basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert basic.critical
    assert (basic.value.ca, basic.value.path_length) == (True, 0)
    assert certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_an_operator_serves_nothing(authority: CertificateAuthority) -> None:
    issued = authority.issue(CertificateRequest(Identity.of("main", "operator", "alice")))
    [certificate] = read_certificates(issued.cert_file)
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not any(name.endswith("catenary.internal") for name in names(certificate))


def test_what_is_good_is_kept_and_what_is_not_is_made_anew(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    first = authority.issue(CertificateRequest(AGENT))
    assert first.made
    assert not authority.issue(CertificateRequest(AGENT)).made
    assert not authority.ensure()
    assert authority.issue(CertificateRequest(AGENT, ("other",))).made  # other names
    first.key_file.write_text("no key")
    assert authority.issue(CertificateRequest(AGENT, ("other",))).made
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(first.cert_file, first.key_file)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "agent-agent-0-key.pem",
        "agent-agent-0.pem",
        "ca-key.pem",
        "ca.pem",
    ]


def test_renewing_replaces_what_has_less_than_a_third_of_its_life_left(tmp_path: Path) -> None:
    short, long = (
        CertificateAuthority(tmp_path, "main", days=1),
        CertificateAuthority(tmp_path, "main", days=30),
    )
    short.ensure(days=1)  # so no certificate can last longer
    issued = short.issue(CertificateRequest(AGENT))
    assert not long.issue(CertificateRequest(AGENT), renew=True).made
    assert issued.ends <= long.ends


def test_a_new_authority_is_trusted_before_it_signs_and_the_old_one_after(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    before = authority.issue(CertificateRequest(AGENT, ("localhost",)))
    [old] = read_certificates(tmp_path / "ca.pem")
    authority.add_next()
    trusted = read_certificates(tmp_path / "ca.pem")
    assert trusted[0] == old
    assert len(trusted) == 2
    assert not authority.issue(CertificateRequest(AGENT, ("localhost",))).made
    with pytest.raises(InvalidInput, match="not used yet"):
        authority.drop_others()
    with pytest.raises(InvalidInput, match="added already"):
        authority.add_next()
    [after] = authority.use_next()
    assert after.made
    assert (after.identity, after.cert_file) == (before.identity, before.cert_file)
    assert "localhost" in names(read_certificates(after.cert_file)[0])
    authority.drop_others()
    assert read_certificates(tmp_path / "ca.pem") == [trusted[1]]
    with pytest.raises(InvalidInput, match="none was added"):
        authority.use_next()


def test_another_clusters_authority_is_not_used(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="cluster main"):
        CertificateAuthority(tmp_path, "other").ensure()
    with pytest.raises(InvalidInput, match="cluster main"):
        authority.issue(CertificateRequest(Identity.of("other", "agent", "agent-0")))


def test_half_an_authority_is_an_error_and_not_a_reason_to_make_another(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    (tmp_path / "ca-key.pem").unlink()
    with pytest.raises(InvalidInput, match=r"no ca-key\.pem"):
        authority.ensure()
    assert (tmp_path / "ca.pem").exists()


@pytest.mark.parametrize(
    "name",
    [
        "gateway.main.catenary.internal",
        "x.catenary.internal",
        "GATEWAY.MAIN.CATENARY.INTERNAL",
        "*.catenary.internal",
        "catenary.internal.",
        "no name",
        "a..b",
        "",
        "-x",
    ],
)
def test_names_that_are_none_or_stand_for_a_role_are_refused(
    authority: CertificateAuthority, name: str
) -> None:
    with pytest.raises(InvalidInput):
        authority.issue(CertificateRequest(AGENT, (name,)))


@pytest.mark.parametrize(
    ("cluster", "role", "name"),
    [
        ("main", "root", "x"),
        ("main", "agent", ""),
        ("main", "agent", "a/b"),
        ("main", "agent", "../x"),
        ("main", "agent", "a b"),
        ("main", "agent", "gateway.main.catenary.internal"),
        ("a/b", "agent", "x"),
        ("", "agent", "x"),
    ],
)
def test_identities_that_fit_into_no_uri_are_refused(cluster: str, role: str, name: str) -> None:
    with pytest.raises(InvalidInput):
        Identity.of(cluster, role, name)


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://other/main/agent/agent-0",
        "spiffe://catenary/main/agent",
        "spiffe://catenary/main/agent/agent-0/more",
        "https://catenary/main/agent/agent-0",
        "spiffe://catenary/main/agent/",
        "",
    ],
)
def test_uris_that_name_nobody_of_ours_are_refused(uri: str) -> None:
    with pytest.raises(InvalidInput):
        Identity.parse(uri)


def test_an_identity_survives_its_uri() -> None:
    assert Identity.parse(GATEWAY.uri) == GATEWAY
