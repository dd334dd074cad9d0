"""Names of metrics, labels, spans and span attributes, with their meaning.

Metrics use base units. Labels have few values (models, reasons, kinds); request ids are never
labels.
"""

from __future__ import annotations

from typing import NamedTuple


class MetricName(NamedTuple):
    """A Prometheus metric without its prefix: name, help and labels."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    prefix: str = "catenary"


GENERATIVE_AI = "gen_ai"
"""Prefix of the metrics that OpenTelemetry's conventions for generative AI define."""

# Gateway.
REQUESTS = MetricName(
    "requests",
    "Requests answered, by outcome: OK or the reason of the error.",
    ("model", "outcome"),
)
REQUEST_SECONDS = MetricName(
    "request_duration_seconds", "From a request's arrival to its answer.", ("model",)
)
REQUESTS_IN_FLIGHT = MetricName("requests_in_flight", "Requests accepted and not yet answered.")
IN_FLIGHT_BYTES = MetricName("in_flight_bytes", "Tensor bytes held for unanswered requests.")
SLO_ATTAINMENT = MetricName(
    "slo_attainment_ratio", "Share of recent requests that met their deadline.", ("model",)
)
SLO_REQUESTS = MetricName(
    "slo_requests", "Requests with a deadline, by whether they met it.", ("model", "met")
)
KEY_REQUESTS = MetricName(
    "key_requests",
    "Requests by the name of their API key and what became of them.",
    ("key", "outcome"),
)
QUOTA_REJECTIONS = MetricName(
    "quota_rejections", "Requests refused because their API key used up its quota.", ("key",)
)
UNANSWERED_LIMIT = MetricName(
    "unanswered_limit",
    "Rows, or generations without a first token, that may be unanswered at a "
    "time; +Inf while there is no overload.",
    ("model",),
)
REDISPATCHES = MetricName(
    "redispatches", "Batches sent again after a loss, by its reason.", ("reason",)
)
REROUTES = MetricName(
    "reroutes", "Requests given to another scheduler group, by why the first had none.", ("reason",)
)

# Gateway, generation. Another prefix marks metrics of OpenTelemetry (semantic-conventions-genai).
_GENERATIVE_AI_LABELS = (
    "gen_ai_operation_name",
    "gen_ai_provider_name",
    "gen_ai_request_model",
)
GENERATIVE_AI_REQUEST_SECONDS = MetricName(
    "server_request_duration_seconds",
    "From a generation's arrival to its last token.",
    (*_GENERATIVE_AI_LABELS, "error_type"),
    GENERATIVE_AI,
)
GENERATIVE_AI_FIRST_TOKEN_SECONDS = MetricName(
    "server_time_to_first_token_seconds",
    "From a generation's arrival to its first token.",
    _GENERATIVE_AI_LABELS,
    GENERATIVE_AI,
)
GENERATIVE_AI_TOKEN_SECONDS = MetricName(
    "server_time_per_output_token_seconds",
    "From a generation's first token to its last, by the tokens behind the first.",
    _GENERATIVE_AI_LABELS,
    GENERATIVE_AI,
)
FIRST_TOKEN, PER_TOKEN = "time_to_first_token", "time_per_output_token"
"""Values of the label `objective`."""
TOKEN_OBJECTIVES = MetricName(
    "token_objectives",
    "Objectives of generations that had any, by whether they were met.",
    ("model", "objective", "met"),
)
PREDICTION_RATIO = MetricName(
    "token_prediction_ratio",
    "Measured time over what was predicted when the generation started.",
    ("model", "objective"),
)
INTER_TOKEN_SECONDS = MetricName(
    "inter_token_latency_seconds", "From one token of a generation to the next.", ("model",)
)
PROMPT_TOKENS = MetricName("prompt_tokens", "Tokens of prompts answered.", ("model",))
GENERATION_TOKENS = MetricName("generation_tokens", "Tokens generated.", ("model",))
GENERATIONS = MetricName(
    "generations",
    "Generations completed, by what ended them: stop or length.",
    ("model", "finished_reason"),
)
SESSIONS_RUNNING = MetricName("sessions_running", "Generations that have a chain.")
SESSIONS_WAITING = MetricName("sessions_waiting", "Generations that wait for a chain.")
MOVED, MOVE_FAILED = "moved", "failed"
"""Values of the label `outcome`."""
GENERATION_MOVES = MetricName(
    "generation_moves",
    "Running generations that moved to another chain, by what travelled (kv or "
    "tokens), as the gateway saw it: failed ones went on where they were.",
    ("model", "mode", "outcome"),
)
MOVE_STALL_SECONDS = MetricName(
    "move_stall_seconds",
    "From the last token of a generation on one chain to its first on the chain it moved to.",
    ("model", "mode"),
)

