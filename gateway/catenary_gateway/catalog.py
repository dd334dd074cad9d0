"""The catalog of models that can be requested, as the scheduler last announced them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from catenary_protos.catenary.v1 import common_pb2, scheduler_pb2
from catenary_services.domain.ids import ModelKey
from catenary_services.domain.tensors import ANY, BYTES, TensorSpec
from catenary_services.errors import ModelNotFound, NoActivePlan, Unavailable

_RETRY_NS = 1_000_000_000
_LONGEST_NAME = 200
_TEXT = TensorSpec("text", BYTES, (ANY,))
"""The input of models of which the gateway makes tokens: a text for each row. Where two are to be
judged together, a row may have a pair of texts instead."""
EMBEDDING, LOGITS = "sentence_embedding", "logits"
"""The names of an encoder's outputs: a vector for each text, or numbers of classes."""


@dataclass(frozen=True, slots=True)
class Model:
    """One served version of a model: its tensor signature, limits and readiness."""

    key: ModelKey
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    ready: bool = True
    not_ready_reason: str = ""
    default_slo_ns: int = 0
    batched: bool = True
    """True if dimension 0 of every tensor counts rows; False if a request always is one row."""
    max_row_bytes: int = 0
    """Bytes of the largest row, summed over all inputs; 0 if unknown."""
    generates: bool = False
    """True if the model generates text (`catenary_gateway.generation`) and takes no inference
    requests."""
    session_tokens: int = 0
    """Most tokens of one session, prompt and answer together; 0 if the model does not generate."""
    content_digest: str = ""
    """Digest of the version's content; empty if it is unknown."""
    sources: tuple[str, ...] = ()
    """The peers that may have its files, the best first."""
    text_tokens: int = 0
    """Most tokens of a text, if the gateway makes the inputs of texts; else 0."""
    given: tuple[TensorSpec, ...] = ()
    """The inputs that are made of texts; () if requests have the inputs themselves."""
    adapters: tuple[str, ...] = ()
    """The names of its LoRA adapters."""
    adapter: str = ""
    """The adapter with which it was asked for; empty for the model itself."""
    label: str = field(init=False)
    """The key as text. It is made once because metrics and traces use it in every request."""
    specs: dict[str, TensorSpec] = field(init=False, hash=False)
    """The input specifications by name, in the model's order."""
    output_index: dict[str, int] = field(init=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", str(self.key))
        object.__setattr__(self, "specs", {spec.name: spec for spec in self.inputs})
        index = {spec.name: at for at, spec in enumerate(self.outputs)}
        object.__setattr__(self, "output_index", index)

    @property
    def takes_texts(self) -> bool:
        """True if it generates text, or if tokens are made of the texts in its requests."""
        return self.generates or self.text_tokens > 0

    @property
    def most_tokens(self) -> int:
        """Most tokens of a session, or of a text; 0 if the model takes neither."""
        return self.session_tokens or self.text_tokens

    @property
    def takes_pairs(self) -> bool:
        """True if rows of a request may be pairs of texts, which a head classifies together."""
        return bool(self.given) and LOGITS in self.output_index


class Catalog:
    """The table of models that can be requested; a scheduler's `ModelTable` replaces all of it."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, Model]] = {}
        self.known = False
        """True once any scheduler has sent a table."""

    def update(self, table: scheduler_pb2.ModelTable) -> None:
        """Replaces all models by those of a scheduler's table."""
        models: dict[str, dict[str, Model]] = {}
        for served in table.models:
            versions = models.setdefault(served.name, {})
            versions[served.version] = _model_of(served)
        # Newest version last, so that a request without a version finds it at the end.
        self._models = {
            name: dict(sorted(versions.items(), key=lambda item: _version_order(item[0])))
            for name, versions in models.items()
        }
        self.known = True

    @property
    def all_ready(self) -> bool:
        """True if a table is known and every model in it is ready."""
        return self.known and all(
            model.ready for versions in self._models.values() for model in versions.values()
        )

    def models(self) -> list[Model]:
        """Returns every served version of every model."""
        return [model for versions in self._models.values() for model in versions.values()]

    def at(self, key: ModelKey) -> Model | None:
        """Returns one version of a model; None if it is not served."""
        return self._models.get(key.name, {}).get(key.version)

    def versions(self, name: str) -> list[str]:
        """Returns the served versions of a model, oldest first."""
        return list(self._models.get(name, ()))

    def model_name(self, name: str) -> str:
        """Returns the name of the model that a name stands for, which may be an adapter's own."""
        models = [] if name in self._models else self._with_adapter(name)
        return models[0] if len(models) == 1 else name

    def find(self, name: str, version: str) -> Model:
        """Returns a model, ready or not, with the LoRA adapter that was asked for.

        An empty version means the newest one that is ready, else the newest one. An adapter is
        asked for as the version of its model, or by its own name.

        Raises:
            ModelNotFound: The model, version or adapter does not exist.
            Unavailable: No scheduler has said yet what is served.
        """
        if not self.known:
            raise Unavailable(
                "no scheduler has told this gateway yet what is served", retry_after_ns=_RETRY_NS
            )
        versions, adapter = self._models.get(name), ""
        if versions is None:
            versions, adapter = self._models.get(self.model_name(name)), name
        if versions is None:
            raise ModelNotFound(self._unknown(name), details={"model": name})
        if version and version not in versions and not adapter:
            adapter, version = version, ""
        if adapter:
            versions = {each: one for each, one in versions.items() if adapter in one.adapters}
        if not versions or version not in ("", *versions):
            asked = version or adapter
            raise ModelNotFound(
                f"model {_shown(name)} has no version {_shown(asked)}",
                details={"model": f"{name}:{asked}"},
            )
        ready = [each for each in versions.values() if each.ready]
        newest = ready[-1] if ready else next(reversed(versions.values()))
        model = versions[version] if version else newest
        return replace(model, adapter=adapter) if adapter else model

    def find_deployed(self, name: str, version: str) -> Model:
        """Returns a model that requests may be submitted to.

        The model need not be ready at this moment: while a lost agent comes back, requests wait
        at the scheduler for as long as their deadlines allow.

        Raises:
            ModelNotFound: The model or version does not exist.
            NoActivePlan: Only the name is known, because the model cannot be deployed.
            Unavailable: No scheduler has said yet what is served.
        """
        model = self.find(name, version)
        if not model.ready and not model.inputs and not model.session_tokens:
            raise NoActivePlan(
                f"model {model.key} is not ready: {model.not_ready_reason or 'no active plan'}",
                details={"model": str(model.key)},
            )
        return model

    def _with_adapter(self, adapter: str) -> list[str]:
        """Returns the names of the models that have an adapter."""
        return [
            name
            for name, versions in self._models.items()
            if any(adapter in model.adapters for model in versions.values())
        ]

    def _unknown(self, name: str) -> str:
        models = self._with_adapter(name)
        if not models:
            return f"no model {_shown(name)}"
        asked = " or ".join(f"{model}:{name}" for model in models[:2])
        return f"several models have an adapter {_shown(name)}: ask for {asked}"


def _model_of(served: scheduler_pb2.ServedModel) -> Model:
    inputs = _specs(served.inputs)
    return Model(
        key=ModelKey(served.name, served.version),
        platform=served.platform,
        inputs=(_TEXT,) if served.text_tokens and inputs else inputs,
        outputs=_specs(served.outputs),
        ready=served.ready,
        not_ready_reason=served.not_ready_reason,
        default_slo_ns=served.default_slo_ns,
        batched=served.batched,
        max_row_bytes=0 if served.text_tokens else served.max_row_bytes,
        generates=served.generates,
        session_tokens=served.session_tokens,
        content_digest=served.content_digest,
        sources=tuple(served.sources),
        text_tokens=served.text_tokens,
        given=inputs if served.text_tokens else (),
        adapters=tuple(served.adapters),
    )


def _specs(specs: Iterable[common_pb2.TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(spec.name, spec.datatype, tuple(spec.shape)) for spec in specs)


def _version_order(version: str) -> tuple[int, int, str]:
    return (1, int(version), "") if version.isdecimal() else (0, 0, version)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_NAME else text[:_LONGEST_NAME] + "…")
