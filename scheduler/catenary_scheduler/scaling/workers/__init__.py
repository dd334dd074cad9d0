"""Decisions about how many workers a model should have, and which agents these are.

autoscaling    the decision: events in, `Scale` commands out
workers_line   how many a rate of arrivals needs (eq. 7), learned
sufficiency    how many suffice: the line, its prior, and what history teaches it
change_points  when a rate, or the lengths of sessions, are no longer what they were
retiring       how many agents that takes, and which of them may go
"""
