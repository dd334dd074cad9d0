"""Conversion of sampling parameters and log probabilities to and from protobuf.

A parameter of 0 stands for "none" there.
"""

from __future__ import annotations

from catenary_protos.catenary.v1 import generation_pb2
from catenary_services.domain.logprobs import TokenLogprobs
from catenary_services.domain.sampling import SamplingParameters


def sampling_of_message(message: generation_pb2.SamplingParameters) -> SamplingParameters:
    """Returns the sampling parameters in a message.

    Raises:
        InvalidInput: A value is outside its range; the error names its field.
    """
    return SamplingParameters(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        repetition_penalty=message.repetition_penalty or 1.0,
        stop=tuple(message.stop),
        seed=message.seed if message.HasField("seed") else None,
        ignore_eos=message.ignore_eos,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        min_p=message.min_p,
        logit_bias=tuple((each.token_id, each.bias) for each in message.logit_bias),
        grammar=message.grammar,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        stop_token_ids=tuple(message.stop_token_ids),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(message.bad_words),
        bad_token_ids=tuple(tuple(each.token_ids) for each in message.bad_token_ids),
        include_stop_str_in_output=message.include_stop_str_in_output,
        skip_special_tokens=(
            message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        ),
    )


def message_of_sampling(parameters: SamplingParameters) -> generation_pb2.SamplingParameters:
    """Returns the message of sampling parameters, which rounds their numbers to float32."""
    return generation_pb2.SamplingParameters(
        max_tokens=parameters.max_tokens,
        min_tokens=parameters.min_tokens,
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        top_k=parameters.top_k,
        repetition_penalty=parameters.repetition_penalty,
        stop=parameters.stop,
        seed=parameters.seed,
        ignore_eos=parameters.ignore_eos,
        presence_penalty=parameters.presence_penalty,
        frequency_penalty=parameters.frequency_penalty,
        min_p=parameters.min_p,
        logit_bias=[
            generation_pb2.TokenBias(token_id=token, bias=bias)
            for token, bias in parameters.logit_bias
        ],
        grammar=parameters.grammar,
        logprobs=parameters.logprobs,
        prompt_logprobs=parameters.prompt_logprobs,
        stop_token_ids=parameters.stop_token_ids,
        allowed_token_ids=parameters.allowed_token_ids,
        bad_words=parameters.bad_words,
        bad_token_ids=[
            generation_pb2.TokenSequence(token_ids=each) for each in parameters.bad_token_ids
        ],
        include_stop_str_in_output=parameters.include_stop_str_in_output,
        skip_special_tokens=None if parameters.skip_special_tokens else False,
    )


def logprobs_of_message(
    message: generation_pb2.TokenLogprobs, token_id: int, most: int | None
) -> TokenLogprobs:
    """Returns the log probabilities in a message.

    Args:
        message: The message.
        token_id: The token, which the message should name.
        most: The most of the likeliest tokens that are wanted; None for none.
    """
    top = tuple((each.token_id, each.logprob) for each in message.top[: most or 0])
    return TokenLogprobs(token_id, message.logprob, message.rank, top)


def message_of_logprobs(scored: TokenLogprobs) -> generation_pb2.TokenLogprobs:
    """Returns the message of log probabilities."""
    return generation_pb2.TokenLogprobs(
        token_id=scored.token_id,
        logprob=scored.logprob,
        rank=scored.rank,
        top=[
            generation_pb2.RankedToken(token_id=token, logprob=logprob)
            for token, logprob in scored.top
        ],
    )
