"""One search for everything that is chosen about the chains of a model that generates text.

figures      what a placement of chains gives, by the latency lines of its chains
shapes       the ways in which agents can serve: whole replicas, chains, roles, some of the agents
search       the best of them in a stated order, and what the others would give
words        the choice, the others, and every idle agent, in sentences
"""

from catenary_scheduler.planning.search.figures import ServingFigures, figures_of
from catenary_scheduler.planning.search.search import (
    ChainSearch,
    SearchOrder,
    best_of,
    search_chains,
)
from catenary_scheduler.planning.search.shapes import Shape, ShapeKind, shapes_of
from catenary_scheduler.planning.search.words import in_words

__all__ = [
    "ChainSearch",
    "SearchOrder",
    "ServingFigures",
    "Shape",
    "ShapeKind",
    "best_of",
    "figures_of",
    "in_words",
    "search_chains",
    "shapes_of",
]