# Scheduler.
ADMISSION_REJECTED = MetricName(
    "admission_rejected", "Requests refused instead of served, by reason.", ("reason",)
)
QUEUED_REQUESTS = MetricName("queued_requests", "Requests waiting for dispatch.", ("model",))
BATCHES_IN_FLIGHT = MetricName("batches_in_flight", "Batches dispatched and not yet completed.")
CHAIN_CAPACITY = MetricName(
    "chain_capacity", "Sessions a chain of the active plan takes at a time.", ("model", "chain")
)
CHAIN_IN_FLIGHT = MetricName(
    "chain_in_flight", "Sessions on a chain of the active plan.", ("model", "chain")
)
BATCH_ROWS = MetricName("batch_rows", "Rows of dispatched batches.", ("model",))
DISPATCH_SECONDS = MetricName(
    "dispatch_decision_seconds", "Time the dispatcher took to handle one event."
)
BOOK_AUDITS = MetricName(
    "book_audits", "Comparisons of the book with what agents hold and gateways wait for."
)
BOOK_LEAKS = MetricName(
    "book_leaks", "Reserved and held by nobody, or held and not reserved, by kind.", ("kind",)
)
BOOK_LEAKS_MENDED = MetricName(
    "book_leaks_mended", "Leaks that the audit after their mending did not find again.", ("kind",)
)
AGENT_SLOWDOWN = MetricName(
    "agent_slowdown_ratio", "Mean of real by booked compute time of late; 1 as booked.", ("agent",)
)
LIVE_RESERVATIONS = MetricName("live_reservations", "Reservations in the book.")
RESERVATION_DRIFT = MetricName(
    "reservation_drift_seconds", "Distance between booked and real ends of computes, summed up."
)
RESERVATION_CORRECTIONS = MetricName(
    "reservation_corrections", "Bookings corrected by what agents reported."
)
RESERVATION_CONFLICTS = MetricName(
    "reservation_conflicts", "Batches moved because an earlier one took longer than booked."
)
LATENCY_LINES = MetricName(
    "latency_line_nanoseconds",
    "Coefficients of a chain's latency lines, as agents report by now.",
    ("model", "chain", "coefficient"),
)
PREDICTION_ERROR = MetricName(
    "latency_prediction_error_ratio",
    "Mean of |measured / predicted - 1| over late reports: of prompts, of decode steps, of caches.",
    ("model", "kind"),
)
PREDICTION_ERROR_MAX = MetricName(
    "latency_prediction_error_max_ratio",
    "The largest of the errors behind the mean.",
    ("model", "kind"),
)
LINK_RATE = MetricName(
    "link_bytes_per_second",
    "How fast key-value caches travel between agents, as measured lately.",
    ("source", "target"),
)
LINK_UTILISATION = MetricName(
    "link_utilisation_ratio",
    "Share of late seconds in which caches were on their way.",
    ("source", "target"),
)
AGENTS = MetricName("agents", "Agents known, by state.", ("state",))
IMPAIRED_AGENTS = MetricName(
    "impaired_agents", "Agents connected that something speaks against, by what.", ("impairment",)
)
AGENTS_WANTED = MetricName("agents_wanted", "Agents the cluster should have for its load.")
AGENTS_NOW = MetricName("agents_present", "Agents connected and not on their way out.")
WORKERS_WANTED = MetricName(
    "workers_wanted", "Chains a model that generates text should be served by.", ("model",)
)
WORKERS = MetricName("workers", "Chains a model that generates text is served by.", ("model",))
SESSION_RATE = MetricName(
    "session_arrivals_per_second",
    "Sessions asked for per second since the rate changed last.",
    ("model",),
)
PLACEMENTS = MetricName(
    "placements",
    "Generations with objectives: placed; of them forced, where no worker met all "
    "constraints in time, and rebalanced; and inadmissible, which no worker could serve. "
    "Preempted: sessions of any kind that had to wait, and go on, because caches were full.",
    ("outcome",),
)
PLACEMENT_THETA = MetricName(
    "placement_theta_ratio", "Share of a worker's slack that placement uses; least of all models."
)
SESSION_ATTAINMENT = MetricName(
    "session_attainment_ratio",
    "Share of the sessions finished lately that met their objectives.",
    ("model",),
)
PACKING_MOVES = MetricName(
    "packing_moves",
    "Moves that packing wanted: begun, or not made because the chain was full, an "
    "objective would be missed (harmful), the session ends soon (worthless) or links and chains "
    "have no time (deferred).",
    ("outcome",),
)
PACKED_CHAINS = MetricName(
    "packed_chains", "Chains of models whose sessions are packed or balanced."
)
PACKED_CHAINS_IN_USE = MetricName("packed_chains_in_use", "Of them, those that hold sessions.")
MIGRATIONS = MetricName(
    "migrations",
    "Running sessions that moved to another chain, by what travelled: kv or tokens.",
    ("mode",),
)
MIGRATION_FAILURES = MetricName(
    "migration_failures",
    "Moves that left their session where it was, by why: deadline (not done "
    "in time), agent (one could not), lost (one is gone), closed (one gave the new session up), "
    "over (the request ended, or lost its session).",
    ("reason",),
)
MIGRATION_BYTES = MetricName(
    "migration_bytes", "Key-value caches that agents sent each other, as they report."
)
MIGRATION_SECONDS = MetricName(
    "migration_duration_seconds", "From the order to move a session to its hand-over.", ("mode",)
)
MIGRATION_HELD_SECONDS = MetricName(
    "migration_held_seconds", "Part of a move in which no token was computed.", ("mode",)
)
SESSIONS_MOVING = MetricName("sessions_moving", "Sessions on their way to another chain.")
SESSIONS_MISPLACED = MetricName(
    "sessions_misplaced",
    "Sessions on agents that drain, or on partitions no plan has any more.",
)
GATEWAYS = MetricName("gateways", "Gateways connected.")
LEADER = MetricName("scheduler_leader", "1 on the scheduler that holds the lease.")
EPOCH = MetricName("scheduler_epoch", "Fencing epoch this scheduler leads or last saw.")
PLAN_ACTIVE = MetricName("plan_active", "The plan that is dispatched by.", ("plan_id",))
PLAN_SWITCHES = MetricName(
    "plan_switches", "Changes of plan, by outcome: done or rolled back.", ("outcome",)
)
PLAN_SWITCH_SECONDS = MetricName(
    "plan_switch_duration_seconds", "From the decision for a new plan to its end, well or ill."
)
PLAN_DOWNTIME = MetricName(
    "plan_downtime_seconds", "Time a model was not dispatched because plans changed.", ("model",)
)
REDIS_CONNECTED = MetricName("redis_connected", "1 while writes reach Redis.")
REDIS_PENDING = MetricName("redis_pending_changes", "Changes not yet written to Redis.")
AGENTS_STUCK = MetricName(
    "agents_stuck", "Agents told to end, as they computed a step that did not."
)
CIRCUITS_OPENED = MetricName(
    "circuits_opened", "Times an agent was left alone for a partition its device failed to compute."
)
REQUESTS_TO_BLAME = MetricName(
    "requests_to_blame", "Requests answered COMPUTE_FAILED: they made several agents fail."
)
SESSIONS_STALLED = MetricName(
    "sessions_stalled", "Sessions started again as they got no token for long."
)
STRAGGLERS = MetricName(
    "stragglers", "Agents that get nothing new, where others can, as they are far too slow."
)
FRAGILE_MODELS = MetricName(
    "fragile_models", "Models of the plan that the loss of one agent would leave unserved."
)
QUARANTINED_RECORDS = MetricName(
    "quarantined_records", "Stored records that could not be read, by table.", ("table",)
)
SPOILED_EPOCHS = MetricName(
    "spoiled_epochs", "Times the epoch in Redis was damaged and was put right."
)
TAKEOVER_FAILURES = MetricName(
    "takeover_failures", "Terms of leadership that could not begin, or ended by an error of ours."
)
QUARANTINED_PEERS = MetricName(
    "quarantined_peers",
    "Times a peer was put in quarantine for what it said, by its role.",
    ("role",),
)
REDIS_FAILURES = MetricName(
    "redis_failures", "Attempts to write to Redis that failed, by what was wrong.", ("reason",)
)

