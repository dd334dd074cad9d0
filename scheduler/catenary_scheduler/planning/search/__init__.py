"""One search for everything that is chosen about a model, and its answer to a question.

options      what a search compares for models of both kinds, and its answer
figures      what a placement of chains gives, by the latency lines of its chains
shapes       the ways in which agents can serve: whole replicas, chains, roles, some of the agents
search       the best of them in a stated order, and what the others would give
words        the choice and the others in sentences, and why an agent is idle
pools        the ways in which agents can serve a model that does not generate text
question     a model and devices that need not be there, as a question
answering    the answer to it, which takes seconds: for a process of its own
"""

from catenary_scheduler.planning.search.figures import figures_of
from catenary_scheduler.planning.search.options import (
    PlanAnswer,
    PlanOption,
    SearchOrder,
    ServingFigures,
)
from catenary_scheduler.planning.search.search import (
    ChainSearch,
    SearchRules,
    best_of,
    search_chains,
    why_not,
)
from catenary_scheduler.planning.search.shapes import Shape, ShapeKind, shapes_of
from catenary_scheduler.planning.search.words import answer_of, idle_reasons, in_words

__all__ = [
    "ChainSearch",
    "PlanAnswer",
    "PlanOption",
    "SearchOrder",
    "SearchRules",
    "ServingFigures",
    "Shape",
    "ShapeKind",
    "answer_of",
    "best_of",
    "figures_of",
    "idle_reasons",
    "in_words",
    "search_chains",
    "shapes_of",
    "why_not",
]
