"""The page of access rights, from the table that every server inside the cluster enforces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from catenary_services.security.identity import Role
from catenary_services.security.roles import RULES, AccessRule
from docs_build.reference.markdown import code, page, table

_INTRO = """\
With TLS every process has a certificate that names its role, and a server lets only those roles
call a method that this table has for it; a method that is not in the table is refused. "With an
operator's key" means that the call must bring an API key with the scope `admin` as well: a gateway
hands it on, and cannot drain or plan of its own accord. Endpoints are for clients, who are asked
for API keys instead."""


def access_page() -> str:
    return page("Who may call what", _INTRO, table(("method", "may call", "with a key"), _rows()))


def _rows() -> Iterator[tuple[str, ...]]:
    for method, rule in sorted(RULES.items()):
        yield code(method.lstrip("/")), _who(rule), _names(rule.with_key)


def _who(rule: AccessRule) -> str:
    if rule.is_public:
        return "clients, by API key"
    return "any process" if rule.roles == frozenset(Role) else _names(rule.roles) or "nobody"


def _names(roles: Iterable[Role]) -> str:
    return ", ".join(sorted(role.value for role in roles))
