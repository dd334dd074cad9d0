from __future__ import annotations

import pytest

import catenary_services.errors as served
from catenary import TlsConfig, errors


@pytest.fixture
def files(authority, tmp_path):
    own = authority.issue_cert("someone@catenary.test")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    for position, blob in enumerate(own.cert_chain_pems):
        blob.write_to_path(tmp_path / "cert.pem", append=position > 0)
    return tmp_path


def tls(files, **more) -> TlsConfig:
    return TlsConfig(ca_file=files / "ca.pem", server_name="catenary.test", **more)


async def test_tls_with_a_trusted_authority_works(secure_server, connect, files):
    assert await connect.to(secure_server, tls=tls(files)).live()


async def test_a_server_nobody_trusts_is_unavailable(secure_server, connect):
    client = connect.to(secure_server, tls=TlsConfig(server_name="catenary.test"), timeout_s=10)
    with pytest.raises(errors.UnavailableError):
        await client.live()


async def test_the_certificate_must_carry_the_servers_name(secure_server, connect, files):
    client = connect.to(
        secure_server, tls=TlsConfig(files / "ca.pem", server_name="other.test"), timeout_s=10
    )
    with pytest.raises(errors.UnavailableError):
        await client.live()


@pytest.mark.parametrize("secure_server", [True], indirect=True)
async def test_mutual_tls_wants_our_certificate_and_gets_it(secure_server, connect, files):
    with pytest.raises(errors.UnavailableError):
        await connect.to(secure_server, tls=tls(files), timeout_s=10).live()
    known = tls(files, certificate_file=files / "cert.pem", key_file=files / "key.pem")
    assert await connect.to(secure_server, tls=known).live()


async def test_admin_calls_use_the_same_tls(secure_server, connect, files):
    assert (await connect.to(secure_server, tls=tls(files)).status()).epoch == 7


async def test_files_that_cannot_be_read_are_named(connect, tmp_path):
    with pytest.raises(errors.InvalidInputError) as caught:
        await connect.to("127.0.0.1:1", tls=TlsConfig(ca_file=tmp_path / "none.pem")).live()
    assert caught.value.field == "ca_file"


async def test_the_key_goes_with_every_call(server, connect):
    client = connect.to(server, api_key="ctn_secret")
    await client.live()
    await client.status()
    sent = [metadata["authorization"] for metadata in server.metadata]
    assert sent == ["Bearer ctn_secret"] * 2


async def test_without_a_key_none_is_sent(server, connect):
    await connect.to(server).live()
    assert "authorization" not in server.metadata[0]


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (served.Unauthenticated("a key is needed"), errors.UnauthenticatedError),
        (served.PermissionDenied("this key may not"), errors.PermissionDeniedError),
    ],
)
async def test_refused_keys_are_typed_errors(server, connect, refusal, expected):
    server.failures.append(refusal)
    with pytest.raises(expected):
        await connect.to(server).live()
