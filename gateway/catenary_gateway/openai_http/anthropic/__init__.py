"""Anthropic's Messages API for text: `/v1/messages` and `/v1/messages/count_tokens`.

message_request   a body as the chat completion that it asks for
message_answers   the object and the events of an answer
message_calls     the paths
"""
