# ruff: noqa: PLW0108 - a table of examples, a line each
"""The models and functions that `census` exports: what models are made of, an example each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from catenary_agent.words import words

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]

_ACTIVATIONS = words("""
    ReLU ReLU6 ELU CELU SELU GELU SiLU Mish Sigmoid LogSigmoid Hardtanh Hardsigmoid Hardswish
    LeakyReLU Softplus Softshrink Hardshrink Softsign Tanh Tanhshrink
""")
_FUNCTIONS = words("""
    abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc exp expm1 exp2 floor log log1p
    log2 log10 neg reciprocal round rsqrt sigmoid sign sgn sin sinh sqrt square tan tanh trunc
    frac sum mean prod std var amax amin max min argmax argmin isnan isinf isfinite logical_not
    relu softmax log_softmax cumsum cumprod logsumexp norm any all sort argsort std_mean
    var_mean aminmax median flip topk bool int long half double float bfloat16 t clone
    contiguous detach numel ndimension positive unsqueeze squeeze flatten triu tril
""")
_FUNCTIONS_OF_TWO = words("""
    add sub mul div remainder fmod floor_divide pow maximum minimum max min eq ne lt le gt ge
    logical_and logical_or logical_xor atan2 cdist rsub true_divide dot kron lerp hypot
""")


def examples() -> Iterator[Example]:
    """Yields modules of all kinds, each with arguments to export it with."""
    image, signal = torch.rand(2, 4, 16, 16), torch.rand(2, 4, 16)
    volume, rows = torch.rand(2, 4, 8, 8, 8), torch.rand(2, 8)
    tokens, sequence = torch.randint(0, 10, (2, 6)), torch.rand(2, 6, 8)
    yield from _layers(image, signal, volume, rows)
    yield from ((_activation, (rows,)) for _activation in _activations())
    yield from _sequences(sequence, tokens)
    yield from ((_Call(function), (rows,)) for function in _arithmetic())
    yield from ((_Call(function), (rows, rows + 0.5)) for function in _pairs())
    yield from ((_Call(function), (image,)) for function in _shaping())
    yield from _demo()
    yield from _encoders(tokens)


class _Call(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *arguments: torch.Tensor) -> Any:
        return self._function(*arguments)


class _First(nn.Module):
    """A module that returns the first output of a model of `transformers`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, value: torch.Tensor) -> Any:
        return self.model(value, return_dict=False)[0]


