"""A program of two ranks: DTensors, tensor parallel layers, FSDP and DDP with lowprec's product.

Started as ``torch_ranks.py RANK FILE``; the ranks meet in the file. It writes one line for each part that holds.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowprec
import lowprec.torch as lt


def draw(seed, *shape):
    """Return integers up to 3, sums of few of which are exact in bfloat16 and in FP32."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=made).float()


def placements(mesh):
    """Every pair of placements, forward and backward."""
    for shapes in (
        ((4, 6), (6, 8)),
        ((2, 4, 6), (6, 8)),
        ((2, 4, 6), (2, 6, 8)),
        ((2, 4, 6), (1, 6, 8)),
    ):
        a, b = (draw(i, *shape) for i, shape in enumerate(shapes))
        gradient = draw(2, *(a @ b).shape)
        for of_a in [Replicate(), *map(Shard, range(a.ndim))]:
            for of_b in [Replicate(), *(Shard(i) for i in range(b.ndim) if b.shape[i] > 1)]:
                x = distribute_tensor(a, mesh, [of_a]).requires_grad_()
                y = distribute_tensor(b, mesh, [of_b]).requires_grad_()
                out = lowprec.matmul(x, y, math_mode="bf16")
                assert isinstance(out, DTensor)
                assert torch.equal(out.full_tensor(), a @ b)
                (out * distribute_tensor(gradient, mesh, [Replicate()])).sum().backward()
                assert torch.equal(
                    x.grad.full_tensor(), gradient @ b.mT.expand(*a.shape[:-2], 8, 6)
                )
                true = (a.mT @ gradient).sum_to_size(b.shape)
                assert torch.equal(y.grad.full_tensor(), true)


def a_sum_over_ranks(mesh):
    """An operand that is a sum is summed before it is rounded: 1 + 2^-9 is 1 in bfloat16, its halves apart are not."""
    part = torch.full((4, 4), 1.0 if mesh.get_local_rank() else 2.0**-9)
    x = DTensor.from_local(part, mesh, [Partial()])
    eye = distribute_tensor(torch.eye(4), mesh, [Replicate()])
    assert torch.equal(lowprec.matmul(x, eye, math_mode="bf16").full_tensor(), torch.ones(4, 4))


def model(linear):
    made = nn.Sequential(linear(6, 8), nn.ReLU(), linear(8, 4))
    for i, parameter in enumerate(made.parameters()):
        parameter.data = draw(i, *parameter.shape)
    return made


def step(net):
    """Return the sum and the gradients of a step on all rows."""
    y = net(draw(9, 4, 6))
    (y * draw(10, 4, 4)).sum().backward()
    return [y.detach(), *(whole(p.grad) for p in net.parameters())]


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def equal(found, true):
    for x, y in zip(found, true, strict=True):
        assert torch.equal(whole(x), y), (whole(x), y)


def tensor_parallel_layer(mesh):
    net = parallelize_module(model(lt.Linear), mesh, PLAN)
    with lowprec.math_mode("fp32"), lowprec.profile() as profile:
        found = step(net)
    equal(found, step(model(nn.Linear)))
    # two forward; three backward, since the gradient of the input is not needed
    assert len(profile) == 5


def tensor_parallel_and_intercepted(mesh):
    net = parallelize_module(model(nn.Linear), mesh, PLAN)
    with lt.intercept("fp32") as seen:
        found = step(net)
    equal(found, step(model(nn.Linear)))
    assert sum(p.count for p in seen.report().taken) == 5
    assert not seen.report().passed


def fully_sharded(mesh):
    net = model(lt.Linear)
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    equal(step(net), step(model(nn.Linear)))


def data_parallel(mesh):
    equal(step(nn.parallel.DistributedDataParallel(model(lt.Linear))), step(model(nn.Linear)))


PARTS = (
    placements,
    a_sum_over_ranks,
    tensor_parallel_layer,
    tensor_parallel_and_intercepted,
    fully_sharded,
    data_parallel,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[1]), world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    for part in PARTS:
        part(mesh)
        sys.stdout.write(part.__name__ + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()
    # Gloo's threads may release tensors after the interpreter has ended, which aborts the process:
    # https://github.com/pytorch/pytorch/pull/179291
    os._exit(0)
