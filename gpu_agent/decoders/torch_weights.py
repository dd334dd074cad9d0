"""Decoder layers of `transformers` with the weights of a range of blocks, and of nothing else.

The model is built without memory (meta device); then only the tensors of the blocks wanted are read
from the safetensors files, by name.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_agent.decoders.torch_attention import ATTENTION, attend
from gpu_agent.decoders.weights import StoredTensor, checked_tensors
from gpu_agent.executors.device import Device
from services.content.reading import Reading
from services.domain.ids import PartitionKey
from services.errors import InvalidInput, NotSupported

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type`; SmolLM2 is a "llama"."""
ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles do not depend on how long the longest session of a step is."""

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


@dataclass(slots=True)
class DecoderBlocks:
    """The modules of one partition, on its device."""

    layers: list[Any]
    rotary: Any
    """Positions [1, rows] -> (cosine, sine), each [1, rows, head size]."""
    embedding: Any | None
    """Where block 0 is."""
    norm: Any | None
    """Where the last block is."""
    head: Any | None
    """Where the last block is: hidden states -> logits."""
    dtype: torch.dtype
    memory_bytes: int


def load_blocks(
    reading: Reading, key: PartitionKey, blocks: int, device: torch.device, dtype: torch.dtype
) -> DecoderBlocks:
    """Reads blocks `[first, last)`, with embedding and head where they belong.

    Args:
        reading: Of a folder with `config.json` and one or more `.safetensors` files.
        key: The partition.
        blocks: Of the whole model.
        device: Where the weights go.
        dtype: Of weights and computation.

    Raises:
        NotSupported: If the model's family, or its rotary embedding, is not one of ours.
        InvalidInput: If a tensor is missing or has another shape than the configuration says.
    """
    import transformers

    folder = reading.folder
    reading.begin(folder / "config.json", first=True)
    transformers.AttentionInterface.register(ATTENTION, attend)
    config = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    _check(config, blocks, key)
    automatic: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = automatic.from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    model.requires_grad_(False).eval()
    base = model.model
    last = key.last_block == blocks
    wanted = {f"model.layers.{i}.": base.layers[i] for i in range(key.first_block, key.last_block)}
    if key.first_block == 0:
        wanted["model.embed_tokens."] = base.embed_tokens
    if last:
        wanted["model.norm."] = base.norm
        # Tied to an embedding that may not be here; its weight is set below.
        model.lm_head = torch.nn.Linear(
            config.hidden_size, config.vocab_size, bias=False, device="meta", dtype=dtype
        ).requires_grad_(False)
        wanted["lm_head."] = model.lm_head
    memory = _fill(wanted, reading, device, dtype)
    rotary = type(base.rotary_emb)(config=config).to(device)
    return DecoderBlocks(
        layers=[base.layers[i] for i in range(key.first_block, key.last_block)],
        rotary=rotary,
        embedding=base.embed_tokens if key.first_block == 0 else None,
        norm=base.norm if last else None,
        head=model.lm_head if last else None,
        dtype=dtype,
        memory_bytes=memory,
    )


def torch_device(device: Device) -> torch.device:
    """Returns PyTorch's name of a device.

    Raises:
        NotSupported: If PyTorch does not see it.
    """
    if device.kind == "cuda":
        if device.index >= torch.cuda.device_count():
            raise NotSupported(f"{device}: PyTorch sees {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", device.index)
    if device.kind != "cpu":
        raise NotSupported(f"{device} cannot run PyTorch")
    return torch.device("cpu")


def compute_dtype(device: torch.device) -> torch.dtype:
    """Returns what to compute in: float32 on a CPU, bfloat16 or float16 on a CUDA device.

    bfloat16 wherever there is hardware for it: residual streams of this family overflow float16.
    """
    if device.type != "cuda":
        return torch.float32
    capable = torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if capable else torch.float16


def _check(config: Any, blocks: int, key: PartitionKey) -> None:
    if config.model_type not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise NotSupported(f"{key.model} is a {config.model_type!r}; families known: {families}")
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in ROTARY_TYPES:
        raise NotSupported(f"{key.model} has rotary embeddings of type {kind!r}")
    if config.num_hidden_layers != blocks:
        raise InvalidInput(
            f"{key.model}/config.json", f"has {config.num_hidden_layers} layers, not {blocks}"
        )


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidInput(folder.name, "has no .safetensors file")
    return files


def _fill(
    wanted: dict[str, Any], reading: Reading, device: torch.device, dtype: torch.dtype
) -> int:
    """Gives the modules their weights; returns the bytes they take, shared ones counted once."""
    from safetensors import safe_open

    with ExitStack() as stack:
        place: dict[str, tuple[Any, Path, StoredTensor]] = {}
        for file in _files(reading.folder):
            stored_here = checked_tensors(file, reading)
            reader = stack.enter_context(safe_open(file, framework="pt", device=str(device)))
            place |= {name: (reader, file, each) for name, each in stored_here.items()}
        read: dict[str, torch.Tensor] = {}
        for prefix, module in wanted.items():
            state = {}
            for name, expected in module.state_dict().items():
                full = prefix + name
                stored = _EMBEDDING if full == _HEAD and full not in place else full
                if stored not in place:
                    raise InvalidInput(stored, "is not in the model's files")
                if stored not in read:
                    reader, file, where = place[stored]
                    reading.begin(file, [(where.offset, where.nbytes)])
                    read[stored] = reader.get_tensor(stored).to(dtype)
                if read[stored].shape != expected.shape:
                    raise InvalidInput(
                        stored, f"is {list(read[stored].shape)}, not {list(expected.shape)}"
                    )
                state[name] = read[stored]
            module.load_state_dict(state, assign=True)
    return sum(tensor.nbytes for tensor in read.values())
