"""Settings: one class per process, filled from `catenary.yaml`, then `CATENARY_*`, then flags.

A process subclasses `ProcessSettings`, gives every field a description, and is built with
`load_settings`. Nothing else reads the environment.
"""

from __future__ import annotations

import json
import os
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import Field, SecretBytes, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core.core_schema import ValidationInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from catenary_services.errors import InvalidInput

KNOWN_SECTIONS = frozenset({"agent", "gateway", "scheduler", "up"})
"""Sections of `catenary.yaml`; a misspelt one must not be silently ignored."""

RENAMED = {
    "door_cert_file": "endpoint_cert_file",
    "door_key_file": "endpoint_key_file",
    "doors_insecure": "endpoints_insecure",
    "first_token_patience_s": "max_first_token_wait_s",
    "scale_patience_s": "scale_down_window_s",
}
"""Settings by the names they once had. An old name in a file or in the environment is refused with
the new one: ignored, it would leave a process with a default that nobody chose."""

DEFAULT_CLUSTER = "main"
USUAL_REPOSITORY = Path(".catenary/models")
"""Folder of the model repository of whoever names none: that of `catenaryd up`."""
_MASK = "***"
_BRACKETED_ADDRESS = re.compile(r"\[[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(?:%\w+)?\]:")
"""A list that begins with the IPv6 address of "[fd00::5]:8004" is no JSON."""
_CREDENTIALS_IN_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/@\s]*@", re.IGNORECASE)
_SECRET_NAME = re.compile(r"(^|_)(password|secret|token|api_key)$")


class ProcessSettings(BaseSettings):
    """The settings that all processes have."""

    model_config = SettingsConfigDict(
        env_prefix="CATENARY_",
        extra="forbid",
        # Lists in the environment are "a,b" or JSON; `_split_lists` reads both.
        enable_decoding=False,
        # `NAME=` in an environment file means the same as a missing line: the default.
        env_ignore_empty=True,
        # Errors name the field without its value, which may be a secret.
        hide_input_in_errors=True,
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe log line that is written."
    )
    log_json: bool = Field(
        default=False, description="Write log lines as JSON instead of text for people."
    )
    insecure: bool = Field(
        default=False, description="Run without TLS; refused unless this says so explicitly."
    )
    cluster: str = Field(
        default=DEFAULT_CLUSTER,
        description="Cluster this process belongs to; with TLS, peers "
        "whose certificates name another one are refused.",
    )
    tls_cert_file: Path | None = Field(
        default=None, description="PEM certificate chain this process shows to others."
    )
    tls_key_file: Path | None = Field(
        default=None, description="PEM private key that belongs to tls_cert_file."
    )
    tls_ca_file: Path | None = Field(
        default=None, description="PEM certificates of the authority every peer must be signed by."
    )
    metrics_host: str = Field(
        default="127.0.0.1", description="Address the Prometheus page listens on."
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of the Prometheus page; unset: none, 0: any free port.",
    )
    health_host: str = Field(
        default="127.0.0.1", description="Address the port for probes listens on."
    )
    health_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of a plain gRPC health service for probes, "
        'which speak no TLS: it answers for "live" and "ready"; unset: none, 0: any free port.',
    )
    otlp_endpoint: str | None = Field(
        default=None, description="OTLP/gRPC collector for traces, e.g. http://localhost:4317."
    )
    trace_sample_ratio: float = Field(
        default=0.01,
        ge=0.0,
        le=1.0,
        description="Share of the requests without a trace context that are traced.",
    )
    drain_timeout_s: float = Field(
        default=20.0, ge=0.0, description="Longest time to finish or hand back work before exit."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _split_lists(cls, value: object, info: ValidationInfo) -> object:
        """Reads "a,b" and '["a", "b"]' alike where a field is a list or tuple of strings."""
        field = cls.model_fields.get(info.field_name or "")
        if not isinstance(value, str) or field is None or not _is_sequence(field):
            return value
        text = value.strip()
        if text.startswith("[") and not _BRACKETED_ADDRESS.match(text):
            try:
                return json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"is not a JSON list: {error}") from error
        return [part.strip() for part in text.split(",") if part.strip()]


