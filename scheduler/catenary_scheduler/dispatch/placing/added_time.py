"""The time that one more session adds to all sessions of a worker, its own included.

That sum is what a placement should keep small: the mean time from request to answer is the sum of
all times over their number, and by Little's law the number of sessions in the system is in
proportion to it. The join-fastest-free-chain policy aims at the same mean, for chains whose
sessions do not slow each other down. A request that looked at its own time only would join a full
batch for a gain of a millisecond, and take more than that from everybody in it.

All terms are a few additions on running sums of the worker, so their cost does not depend on the
number of its sessions.
"""

from __future__ import annotations

from catenary_scheduler.dispatch.placing.worker import Worker


def added_ns(
    worker: Worker,
    prompt_tokens: int,
    answer_tokens: float,
    others: float = 0.0,
    others_tokens: float = 0.0,
    cached_tokens: int = 0,
) -> float:
    """Returns the nanoseconds by which the ends of all sessions move if one more is placed now.

    The new session ends after its first token and the steps of its answer, each as long as it takes
    with this session in the batch. Every session that is there waits for the passes of the prompt,
    and has longer steps for as long as both generate: no longer than the new answer is, and no
    longer than what the sessions have left, all together.

    Args:
        worker: The worker.
        prompt_tokens: Tokens of the prompt.
        answer_tokens: Predicted tokens of the answer.
        others: Sessions of other workers on the same devices, each by the share of the blocks that
            it has there.
        others_tokens: Tokens that these have cached, in the same shares.
        cached_tokens: Tokens of the prompt that need not be run.
    """
    unrun = prompt_tokens - cached_tokens
    lines = worker.lines
    own = len(worker.running_sequences)
    sessions = own + others
    context = worker.now_tokens + others_tokens
    steps = max(0.0, answer_tokens - 1.0)
    # The decode half of a pair runs no prompts.
    is_decode = worker.limits.split_decode
    prompt_ns = 0.0 if is_decode else worker.prompt_ns(unrun, 0.0)
    if sessions <= 0.0:
        after = lines.decode(1, prompt_tokens + worker.limits.gamma * answer_tokens)
        return prompt_ns + steps * after
    before = _step_ns(worker, sessions, context)
    after = _step_ns(
        worker,
        sessions + 1.0,
        context + prompt_tokens + worker.limits.gamma * answer_tokens,
    )
    first = 0.0
    if not is_decode:
        first = before / 2.0 + worker.prompt_ns(worker.unrun_tokens + unrun, before)
    left = max(0.0, worker.final_tokens - worker.now_tokens)
    together = min(left, own * steps) + others * steps
    # Where a larger batch costs nothing, the nanoseconds at the end prefer the emptier worker.
    return first + steps * after + sessions * prompt_ns + (after - before) * together + sessions


def _step_ns(worker: Worker, sessions: float, context_tokens: float) -> float:
    """Returns the nanoseconds of a step of a batch.

    A lone session's step is measured by itself, and may lie above the line of larger batches. No
    batch is taken to be faster than a lone session, which would have sessions join it for speed.
    """
    lines = worker.lines
    lone_ns = lines.decode_lone_ns
    if sessions <= 1.0 and lone_ns:
        return lone_ns
    step_ns = (
        lines.decode_context_token_ns * context_tokens
        + lines.decode_session_ns * sessions
        + lines.decode_ns
    )
    return max(lone_ns, step_ns)
