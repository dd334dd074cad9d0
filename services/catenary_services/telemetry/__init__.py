"""What a process says of itself: spans and metrics.

`tracing.Tracer` builds spans from times recorded along the way, after the reply has left; no
interceptor sits in any call. `metrics.Metrics` holds every Prometheus metric as a typed attribute,
served by `metrics.start_metrics_server`. All names, with help text, are in `names`.
"""
