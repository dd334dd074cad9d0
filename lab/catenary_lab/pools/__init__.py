"""Rivals of pooled pipelines: planners, the artifact's rules, a dispatcher.

baselines, reference      NP and DART-r; the plans that PPipe's authors recorded
planners                  these as `catenaryd plan` and `catenaryd simulate` ask them
solving, reference_rules, slots, sums, slot_sums
                          plans under the rules of PPipe's artifact
reactive, reactive_pools  dispatch without reservations
"""
