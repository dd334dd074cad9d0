"""The command `chat`, which talks to a language model."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Annotated, Any, cast

import typer

from catenary.client import Client
from catenary.command_line.kit import CommandOptions, command, console, fail, print_json, table
from catenary.errors import CatenaryError, NotSupportedError
from catenary.text.generation import (
    ChainChange,
    GenerationOptions,
    GenerationResult,
    ObjectivesReport,
    TokenHop,
    TokenTiming,
)
from catenary.types import as_json

_MODEL = Annotated[str, typer.Argument(help="Name of a language model.")]
_TEXT = Annotated[str, typer.Argument(help="What to say to it; left out with --interactive.")]
_SYSTEM = Annotated[str, typer.Option(help="What it is told before the conversation.")]
_KEPT = "\n\t"


def register(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command(
        epilog='Example: catenary chat smollm2-135m "Why is the sky blue?" --max-tokens 60'
    )(chat)


@command
def chat(  # noqa: PLR0913 - one parameter an option
    options: CommandOptions,
    model: _MODEL,
    text: _TEXT = "",
    *,
    system: _SYSTEM = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Share of probability kept.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Likeliest tokens kept.")] = None,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends before it; repeatable.")] = None,
    timeout: Annotated[float | None, typer.Option(help="gRPC deadline in seconds.")] = None,
    time_to_first_token_slo_ms: Annotated[
        float | None, typer.Option(help="When the first token should be there.")
    ] = None,
    time_per_output_token_slo_ms: Annotated[
        float | None, typer.Option(help="How long each further token may take in the mean.")
    ] = None,
    timings: Annotated[
        bool, typer.Option("--timings", help="Show where the time of each token went.")
    ] = False,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Go on with a conversation; ends at EOF.")
    ] = False,
) -> None:
    """Ask a language model and print its answer as it comes."""
    if not text and not interactive:
        fail("say something, or use --interactive", 2)
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop or None,
        "timeout_s": timeout,
        "timings": timings or None,
        "time_to_first_token_slo_ms": time_to_first_token_slo_ms,
        "time_per_output_token_slo_ms": time_per_output_token_slo_ms,
    }
    asked = cast("GenerationOptions", {k: v for k, v in given.items() if v is not None})
    messages = [{"role": "system", "content": system}] if system else []
    try:
        with options.client() as client:
            if text:
                _say(client, options, model, (messages, text), asked)
            while interactive and (text := _next_line()):
                try:
                    _say(client, options, model, (messages, text), asked)
                except KeyboardInterrupt:  # ends this answer, not the conversation
                    messages.pop()
                    typer.echo()
    except NotSupportedError as error:
        if error.details:
            raise
        fail(f"text generation is not served by {options.target} [NOT_SUPPORTED]")


def _say(
    client: Client,
    options: CommandOptions,
    model: str,
    said: tuple[list[dict[str, str]], str],
    asked: GenerationOptions,
) -> None:
    """Prints one answer, and adds question and answer to the conversation."""
    messages, text = said
    messages.append({"role": "user", "content": text})
    with client.chat(model, messages, stream=True, **asked) as answer:
        try:
            for piece in answer:
                if not options.as_json:
                    typer.echo(printable(piece.text), nl=False)
        except CatenaryError:
            if not options.as_json and answer.so_far.text:
                typer.echo()  # the error begins on a line of its own
            raise
        result = answer.so_far
    messages.append({"role": "assistant", "content": result.text})
    if options.as_json:
        print_json(facts(result))
        return
    typer.echo()
    if result.timings:
        typer.echo("milliseconds of each token; per agent: before + computing + sending")
        console().print(timing_table(result.timings))
    if asked.get("timings"):
        typer.echo(_summary(result))
        if result.objectives is not None:
            typer.echo(objectives_line(result.objectives))
        for change in result.chain_changes:
            typer.echo(change_line(change))


def _next_line() -> str:
    try:
        while True:
            line = input("> ").strip()
            if line:
                return line
    except EOFError:
        typer.echo()
        return ""


def printable(text: str) -> str:
    """Returns a text without control characters, so that an answer cannot move the cursor."""
    return "".join(c for c in text if c in _KEPT or unicodedata.category(c) != "Cc")


def facts(result: GenerationResult) -> dict[str, Any]:
    """Returns an answer as JSON values, without timings, objectives and chain changes if empty."""
    found: dict[str, Any] = as_json(result)
    for name in ("timings", "objectives", "chain_changes"):
        if not found[name]:
            del found[name]
    return found


def timing_table(timings: Iterable[TokenTiming]) -> Any:
    """Returns a table with a row per token and a column per hop, in milliseconds.

    A hop shows the time to get there (transfer and wait), to compute and to send on.
    """
    rows = list(timings)
    hops: list[tuple[str, int, int]] = []
    for timing in rows:
        hops += [key for hop in timing.hops if (key := _key(hop)) not in hops]
    columns = ["TOKEN", "ID", "ms", *(f"{agent} [{a},{b})" for agent, a, b in hops)]
    cells = []
    for index, timing in enumerate(rows):
        at = {_key(hop): hop for hop in timing.hops}
        cells.append(
            [
                index,
                timing.token_id,
                timing.since_previous_ns / 1e6,
                *(_cell(at[key]) if key in at else "-" for key in hops),
            ]
        )
    return table(columns, cells)


def _key(hop: TokenHop) -> tuple[str, int, int]:
    return hop.agent_id, hop.first_block, hop.last_block


def _cell(hop: TokenHop) -> str:
    before = (hop.transfer_ns + hop.wait_ns) / 1e6
    return f"{before:.1f} + {hop.compute_ns / 1e6:.1f} + {hop.send_ns / 1e6:.1f}"


def objectives_line(report: ObjectivesReport) -> str:
    """Returns a line of measured, expected and wanted times, in milliseconds."""
    first = _compared(
        report.time_to_first_token_ns,
        report.predicted_time_to_first_token_ns,
        report.time_to_first_token_slo_ns,
    )
    each = _compared(
        report.time_per_output_token_ns,
        report.predicted_time_per_output_token_ns,
        report.time_per_output_token_slo_ns,
    )
    held = report.time_to_first_token_slo_ns or report.time_per_output_token_slo_ns
    verdict = ("; objectives met" if report.met else "; objectives missed") if held else ""
    return f"at the gateway: first token {first}, then {each} per token{verdict}"


def change_line(change: ChainChange) -> str:
    """Returns a line on an answer's change from one chain to another, and its cost."""
    moved = "began again" if change.how == "restart" else f"moved by {change.how}"
    way = f"{', '.join(change.from_agents)} to {', '.join(change.to_agents)}"
    return (
        f"{moved} after {change.generated_tokens} tokens ({change.after_ns / 1e6:.0f} ms), from "
        f"{way}; {change.stall_ns / 1e6:.1f} ms without a token"
    )


def _compared(measured_ns: int, predicted_ns: int, slo_ns: int) -> str:
    beside = []
    if predicted_ns:
        beside.append(f"expected {predicted_ns / 1e6:.0f}")
    if slo_ns:
        beside.append(f"wanted {slo_ns / 1e6:.0f}")
    remark = f" ({', '.join(beside)})" if beside else ""
    return (f"{measured_ns / 1e6:.0f} ms" if measured_ns else "-") + remark


def _summary(result: GenerationResult) -> str:
    tokens = result.usage.completion_tokens
    rest_s = result.total_s - result.first_token_s
    rate = f", then {(tokens - 1) / rest_s:.1f} tokens/s" if tokens > 1 and rest_s > 0 else ""
    return (
        f"{result.usage.prompt_tokens} + {tokens} tokens, {result.finish_reason}; "
        f"first after {result.first_token_s * 1e3:.0f} ms{rate}"
    )
