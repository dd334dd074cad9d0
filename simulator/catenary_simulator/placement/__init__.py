"""Placing sessions on workers under objectives, on a virtual clock around the real dispatcher.

workload     requests: drawn from recorded lengths, a trace's stretch, or lognormal ones
engine       one worker, iteration by iteration: prompts whole or in chunks, cache, preemption
loop         the event heap: the scheduler's own `ChainedDispatcher` decides
serve        a number of equal workers serve a workload by a policy
search       the smallest number of workers that reaches an attainment
result       the figures of a run
"""
