"""The second half of `make demo`: a chat over a ring of three agents, token by token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median
from typing import Any

import click

import catenary
from catenary.text.generation import TokenHop, TokenTiming
from catenary_services.domain.ids import ModelKey
from catenary_services.models.model_repository import ModelRepository

CHAT_MODEL = "smollm2-135m"
QUESTION = "Why does a chain that hangs between two poles form a curve?"
TOKENS = 40
_SHOWN = 8


def ring_placement(blocks: int, agents: int = 3, sessions: int = 4) -> dict[str, Any]:
    """Returns a plan of one chain over `agents` agents, with nearly equal numbers of blocks."""
    cuts = [round(blocks * index / agents) for index in range(agents + 1)]
    hops = [
        {"agent": f"agent-{index}", "blocks": [cuts[index], cuts[index + 1]]}
        for index in range(agents)
    ]
    return {"name": CHAT_MODEL, "chains": [{"capacity": sessions, "hops": hops}]}


def expected_answer(repository: ModelRepository, key: ModelKey) -> list[int]:
    """Returns the token ids of the whole model's greedy answer, by `transformers` in-process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder: Path = repository.folder(key)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.inference_mode():
        output = model.generate(**chat, do_sample=False, max_new_tokens=TOKENS)
    answer: list[int] = output[0, chat["input_ids"].shape[1] :].tolist()
    return answer


async def chat(client: catenary.AsyncClient, expected: list[int]) -> bool:
    """Prints the answer as it comes, and where its time went; False if it is not `expected`."""
    click.echo(f"\n> {QUESTION}\n")
    stream = client.chat(CHAT_MODEL, QUESTION, stream=True, max_tokens=TOKENS, timings=True)
    async with stream as pieces:
        async for piece in pieces:
            click.echo(piece.text, nl=False)
            await asyncio.sleep(0)
        result = pieces.so_far
    same = list(result.token_ids) == expected
    verdict = "as" if same else "DIFFERENT from what"
    click.echo(
        f"\n\n{len(result.token_ids)} tokens, {verdict} transformers.generate gives;"
        f" first after {result.first_token_s * 1e3:.0f} ms,"
        f" then {_per_token_ms(result):.1f} ms per token"
    )
    click.echo(waterfall_of_tokens(result.timings))
    return same


def _per_token_ms(result: catenary.GenerationResult) -> float:
    return (result.total_s - result.first_token_s) * 1e3 / max(1, len(result.token_ids) - 1)


def waterfall_of_tokens(timings: tuple[TokenTiming, ...]) -> str:
    """Returns a line for each of the first tokens and one for the median, in ms per hop."""
    rows = [timing for timing in timings if timing.hops]
    if not rows:
        return ""
    hops = rows[0].hops
    heads = [f"{hop.agent_id} [{hop.first_block},{hop.last_block})" for hop in hops]
    lines = ["where the time of each token went, in ms: on the way + waiting + computing"]
    lines.append(f"{'token':>8} {'total':>8}  " + "  ".join(f"{head:>22}" for head in heads))
    for number, row in enumerate(rows[:_SHOWN]):
        cells = "  ".join(f"{_cell(hop):>22}" for hop in row.hops)
        lines.append(f"{number:>8} {row.since_previous_ns / 1e6:>8.1f}  {cells}")
    steady = rows[1:] or rows
    total = median(row.since_previous_ns for row in steady) / 1e6
    cells = "  ".join(f"{_cell(_median_hop(steady, at)):>22}" for at in range(len(hops)))
    lines.append(f"{'median':>8} {total:>8.1f}  {cells}")
    return "\n".join(lines)


def _cell(hop: TokenHop) -> str:
    return f"{hop.transfer_ns / 1e6:.2f} + {hop.wait_ns / 1e6:.2f} + {hop.compute_ns / 1e6:.1f}"


def _median_hop(rows: list[TokenTiming], at: int) -> TokenHop:
    hops = [row.hops[at] for row in rows if len(row.hops) > at]
    first = hops[0]
    return TokenHop(
        first.agent_id,
        first.first_block,
        first.last_block,
        *(
            round(median(getattr(hop, name) for hop in hops))
            for name in ("transfer_ns", "wait_ns", "compute_ns", "send_ns")
        ),
    )
