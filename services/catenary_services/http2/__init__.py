"""HTTP/2 as a server speaks it, whose memory and cost are bounded."""