class ModelFolderSettings(ProcessSettings):
    """The settings that processes with a model folder have."""

    store_bytes: int = Field(
        default=0,
        ge=0,
        description="Most that model files fetched from peers take up in `model_repository`; "
        "versions that nothing has loaded make way, the least recently used first. 0: the disk.",
    )
    fetch_bytes_per_second: int = Field(
        default=0,
        ge=0,
        description="Most that model files are fetched at from all peers together; 0: no limit "
        "but live traffic, to which fetching gives way.",
    )
    serve_bytes_per_second: int = Field(
        default=0,
        ge=0,
        description="Most that model files are sent at to all peers together; 0: no limit.",
    )


S = TypeVar("S", bound=ProcessSettings)


def load_settings(
    cls: type[S], *, file: Path | None, section: str, flags: Mapping[str, object]
) -> S:
    """Returns settings from a section of `file`, overridden by `CATENARY_*`, then by `flags`.

    Args:
        cls: Settings class of the process.
        file: A YAML file of sections, or None.
        section: Section of the process, e.g. "gateway"; the file need not have it.
        flags: Values of the command line; None for a flag that was not given.

    Raises:
        InvalidInput: The file cannot be read, a key is unknown or renamed, or a value is wrong. The
            field is named with its section, e.g. "gateway.grpc_port", or as a variable.
    """
    _refuse_renamed_variables(cls)
    values: dict[str, Any] = {} if file is None else _read_section(cls, file, section)
    values.update(EnvSettingsSource(cls)())
    values.update({name: value for name, value in flags.items() if value is not None})
    try:
        return cls(**values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join([section, *(str(part) for part in first["loc"])])
        raise InvalidInput(path, str(first["msg"])) from None


def describe(settings: BaseSettings) -> dict[str, object]:
    """Returns every setting as a printable value, with secrets masked."""
    described: dict[str, object] = {}
    for name, value in settings.model_dump().items():
        described[name] = _MASK if _SECRET_NAME.search(name) and value else _printable(value)
    return described


def _printable(value: object) -> object:
    if isinstance(value, SecretStr | SecretBytes):
        return _MASK if value.get_secret_value() else ""
    if isinstance(value, str):
        return _CREDENTIALS_IN_URL.sub(rf"\g<scheme>{_MASK}@", value)
    if isinstance(value, Mapping):
        return {str(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_printable(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _refuse_renamed_variables(cls: type[ProcessSettings]) -> None:
    """Refuses variables that name a setting of `cls` as it was called once.

    Processes share an environment, so variables of other processes' settings are no error.
    """
    for old, new in RENAMED.items():
        variable = f"CATENARY_{old.upper()}"
        if new in cls.model_fields and os.environ.get(variable):
            raise InvalidInput(variable, f"is called CATENARY_{new.upper()} now")


def _is_sequence(field: FieldInfo) -> bool:
    choices = (field.annotation, *typing.get_args(field.annotation))
    return any(typing.get_origin(choice) in (list, tuple, set, frozenset) for choice in choices)


def _read_section(cls: type[ProcessSettings], file: Path, section: str) -> dict[str, Any]:
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(str(file), f"cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise InvalidInput(str(file), f"is not valid YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise InvalidInput(str(file), "must hold sections, e.g. 'gateway:'")
    for name in document:
        if name not in KNOWN_SECTIONS and name != section:
            raise InvalidInput(str(name), f"unknown section in {file.name}")
    values = document.get(section)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InvalidInput(section, "must hold settings as 'name: value' lines")
    for name in values:
        if RENAMED.get(name) in cls.model_fields:
            raise InvalidInput(f"{section}.{name}", f"is called {RENAMED[name]} now")
        if name not in cls.model_fields:
            raise InvalidInput(f"{section}.{name}", f"unknown setting in {file.name}")
    # `null` means the same as a missing flag: the default.
    return {str(name): value for name, value in values.items() if value is not None}
