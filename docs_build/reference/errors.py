"""The page of errors: every reason with its gRPC and HTTP status, and whether to retry."""

from __future__ import annotations

from collections.abc import Iterator

from catenary_services.errors import CatenaryError
from catenary_services.grpc import error_tables
from docs_build.reference.markdown import code, page, prose, table

_INTRO = """\
An error has a *reason*, the same in gRPC (`google.rpc.ErrorInfo.reason`), in the `code` of
OpenAI's error body (lower case), in logs, in the label `outcome` of metrics, and in the SDK
(`error.reason`). gRPC carries the details in the trailer `grpc-status-details-bin`.

Try again exactly when you are told to: by `RetryInfo` and the trailer `grpc-retry-pushback-ms` on
gRPC, by `Retry-After` (whole seconds) on HTTP. "As told" below means that the server computed
when; where it has none to give, and where the column says no, the same request will fail again.
HTTP 503 means that the cluster is full or not there, 429 that this key has used up its share."""

_MILLISECOND_NS = 1_000_000


def errors_page() -> str:
    columns = ("reason", "gRPC", "HTTP", "type for OpenAI", "try again", "what happened")
    return page("Errors", _INTRO, table(columns, _rows()))


def _rows() -> Iterator[tuple[str, ...]]:
    for kind, row in error_tables.TABLE.items():
        yield (
            f'<span id="{kind.reason.lower()}"></span>{code(kind.reason)}',
            code(row.grpc.name),
            str(row.http),
            code(row.openai_type),
            _advice(kind, row.retry_after_ns),
            prose((kind.__doc__ or "").partition("\n\n")[0]),
        )


def _advice(kind: type[CatenaryError], usual_ns: int | None) -> str:
    if usual_ns is not None:
        return f"as told, else after {usual_ns // _MILLISECOND_NS} ms"
    told = any(base.__name__ == "OverloadError" for base in kind.__mro__)
    return "as told, if at all" if told else "no"
