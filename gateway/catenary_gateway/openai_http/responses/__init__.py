"""OpenAI's Responses API for text and tools: `/v1/responses`.

A request becomes a chat completion, which is generated as any other; what is kept for
`previous_response_id` is its conversation.

response_request   a body as the chat completion that it asks for
response_input     its conversation and tools
response_answers   the object and the events of an answer
response_items     what an answer consists of: messages, reasoning, calls
response_store     answers that may be continued or read again, within bounds
response_calls     the paths
"""
