"""The commands that bring published models into the repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, ModelKey
from catenary_services.models.model_repository import PRECISIONS, TARGETS, ModelRepository
from catenaryd.shared_options import MODEL_REPOSITORY, print_progress


@click.command("import-model")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--name", required=True, help="Name it is served under.")
@click.option("--version", default="1", show_default=True, help="Version of it.")
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default="fp32",
    show_default=True,
    help="Of the weights: int8 and int4 are quantised.",
)
@click.option(
    "--target",
    type=click.Choice(TARGETS),
    default="both",
    show_default=True,
    help="Agents that are to run it. gpu: no graph is made, nothing is computed.",
)
@click.option("--copy", is_flag=True, help="Copy the weights where they could be linked.")
@click.option(
    "--session-tokens",
    type=click.IntRange(2, 1 << 20),
    default=2048,
    show_default=True,
    help="Most tokens of one session, prompt and answer together.",
)
@click.option(
    "--slo-ms",
    type=click.FloatRange(1),
    default=60_000.0,
    show_default=True,
    help="Time for a whole answer if the request names none.",
)
@MODEL_REPOSITORY
@click.option("--json", "as_json", is_flag=True, help="Print the sizes as one JSON object.")
def import_model(source: Path, model_repository: Path, as_json: bool, **options: Any) -> None:
    """Imports the language model in SOURCE: a GGUF file, or a Hugging Face folder.

    Llama 2 and 3, Mistral, Qwen 2 and 3 and what is built like them (SmolLM2); for GPUs alone
    also Phi 3, OLMo 2, StarCoder 2, GLM 4, SmolLM3, Ministral, Seed-OSS, Granite and Command R.
    A folder needs config.json, tokenizer.json and safetensors; its weights are linked or copied
    as they are. Agents on a CPU need a graph, which takes a float32 copy and a while.

    Example: catenaryd import-model Llama-3.1-8B-Instruct --name llama --target gpu
    """
    from catenary_agent.decoders.importing.importing import ImportOptions, import_decoder

    key = ModelKey(options["name"], options["version"])
    table = import_decoder(
        ModelRepository(model_repository),
        source,
        key,
        ImportOptions(
            precision=options["precision"],
            target=options["target"],
            copies=options["copy"],
            session_tokens=options["session_tokens"],
            slo_ns=round(options["slo_ms"] * NANOSECONDS_PER_MILLISECOND),
        ),
        print_progress,
    )
    weights = table.weight_bytes(0, table.blocks)
    if as_json:
        facts = {"model": str(key), "precision": options["precision"], "weight_bytes": weights}
        facts["target"] = options["target"]
        names = ("blocks", "hidden_size", "vocabulary_size", "context_tokens", "block_bytes")
        forms = {
            str(held.form): {
                "weight_bytes": held.weight_bytes(0, table.blocks),
                "cache_bytes_per_token": table.blocks * held.cache_bytes_per_token,
            }
            for held in table.forms
        }
        plain = {name: getattr(table, name) for name in names}
        click.echo(json.dumps(facts | plain | {"forms": forms}))
        return
    click.echo(f"{key}: {table.blocks} blocks, {weights:,} bytes, {options['precision']}")
    for held in table.forms:
        click.echo(
            f"  as {held.form}: {held.weight_bytes(0, table.blocks):,} bytes of weights,"
            f" {table.blocks * held.cache_bytes_per_token:,} bytes a token"
        )


@click.command("import-encoder")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--name", required=True, help="Name it is served under.")
@click.option("--version", default="1", show_default=True, help="Version of it.")
@click.option("--blocks", default=10, show_default=True, help="How many blocks to aim for.")
@click.option(
    "--max-batch",
    type=click.IntRange(1, 4096),
    default=32,
    show_default=True,
    help="Most texts of a batch.",
)
@click.option(
    "--slo-ms",
    type=click.FloatRange(1),
    default=1000.0,
    show_default=True,
    help="Time for an answer if the request names none.",
)
@MODEL_REPOSITORY
@click.option("--json", "as_json", is_flag=True, help="Print the facts as one JSON object.")
def import_encoder(source: Path, model_repository: Path, as_json: bool, **options: Any) -> None:
    """Imports the encoder in SOURCE, a Hugging Face or sentence-transformers folder.

    BERT, DistilBERT, ELECTRA, MPNet, RoBERTa and XLM-RoBERTa, for embeddings or with a head that
    classifies. A folder needs config.json, tokenizer.json and safetensors. Requests have texts.

    Example: catenaryd import-encoder all-MiniLM-L6-v2 --name minilm
    """
    from catenary_agent.encoders import importing

    key = ModelKey(options["name"], options["version"])
    repository = ModelRepository(model_repository)
    slo_ns = round(options["slo_ms"] * NANOSECONDS_PER_MILLISECOND)
    chosen = importing.EncoderOptions(options["blocks"], options["max_batch"], slo_ns)
    table = importing.import_encoder(repository, source, key, chosen, print_progress)
    tokens = repository.manifest(key).text_tokens
    output = table.boundaries[-1].tensors[0]
    if as_json:
        facts = {"model": str(key), "blocks": table.blocks, "text_tokens": tokens}
        click.echo(json.dumps(facts | {"output": output.name, "shape": list(output.shape)}))
        return
    click.echo(
        f"{key}: {table.blocks} blocks, texts of up to {tokens} tokens,"
        f" answers {output.name} {list(output.shape)}"
    )
