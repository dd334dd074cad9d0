"""Admission under overload, fair among API keys (docs/security.md, "Fair share").

    limit         how much of a model's work may be unanswered, learnt from the time it takes
    fair_limiter  lets a request for one model in or not, at once: by that limit, and by which of
                  the keys that want more than their share has had the least

Everything but `FairLimiters`, which has the limiters of all models and makes the errors callers
get, is pure: time is an argument. A request is never queued here: a refusal costs a dictionary
look-up and says when to come back.
"""
