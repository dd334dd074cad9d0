"""Telemetry of a process: spans and metrics.

`tracing.Tracer` builds spans from times recorded along the way, after the reply has left; no
interceptor sits in any call. `metrics.Metrics` holds every Prometheus metric as a typed attribute,
and `metrics.start_metrics_server` serves them. All names, with help texts, are in `names`.
"""