# Gateway and agent.
FRAMES_REFUSED = MetricName(
    "frames_refused", "Frames of peers that were not to send them, by why.", ("reason",)
)

# Every process inside the cluster.
INVALID_MESSAGES = MetricName(
    "invalid_messages",
    "Messages that said what cannot be, by the role of the sender; "
    "the log names peer, message and field.",
    ("role",),
)

# Every process with TLS.
CERTIFICATE_EXPIRY = MetricName(
    "certificate_expiry_seconds",
    "Time until the certificate of this process is no longer good; NaN without one.",
)

# Agent.
BATCHES = MetricName(
    "batches", "Batches that left this agent, by outcome: OK or a reason.", ("model", "outcome")
)
STAGE_SECONDS = MetricName(
    "stage_seconds", "Time of one hop of one batch in one phase.", ("model", "phase")
)
QUEUED_BATCHES = MetricName("queued_batches", "Batches complete and waiting for the device.")
DEVICE_BUSY_SECONDS = MetricName("device_busy_seconds", "Time the device spent computing.")
PARTITIONS = MetricName("partitions_loaded", "Partitions this agent hosts.")
PARTITION_BYTES = MetricName("partition_memory_bytes", "Memory of the hosted partitions.")
ORDERS_REFUSED = MetricName("orders_refused", "Orders of a stale epoch that were refused.")
FRAMES = MetricName("frames", "Frames moved between peers.", ("transport", "direction"))
FRAME_BYTES = MetricName(
    "frame_bytes", "Tensor bytes moved between peers.", ("transport", "direction")
)
GENERATION_STEP_SECONDS = MetricName(
    "generation_step_seconds", "Time of one iteration of text generation.", ("model",)
)
GENERATION_ROWS = MetricName(
    "generation_rows",
    "Tokens that went through this agent, by phase: prefill or decode.",
    ("model", "phase"),
)
GENERATION_SESSIONS = MetricName("generation_sessions", "Sessions that hold block slots.")
GENERATION_SESSIONS_ENDED = MetricName(
    "generation_sessions_ended",
    "Sessions that left this agent, by outcome: OK or a reason.",
    ("model", "outcome"),
)
CACHE_BYTES = MetricName(
    "cache_bytes", "Bytes of key-value caches that left for other agents.", ("model",)
)
HANDOVER_SECONDS = MetricName(
    "handover_seconds",
    "From the first token, sampled on the ring of the prompt, until the ring "
    "that generates has all caches.",
    ("model",),
)
SESSION_MOVES = MetricName(
    "session_moves",
    "Running sessions that this agent handed over to another chain, by what "
    "travelled: kv or tokens.",
    ("model", "mode"),
)
SESSION_MOVES_FAILED = MetricName(
    "session_moves_failed",
    "Moves led by this agent that left their session here, by reason.",
    ("model", "reason"),
)
SESSION_TAKEOVER_SECONDS = MetricName(
    "session_takeover_seconds",
    "From the hand-over of a session that moved until it could go on "
    "at the first agent of its new chain.",
    ("model", "mode"),
)
BLOCK_SLOTS = MetricName("block_slots", "Key-value cache slots, one session in one block each.")
BLOCK_SLOTS_USED = MetricName("block_slots_used", "Block slots that sessions hold.")

