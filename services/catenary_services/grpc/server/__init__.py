"""The server of gRPC: calls, their messages and their statuses, on HTTP/2 of this project."""
