from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, SecretStr

from catenary_services.errors import InvalidInput
from catenary_services.settings import ProcessSettings, describe, load_settings


class ExampleSettings(ProcessSettings):
    port: int = Field(default=1, ge=1, le=65535, description="A port.")
    peers: list[str] = Field(default_factory=list, description="A list.")
    pair: tuple[str, ...] | None = Field(default=None, description="A tuple or nothing.")
    redis_url: str = Field(default="", description="A URL that may hold a password.")
    admin_password: SecretStr = Field(default=SecretStr(""), description="A secret.")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "catenary.yaml"
    path.write_text("gateway:\n  port: 2\n  peers: [a, b]\n  log_level: debug\nagent:\n  odd: 1\n")
    return path


def load(file: Path | None = None, **flags: object) -> ExampleSettings:
    return load_settings(ExampleSettings, file=file, section="gateway", flags=flags)


def test_defaults_hold_without_any_source() -> None:
    settings = load()
    assert (settings.port, settings.peers, settings.insecure) == (1, [], False)


def test_environment_beats_file_and_flag_beats_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(file).port == 2
    monkeypatch.setenv("CATENARY_PORT", "3")
    assert load(file).port == 3
    assert load(file, port=4).port == 4
    assert load(file, port=None).port == 3
    assert load(file).log_level == "debug"


@pytest.mark.parametrize("text", ["x:1,y:2", " x:1 , y:2 ,", '["x:1", "y:2"]'])
def test_lists_are_read_from_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATENARY_PEERS", text)
    monkeypatch.setenv("CATENARY_PAIR", text)
    settings = load()
    assert settings.peers == ["x:1", "y:2"]
    assert settings.pair == ("x:1", "y:2")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("gateway:\n  prot: 2\n", "gateway.prot"),
        ("gatway:\n  port: 2\n", "gatway"),
        ("gateway: 5\n", "gateway"),
        ("gateway:\n  port: 70000\n", "gateway.port"),
        ("gateway:\n  log_level: loud\n", "gateway.log_level"),
    ],
)
def test_wrong_file_names_the_key(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        load(path)
    assert caught.value.field == field


class RenamedSettings(ExampleSettings):
    endpoint_cert_file: Path | None = Field(default=None, description="Once door_cert_file.")


def test_an_old_name_in_a_file_is_refused_with_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("gateway:\n  door_cert_file: a.pem\n")
    with pytest.raises(InvalidInput, match="is called endpoint_cert_file now") as caught:
        load_settings(RenamedSettings, file=path, section="gateway", flags={})
    assert caught.value.field == "gateway.door_cert_file"


def test_an_old_name_in_the_environment_is_refused_by_the_process_that_had_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CATENARY_DOOR_CERT_FILE", "a.pem")
    with pytest.raises(InvalidInput, match="is called CATENARY_ENDPOINT_CERT_FILE now") as caught:
        load_settings(RenamedSettings, file=None, section="gateway", flags={})
    assert caught.value.field == "CATENARY_DOOR_CERT_FILE"
    assert load().port == 1  # a process that never had it
    monkeypatch.setenv("CATENARY_DOOR_CERT_FILE", "")  # as good as a missing line
    load_settings(RenamedSettings, file=None, section="gateway", flags={})


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", "\x00"])
def test_file_that_is_no_sections_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInput):
        load(path)


def test_missing_file_is_refused_and_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        load(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert load(tmp_path / "empty.yaml").port == 1


def test_unknown_flag_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        load(prot=3)
    assert caught.value.field == "gateway.prot"


def test_wrong_value_is_not_repeated_in_the_message() -> None:
    with pytest.raises(InvalidInput) as caught:
        load(port="hunter2")
    assert "hunter2" not in str(caught.value)


def test_broken_json_list_in_the_environment_names_the_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CATENARY_PEERS", "[a")
    with pytest.raises(InvalidInput) as caught:
        load()
    assert caught.value.field == "gateway.peers"


def test_describe_masks_secrets_and_shows_the_rest() -> None:
    settings = load(
        redis_url="redis://:s3cret@host:1/0", admin_password="s3cret", tls_ca_file="/a/ca.pem"
    )
    described = describe(settings)
    assert "s3cret" not in str(described)
    assert described["redis_url"] == "redis://***@host:1/0"
    assert described["tls_ca_file"] == "/a/ca.pem"
    assert described["port"] == 1


def test_every_field_has_a_description() -> None:
    assert all(field.description for field in ProcessSettings.model_fields.values())
