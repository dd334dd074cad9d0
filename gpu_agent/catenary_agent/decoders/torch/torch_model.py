"""The pass of a step's rows through the layers of a partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from catenary_agent.decoders.torch.torch_attention import LayerCall, StepTensors
from catenary_agent.decoders.torch.torch_weights import DecoderBlocks


class BlockModel:
    """The layers as one function, which eager steps and CUDA graphs share."""

    def __init__(self, blocks: DecoderBlocks) -> None:
        self.blocks = blocks
        kinds = list(dict.fromkeys(blocks.rotary_kinds))
        by_kind = [partial(blocks.rotary, layer_type=each) for each in kinds]
        self._rotaries: list[Any] = by_kind or [blocks.rotary]
        places = [kinds.index(each) for each in blocks.rotary_kinds]
        self._rotary_of = places or [0] * len(blocks.layers)

    def forward(
        self,
        step: StepTensors,
        positions: torch.Tensor,
        joining: Mapping[int, torch.Tensor],
        sessions: Sequence[int],
    ) -> torch.Tensor:
        """Runs every layer once, for all sessions that have reached it.

        Args:
            step: The places of keys and values.
            positions: int64 [rows].
            joining: The inputs that enter at a layer: token ids int64 [rows] or hidden states
                float32 [rows, hidden size].
            sessions: [layers]: the number of sessions, from the first on, that run through each
                layer.

        Returns:
            Hidden states float32 [rows, hidden size] after the last layer.
        """
        blocks = self.blocks
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        whole = [rotary(like, positions[None]) for rotary in self._rotaries]
        angles: list[tuple[torch.Tensor, torch.Tensor]] = []
        hidden: torch.Tensor | None = None
        for index, layer in enumerate(blocks.layers):
            entering = joining.get(index)
            if entering is not None:
                if not entering.is_floating_point():
                    assert blocks.embedding is not None  # checked with the step's items
                    entering = blocks.embedding(entering)
                entering = entering[None]
                hidden = entering if hidden is None else torch.cat((hidden, entering), 1)
                rows = hidden.shape[1]
                angles = [(cosine[:, :rows], sine[:, :rows]) for cosine, sine in whole]
            if hidden is None:
                continue
            hidden = layer(
                hidden,
                attention_mask=None,
                position_embeddings=angles[self._rotary_of[index]],
                catenary=LayerCall(step, index, sessions[index]),
            )
        assert hidden is not None
        blocks.entering.forget()
        return hidden[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 [rows, vocabulary] of hidden states after the last block."""
        assert self.blocks.norm is not None
        assert self.blocks.head is not None
        result: torch.Tensor = self.blocks.head(self.blocks.norm(hidden))
        self.blocks.entering.forget()
        return result
