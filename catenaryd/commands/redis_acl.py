"""The command `catenaryd redis-acl`: the ACL file of a Redis server that serves one cluster.

Each service has a user of its own with only the rights it needs; the default user is off. The rules
name every command, because a category would grow with the server's versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from catenary_scheduler.storage.keys import RedisKeys
from catenary_services.errors import InvalidInput

SCHEDULER = "catenary-scheduler"
VIEW = "catenary-view"
HEALTH = "catenary-health"
REPLICA = "catenary-replica"
SENTINEL = "catenary-sentinel"

_HANDSHAKE = "+hello +auth +ping"
_KEYS = "{keys}"
_RULES: Mapping[str, str] = {
    # Redis checks commands in scripts as if the user had called them.
    SCHEDULER: f"{_KEYS} {_HANDSHAKE} +select +eval +evalsha +time +get +set +exists +del +pttl"
    " +pexpire +hget +hset +hdel +hgetall +hscan +xadd +type +getrange +dump +unlink +memory|usage",
    VIEW: f"{_KEYS} {_HANDSHAKE} +select +time +get +exists +type +pttl +hget +hmget +hgetall +hlen"
    " +hscan +xlen +xrange +xrevrange",
    HEALTH: _HANDSHAKE,
    REPLICA: f"{_HANDSHAKE} +psync +replconf",
    SENTINEL: f"allchannels {_HANDSHAKE} +info +role +publish +subscribe +multi +exec +slaveof"
    " +config|rewrite +client|setname +client|kill +script|kill",
}
"""Rights of each user, added after all rights were taken from it."""
USERS = tuple(_RULES)
_SHORTEST_PASSWORD = 8


def acl_file(cluster: str, passwords: Mapping[str, str]) -> str:
    """Returns the text of a users.acl with the users in `passwords`.

    Raises:
        InvalidInput: The cluster's name is not valid, there is no such user, or a password is
            empty, short or has a line break.
    """
    keys = _key_patterns(cluster)
    lines = ["user default off resetpass resetkeys resetchannels -@all"]
    for user, password in passwords.items():
        if user not in _RULES:
            raise InvalidInput("password_file", f"no user {user!r}; there are {', '.join(USERS)}")
        if len(password) < _SHORTEST_PASSWORD or not password.isprintable():
            raise InvalidInput(
                "password_file",
                f"the password of {user} needs {_SHORTEST_PASSWORD} characters in one line",
            )
        digest = hashlib.sha256(password.encode()).hexdigest()
        rules = _RULES[user].replace(_KEYS, keys)
        lines.append(f"user {user} on #{digest} resetkeys resetchannels -@all {rules}")
    return "\n".join(lines) + "\n"


def _key_patterns(cluster: str) -> str:
    RedisKeys(cluster)  # raises for a text that is more than a name
    return f"~catenary:{{{cluster}}}:* ~catenary:{{{cluster}/*}}:*"


@click.command("redis-acl")
@click.option("--cluster", default="main", show_default=True, help="Name of the cluster.")
@click.option(
    "--password-file",
    "password_files",
    multiple=True,
    required=True,
    metavar="USER=FILE",
    help=f"File with the password of a user; may be repeated. Users: {', '.join(USERS)}.",
)
def redis_acl(cluster: str, password_files: Sequence[str]) -> None:
    """Prints the ACL file of a Redis server for this cluster, with hashes of the passwords.

    Redis reads it with `aclfile users.acl`, and anew on `ACL LOAD`.

    Example: catenaryd redis-acl --password-file catenary-scheduler=scheduler.txt > users.acl
    """
    click.echo(acl_file(cluster, dict(map(_read, password_files))), nl=False)


def _read(argument: str) -> tuple[str, str]:
    user, equals, file = argument.partition("=")
    if not equals or not user or not file:
        raise InvalidInput("password_file", f"{argument!r} is not USER=FILE")
    try:
        return user, Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput("password_file", f"{file} cannot be read: {error}") from None
