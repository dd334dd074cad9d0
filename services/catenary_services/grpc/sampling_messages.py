"""Conversion of sampling parameters to and from protobuf, where 0 stands for "none"."""

from __future__ import annotations

from catenary_protos.catenary.v1 import generation_pb2
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
    )
