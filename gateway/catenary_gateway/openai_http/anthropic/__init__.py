"""Anthropic's Messages API for text and tools: `/v1/messages` and `/v1/messages/count_tokens`.

message_request   a body as the chat completion that it asks for
message_input     its conversation and tools
message_answers   the object and the events of an answer
message_calls     the paths
"""
