"""Plans of pooled pipelines (PPipe, sections 4 and 5, and appendix A)."""
