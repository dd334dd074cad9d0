"""HTTP/2 as a server speaks it, with memory and patience that are bounded."""