def _layers(
    image: torch.Tensor, signal: torch.Tensor, volume: torch.Tensor, rows: torch.Tensor
) -> Iterator[Example]:
    for n, value in ((1, signal), (2, image), (3, volume)):
        kinds: dict[str, Any] = vars(nn)
        for name, arguments, options in (
            ("Conv{}d", (4, 8, 3), {"padding": 1, "stride": 2}),
            ("Conv{}d", (4, 8, 3), {"groups": 4}),
            ("Conv{}d", (4, 8, 3), {"padding": "same"}),
            ("Conv{}d", (4, 8, 3), {"padding": 1, "padding_mode": "reflect"}),
            ("Conv{}d", (4, 8, 3), {"padding": 1, "padding_mode": "circular"}),
            ("ConvTranspose{}d", (4, 8, 3), {"stride": 2}),
            ("BatchNorm{}d", (4,), {}),
            ("InstanceNorm{}d", (4,), {"affine": True}),
            ("MaxPool{}d", (2,), {}),
            ("InstanceNorm{}d", (4,), {"affine": True, "track_running_stats": True}),
            ("AvgPool{}d", (2,), {}),
            ("AdaptiveAvgPool{}d", (1,), {}),
            ("LPPool{}d", (2, 2), {}),
            ("AdaptiveAvgPool{}d", (3,), {}),
            ("AdaptiveMaxPool{}d", (2,), {}),
            ("ConstantPad{}d", (1, 0.5), {}),
            ("ReflectionPad{}d", (1,), {}),
            ("ReplicationPad{}d", (1,), {}),
            ("ZeroPad{}d", (1,), {}),
            ("CircularPad{}d", (1,), {}),
        ):
            if name.format(n) in kinds:
                yield kinds[name.format(n)](*arguments, **options), (value,)
        yield nn.MaxPool2d(2, return_indices=True), (image,)
    for module in (
        nn.GroupNorm(2, 4),
        nn.LayerNorm([4, 16, 16]),
        nn.LocalResponseNorm(2),
        nn.PixelShuffle(2),
        nn.PixelUnshuffle(2),
        nn.ChannelShuffle(2),
        nn.Flatten(),
        nn.Unfold(3),
        nn.Dropout(),
        nn.Dropout2d(),
        nn.Softmax2d(),
        nn.UpsamplingNearest2d(scale_factor=2),
        nn.UpsamplingBilinear2d(scale_factor=2),
        nn.Upsample(scale_factor=2, mode="bicubic"),
        nn.Upsample(size=(8, 8), mode="bilinear"),
        nn.Upsample(size=(8, 8), mode="area"),
        nn.Upsample(size=(9, 9), mode="nearest-exact"),
        nn.PReLU(4),
    ):
        yield module, (image,)
    for layer in (
        nn.Linear(8, 4),
        nn.Linear(8, 4, bias=False),
        nn.Identity(),
        nn.LayerNorm(8),
        nn.RMSNorm(8),
        nn.BatchNorm1d(8),
        nn.Unflatten(1, (2, 4)),
        nn.AlphaDropout(),
        nn.FeatureAlphaDropout(),
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(True), nn.Dropout(0.5, True), nn.Linear(8, 2)),
    ):
        yield layer, (rows,)
    yield nn.Upsample(scale_factor=2, mode="linear"), (signal,)
    yield nn.Upsample(scale_factor=2, mode="trilinear"), (volume,)
    yield nn.Upsample(scale_factor=2, mode="nearest"), (signal,)
    yield nn.Upsample(scale_factor=2, mode="nearest"), (volume,)
    yield nn.Fold((8, 8), 2, stride=2), (torch.rand(2, 16, 16),)
    yield nn.Bilinear(8, 8, 3), (rows, rows)
    yield nn.CosineSimilarity(), (rows, rows)
    yield nn.PairwiseDistance(), (rows, rows)


def _activations() -> Iterator[nn.Module]:
    yield from (nn.Softmax(1), nn.LogSoftmax(1), nn.Softmin(1), nn.GLU(1), nn.GELU("tanh"))
    for name in _ACTIVATIONS:
        kind = getattr(nn, name)
        yield kind()
        try:
            yield kind(inplace=True)
        except TypeError:
            continue
    yield nn.Threshold(0.1, 0.0)
    yield nn.Threshold(0.1, 0.0, inplace=True)


def _sequences(sequence: torch.Tensor, tokens: torch.Tensor) -> Iterator[Example]:
    yield nn.Embedding(10, 8), (tokens,)
    yield nn.Embedding(10, 8, padding_idx=0), (tokens,)
    for cell in (nn.LSTM, nn.GRU, nn.RNN):
        yield cell(8, 8, batch_first=True), (sequence,)
        yield cell(8, 8, num_layers=2, bidirectional=True), (sequence,)
    yield nn.LSTMCell(8, 8), (sequence[:, 0],)
    yield nn.GRUCell(8, 8), (sequence[:, 0],)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    yield _Call(lambda x: attention(x, x, x, need_weights=False)[0]), (sequence,)
    weighed = nn.MultiheadAttention(8, 2)
    yield _Call(lambda x: weighed(x, x, x)), (sequence,)
    for first in (True, False):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=first)
        yield layer, (sequence,)
        yield nn.TransformerEncoder(layer, 2), (sequence,)
    yield nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), (sequence, sequence)
    attend: Any = functional.scaled_dot_product_attention
    heads = sequence.reshape(2, 6, 2, 4).transpose(1, 2)
    yield _Call(lambda q: attend(q, q, q)), (heads,)
    yield _Call(lambda q: attend(q, q, q, is_causal=True)), (heads,)
    mask = torch.ones(6, 6).tril().bool()
    yield _Call(lambda q: attend(q, q, q, attn_mask=mask)), (heads,)


