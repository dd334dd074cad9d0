"""The model repository and its documents."""
