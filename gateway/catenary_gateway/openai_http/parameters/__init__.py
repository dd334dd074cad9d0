"""The table of all parameters of these paths: taken, refused, or ignored.

The page of these paths shows it, and refusals are made from it. A parameter that is neither in the
table nor a field of the path's body is ignored.

parameter         what a parameter is
chat_parameters   those of chats and completions
path_parameters   what the other paths refuse and ignore
table             both together, and the refusal
"""

from catenary_gateway.openai_http.parameters.table import PARAMETERS, refuse

__all__ = ["PARAMETERS", "refuse"]
