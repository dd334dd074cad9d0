"""Generation of the documentation site's reference pages from the code they describe.

`make docs` builds the site with MkDocs, whose hook (`hooks.py`) adds these pages. They are not
committed, so none can be out of date.

reference/  one module for each kind of page:
  protos     pages of the gRPC services, from the comments of the .proto files
  settings   every setting of every process, from the settings classes
  commands   `catenaryd` and `catenary`, from the commands themselves
  metrics    every metric, from `catenary_services.telemetry.metric_table`
  errors     every error, from the table that maps them to gRPC and HTTP
  access     which role may call which gRPC method
  http       every HTTP route of a gateway
  sdk        the Python SDK; mkdocstrings fills in the docstrings
pages       all of them by their place in the site

`truth` is another thing: it makes the committed result pages (`make truth`).
"""
