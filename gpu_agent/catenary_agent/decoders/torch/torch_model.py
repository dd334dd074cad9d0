"""The pass of a step's rows through the layers of a partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from catenary_agent.decoders.torch.torch_attention import LayerCall, StepTensors
from catenary_agent.decoders.torch.torch_weights import DecoderBlocks


class BlockModel:
    """The layers as one function, which eager steps and CUDA graphs share."""

    def __init__(self, blocks: DecoderBlocks) -> None:
        self.blocks = blocks

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
        cosine, sine = blocks.rotary(like, positions[None])
        hidden: torch.Tensor | None = None
        for index, layer in enumerate(blocks.layers):
            entering = joining.get(index)
            if entering is not None:
                if not entering.is_floating_point():
                    assert blocks.embedding is not None  # checked with the step's items
                    entering = blocks.embedding(entering)
                entering = entering[None]
                hidden = entering if hidden is None else torch.cat((hidden, entering), 1)
            if hidden is None:
                continue
            rows = hidden.shape[1]
            hidden = layer(
                hidden,
                attention_mask=None,
                position_embeddings=(cosine[:, :rows], sine[:, :rows]),
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
