"""The group `catenaryd replay`, with one command for each kind of case."""

from __future__ import annotations

import json

import click

from catenary_services.errors import InvalidInput
from catenaryd.replay.fields import parse
from catenaryd.replay.kinds import KINDS, ReplayKind


@click.group("replay")
def replay_group() -> None:
    """Replays recorded cases of scheduling decisions, without a running cluster.

    Example: catenaryd replay placement aladdin_placement.json --json
    """


def _command(kind: ReplayKind) -> click.Command:
    @click.command(kind.name, help=kind.help)
    @click.argument("file", type=click.Path(allow_dash=True, dir_okay=False, path_type=str))
    @click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
    def command(file: str, as_json: bool) -> None:
        cases = parse(_text(file)).objects("cases")
        results = [kind.replay(case) for case in cases]
        if as_json:
            click.echo(json.dumps({"results": results}))
            return
        for number, (case, result) in enumerate(zip(cases, results, strict=True)):
            click.echo(f"{case.text('name', f'case {number}')}: {kind.words(result)}")

    return command


def _text(file: str) -> str:
    try:
        with click.open_file(file, encoding="utf-8") as stream:
            return str(stream.read())
    except OSError as error:
        raise InvalidInput("file", f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInput("file", f"{file} is not UTF-8 text") from None


for _kind in KINDS:
    replay_group.add_command(_command(_kind))
