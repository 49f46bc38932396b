"""Backbone: finds the head of any net, keeps nothing between passes, and is transparent to torch's transforms."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from metacal.errors import InputError
from metacal.models import Backbone


class Odd(nn.Module):
    """A net whose last registered Linear layer does not make the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.classify = nn.Linear(6, 3)
        self.body = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(torch.tanh(self.body(x)))


class Wrapped(nn.Module):
    """A net that changes the output of `inner` by `change`."""

    def __init__(self, change: object) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.inner(x))  # type: ignore[operator]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def test_features_logits_and_sizes() -> None:
    net = small()
    backbone = Backbone(net)
    x = torch.randn(5, 4)
    logits, features = backbone(x)
    assert backbone.net is net
    assert (backbone.head_name, backbone.in_features, backbone.n_classes) == ("3", 6, 3)
    torch.testing.assert_close(logits, net[3](features), rtol=0, atol=0)
    net.eval(), backbone.eval()
    torch.testing.assert_close(backbone(x)[0], net(x), rtol=0, atol=0)


def test_logits_inside_an_output_object() -> None:
    class Output(dict):
        """As model libraries return: a dictionary with attributes."""

        def __getattr__(self, name: str) -> Tensor:
            return self[name]

    net, x = small(), torch.randn(5, 4)
    held = nn.Sequential(net)
    held.register_forward_hook(lambda _m, _a, logits: Output(logits=logits, hidden_states=None))
    for got, wanted in zip(Backbone(held)(x), Backbone(net)(x)):
        assert torch.equal(got, wanted)
    with pytest.raises(InputError, match="are not the output of its layer 'inner'"):
        Backbone(Wrapped(lambda z: Output(logits=z + 1)))(x)


def test_named_head() -> None:
    x = torch.randn(5, 4)
    net = Odd()
    logits, features = Backbone(net, head="classify")(x)
    torch.testing.assert_close(features, torch.tanh(net.body(x)))
    torch.testing.assert_close(logits, net(x))


def test_head_named_by_registration_but_not_making_the_logits_is_explained() -> None:
    with pytest.raises(InputError, match="they come from 'classify': pass head='classify'"):
        Backbone(Odd())(torch.randn(5, 4))


@pytest.mark.parametrize("change", [lambda z: z.log_softmax(-1), lambda z: 2 * z, lambda z: z[:, :2]])
def test_logits_changed_after_the_head_are_refused(change: object) -> None:
    with pytest.raises(InputError, match="are not the output of its layer 'inner'; the model must return"):
        Backbone(Wrapped(change))(torch.randn(5, 4))


def test_other_refusals() -> None:
    with pytest.raises(InputError, match="Sequential has no Linear layer"):
        Backbone(nn.Sequential(nn.Flatten()))
    with pytest.raises(InputError, match="head must name a Linear layer of the model, got 'fc'; it has '0', '3'"):
        Backbone(small(), head="fc")
    with pytest.raises(InputError, match="must return a tensor of logits, got dict"):
        Backbone(Wrapped(lambda z: {"logits": z}))(torch.randn(5, 4))


def test_state_dict_keys_hooks_and_parameters_of_the_net_stay() -> None:
    net = small()
    keys = list(net.state_dict())
    backbone = Backbone(net)
    backbone(torch.randn(5, 4))
    assert list(backbone.net.state_dict()) == keys
    assert [id(p) for p in backbone.parameters()] == [id(p) for p in net.parameters()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in backbone.modules())


def test_hook_is_gone_after_an_error() -> None:
    backbone = Backbone(small())
    with pytest.raises(RuntimeError):
        backbone(torch.randn(5, 7))
    assert not backbone.head._forward_hooks


def test_nothing_of_a_pass_outlives_it() -> None:
    backbone = Backbone(small())
    logits, features = backbone(torch.randn(5, 4))
    alive = [weakref.ref(logits), weakref.ref(features)]
    gc.disable()  # reference counts alone must free them: cycles would pile up between collections
    try:
        del logits, features
        assert [a() for a in alive] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_copies_are_independent(duplicate: object) -> None:
    backbone = Backbone(small()).eval()
    x = torch.randn(5, 4)
    backbone(x)
    twin = duplicate(backbone)  # type: ignore[operator]
    torch.testing.assert_close(twin(x), backbone(x), rtol=0, atol=0)
    with torch.no_grad():
        backbone.head.weight.zero_()
    assert not torch.equal(twin(x)[0], backbone(x)[0])
    torch.testing.assert_close(twin(x)[0], twin.head(twin(x)[1]))


def test_functional_call_uses_the_given_parameters() -> None:
    backbone = Backbone(small()).eval()
    x = torch.randn(5, 4)
    params = {n: torch.randn_like(p) for n, p in backbone.named_parameters()}
    other = copy.deepcopy(backbone)
    other.load_state_dict(params, strict=False)
    torch.testing.assert_close(functional_call(backbone, params, (x,)), other(x))


def test_vmap_over_parameters() -> None:
    backbone = Backbone(small()).eval()
    x = torch.randn(5, 4)
    params = {n: torch.stack([p, 2 * p]).detach() for n, p in backbone.named_parameters()}
    logits, features = vmap(lambda p: functional_call(backbone, p, (x,)))(params)
    assert logits.shape == (2, 5, 3) and features.shape == (2, 5, 6)
    torch.testing.assert_close(logits[0], backbone(x)[0])


def test_head_used_twice_gives_the_features_of_its_last_use() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.tanh(self.layer(x)))

    net = Twice()
    x = torch.randn(5, 4)
    _, features = Backbone(net)(x)
    torch.testing.assert_close(features, torch.tanh(net.layer(x)))


def test_autocast_keeps_the_head_found() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        logits, features = Backbone(small())(torch.randn(5, 4))
    assert logits.dtype == torch.bfloat16 and features.shape == (5, 6)


def test_compiled_net_is_one_graph_and_equals_eager() -> None:
    sizes = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> torch.fx.GraphModule:
        sizes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph

    backbone = Backbone(small())
    compiled = torch.compile(backbone, backend=backend)
    for _ in range(3):
        x = torch.randn(5, 4)
        torch.testing.assert_close(compiled(x), backbone(x))
    assert len(sizes) == 1 and sizes[0] >= 5  # four layers and the flattening; never compiled again
    logits, features = compiled(x)
    (grad,) = torch.autograd.grad(logits.square().sum(), backbone.head.weight)
    torch.testing.assert_close(grad, 2 * logits.T @ features)
    assert not backbone.head._forward_hooks
