"""Plain PyTorch versions of TransformerEngine's modules in float64, with bounds of their distance.

Distances are Frobenius norms relative to the reference. Bounds add up along a chain of matrix products:

* fp32: a sum of K products in a different order differs by at most K * 2^-24 relative to the sum of magnitudes
  (Higham, Accuracy and Stability, 3.1), and its norm by less; elementwise functions add a few ulps.
  ``fp32_bound`` allows K * 2^-24 for each product.
* quantized: rounding to nearest with half-ulp eps has a root mean square of at most eps / sqrt(3) (uniform in
  an interval of +-eps). A product of independent operands keeps the rms: sqrt((a^2 + b^2) / 3) for each
  product of the chain.
"""

import math

import torch
import torch.nn.functional as F

FP32_UNIT = 2.0**-24
BF16_EPS = (
    2.0**-9
)  # half an ulp of 8 significant bits, relative to a value at the bottom of a binade: 2^-8 / 2
E4M3_EPS = 2.0**-4
E5M2_EPS = 2.0**-3


def fp32_bound(inner, products):
    """Bound for ``products`` chained matrix products whose sums have up to ``inner`` terms."""
    return products * inner * FP32_UNIT


def stage(eps_a, eps_b):
    """Bound of one product of quantized operands."""
    return math.sqrt((eps_a**2 + eps_b**2) / 3)


def distance(result, expected):
    """Return the relative Frobenius distance."""
    expected = expected.double()
    return ((result.detach().double() - expected).norm() / expected.norm()).item()


def double(module):
    """Return float64 leaf copies of a module's parameters, by name."""
    return {name: _plain(p).double().requires_grad_() for name, p in module.named_parameters()}


def _plain(param):
    param = param.detach()
    return param.dequantize() if hasattr(param, "get_metadata") else param.clone()


def norm(x, weight, bias=None, *, kind="LayerNorm", eps=1e-5, zero_centered=False):
    """Return LayerNorm or RMSNorm over the last dim."""
    if zero_centered:
        weight = weight + 1
    if kind == "RMSNorm":
        return weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def quick(x, alpha=1.702):
    """Return quick GELU."""
    return x * torch.sigmoid(alpha * x)


PLAIN = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": quick,
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def activation(name, x, limit=7.0, alpha=1.702, offset=1.0):
    """Return activation by TransformerEngine's name; gated ones halve the last dim."""
    if name in PLAIN:
        return PLAIN[name](x)
    first, second = x.chunk(2, dim=-1)
    if name == "glu":
        return torch.sigmoid(first) * second
    if name == "clamped_swiglu":
        return quick(first.clamp(max=limit), alpha) * (second.clamp(-limit, limit) + offset)
    return PLAIN[GATED[name]](first) * second


def attention(q, k, v, *, mask=None, offset=None, extra=False, scale=None):
    """Return (s, b, h, d) attention; ``mask`` (b or 1, h or 1, sq, sk) True where forbidden; grouped k, v.

    ``extra`` adds one logit of value ``offset`` (0 by default) to each row's normalization: off-by-one and
    learnable softmax.
    """
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    if extra:
        offset = torch.zeros(q.shape[2], dtype=scores.dtype) if offset is None else offset
        logit = offset.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        probabilities = torch.softmax(torch.cat([scores, logit], -1), -1)[..., :-1]
    else:
        probabilities = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("bhst,tbhd->sbhd", probabilities, v).flatten(2)


def causal(sq, sk):
    """Return the mask of a causal attention aligned at the bottom right."""
    return ~torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq)


def rope(x, angles):
    """Return rotary embedding of (s, b, h, d), halves layout, angles (s, 1, 1, d)."""
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def transformer_layer(p, x, *, heads, groups, activation_name="gelu", kind="LayerNorm", angles=None):
    """Return TransformerEngine's TransformerLayer (self attention, pre-norm, interleaved fused QKV, causal)."""
    s, b, hidden = x.shape
    pre = "self_attention.layernorm_qkv."
    y = norm(x, p[pre + "layer_norm_weight"], p.get(pre + "layer_norm_bias"), kind=kind)
    mixed = F.linear(y, p[pre + "weight"], p.get(pre + "bias"))
    mixed = mixed.view(s, b, groups, heads // groups + 2, hidden // heads)
    q = mixed[..., :-2, :].reshape(s, b, heads, -1)
    k, v = mixed[..., -2, :], mixed[..., -1, :]
    if angles is not None:
        q, k = rope(q, angles), rope(k, angles)
    out = attention(q, k, v, mask=causal(s, s))
    x = x + F.linear(out, p["self_attention.proj.weight"], p.get("self_attention.proj.bias"))
    return x + layernorm_mlp(p, x, activation_name, kind=kind, prefix="layernorm_mlp.")


def layernorm_mlp(p, x, name, *, kind="LayerNorm", prefix=""):
    """Return TransformerEngine's LayerNormMLP."""
    y = norm(x, p[prefix + "layer_norm_weight"], p.get(prefix + "layer_norm_bias"), kind=kind)
    y = F.linear(y, p[prefix + "fc1_weight"], p.get(prefix + "fc1_bias"))
    return F.linear(activation(name, y), p[prefix + "fc2_weight"], p.get(prefix + "fc2_bias"))