def _arithmetic() -> Iterator[Callable[..., Any]]:
    for name in _FUNCTIONS:
        call = getattr(torch, name, None) or getattr(torch.Tensor, name)
        for more in ((), (1,), ([1],), ([0, 1],)):
            yield lambda x, call=call, more=more: call(x, *more)
    yield from (
        lambda x: x.sum(1, keepdim=True),
        lambda x: x.mean((0, 1)),
        lambda x: x.clamp(0.1, 0.9),
        lambda x: x.clamp(min=0.1),
        lambda x: x.clamp_(max=0.9),
        lambda x: x + 1,
        lambda x: x - 1,
        lambda x: x * 2,
        lambda x: x / 2,
        lambda x: x // 2,
        lambda x: x % 2,
        lambda x: x**2,
        lambda x: 2**x,
        lambda x: 1 - x,
        lambda x: 1 / x,
        lambda x: x > 0.5,
        lambda x: x >= 0.5,
        lambda x: x < 0.5,
        lambda x: x <= 0.5,
        lambda x: x == 0.5,
        lambda x: x != 0.5,
        lambda x: x.masked_fill(x > 0.5, 0.0),
        lambda x: torch.where(x > 0.5, x, 0.0),
        lambda x: torch.where(x > 0.5, 1.0, 0.0),
        lambda x: x.to(torch.float16).to(x),
        lambda x: x.type_as(x),
        lambda x: torch.zeros_like(x),
        lambda x: torch.ones_like(x),
        lambda x: torch.full_like(x, 2.0),
        lambda x: x.new_zeros(3),
        lambda x: x.new_ones(3),
        lambda x: x.new_full((3,), 2.0),
        lambda x: x + torch.arange(8),
        lambda x: x.cpu(),
        lambda x: x + torch.arange(0, 8, device="cpu"),
        lambda x: x + torch.arange(0, 16, 2),
        lambda x: x + torch.linspace(0, 1, 8),
        lambda x: x + torch.zeros(8),
        lambda x: x + torch.ones(8),
        lambda x: x + torch.full((8,), 2.0),
        lambda x: x + torch.eye(8)[0],
        lambda x: x + torch.tensor([1.0] * 8),
        lambda x: x + torch.scalar_tensor(2.0),
        lambda x: functional.normalize(x),
        lambda x: functional.one_hot(x.argmax(1), 8),
        lambda x: x.gather(1, x.argmax(1, keepdim=True)),
        lambda x: x.softmax(-1, torch.float32),
        lambda x: functional.pad(x, (1, 1)),
        lambda x: x.norm(p=2, dim=1),
        lambda x: x.clip(0, 1),
        lambda x: torch.linalg.vector_norm(x, dim=1),
        lambda x: x.add_(1),
        lambda x: x.mul_(2),
        lambda x: x.relu_(),
        lambda x: x.sub_(1),
        lambda x: x.div_(2),
        lambda x: x.sigmoid_(),
        lambda x: x.tanh_(),
        lambda x: x.exp_(),
        lambda x: x.masked_fill_(x > 0.5, 0.0),
        lambda x: torch.nan_to_num(x),
        lambda x: torch.bitwise_not(x > 0.5),
        lambda x: ~(x > 0.5),
        lambda x: torch.bucketize(x, torch.rand(4)),
        lambda x: torch.diag(torch.ones(8)) @ x.t(),
        lambda x: torch.nn.functional.glu(x),
        lambda x: x.fill_(1.0),
        lambda x: x.zero_(),
    )


