"""Checks Kubernetes manifests against the real schemas; unknown fields are errors.

    helm template x deploy/helm/catenary | .venv-deploy/bin/python deploy/validate.py -

Kubernetes' own kinds are checked against its OpenAPI schemas in their strict form
(kubernetes-validate), those of KEDA, the Prometheus operator and cert-manager against models
generated from their definitions (cloudcoil), those of KServe against the types of its Python
package. A kind nobody here knows is an error, unless it is named in `UNCHECKED`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-not-found]  # in a virtual environment of its own
import yaml

KUBERNETES = "1.35"
"""Release whose schemas are used."""
UNCHECKED = frozenset({"inference.networking.k8s.io/v1/InferencePool"})
"""Kinds without a package that has their schema."""

_MODELS = {
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
    "cert-manager.io/v1": "cloudcoil.models.cert_manager.v1",
}
_KSERVE = {
    "serving.kserve.io/v1alpha1/ServingRuntime": "v1alpha1_serving_runtime",
    "serving.kserve.io/v1beta1/InferenceService": "v1beta1_inference_service",
}
_SCALARS: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
    "object": object,
}

Document = dict[str, Any]


def problems_of(document: Document) -> list[str]:
    """Returns what is wrong with one manifest, each with the place; empty if nothing is."""
    version, kind = document.get("apiVersion", ""), document.get("kind", "")
    name = f"{version}/{kind}"
    if name in UNCHECKED:
        return []
    if version in _MODELS:
        return list(_model_problems(document, _MODELS[version], kind))
    if name in _KSERVE:
        return list(_KserveTypes().problems(document, _class_of(_KSERVE[name]), kind))
    return list(_kubernetes_problems(document, kind))


def _kubernetes_problems(document: Document, kind: str) -> Iterator[str]:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        yield f"{kind}: no schema of {document.get('apiVersion')}"
    except kubernetes_validate.ValidationError as error:
        where = ".".join(str(part) for part in error.path)
        yield f"{kind}.{where}: {error.message}"


def _model_problems(document: Document, module: str, kind: str) -> Iterator[str]:
    """Validates with a pydantic model; what the model drops it does not know."""
    model = getattr(importlib.import_module(module), kind, None)
    if model is None:
        yield f"{kind}: is not in {module}"
        return
    try:
        read = model.model_validate(document)
    except ValueError as error:
        yield f"{kind}: {error}"
        return
    kept = read.model_dump(by_alias=True, exclude_unset=True, mode="json")
    yield from _dropped(document, kept, kind)


def _dropped(given: Any, kept: Any, where: str) -> Iterator[str]:
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        for key, value in given.items():
            if key not in kept:
                yield f"{where}.{key}: unknown field"
            else:
                yield from _dropped(value, kept[key], f"{where}.{key}")
    elif isinstance(given, list) and isinstance(kept, list):
        for at, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from _dropped(value, other, f"{where}[{at}]")


class _KserveTypes:
    """Reads the types of KServe's models without importing them, which would take much more."""

    def problems(self, value: Any, kind: str, where: str) -> Iterator[str]:
        """Yields what does not fit a type, e.g. "list[V1Container]"."""
        if found := re.fullmatch(r"list\[(.+)\]", kind):
            yield from self._items(value, found[1], where)
        elif re.fullmatch(r"dict\(str, (.+)\)", kind):
            if not isinstance(value, Mapping):
                yield f"{where}: is no mapping"
        elif kind in _SCALARS:
            if not isinstance(value, _SCALARS[kind]):
                yield f"{where}: {value!r} is no {kind}"
        elif _has_class(kind):
            yield from self._fields(value, kind, where)
        elif kind.startswith("V1"):
            yield from _definition_problems(value, kind.removeprefix("V1"), where)

    def _items(self, value: Any, kind: str, where: str) -> Iterator[str]:
        if not isinstance(value, list):
            yield f"{where}: is no list"
            return
        for at, item in enumerate(value):
            yield from self.problems(item, kind, f"{where}[{at}]")

    def _fields(self, value: Any, kind: str, where: str) -> Iterator[str]:
        types, names = _class_body(kind)
        if not isinstance(value, Mapping):
            yield f"{where}: is no mapping"
            return
        by_key = {key: types[attribute] for attribute, key in names.items()}
        for key, item in value.items():
            if key not in by_key:
                yield f"{where}.{key}: unknown field"
            else:
                yield from self.problems(item, by_key[key], f"{where}.{key}")


def _definition_problems(value: Any, name: str, where: str) -> Iterator[str]:
    """Checks a part of Kubernetes' own API, e.g. a Container, inside a kind that is not its own."""
    holders: dict[str, Callable[[Any], Document]] = {
        "Container": lambda part: {"containers": [part]},
        "Volume": lambda part: {"containers": [{"name": "x"}], "volumes": [part]},
        "Toleration": lambda part: {"containers": [{"name": "x"}], "tolerations": [part]},
    }
    if name in holders:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
        for problem in _kubernetes_problems({**pod, "spec": holders[name](value)}, "Pod"):
            yield f"{where}: {problem}"


@cache
def _kserve_models() -> Path:
    spec = importlib.util.find_spec("kserve")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "models"


def _file_of(kind: str) -> Path:
    """V1alpha1ServingRuntimeSpec is in v1alpha1_serving_runtime_spec.py."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
    return _kserve_models() / f"{snake}.py"


def _has_class(kind: str) -> bool:
    return _file_of(kind).exists()


def _class_of(module: str) -> str:
    tree = ast.parse((_kserve_models() / f"{module}.py").read_text())
    return next(node.name for node in tree.body if isinstance(node, ast.ClassDef))


@cache
def _class_body(kind: str) -> tuple[dict[str, str], dict[str, str]]:
    """Returns types and JSON names of a class by its attributes."""
    tree = ast.parse(_file_of(kind).read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef))
    found: dict[str, dict[str, str]] = {}
    for node in body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        if node.targets[0].id in ("openapi_types", "attribute_map"):
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found["openapi_types"], found["attribute_map"]


def main(paths: list[str]) -> int:
    """Prints every problem; returns 1 if there was one."""
    checked, found = 0, 0
    for path in paths or ["-"]:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        for document in yaml.safe_load_all(text):
            if document is None:
                continue
            checked += 1
            name = document.get("metadata", {}).get("name", "?")
            for problem in problems_of(document):
                found += 1
                print(f"{path}: {document.get('kind')} {name}: {problem}", file=sys.stderr)
    print(f"{checked} manifests, {found} problems")
    return 1 if found or not checked else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
