"""The command `catenaryd make-model`: a language model of a published shape with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import click

from catenaryd.shared_options import print_progress


@click.command("make-model")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--like", required=True, help="Shape of it: llama-3-8b, qwen3-4b, smollm2-135m, ..")
@click.option("--seed", type=int, default=0, show_default=True, help="The same makes the same.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Of the weights.",
)
@click.option(
    "--layers",
    type=click.IntRange(0, 1024),
    default=0,
    show_default=True,
    help="So many layers; 0: as many as the model has.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the sizes as one JSON object.")
def make_model(folder: Path, like: str, seed: int, dtype: str, layers: int, as_json: bool) -> None:
    """Makes a model with random weights in FOLDER, as published models come, for benches.

    The weights depend on seed and tensor names only: every machine makes the same. Its tokenizer
    reads text byte by byte. `catenaryd import-model FOLDER` brings it into a repository.

    Example: catenaryd make-model /tmp/llama --like llama-3-8b --seed 0
    """
    from catenary_agent.decoders.synthetic.random_models import RandomModel, write_random_model

    weights = write_random_model(folder, RandomModel(like, seed, dtype, layers), print_progress)
    if as_json:
        facts = {"folder": str(folder), "like": like, "seed": seed, "dtype": dtype}
        click.echo(json.dumps(facts | {"weight_bytes": weights}))
        return
    click.echo(f"{folder}: {like}, {weights:,} bytes of {dtype}, seed {seed}")
