"""Pooled pipelines (PPipe, Algorithms 1 and 2): a dispatcher without I/O.

row_queue     rows that wait, per model, by priority and deadline
text_batches  rows of unlike lengths in batches that are counted in tokens
routes        the active plan, as pools of agents that are alive
batching      Algorithm 1: dispatch now, wait, or drop
booked_times  the times that agents really take, learned from reports
tracking      requests and batches in flight, so that none is ever lost
ledger        all of that state, and the operations on it
window_usage  which models have use for dispatch windows
windows       dispatch windows: time on a path for a gateway that dispatches by itself
lifecycle     what each event does
dispatcher    events in, decisions, commands out
"""
