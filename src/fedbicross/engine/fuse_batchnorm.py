"""Frozen networks whose batch normalisation is folded into the convolutions before it.

With stored statistics a normalisation is a scale and a shift per channel. A GPU has kernels for convolution, shift,
shortcut and ReLU in one, so that a layer's output is written once instead of being read and written again for each.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedbicross.engine.layers import FastConv2d, can_be_fitted, fitted, padded
from fedbicross.engine.norm import Norm

RELU, ADD = (F.relu, torch.relu), (operator.add, torch.add)


class FusedConv2d(nn.Module):
    """A frozen convolution with its shift, to which a shortcut may be added; ``relu`` says whether a ReLU follows."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, conv: nn.Conv2d, norm: Norm) -> None:
        super().__init__()
        scale, shift = norm.stored_scale_and_shift()
        if conv.bias is not None:
            shift = shift + scale * conv.bias.detach()
        weight = conv.weight.detach() * scale.view(-1, 1, 1, 1)
        self.fits = can_be_fitted(conv)
        weight = padded(weight) if self.fits else weight
        self.register_buffer("weight", weight.contiguous(memory_format=torch.channels_last))
        self.register_buffer("bias", shift)
        assert not isinstance(conv.padding, str)
        self.padding: tuple[int, ...] = conv.padding
        self.stride, self.dilation, self.groups = conv.stride, conv.dilation, conv.groups
        self.relu = False

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """[B, inputs, H, W] to [B, outputs, ...]."""
        weight, stride, padding, rest = self.weight, self.stride, self.padding, (self.dilation, self.groups)
        if self.fits:
            x, weight, stride = fitted(x, weight, stride, padding)
        if self.relu and self.bias is not None and _has_kernel(x):
            if shortcut is None:
                return torch.cudnn_convolution_relu(x, weight, self.bias, stride, padding, *rest)
            if shortcut.shape == _output_shape(x, weight, stride, padding, self.dilation):
                return torch.cudnn_convolution_add_relu(x, weight, shortcut, 1.0, self.bias, stride, padding, *rest)
        out = F.conv2d(x, weight, self.bias, stride, padding, *rest)
        out = out if shortcut is None else out + shortcut
        return F.relu(out) if self.relu else out

    def take_bias(self, other: FusedConv2d) -> None:
        """One shift for both, where the two are added up."""
        if self.bias is not None and other.bias is not None:
            self.bias, other.bias = self.bias + other.bias, None


def _has_kernel(x: Tensor) -> bool:
    if not x.is_cuda or torch.version.hip is not None or x.dtype == torch.float64:
        return False
    return x.dtype != torch.bfloat16 or torch.cuda.get_device_capability(x.device)[0] >= 8


def _output_shape(
    x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[int, ...]:
    sides = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return (len(x), len(weight), *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides))


class _Proxy(fx.Proxy):
    """torch would trace ``x += y`` as ``x + y``, and what was kept of x would not see the change."""

    def _refuse(self, other: object) -> fx.Proxy:
        raise fx.proxy.TraceError("an operation in place")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = _refuse


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What the network's forward pass is given in place of a tensor."""
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Layers that are folded stay whole."""
        return isinstance(m, Norm | nn.Conv2d) or super().is_leaf_module(m, module_qualified_name)


def fuse_batchnorm(model: nn.Module) -> nn.Module | None:
    """The network with its stored statistics, as a new one that shares its other layers; None where that cannot be.

    That is so where a normalisation does not follow a plain convolution of its own (a pre-activation network), and
    where torch cannot trace the network (its way depends on the numbers, or it changes tensors in place).
    """
    try:
        graph = _Tracer().trace(model)
    except Exception:  # whatever a stranger's forward pass does that cannot be traced: it stays as it is
        return None
    for node in graph.nodes:
        node.type = None  # annotations, which would hinder a copy from travelling to another process
    network = fx.GraphModule(model, graph)
    for node in list(graph.nodes):
        if isinstance(_module(network, node), nn.Identity):  # it would come between a sum and what is added
            _replace(node, node.args[0])
    for node in list(graph.nodes):
        if isinstance(_module(network, node), Norm) and not _fold(network, node):
            return None
    for node in list(graph.nodes):
        _absorb(network, node)
    network.delete_all_unused_submodules()
    network.recompile()
    return network


def _fold(network: fx.GraphModule, node: fx.Node) -> bool:
    """Put this normalisation into the convolution before it."""
    before: Any = node.args[0]
    conv, norm = _module(network, before), _module(network, node)
    if type(conv) not in (nn.Conv2d, FastConv2d) or not isinstance(norm, Norm) or not _only(before, node):
        return False  # another kind of convolution may do something of its own
    assert isinstance(conv, nn.Conv2d)
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return False
    name = f"folded_{node.name}"
    network.add_submodule(name, FusedConv2d(conv, norm))
    before.target = name
    _replace(node, before)
    return True


def _absorb(network: fx.GraphModule, node: fx.Node) -> None:
    """Put this ReLU, and the sum before it if there is one, into the convolution before it."""
    by_name = node.op == "call_method" and node.target == "relu"
    if not (by_name or node.target in RELU or isinstance(_module(network, node), nn.ReLU)):
        return
    before: Any = node.args[0]
    last, shortcut = before, None
    if before.op == "call_function" and before.target in ADD and not before.kwargs and _only(before, node):
        parts = [part for part in before.args if isinstance(part, fx.Node)]
        if len(parts) < 2 or parts[0] is parts[1]:
            return
        order = list(network.graph.nodes)
        shortcut, last = sorted(parts, key=order.index)  # the later one can be given the earlier one's output
    fused = _module(network, last)
    if not isinstance(fused, FusedConv2d) or fused.relu or not _only(last, node if shortcut is None else before):
        return
    fused.relu = True
    if shortcut is not None:
        other = _module(network, shortcut)
        if isinstance(other, FusedConv2d) and not other.relu and _only(shortcut, before):
            fused.take_bias(other)
        last.args = (*last.args, shortcut)
    _replace(node, last)
    if shortcut is not None:
        network.graph.erase_node(before)


def _replace(node: fx.Node, by: Any) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def _module(network: fx.GraphModule, node: Any) -> nn.Module | None:
    is_call = isinstance(node, fx.Node) and node.op == "call_module"
    return network.get_submodule(str(node.target)) if is_call else None


def _only(node: fx.Node, user: fx.Node) -> bool:
    return set(node.users) == {user}
