from __future__ import annotations

from fedbicross import models
from fedbicross.methods import create
from fedbicross.parts.costs import synthesis_flops
from fedbicross.parts.teachers import send_network
from small import TINY_METHODS, tiny_clients, tiny_context


def test_costs_count_forward_passes() -> None:
    ctx = tiny_context()
    uploads = [send_network(client, ctx) for client in tiny_clients(3)]
    one = models.forward_flops("resnet8", 3, 3, 12)
    assert synthesis_flops(ctx, uploads, 12, 5, 7) == one * 12 * (2 * 3 * 5 + (2 * 3 + 3) * 7)
    assert synthesis_flops(ctx, uploads, 12, 5, 7, students=4) == one * 12 * (2 * 3 * 5 + (2 * 3 + 12) * 7)
    for name, synthesis, distillation in [("fedisca", 6, 6), ("e_fedisca", 3, 6)]:
        ctx = tiny_context()
        create(name, TINY_METHODS).fuse(uploads, ctx)
        assert ctx.record.flops == synthesis_flops(ctx, uploads, 12, synthesis, distillation)
