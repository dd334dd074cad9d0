"""What tests of any part use: waiting, servers, commands."""
