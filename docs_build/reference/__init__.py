"""Generated pages of the reference: commands, settings, metrics, errors, protocols."""
