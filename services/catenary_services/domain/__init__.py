"""Value types that all processes share: ids, tensors, models, plans. They have no I/O."""
