"""The command `catenaryd repair`, which moves unusable entries of a cluster's Redis away."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from catenary_scheduler.settings import SchedulerSettings
from catenary_services.errors import Unavailable
from catenary_services.settings import load_settings
from catenaryd.process_options import given, settings_options
from catenaryd.shared_options import AS_JSON

if TYPE_CHECKING:
    from catenary_scheduler.storage.keys import RedisKeys
    from catenary_scheduler.storage.repair import StoreExamination

_SETTINGS = (
    "cluster",
    "scheduler_groups",
    "redis_url",
    "redis_password_file",
    "redis_ca_file",
    "redis_sentinels",
    "redis_sentinel_service",
    "redis_sentinel_password_file",
    "tls_ca_file",
    "tls_cert_file",
    "tls_key_file",
)
_TIMEOUT_S = 10.0
_SHOWN = 60


@click.command()
@settings_options(SchedulerSettings, only=_SETTINGS)
@click.option("--apply", is_flag=True, help="Put what is found into the quarantine.")
@AS_JSON
@click.pass_obj
def repair(config: Path | None, /, *, apply: bool, as_json: bool, **flags: Any) -> None:
    """Looks for records, keys and epochs in Redis that no scheduler can use.

    Needs no scheduler. Without --apply it only looks; with it, what is found is moved to the stream
    `catenary:{CLUSTER}:quarantine`, from where it can be read. Exit code 1: something was found
    and is still there.

    Example: catenaryd repair --redis-url redis://127.0.0.1:6379 --apply
    """
    # A scheduler needs further settings, which are not asked for here.
    settings = load_settings(
        SchedulerSettings,
        file=config,
        section="scheduler",
        flags={"insecure": True, **given(flags)},
    )
    found = asyncio.run(_run(settings, apply=apply))
    if as_json:
        click.echo(json.dumps({"applied": apply, "groups": [_facts(*each) for each in found]}))
    else:
        click.echo("\n".join(line for each in found for line in _lines(*each, applied=apply)))
    if not apply and any(examination.damage for _, examination in found):
        raise SystemExit(1)


async def _run(
    settings: SchedulerSettings, *, apply: bool
) -> list[tuple[RedisKeys, StoreExamination]]:
    from redis.exceptions import RedisError

    from catenary_scheduler.storage.keys import RedisKeys
    from catenary_scheduler.storage.repair import examine, put_away
    from catenary_services.redis.redis_client import connect, problem_of

    groups = settings.scheduler_groups
    redis = connect(settings.redis_address(), timeout_s=_TIMEOUT_S)
    found = []
    try:
        for group in range(groups):
            keys = RedisKeys(settings.cluster, group, groups)
            examination = await examine(redis, keys)
            if apply:
                await put_away(redis, keys, examination.damage)
            found.append((keys, examination))
    except (RedisError, OSError, TimeoutError) as error:
        raise Unavailable(f"Redis: {problem_of(error)[1]}") from None
    finally:
        await redis.aclose()
    return found


def _facts(keys: RedisKeys, found: StoreExamination) -> dict[str, object]:
    return {
        "group": keys.group,
        "leader": found.leader,
        "epoch": found.epoch,
        "quarantined": found.quarantined,
        "damage": [
            {
                "table": each.table,
                "name": each.name.decode(errors="replace"),
                "why": each.why,
                "bytes": each.size,
            }
            for each in found.damage
        ],
    }


def _lines(keys: RedisKeys, found: StoreExamination, *, applied: bool) -> list[str]:
    epoch = "none" if found.epoch is None else str(found.epoch)
    head = (
        f"{keys.table('')}*  epoch {epoch}, led by {found.leader or 'nobody'}, "
        f"{found.quarantined} entries in quarantine"
    )
    if not found.damage:
        return [head, "nothing unreadable was found"]
    done = "put into the quarantine" if applied else "found; --apply puts it into the quarantine"
    shown = [
        f"  {each.table}  {each.name.decode(errors='replace')[:_SHOWN]!r}  {each.why}"
        if each.name
        else f"  {each.table}  (the whole key)  {each.why}"
        for each in found.damage
    ]
    return [head, *shown, f"{len(found.damage)} {done}"]
