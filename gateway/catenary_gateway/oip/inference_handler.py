"""The answering of requests to infer over HTTP, with Triton's binary tensor extension."""

from __future__ import annotations

from collections.abc import Mapping

from catenary_gateway.admission.request_pipeline import RequestPipeline, caller
from catenary_gateway.endpoints.connections.http_call import (
    JSON_TYPE,
    REQUEST_ID,
    HttpAnswer,
    HttpCall,
)
from catenary_gateway.endpoints.http_bodies import BoundedThreadPool
from catenary_gateway.endpoints.http_calls import presented_key
from catenary_gateway.oip import oip_json
from catenary_gateway.oip.extensions import ProtocolExtensions
from catenary_gateway.oip.route_schemas import BINARY
from catenary_services.errors import InvalidInput

JSON_SIZE = "Inference-Header-Content-Length"
_INFER_ROUTE = "/v2/models/{model}/infer"
_REQUEST_ID, _JSON_SIZE = REQUEST_ID.lower(), JSON_SIZE.lower()


class InferenceHandler:
    """Answers requests to infer, whoever reads their bytes."""

    def __init__(
        self,
        pipeline: RequestPipeline,
        extensions: ProtocolExtensions,
        off_loop: BoundedThreadPool,
    ) -> None:
        self._pipeline = pipeline
        self._extensions = extensions
        self._off_loop = off_loop

    async def answer(self, call: HttpCall, name: str, version: str) -> HttpAnswer:
        """Returns the answer to a request to infer a model, of any version if `version` is "".

        Raises:
            CatenaryError: There is none.
        """
        pipeline, headers = self._pipeline, call.headers
        arrival = pipeline.arrivals.arrive(_INFER_ROUTE, headers.get("traceparent"))
        # Checked before the body is read: a refused request need not be received.
        principal = pipeline.enter(presented_key(headers))
        largest = pipeline.capacity.max_request_bytes
        with pipeline.admit(principal, name, version, call.announced_bytes) as admitted:
            # The announced size was only checked; bytes are held as they arrive.
            admitted.hold(0)
            sender = caller()
            with admitted.arriving(sender.subject):
                body = await call.body(largest, admitted)
                sender.read_bytes = len(body)  # what it is charged for if it is refused
                memory = self._extensions.memory_of(sender)
                conversion = pipeline.arrivals.conversion(memory, headers.get(_REQUEST_ID))
                json_size = _json_size(headers, len(body))
                wanted, form = await self._off_loop.run(
                    len(body) if json_size is None else json_size,
                    lambda: oip_json.request_of(body, json_size, admitted.model, conversion),
                )
            if memory.read_bytes:
                admitted.hold_more(memory.read_bytes)
            response = await admitted.infer(wanted, arrival)
            if form.class_counts:
                response = await self._extensions.with_classes(response, form.class_counts)
            pieces, json_size = oip_json.response_of(response, form, wanted.outputs, memory)
        fields = {REQUEST_ID: response.id} if response.id.isprintable() else {}
        if json_size is None:
            fields["Content-Type"] = JSON_TYPE
        else:
            fields[JSON_SIZE] = str(json_size)
            fields["Content-Type"] = BINARY
        return HttpAnswer(200, fields, pieces)


def _json_size(headers: Mapping[str, str], body_bytes: int) -> int | None:
    text = headers.get(_JSON_SIZE)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 20) or int(text) > body_bytes:
        raise InvalidInput(JSON_SIZE, f"must be a number of bytes, at most {body_bytes}")
    return int(text)