# Spans of one request, outermost first.
SPAN_SCHEDULE = "scheduler.dispatch"
"""Span from the request's arrival at the scheduler to its dispatch."""
SPAN_HOP = "hop"
"""Span of one hop of one batch at its agent, from the complete frame until it was sent on."""
SPAN_WAIT = "wait"
"""Span inside a hop, from the complete frame to the start of compute."""
SPAN_COMPUTE = "compute"
"""Span inside a hop, of the computation on the device."""
SPAN_SEND = "send"
"""Span inside a hop, from the end of compute until the result was handed to the transport."""
SPAN_SESSION = "session"
"""Span of one session's stay at an agent of its ring."""
SPAN_PREFILL = "prefill"
"""Span inside a session, from its first step to the end of the one that made its first token."""
SPAN_DECODE = "decode"
"""Span inside a session, from the end of its prefill to the end of the session."""
SPAN_MOVE = "move"
"""Span from the order to move a session to its hand-over, at the agent that leads the move."""
ATTRIBUTE_MOVE_MODE = "catenary.move.mode"
ATTRIBUTE_MOVE_ROUNDS = "catenary.move.rounds"
"""Rounds in which the cache of a moving session was sent."""

# Attributes of spans. Those without the prefix `catenary` are OpenTelemetry's.
ATTRIBUTE_MODEL = "catenary.model"
ATTRIBUTE_MODEL_VERSION = "catenary.model.version"
ATTRIBUTE_REQUEST_ID = "catenary.request.id"
ATTRIBUTE_BATCH_ID = "catenary.batch.id"
ATTRIBUTE_BATCH_ROWS = "catenary.batch.rows"
ATTRIBUTE_ATTEMPT = "catenary.attempt"
ATTRIBUTE_MOVES = "catenary.moves"
ATTRIBUTE_AGENT_ID = "catenary.agent.id"
ATTRIBUTE_BLOCKS = "catenary.blocks"
ATTRIBUTE_POSITION = "catenary.position"
ATTRIBUTE_SESSION_ID = "catenary.session.id"
ATTRIBUTE_CHAIN_ID = "catenary.chain.id"
ATTRIBUTE_SESSION_TOKENS = "catenary.session.tokens"
ATTRIBUTE_SESSION_STEPS = "catenary.session.steps"
ATTRIBUTE_COMPUTE_SECONDS = "catenary.compute.seconds"
ATTRIBUTE_ERROR_TYPE = "error.type"
ATTRIBUTE_OPERATION = "gen_ai.operation.name"
ATTRIBUTE_PROVIDER = "gen_ai.provider.name"
ATTRIBUTE_REQUEST_MODEL = "gen_ai.request.model"
ATTRIBUTE_RESPONSE_MODEL = "gen_ai.response.model"
ATTRIBUTE_MAX_TOKENS = "gen_ai.request.max_tokens"
ATTRIBUTE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
ATTRIBUTE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ATTRIBUTE_FIRST_TOKEN = "catenary.time_to_first_token.seconds"
ATTRIBUTE_FIRST_TOKEN_SLO = "catenary.time_to_first_token.slo.seconds"
ATTRIBUTE_FIRST_TOKEN_PREDICTED = "catenary.time_to_first_token.predicted.seconds"
ATTRIBUTE_PER_TOKEN = "catenary.time_per_output_token.seconds"
ATTRIBUTE_PER_TOKEN_SLO = "catenary.time_per_output_token.slo.seconds"
ATTRIBUTE_PER_TOKEN_PREDICTED = "catenary.time_per_output_token.predicted.seconds"
ATTRIBUTE_FINISH_REASONS = "gen_ai.response.finish_reasons"
PROVIDER = "catenary"
"""Value of `gen_ai.provider.name`."""
