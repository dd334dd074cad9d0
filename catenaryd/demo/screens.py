"""Printing of the demo's screens: a number and a title, sentences, and shares as bars."""

from __future__ import annotations

import textwrap

import click

WIDTH = 96
SCREENS = 6
_INDENT = "  "
_BAR = 40


def begin(number: int, title: str, why: str) -> None:
    """Begins a screen, and says what it shows and why."""
    head = f"-- {number} of {SCREENS}: {title} "
    click.echo(f"\n{click.style(head.ljust(WIDTH, '-'), bold=True)}")
    click.echo(f"{textwrap.fill(' '.join(why.split()), WIDTH)}\n")


def say(text: str) -> None:
    """Prints a sentence in lines that fit the screen."""
    text = " ".join(text.split())
    click.echo(
        textwrap.fill(
            text,
            WIDTH,
            initial_indent=_INDENT,
            subsequent_indent=_INDENT,
            break_on_hyphens=False,
            break_long_words=False,
        )
    )


def show(text: str) -> None:
    """Prints lines as they are, indented."""
    click.echo(textwrap.indent(text, _INDENT))


def flow(text: str, column: int, *, reverse: bool = False) -> int:
    """Prints a piece of a text that comes in pieces, and returns the column in which it ends.

    Args:
        text: A word, or part of one; words begin with a blank.
        column: The column in which the last piece ended; 0 for the first piece.
        reverse: Whether it is to stand out.
    """
    if column == 0 or (text.startswith(" ") and column + len(text) > WIDTH):
        click.echo(("\n" if column else "") + _INDENT, nl=False)
        column, text = len(_INDENT), text.lstrip()
    click.echo(click.style(text, reverse=reverse) if reverse else text, nl=False)
    return column + len(text)


def bar(value: float, largest: float) -> str:
    """Returns a bar that is as long as the value's share of the largest one."""
    return "█" * max(1, round(_BAR * value / largest)) if value > 0 and largest > 0 else ""
