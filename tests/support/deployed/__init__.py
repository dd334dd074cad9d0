"""Programs beside Catenary: browsers, containers, Redis, load generators."""
