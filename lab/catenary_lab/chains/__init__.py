"""PETALS and BPRR: where they put blocks and how they route; exact response times."""
