"""The group `catenaryd replay`, with one command for each kind of case."""

from __future__ import annotations

import json

import click

from catenaryd.replay.fields import parse
from catenaryd.replay.kinds import KINDS, ReplayKind
from catenaryd.shared_options import read_text


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
        cases = parse(read_text(file)).objects("cases")
        results = [kind.replay(case) for case in cases]
        if as_json:
            click.echo(json.dumps({"results": results}))
            return
        for number, (case, result) in enumerate(zip(cases, results, strict=True)):
            click.echo(f"{case.text('name', f'case {number}')}: {kind.words(result)}")

    return command


for _kind in KINDS:
    replay_group.add_command(_command(_kind))