def _pairs() -> Iterator[Callable[..., Any]]:
    yield from (getattr(torch, name) for name in _FUNCTIONS_OF_TWO)
    yield from (
        lambda a, b: a @ b.t(),
        lambda a, b: torch.cat((a, b), 1),
        lambda a, b: torch.stack((a, b)),
        lambda a, b: torch.mm(a, b.t()),
        lambda a, b: torch.bmm(a[:, None], b[:, :, None]),
        lambda a, b: torch.baddbmm(a[:, :1, None], a[:, None], b[:, :, None]),
        lambda a, b: torch.addmm(a[:, :2], a, b.t()[:, :2]),
        lambda a, b: torch.addcmul(a, a, b),
        lambda a, b: torch.addcdiv(a, a, b),
        lambda a, b: torch.einsum("bi,bj->bij", a, b),
        lambda a, b: torch.outer(a[0], b[0]),
        lambda a, b: a.add_(b),
        lambda a, b: a.mul_(b),
        lambda a, b: a.sub_(b),
        lambda a, b: a.div_(b),
        lambda a, b: a.copy_(b),
        lambda a, b: torch.where(a > b, a, b),
        lambda a, b: (a > b) & (b > a),
        lambda a, b: (a > b) | (b > a),
        lambda a, b: (a > b) ^ (b > a),
        lambda a, b: a.expand_as(b),
        lambda a, b: a.view_as(b),
        lambda a, b: torch.hstack((a, b)),
        lambda a, b: torch.vstack((a, b)),
        torch.broadcast_tensors,
        lambda a, b: torch.meshgrid(a[0], b[0], indexing="ij"),
        lambda a, b: torch.matmul(a, b.mT),
        lambda a, b: torch.div(a, b, rounding_mode="floor"),
        lambda a, b: torch.lerp(a, b, 0.3),
        lambda a, b: functional.mse_loss(a, b, reduction="none"),
        lambda a, b: functional.grid_sample(
            a[:, None, None],
            torch.zeros(1, 1, 1, 2).expand(a.shape[0], 1, 1, 2),
            align_corners=False,
        ),
    )


def _shaping() -> Iterator[Callable[..., Any]]:
    yield from (
        lambda x: x.reshape(x.shape[0], -1),
        lambda x: x.view(x.shape[0], 4, 256),
        lambda x: x.flatten(1),
        lambda x: x.permute(0, 2, 3, 1),
        lambda x: x.transpose(1, 2),
        lambda x: x[:, 0],
        lambda x: x[:, 1:3],
        lambda x: x[..., ::2],
        lambda x: x[:, None],
        lambda x: x.unsqueeze(1).squeeze(1),
        lambda x: x[:, [0, 2]],
        lambda x: x.chunk(2, 1),
        lambda x: x.split(2, 1),
        lambda x: x.split([1, 3], 1),
        lambda x: x.unbind(1),
        lambda x: x.repeat(1, 2, 1, 1),
        lambda x: x.expand(-1, 4, -1, -1),
        lambda x: x.tile((1, 2, 1, 1)),
        lambda x: x.roll(1, 2),
        lambda x: x.roll((1, 1), (2, 3)),
        lambda x: x.flip(2),
        lambda x: x.rot90(1, (2, 3)),
        lambda x: x.select(1, 0),
        lambda x: x.narrow(1, 0, 2),
        lambda x: x.index_select(1, torch.tensor([0, 2])),
        lambda x: x.movedim(1, 3),
        lambda x: x.swapaxes(1, 2),
        lambda x: x.unflatten(1, (2, 2)),
        lambda x: x.unfold(2, 4, 4),
        lambda x: x.repeat_interleave(2, dim=1),
        lambda x: x.contiguous(),
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.diagonal(0, 2, 3),
        lambda x: x.squeeze(),
        lambda x: torch.concat((x, x), 1),
        lambda x: torch.cat((x, x), 0),
        lambda x: x.mean((2, 3)),
        lambda x: x.amax((2, 3), keepdim=True),
        lambda x: x.mean((2, 3), keepdim=True),
        lambda x: x.mT,
        lambda x: functional.interpolate(x, scale_factor=2.0),
        lambda x: functional.interpolate(x, size=(9, 9)),
        lambda x: functional.interpolate(x, size=(9, 9), mode="bilinear", antialias=True),
        lambda x: functional.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=True),
        lambda x: functional.avg_pool2d(x, 3, 1, 1),
        lambda x: functional.max_pool2d(x, 3, 2, 1),
        lambda x: torch.cat([torch.zeros(1, 4, 1, 16).expand(x.shape[0], -1, -1, -1), x], 2),
        lambda x: (
            x.view(x.shape[0], 4, 2, 8, 2, 8).permute(0, 1, 2, 4, 3, 5).reshape(x.shape[0], -1)
        ),
        lambda x: x.scatter(1, x.argmax(1, keepdim=True), 0.0),
        lambda x: x.cumsum(2),
        lambda x: x.sum((1, 2)),
        lambda x: torch.index_put(x, (torch.tensor([0]),), x[0]),
        lambda x: x.masked_fill(x.gt(0.1).logical_not(), -1e4),
        lambda x: torch.slice_scatter(x, x[:, :1], 1, 0, 1),
        lambda x: torch.select_scatter(x, x[:, 0], 1, 1),
    )


