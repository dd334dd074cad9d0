"""The table of parameters, and the refusal of what it has as refused."""

from __future__ import annotations

from catenary_gateway.openai_http.fields import Fields
from catenary_gateway.openai_http.parameters.chat_parameters import CHAT_PARAMETERS
from catenary_gateway.openai_http.parameters.parameter import ALL, Parameter, ParameterKind
from catenary_gateway.openai_http.parameters.path_parameters import PATH_PARAMETERS
from catenary_services.errors import InvalidInput

PARAMETERS: tuple[Parameter, ...] = (*CHAT_PARAMETERS, *PATH_PARAMETERS)
_REFUSED = {
    path: {
        parameter.name: parameter
        for parameter in PARAMETERS
        if parameter.kind is ParameterKind.REFUSED and path in parameter.paths
    }
    for path in ALL
}


def refuse(fields: Fields, path: str) -> None:
    """Raises InvalidInput for a field that would change the answer and is not supported."""
    refused = _REFUSED[path]
    # Only those that are there are looked at: what is looked at counts as a field that is taken.
    for name in [each for each in fields if each in refused]:
        parameter, value = refused[name], fields[name]
        if value is not None and not parameter.harmless(value):
            raise InvalidInput(name, parameter.text)
