"""The value types every process speaks: ids, tensors, models, plans. No behaviour, no I/O."""
