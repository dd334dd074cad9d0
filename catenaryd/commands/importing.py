"""The commands `catenaryd pull` and `catenaryd import-model`: models into the repository.

They run where the repository is. `catenary pull` and `catenary deploy` ask a cluster for the same
from elsewhere.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
import msgspec

from catenary_services.domain.ids import NANOSECONDS_PER_MILLISECOND, ModelKey
from catenary_services.domain.model import ENGINE_OF
from catenary_services.errors import CatenaryError, NotSupported
from catenary_services.models.model_repository import PRECISIONS, TARGETS, ModelRepository
from catenaryd.shared_options import MODEL_REPOSITORY
from catenaryd.sources.hub import HubAccess
from catenaryd.sources.source_names import source_of
from catenaryd.sources.steps import ImportPhase, ImportStep
from catenaryd.sources.versions import PullOptions

if TYPE_CHECKING:
    from catenaryd.sources.bringing import PulledModel

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--file", default="", help="File of the source, if it has several models."),
    click.option(
        "--precision",
        type=click.Choice(PRECISIONS),
        default="fp32",
        show_default=True,
        help="Of the weights: int8 and int4 are quantised.",
    ),
    click.option(
        "--target",
        type=click.Choice(TARGETS),
        default="both",
        show_default=True,
        help="Agents that are to run it. gpu: no graph is made, nothing is computed.",
    ),
    click.option(
        "--engine",
        type=click.Choice(sorted(ENGINE_OF)),
        help="Import for this engine alone: agents that have it serve the model whole, of any "
        "family; the others do not.",
    ),
    click.option(
        "--keep-gguf",
        is_flag=True,
        help="Keep a GGUF file beside the blocks made of it: agents with llama-server serve it, "
        "too.",
    ),
    click.option(
        "--adapter",
        "adapters",
        multiple=True,
        metavar="NAME=FOLDER",
        help="A LoRA adapter as PEFT writes it, served by vLLM as MODEL:NAME; several times for "
        "several.",
    ),
    click.option("--copy", is_flag=True, help="Copy the weights where they could be linked."),
    click.option(
        "--session-tokens",
        type=click.IntRange(2, 1 << 20),
        default=2048,
        show_default=True,
        help="Most tokens of one session, prompt and answer together.",
    ),
    click.option(
        "--slo-ms",
        type=click.FloatRange(1),
        help="Time for an answer if the request names none.  [default: 60000 for language models, "
        "else 1000]",
    ),
    click.option("--hub-endpoint", default="", help="A mirror of the hub.  [default: HF_ENDPOINT]"),
    click.option(
        "--hub-token",
        default="",
        envvar="CATENARY_HUB_TOKEN",
        show_envvar=True,
        help="By whose right the hub is asked.  [default: HF_TOKEN]",
    ),
    click.option("--dry-run", is_flag=True, help="Only say what would be fetched."),
    MODEL_REPOSITORY,
)


def _import_options(function: F) -> F:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command("pull")
@click.argument("source")
@click.option("--name", default="", help="Name it gets.  [default: the last part of the source]")
@click.option("--version", default="", help="Version of it.  [default: the next free number]")
@_import_options
@click.option(
    "--steps", is_flag=True, hidden=True, help="Tell the steps on stdout, for schedulers."
)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as one JSON object.")
def pull(source: str, steps: bool, as_json: bool, **options: Any) -> None:
    """Fetches the model at SOURCE and imports it into the repository of this machine.

    SOURCE is hf:ORGANISATION/NAME (with /FILE and @REVISION), an s3://, gs://, http(s):// or
    file:// URL, or a file or folder: safetensors with config.json (models that generate text, and
    encoders with their tokenizer), GGUF, ONNX or torch.export (.pt2). Sizes and time are said
    first. What was fetched before an interruption is kept; the same command goes on from there.

    Example: catenaryd pull hf:organisation/name@main --target gpu
    """
    if steps:
        _tell_steps(source, options)
    brought = _shown(source, options)
    if as_json:
        repository = ModelRepository(options["model_repository"])
        facts = {"model": brought.key.name, "version": brought.key.version, "known": brought.known}
        facts["total_bytes"] = brought.total_bytes
        record = None if options["dry_run"] else repository.source(brought.key)
        if record is not None:
            facts |= {"source": record.source, "revision": record.revision}
        click.echo(json.dumps(facts))
        return
    click.echo(str(brought.key))


@click.command("import-model")
@click.argument("source")
@click.option("--name", required=True, help="Name it is served under.")
@click.option("--version", default="1", show_default=True, help="Version of it.")
@_import_options
@click.option("--json", "as_json", is_flag=True, help="Print the sizes as one JSON object.")
def import_model(source: str, as_json: bool, **options: Any) -> None:
    """Imports the language model at SOURCE under a name of your own, and prints its sizes.

    The same as `pull` with --name and --version. docs/families.md lists the families that agents
    on GPUs and on CPUs run. A folder needs config.json, tokenizer.json and safetensors; its weights
    are linked or copied as they are. Agents on a CPU need a graph, which takes a float32 copy and a
    while.

    Example: catenaryd import-model Llama-3.1-8B-Instruct --name llama --target gpu
    """
    brought = _shown(source, options, takes_unrecorded=True)
    if options["dry_run"]:
        return
    _print_sizes(ModelRepository(options["model_repository"]), brought.key, options, as_json)


def _shown(source: str, options: dict[str, Any], *, takes_unrecorded: bool = False) -> PulledModel:
    """Brings a model in and shows how far it is."""
    from catenary.command_line.import_view import ImportView

    with ImportView() as view:
        return _bring(source, options, view.show, takes_unrecorded=takes_unrecorded)


def _bring(
    source: str,
    options: dict[str, Any],
    show: Callable[[ImportStep], None],
    *,
    takes_unrecorded: bool = False,
) -> PulledModel:
    from catenaryd.sources.bringing import bring

    slo_ms = options["slo_ms"]
    wanted = PullOptions(
        name=options["name"],
        version=options["version"],
        precision=options["precision"],
        target=options["target"],
        engine=options["engine"] or "",
        keeps_gguf=options["keep_gguf"],
        adapters=_adapters(options["adapters"]),
        copies=options["copy"],
        session_tokens=options["session_tokens"],
        slo_ns=round(slo_ms * NANOSECONDS_PER_MILLISECOND) if slo_ms else 0,
        hub=HubAccess(options["hub_endpoint"], options["hub_token"]),
        takes_unrecorded=takes_unrecorded,
        dry_run=options["dry_run"],
    )
    repository = ModelRepository(options["model_repository"])
    return bring(repository, source_of(source, options["file"]), wanted, show)


def _adapters(given: Sequence[str]) -> dict[str, Path]:
    """Returns the folders of adapters by their names."""
    found = {}
    for each in given:
        name, _, folder = each.partition("=")
        if not name or not folder or name in found:
            raise click.BadParameter(f"{each!r} is not NAME=FOLDER", param_hint="--adapter")
        found[name] = Path(folder)
    return found


def _tell_steps(source: str, options: dict[str, Any]) -> NoReturn:
    """Runs an import that a scheduler reads, one JSON object a line, and ends the process."""
    # Whoever is told to end still ends what it has in the jail, and removes what is half made.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def tell(step: ImportStep) -> None:
        click.echo(msgspec.json.encode(step).decode())

    try:
        brought = _bring(source, options, tell)
    except CatenaryError as error:
        field = error.details.get("field", "")
        failed = ImportPhase.FAILED
        tell(ImportStep(failed, error.message[:16_000], reason=error.reason, field=field[:1000]))
        sys.exit(1)
    key, total = brought.key, brought.total_bytes
    tell(
        ImportStep(
            ImportPhase.DONE,
            done_bytes=total,
            total_bytes=total,
            model=key.name,
            version=key.version,
            known=brought.known,
        )
    )
    sys.exit(0)


def _print_sizes(
    repository: ModelRepository, key: ModelKey, options: dict[str, Any], as_json: bool
) -> None:
    if not repository.manifest(key).generates_text:
        raise NotSupported(f"{key} is in the repository; it is no language model, which has sizes")
    table = repository.decoder_table(key)
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
