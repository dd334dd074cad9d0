"""SLO-aware placement of sessions on workers (Aladdin, section 4)."""
