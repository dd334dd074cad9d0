"""Fifty chats of different length and kind, for tests that compare whole answers."""

from __future__ import annotations

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three primary colours.",
    "What is two plus two?",
    "Write a haiku about rain.",
    "Who wrote Hamlet?",
    "Explain photosynthesis in one sentence.",
    "What does a catenary curve look like?",
    "List four programming languages.",
    "How many legs does a spider have?",
    "Translate 'good morning' into Spanish.",
    "What is the boiling point of water?",
    "Give me a synonym for 'happy'.",
    "What is a prime number?",
    "Tell me a short joke.",
    "What is the largest planet?",
    "How do I boil an egg?",
    "What is a graphics processor?",
    "Name a river in Egypt.",
    "What is the opposite of 'cold'?",
    "Who painted the Mona Lisa?",
    "What is DNA?",
    "What comes after Tuesday?",
    "How far away is the moon?",
    "Write one line of Python that prints hello.",
)
TASKS = (
    "Summarise this in one sentence: the server was slow because its cache was too small, so the"
    " engineers doubled it and the latency fell by half.",
    "Continue the story: The old bridge hung between two cliffs, and nobody had crossed it since",
    "Fix the grammar: 'She don't likes apples and neither do he.'",
    "Make a shopping list for a vegetable soup for four people.",
    "Is 91 a prime number? Think about its factors before you answer.",
)
PROMPTS: tuple[str, ...] = (
    *QUESTIONS,
    *TASKS,
    *(f"Answer briefly and politely. {question}" for question in QUESTIONS[:20]),
)
assert len(PROMPTS) == 50
