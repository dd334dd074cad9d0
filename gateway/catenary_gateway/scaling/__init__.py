"""The scheduler's advice on scaling, offered to KEDA and as metrics."""
