"""Every metric of gateways, schedulers and agents, with its meaning, labels and buckets.

Metrics use base units. Labels have few values (models, reasons, kinds); request ids are never
labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

GENERATIVE_AI = "gen_ai"
"""Prefix of the metrics that OpenTelemetry's conventions for generative AI define."""
_GENERATIVE_AI_LABELS = "gen_ai_operation_name gen_ai_provider_name gen_ai_request_model"

LATENCY_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Bucket bounds in seconds, fine around the usual deadlines of vision models."""

GENERATION_BUCKETS = tuple(0.01 * 2**doubling for doubling in range(14))
FIRST_TOKEN_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""Bucket bounds in seconds, as OpenTelemetry's conventions for generative AI advise."""

_RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.85, 0.95, 1.0, 1.05, 1.15, 1.3, 1.5, 2.0, 4.0)
_MICRO_BUCKETS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2e-2, 1e-1)
_ROW_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_SWITCH_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class MetricName(NamedTuple):
    """A Prometheus metric, with its name without prefix."""

    name: str
    help: str
    labels: tuple[str, ...]
    prefix: str
    kind: type[Counter] | type[Gauge] | type[Histogram]
    options: dict[str, Any]

    def made(self, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
        """Returns the metric in a registry, where it counts from 0."""
        full = f"{self.prefix}_{self.name}"
        return self.kind(full, self.help, self.labels, registry=registry, **self.options)


def counter(name: str, meaning: str, labels: str = "") -> Counter:
    """Declares a counter in a `MetricTable`; `labels` are names with spaces between them."""
    metric = MetricName(name, meaning, tuple(labels.split()), "catenary", Counter, {})
    return cast(Counter, metric)


def gauge(name: str, meaning: str, labels: str = "") -> Gauge:
    """Declares a gauge; see `counter`."""
    metric = MetricName(name, meaning, tuple(labels.split()), "catenary", Gauge, {})
    return cast(Gauge, metric)


def histogram(
    name: str,
    meaning: str,
    labels: str = "",
    *,
    buckets: Sequence[float],
    prefix: str = "catenary",
) -> Histogram:
    """Declares a histogram with bounds of buckets; see `counter`."""
    options = {"buckets": buckets}
    metric = MetricName(name, meaning, tuple(labels.split()), prefix, Histogram, options)
    return cast(Histogram, metric)


class MetricTable:
    """The metrics as typed attributes: declared in the class, made in each instance."""

    # Gateway.
    requests = counter(
        "requests", "Requests answered, by outcome: OK or the reason of the error.", "model outcome"
    )
    request_seconds = histogram(
        "request_duration_seconds",
        "From a request's arrival to its answer.",
        "model",
        buckets=LATENCY_BUCKETS,
    )
    requests_in_flight = gauge("requests_in_flight", "Requests accepted and not yet answered.")
    in_flight_bytes = gauge("in_flight_bytes", "Tensor bytes held for unanswered requests.")
    arrivals = counter(
        "arrivals",
        "Requests that arrived, by what became of them: good (in time), late (accepted, and late "
        "or failed), refused (no room, or nobody to serve it), client (the client's own mistake).",
        "model kind",
    )
    slo_attainment = gauge(
        "slo_attainment_ratio",
        "Share of the last 1000 requests that were good; those refused count, clients' own "
        "mistakes do not.",
        "model",
    )
    slo_requests = counter(
        "slo_requests",
        "Requests by whether they were good; those refused count, clients' own mistakes do not.",
        "model met",
    )
    key_requests = counter(
        "key_requests",
        "Requests by the name of their API key and what became of them.",
        "key outcome",
    )
    quota_rejections = counter(
        "quota_rejections", "Requests refused because their API key used up its quota.", "key"
    )
    unanswered_limit = gauge(
        "unanswered_limit",
        "Rows, or generations without a first token, that may be unanswered at a "
        "time; +Inf while there is no overload.",
        "model",
    )
    window_requests = counter(
        "window_requests", "Requests sent by a dispatch window, without asking.", "model"
    )
    redispatches = counter(
        "redispatches", "Batches sent again after a loss, by its reason.", "reason"
    )
    reroutes = counter(
        "reroutes",
        "Requests given to another scheduler group, by why the first had none.",
        "reason",
    )

    # Gateway, generation. Another prefix marks OpenTelemetry's (semantic-conventions-genai).
    generation_seconds = histogram(
        "server_request_duration_seconds",
        "From a generation's arrival to its last token.",
        f"{_GENERATIVE_AI_LABELS} error_type",
        buckets=GENERATION_BUCKETS,
        prefix=GENERATIVE_AI,
    )
    first_token_seconds = histogram(
        "server_time_to_first_token_seconds",
        "From a generation's arrival to its first token.",
        _GENERATIVE_AI_LABELS,
        buckets=FIRST_TOKEN_BUCKETS,
        prefix=GENERATIVE_AI,
    )
    token_seconds = histogram(
        "server_time_per_output_token_seconds",
        "From a generation's first token to its last, by the tokens behind the first.",
        _GENERATIVE_AI_LABELS,
        buckets=TOKEN_BUCKETS,
        prefix=GENERATIVE_AI,
    )
    token_objectives = counter(
        "token_objectives",
        "Objectives of generations that had any, by whether they were met.",
        "model objective met",
    )
    prediction_ratio = histogram(
        "token_prediction_ratio",
        "Measured time over what was predicted when the generation started.",
        "model objective",
        buckets=_RATIO_BUCKETS,
    )
    inter_token_seconds = histogram(
        "inter_token_latency_seconds",
        "From one token of a generation to the next.",
        "model",
        buckets=TOKEN_BUCKETS,
    )
    prompt_tokens = counter("prompt_tokens", "Tokens of prompts answered.", "model")
    generation_tokens = counter("generation_tokens", "Tokens generated.", "model")
    generations = counter(
        "generations",
        "Generations completed, by what ended them: stop or length.",
        "model finished_reason",
    )
    sessions_running = gauge("sessions_running", "Generations that have a chain.")
    sessions_waiting = gauge("sessions_waiting", "Generations that wait for a chain.")
    generation_moves = counter(
        "generation_moves",
        "Running generations that moved to another chain, by what travelled (kv or "
        "tokens), as the gateway saw it: failed ones went on where they were.",
        "model mode outcome",
    )
    move_stall_seconds = histogram(
        "move_stall_seconds",
        "From the last token of a generation on one chain to its first on the chain it moved to.",
        "model mode",
        buckets=TOKEN_BUCKETS,
    )

    # Scheduler.
    admission_rejected = counter(
        "admission_rejected", "Requests refused instead of served, by reason.", "reason"
    )
    queued_requests = gauge("queued_requests", "Requests waiting for dispatch.", "model")
    batches_in_flight = gauge("batches_in_flight", "Batches dispatched and not yet completed.")
    dispatch_windows = counter(
        "dispatch_windows",
        "Dispatch windows by what became of them: granted, extended, revoked, expired (without a "
        "report), unused (hardly used).",
        "outcome",
    )
    window_batches = counter("window_batches", "Batches that gateways sent by dispatch windows.")
    chain_capacity = gauge(
        "chain_capacity", "Sessions a chain of the active plan takes at a time.", "model chain"
    )
    chain_in_flight = gauge(
        "chain_in_flight", "Sessions on a chain of the active plan.", "model chain"
    )
    batch_rows = histogram(
        "batch_rows", "Rows of dispatched batches.", "model", buckets=_ROW_BUCKETS
    )
    dispatch_seconds = histogram(
        "dispatch_decision_seconds",
        "Time the dispatcher took to handle one event.",
        buckets=_MICRO_BUCKETS,
    )
    book_audits = counter(
        "book_audits", "Comparisons of the book with what agents hold and gateways wait for."
    )
    book_leaks = counter(
        "book_leaks", "Reserved and held by nobody, or held and not reserved, by kind.", "kind"
    )
    book_leaks_mended = counter(
        "book_leaks_mended", "Leaks that the audit after their mending did not find again.", "kind"
    )
    agent_slowdown = gauge(
        "agent_slowdown_ratio", "Mean of real by booked compute time of late; 1 as booked.", "agent"
    )
    live_reservations = gauge("live_reservations", "Reservations in the book.")
    reservation_drift = counter(
        "reservation_drift_seconds", "Distance between booked and real ends of computes, summed up."
    )
    reservation_corrections = counter(
        "reservation_corrections", "Bookings corrected by what agents reported."
    )
    reservation_conflicts = counter(
        "reservation_conflicts", "Batches moved because an earlier one took longer than booked."
    )
    latency_lines = gauge(
        "latency_line_nanoseconds",
        "Coefficients of a chain's latency lines, as agents report by now.",
        "model chain coefficient",
    )
    prediction_error = gauge(
        "latency_prediction_error_ratio",
        "Mean of |measured / predicted - 1| over late reports: of prompts, of decode steps, of "
        "caches.",
        "model kind",
    )
    prediction_error_max = gauge(
        "latency_prediction_error_max_ratio",
        "The largest of the errors behind the mean.",
        "model kind",
    )
    link_rate = gauge(
        "link_bytes_per_second",
        "How fast key-value caches travel between agents, as measured lately.",
        "source target",
    )
    link_utilisation = gauge(
        "link_utilisation_ratio",
        "Share of late seconds in which caches were on their way.",
        "source target",
    )
    server_link_rate = gauge(
        "server_link_bytes_per_second",
        "How fast frames travel between servers, as agents measured it.",
        "source target",
    )
    server_link_round_trip = gauge(
        "server_link_round_trip_seconds",
        "How long a small frame and its echo travel between servers, as agents measured it.",
        "source target",
    )
    agents = gauge("agents", "Agents known, by state.", "state")
    impaired_agents = gauge(
        "impaired_agents", "Agents connected that something speaks against, by what.", "impairment"
    )
    agents_wanted = gauge("agents_wanted", "Agents the cluster should have for its load.")
    agents_now = gauge("agents_present", "Agents connected and not on their way out.")
    workers_wanted = gauge(
        "workers_wanted", "Chains a model that generates text should be served by.", "model"
    )
    workers = gauge("workers", "Chains a model that generates text is served by.", "model")
    session_rate = gauge(
        "session_arrivals_per_second",
        "Sessions asked for per second since the rate changed last.",
        "model",
    )
    placements = counter(
        "placements",
        "Generations with objectives: placed; of them forced, where no worker met all "
        "constraints in time, and rebalanced; and inadmissible, which no worker could serve. "
        "Preempted: sessions of any kind that had to wait, and go on, because caches were full.",
        "outcome",
    )
    placement_theta = gauge(
        "placement_theta_ratio",
        "Share of a worker's slack that placement uses; least of all models.",
    )
    session_attainment = gauge(
        "session_attainment_ratio",
        "Share of the sessions finished lately that met their objectives.",
        "model",
    )
    packing_moves = counter(
        "packing_moves",
        "Moves that packing wanted: begun, or not made because the chain was full, an objective "
        "would be missed (harmful), the session ends soon (worthless) or links and chains have no "
        "time (deferred).",
        "outcome",
    )
    packed_chains = gauge(
        "packed_chains", "Chains of models whose sessions are packed or balanced."
    )
    packed_chains_in_use = gauge("packed_chains_in_use", "Of them, those that hold sessions.")
    migrations = counter(
        "migrations",
        "Running sessions that moved to another chain, by what travelled: kv or tokens.",
        "mode",
    )
    migration_failures = counter(
        "migration_failures",
        "Moves that left their session where it was, by why: deadline (not done in time), agent "
        "(one could not), lost (one is gone), closed (one gave the new session up), over (the "
        "request ended, or lost its session).",
        "reason",
    )
    migration_bytes = counter(
        "migration_bytes", "Key-value caches that agents sent each other, as they report."
    )
    migration_seconds = histogram(
        "migration_duration_seconds",
        "From the order to move a session to its hand-over.",
        "mode",
        buckets=LATENCY_BUCKETS,
    )
    migration_held_seconds = histogram(
        "migration_held_seconds",
        "Part of a move in which no token was computed.",
        "mode",
        buckets=TOKEN_BUCKETS,
    )
    sessions_moving = gauge("sessions_moving", "Sessions on their way to another chain.")
    sessions_misplaced = gauge(
        "sessions_misplaced",
        "Sessions on agents that drain, or on partitions no plan has any more.",
    )
    gateways = gauge("gateways", "Gateways connected.")
    leader = gauge("scheduler_leader", "1 on the scheduler that holds the lease.")
    epoch = gauge("scheduler_epoch", "Fencing epoch this scheduler leads or last saw.")
    plan_active = gauge("plan_active_info", "The plan that is dispatched by.", "plan_id")
    plan_switches = counter(
        "plan_switches", "Changes of plan, by outcome: done or rolled back.", "outcome"
    )
    plan_switch_seconds = histogram(
        "plan_switch_duration_seconds",
        "From the decision for a new plan to its end, well or ill.",
        buckets=_SWITCH_BUCKETS,
    )
    plan_downtime = counter(
        "plan_downtime_seconds", "Time a model was not dispatched because plans changed.", "model"
    )
    redis_connected = gauge("redis_connected", "1 while writes reach Redis.")
    redis_pending = gauge("redis_pending_changes", "Changes not yet written to Redis.")
    agents_stuck = counter(
        "agents_stuck", "Agents told to end, as they computed a step that did not."
    )
    circuits_opened = counter(
        "circuits_opened",
        "Times an agent was left alone for a partition its device failed to compute.",
    )
    poison_requests = counter(
        "poison_requests", "Requests answered COMPUTE_FAILED: they made several agents fail."
    )
    sessions_stalled = counter(
        "sessions_stalled", "Sessions started again as they got no token for long."
    )
    stragglers = gauge(
        "stragglers", "Agents that get nothing new, where others can, as they are far too slow."
    )
    fragile_models = gauge(
        "fragile_models", "Models of the plan that the loss of one agent would leave unserved."
    )
    quarantined_records = counter(
        "quarantined_records", "Stored records that could not be read, by table.", "table"
    )
    repaired_epochs = counter(
        "repaired_epochs", "Times the epoch in Redis was damaged and was put right."
    )
    takeover_failures = counter(
        "takeover_failures",
        "Terms of leadership that could not begin, or ended by an error of ours.",
    )
    quarantined_peers = counter(
        "quarantined_peers",
        "Times a peer was put in quarantine for what it said, by its role.",
        "role",
    )
    redis_failures = counter(
        "redis_failures", "Attempts to write to Redis that failed, by what was wrong.", "reason"
    )

    # Gateway and agent.
    frames_refused = counter(
        "frames_refused", "Frames of peers that were not to send them, by why.", "reason"
    )
    fetched_bytes = counter(
        "fetched_bytes", "Bytes of model files that came from peers as they were recorded."
    )

    # Every process inside the cluster.
    invalid_messages = counter(
        "invalid_messages",
        "Messages that said what cannot be, by the role of the sender; "
        "the log names peer, message and field.",
        "role",
    )

    # Every process with TLS.
    certificate_expiry = gauge(
        "certificate_expiry_seconds",
        "Time until the certificate of this process is no longer good; NaN without one.",
    )

    # Agent.
    batches = counter(
        "batches", "Batches that left this agent, by outcome: OK or a reason.", "model outcome"
    )
    stage_seconds = histogram(
        "stage_seconds",
        "Time of one hop of one batch in one phase.",
        "model phase",
        buckets=LATENCY_BUCKETS,
    )
    queued_batches = gauge("queued_batches", "Batches complete and waiting for the device.")
    device_busy_seconds = counter("device_busy_seconds", "Time the device spent computing.")
    partitions = gauge("partitions_loaded", "Partitions this agent hosts.")
    partition_bytes = gauge("partition_memory_bytes", "Memory of the hosted partitions.")
    orders_refused = counter("orders_refused", "Orders of a stale epoch that were refused.")
    frames = counter("frames", "Frames moved between peers.", "transport direction")
    frame_bytes = counter("frame_bytes", "Tensor bytes moved between peers.", "transport direction")
    generation_step_seconds = histogram(
        "generation_step_seconds",
        "Time of one iteration of text generation.",
        "model",
        buckets=LATENCY_BUCKETS,
    )
    generation_rows = counter(
        "generation_rows",
        "Tokens that went through this agent, by phase: prefill or decode.",
        "model phase",
    )
    generation_prompt_tokens = counter(
        "generation_prompt_tokens",
        "Tokens with which sessions began at their first agent, by source: computed, or reused "
        "from the caches of sessions before.",
        "model source",
    )
    generation_guesses = counter(
        "generation_guesses",
        "Next tokens that were guessed and computed ahead, by result: right or wrong.",
        "model result",
    )
    generation_sessions = gauge("generation_sessions", "Sessions that hold block slots.")
    generation_sessions_ended = counter(
        "generation_sessions_ended",
        "Sessions that left this agent, by outcome: OK or a reason.",
        "model outcome",
    )
    cache_bytes = counter(
        "cache_bytes",
        "Bytes of key-value caches that left for other agents, by way: frames, or memory that was "
        "lent to an agent of the same host (host, cuda).",
        "model way",
    )
    cache_loans_failed = counter(
        "cache_loans_failed",
        "Memory lent to agents of the same host that they could not read, or did not return, by "
        "its kind; caches leave as frames instead.",
        "way",
    )
    handover_seconds = histogram(
        "handover_seconds",
        "From the first token, sampled on the ring of the prompt, until the ring "
        "that generates has all caches.",
        "model",
        buckets=LATENCY_BUCKETS,
    )
    session_moves = counter(
        "session_moves",
        "Running sessions that this agent handed over to another chain, by what "
        "travelled: kv or tokens.",
        "model mode",
    )
    session_moves_failed = counter(
        "session_moves_failed",
        "Moves led by this agent that left their session here, by reason.",
        "model reason",
    )
    session_takeover_seconds = histogram(
        "session_takeover_seconds",
        "From the hand-over of a session that moved until it could go on "
        "at the first agent of its new chain.",
        "model mode",
        buckets=LATENCY_BUCKETS,
    )
    block_slots = gauge("block_slots", "Key-value cache slots, one session in one block each.")
    block_slots_used = gauge("block_slots_used", "Block slots that sessions hold.")
    kept_block_tokens = gauge(
        "kept_block_tokens",
        "Tokens kept of sessions that are over, for others that begin alike; each counts once per "
        "block of the model.",
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        for attribute, metric in declared_metrics().items():
            setattr(self, attribute, metric.made(registry))


def declared_metrics() -> dict[str, MetricName]:
    """Returns all metrics by the names of their attributes, in the order of the table."""
    table = vars(MetricTable).items()
    return {attribute: metric for attribute, metric in table if isinstance(metric, MetricName)}
