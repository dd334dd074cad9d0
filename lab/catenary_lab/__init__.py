"""The research bench: what Catenary is compared with, and the scenarios that compare it.

Nothing of the product imports this package; it gives the product's commands what they offer beside
their own by entry points (docs/adr/0028-product-and-lab.md).

scenarios   one framework of scenario files: schema, runner, report; a folder for each kind
live        the same on real processes: clusters of emulated agents, loads, figures
pools       planners and dispatchers that pooled pipelines are compared with, the artifact's rules
chains      PETALS and BPRR: placed, routed and served as these systems would
policies    rivals of the policies that choose a chain for a session
packing     rivals of the policies that decide where sessions live
limits      figures of scenarios and benches beside their limits
"""
