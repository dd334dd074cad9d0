"""Rivals of pooled pipelines: planners, the artifact's rules, a dispatcher.

alpa_serve                AlpaServe's placement, in which models take turns on groups of GPUs
artifact                  plans under the rules of PPipe's artifact
baselines, reference      NP and DART-r; the plans that PPipe's authors recorded
planners                  these as `catenaryd plan` and `catenaryd simulate` ask them
reactive, reactive_pools  dispatch without reservations
"""
