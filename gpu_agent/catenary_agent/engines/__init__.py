"""Engines that serve whole language models as child processes: vLLM, and llama.cpp's server.

To the generation loop an engine is a decoder executor of all blocks of a model. What differs is who
makes the steps: a session whose next token is not here yet waits outside the queues, and a step
takes what the engine has generated. See docs/adr/0049-engine-agents.md.

loading     an ordered partition: child, capacity, first times
executor    sessions and slots, as of every executor; batcher has its queues
client      the thread that talks to the child; streams are the answers of its sessions
rounds      which tokens came of one step of the engine, and how long that took
child       the process; engine_child is the script that it runs
requests    what an engine is asked and says; vllm and llama_server translate
"""
