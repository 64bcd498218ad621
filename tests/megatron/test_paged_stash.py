"""Megatron's paged stash under the orders of this project: its own Python, with pages turned on the CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron_pp_ext.megatron.runners.pipeline_runner import begin_step
from megatron_pp_ext.schedule import catalog
from megatron_pp_ext.schedule.actions import Kind

stash = pytest.importorskip("megatron.core.transformer.moe.paged_stash", reason="Megatron 0.18 and later")

MOST_TOKENS, WIDTH, LAYERS = 16, 4, 2
CONFIG = SimpleNamespace(
    moe_paged_stash=True,
    moe_paged_stash_page_size=4,
    moe_paged_stash_buffer_size_factor_cuda=1.1,
    moe_paged_stash_buffer_size_factor_cpu=0.0,
)


class Kernel:
    """A Triton kernel's way of being called, around a function."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid):
        return self._function


def pages_of(tensor, tokens, size):
    """The rows in use, a page at a time."""
    rows = tensor.reshape(-1)[: int(tokens) * WIDTH].view(-1, WIDTH)
    return rows.split(size)


def turn_in(source, buffer, _, tokens, free, __, head, tail, capacity, record, overflow, *rest, **sizes):
    pages = pages_of(source, tokens, sizes["PAGE_SIZE"])
    first, new_head = int(head[0]), rest[-1]
    new_head.copy_(head)
    if first + len(pages) > int(tail[0]):
        overflow.fill_(1)
        return
    for number, page in enumerate(pages):
        record[number] = free[(first + number) % int(capacity[0])]
        start = int(record[number]) * sizes["PAGE_SIZE"]
        buffer[start : start + len(page)] = page
    new_head[0] = first + len(pages)


def bring_back(buffer, _, target, tokens, record, __, ___, free, ____, tail, capacity, new_tail, **sizes):
    """Pages given back are spoilt: nobody may read them any more."""
    new_tail.copy_(tail)
    pages = pages_of(target, tokens, sizes["PAGE_SIZE"])
    for number, page in enumerate(pages):
        start = int(record[number]) * sizes["PAGE_SIZE"]
        page.copy_(buffer[start : start + len(page)])
        buffer[start : start + len(page)] = torch.nan
        free[(int(tail[0]) + number) % int(capacity[0])] = record[number]
    new_tail[0] = int(tail[0]) + len(pages)


class Experts(torch.autograd.Function):
    """x * x / 2 of the tokens that came, with its input kept as a fused grouped MLP keeps it."""

    @staticmethod
    def forward(ctx, x, tokens):
        kept = x.detach().clone()
        kept.grouped_tensor_scale_inv = False
        ctx.save_for_backward(kept)
        ctx.used = (torch.arange(MOST_TOKENS) < tokens)[:, None]
        return torch.where(ctx.used, x * x / 2, 0)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.where(ctx.used, gradient * x, 0), None


def forward(x, chunk, chunks, tokens):
    """A chunk's layers between the marks that Megatron sets; without pages if there is no ``begin_step``."""
    stash.paged_stash_init_chunk_handler(chunks, chunk)
    for _ in range(LAYERS):
        x = stash.paged_stash_group_start(x)
        pages = stash.get_paged_stash_context("experts", MOST_TOKENS, torch.tensor(tokens), tokens)
        with pages or nullcontext():
            x = Experts.apply(x, tokens)
        x = stash.paged_stash_group_commit(x)
    return x


def gradients(schedule, rank):
    """The gradients of all inputs, by stage and microbatch, in a step of the order of ``rank``."""
    in_flight, found = {}, {}
    for stage, kind, microbatch in schedule.orders[rank]:
        at = stage, microbatch
        if kind is Kind.F:
            seed = torch.Generator().manual_seed(100 * stage + microbatch)
            x = (torch.rand(MOST_TOKENS, WIDTH, generator=seed) + 0.5).requires_grad_()
            tokens = MOST_TOKENS - (stage + microbatch) % 3
            placement = schedule.placement
            in_flight[at] = x, forward(x, placement.chunk_of(stage), placement.chunks, tokens)
        elif kind is not Kind.W:
            x, output = in_flight.pop(at)
            output.sum().backward()
            found[at] = x.grad
    return found


@pytest.fixture(autouse=True)
def pages(monkeypatch):
    monkeypatch.setattr(stash, "paged_stash_copy_kernel", Kernel(turn_in))
    monkeypatch.setattr(stash, "paged_stash_pop_kernel", Kernel(bring_back))
    monkeypatch.setattr(stash.PagedStashManager, "STASH_MGR", None)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_pages_come_back_in_time_under_every_order(name, monkeypatch):
    ranks = 3
    schedule = catalog.build(name, ranks, 5)
    for rank in range(ranks):
        monkeypatch.setattr(stash.PagedStashManager, "STASH_MGR", None)
        plain = gradients(schedule, rank)
        monkeypatch.setattr(stash.PagedStashManager, "STASH_MGR", None)
        for _ in range(3):
            begin_step(CONFIG, forward_only=False)
            ours = gradients(schedule, rank)
            assert all(torch.equal(ours[at], plain[at]) for at in plain)
            begin_step(CONFIG, forward_only=True)  # an evaluation goes without pages
            gradients(catalog.forward_only(schedule.placement, 3), rank)
        manager = stash.PagedStashManager.get_instance()
        assert manager.status == "captured" and not manager.overflow.any()


def test_without_the_flag_there_are_no_pages():
    begin_step(SimpleNamespace(moe_paged_stash=False), forward_only=False)
    begin_step(SimpleNamespace(), forward_only=False)
    assert stash.PagedStashManager.STASH_MGR is None
