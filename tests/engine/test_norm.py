"""The frozen batch normalisation: matching with kernels against the obvious way to write it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedbicross.engine.norm import Norm, Pass, batch_statistics
from steps.tiny import noise


def layer(affine: bool = True, device: str = "cpu") -> Norm:
    source = nn.BatchNorm2d(4, affine=affine).double()
    assert source.running_mean is not None and source.running_var is not None
    with torch.no_grad():
        source.running_mean.copy_(noise(4, seed=1))
        source.running_var.copy_(noise(4, seed=2).square() + 0.5)
        if affine:
            source.weight.copy_(torch.tensor([1.5, -0.7, 0.0, 1e-3]))  # turned round, trained to nothing, nearly so
            source.bias.copy_(noise(4, seed=3))
    return Norm(source.to(device).requires_grad_(False), "norm", Pass())


def obvious(norm: Norm, x: Tensor) -> tuple[Tensor, Tensor]:
    """What matching is, one value after another."""
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    scale = torch.ones_like(mean) if norm.weight is None else norm.weight
    shift = torch.zeros_like(mean) if norm.bias is None else norm.bias
    wide = [value.view(1, -1, 1, 1) for value in (norm.running_mean, norm.running_var, scale, shift)]
    out = (x - wide[0]) / (wide[1] + norm.eps).sqrt() * wide[2] + wide[3]
    return out, (mean - norm.running_mean).square().sum().sqrt() + (var - norm.running_var).square().sum().sqrt()


def with_kernels(norm: Norm, x: Tensor) -> tuple[Tensor, Tensor]:
    with norm.current.doing("match", "kernels"):
        return norm(x), norm.current.terms[0]


def gradient(out: Tensor, term: Tensor, x: Tensor) -> Tensor:
    weights = noise(*out.shape, seed=7).to(out)
    (found,) = torch.autograd.grad((out * weights).sum() + 3 * term, x)
    return found


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("affine", [True, False])
def test_matching_with_kernels_is_what_the_equation_says(
    affine: bool, layout: torch.memory_format, device: str
) -> None:
    norm = layer(affine, device)
    x = (2 * noise(6, 4, 5, 3) + 1).to(device).contiguous(memory_format=layout).requires_grad_(True)
    found, expected = with_kernels(norm, x), obvious(norm, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradient(*found, x), gradient(*expected, x), rtol=0, atol=1e-10)


def test_both_ways_back_reach_x_alone_too() -> None:
    norm, x = layer(), noise(6, 4, 5, 3).requires_grad_(True)
    for part in (0, 1):
        found, expected = (torch.autograd.grad(way(norm, x)[part].sum(), x)[0] for way in (with_kernels, obvious))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_statistics_that_agree_leave_no_gradient() -> None:
    norm, x = layer(), noise(6, 4, 5, 3)
    mean, var = batch_statistics(x)
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(var)
    leaf = x.requires_grad_(True)
    term = with_kernels(norm, leaf)[1]
    (found,) = torch.autograd.grad(term, leaf)
    assert float(term.detach()) == 0 and torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("device", DEVICES)
def test_statistics_of_bf16_are_wide_and_its_gradient_is_close(device: str) -> None:
    exact, norm = layer(device=device), layer(device=device).float()
    x = (noise(64, 4, 9, 9) + 100).to(device).bfloat16().requires_grad_(True)
    wide = x.detach().double().requires_grad_(True)
    found, expected = with_kernels(norm, x), obvious(exact, wide)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-5, atol=0)
    ours, theirs = gradient(*found, x), gradient(*expected, wide)
    assert ours.dtype == torch.bfloat16 and float((ours.double() - theirs).norm() / theirs.norm()) < 1e-2


def test_nothing_of_a_pass_is_kept() -> None:
    current = Pass()
    with pytest.raises(RuntimeError), current.doing("match", "kernels", batches=2):
        current.terms.append(noise(1))
        raise RuntimeError("as a checkpoint does, once it has recomputed what it needs")
    assert vars(current) == vars(Pass())
