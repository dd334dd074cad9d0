"""The parts of an answer beside its text: calls of tools, and reasoning between tags.

`calls` has a form of calls in each module: how a model writes them, how they are read again while
the answer comes, and the grammar that forces them. `reasoning` does the same for reasoning,
`model_forms` chooses both for a model, `answer_syntax` puts them together for one answer, and
`conversations` brings tools and earlier calls into the prompt.
"""