def _demo() -> Iterator[Example]:
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        return
    yield EfficientNet.from_name("efficientnet-lite0"), (torch.rand(2, 3, 224, 224),)


def _encoders(tokens: torch.Tensor) -> Iterator[Example]:
    try:
        import transformers as t
    except ImportError:
        return
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    text: dict[str, Any] = {"vocab_size": 99, "max_position_embeddings": 64, **sizes}
    image: dict[str, Any] = {"image_size": 32, "patch_size": 8, **sizes}
    texts: tuple[Callable[[], Any], ...] = (
        lambda: t.BertModel(t.BertConfig(**text)),
        lambda: t.RobertaModel(t.RobertaConfig(**text)),
        lambda: t.DistilBertModel(
            t.DistilBertConfig(vocab_size=99, dim=32, n_layers=2, n_heads=2, hidden_dim=64)
        ),
        lambda: t.MPNetModel(t.MPNetConfig(**text)),
        lambda: t.ElectraModel(t.ElectraConfig(**text)),
        lambda: t.LlamaModel(t.LlamaConfig(use_cache=False, **text)),
        lambda: t.Qwen2Model(t.Qwen2Config(use_cache=False, num_key_value_heads=1, **text)),
    )
    pixels = torch.rand(2, 3, 32, 32)
    pictures: tuple[Callable[[], Any], ...] = (
        lambda: t.ViTModel(t.ViTConfig(**image)),
        lambda: t.DeiTModel(t.DeiTConfig(**image)),
        lambda: t.Dinov2Model(t.Dinov2Config(**image)),
        lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**image)),
        lambda: t.SiglipVisionModel(t.SiglipVisionConfig(**image)),
        lambda: t.ResNetModel(
            t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
        ),
        lambda: t.ConvNextModel(
            t.ConvNextConfig(num_stages=2, hidden_sizes=[8, 16], depths=[1, 1])
        ),
        lambda: t.MobileNetV2Model(t.MobileNetV2Config()),
        lambda: t.SwinModel(
            t.SwinConfig(
                image_size=32,
                patch_size=4,
                embed_dim=8,
                depths=[1, 1],
                num_heads=[1, 2],
                window_size=4,
            )
        ),
        lambda: t.SegformerModel(
            t.SegformerConfig(
                hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 1, 1]
            )
        ),
    )
    for makers, value in ((texts, tokens), (pictures, pixels)):
        for make in makers:
            yield _First(make().eval()), (value,)
