"""What needs no second process: which rows are whose, and that one rank is told nothing."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from metacal import ranks
from metacal.batchnorm import UnionBatchNorm, average_statistics, synchronise, synchronises


@given(n=st.integers(0, 40), size=st.integers(1, 9))
def test_every_row_is_one_ranks(n: int, size: int) -> None:
    shares = []
    for rank in range(size):
        with patch.object(ranks, "size", lambda: size), patch.object(ranks, "rank", lambda r=rank: r):
            shares.append(ranks.share(n))
    assert [i for s in shares for i in range(n)[s]] == list(range(n))
    lengths = [len(range(n)[s]) for s in shares]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)
    for rank, s in enumerate(shares):
        layout = ranks.Rows(tuple(lengths), rank)
        assert (layout.here, layout.total) == (s, n)


def test_one_rank_is_handed_back_what_it_gave() -> None:
    t = torch.randn(3, 2, requires_grad=True)
    before, value = (ranks.bytes_sent(), ranks.messages_sent()), t.detach().clone()
    assert ranks.gather_rows(t) is t and ranks.gather_rows(t, summed=True) is t and ranks.summed(t) is t
    ranks.sum_([t])
    ranks.average_([t])
    ranks.barrier()
    assert torch.equal(t, value) and torch.equal(ranks.gather_together([t])[0], value)
    assert ranks.require_same(3, "seed") == 3 and ranks.broadcast_object("a") == "a"
    assert ranks.gather_integers(1, 2) == [[1, 2]] and ranks.gather_objects(1) == [1]
    assert (ranks.size(), ranks.rank(), ranks.is_first()) == (1, 0, True)
    assert (ranks.bytes_sent(), ranks.messages_sent()) == before


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_normalisation_of_one_rank_is_torchs(momentum: float | None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, momentum=momentum), nn.Flatten(), nn.LazyBatchNorm1d())
    x = torch.randn(5, 2, 4, 4)
    net(x)
    theirs = [net(x), net.eval()(x)]
    net[1].reset_running_stats()
    net[3].reset_running_stats()
    weight, names = net[1].weight, list(net.state_dict())
    net.train()(x)
    assert synchronise(net) is net and type(net[1]) is type(net[3]) is UnionBatchNorm
    assert net[1].weight is weight and list(net.state_dict()) == names
    assert synchronises(net) and not synchronises(net.eval())
    ours = [net.train()(x), net.eval()(x)]
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours))
    average_statistics(net)
