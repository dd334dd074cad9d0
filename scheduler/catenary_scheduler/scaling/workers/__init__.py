"""Decisions about how many workers a model should have, and which agents these are.

autoscaling         the decision: events in, `Scale` commands out
workers_line        the number of workers that a rate of arrivals needs (eq. 7), learned
sufficient_workers  the number that suffices: the line, its prior, and what history teaches it
change_points       detection of a change in a rate, or in the lengths of sessions
trend               the direction in which a rate is moving
attainment, safety  recent outcomes of sessions, and signs that there are too few workers
worker_statistics   the policy, and the statistics from which scaling decides
model_workers       the number of agents that workers take, and which of them may go
"""
