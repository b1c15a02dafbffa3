"""The spectral parameterisation: eigenvalues where they belong, at the start and after training."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attoscope
from attoscope import AttoscopeError
from attoscope.remedies import Treatment
from attoscope.remedies.places import Place
from attoscope.remedies.spectral import LEAST, nearest_start, row_map
from attoscope.trace import Batch
from attoscope.unchanged import first_output
from tests.models import HEADS, WIDTH
from tests.remedies.treated import data_of, hooks, output, sized

MODELS = ("bert", "vit", "gpt2", "bloom", "deberta", "nano", "encoder", "encoder_time_first")


def maps(model: nn.Module, treatment: Treatment) -> list[tuple[Tensor, Tensor, int]]:
    """(value, output) of every treated layer, as maps on rows; and the size of a head."""
    found = []
    for record in treatment.record["places"]:
        place = Place.of(record)
        value, out = (row_map(model.get_submodule(n)) for n in (place.value, place.output))
        value, out = (
            w.detach().T if transposed else w.detach() for w, transposed in (value, out)
        )
        found.append((place.heads.own(value), out, place.heads.size))
    return found


def spectra(model: nn.Module, treatment: Treatment) -> list[np.ndarray]:
    return [
        torch.linalg.eigvals((value @ out).double()).numpy()
        for value, out, _ in maps(model, treatment)
    ]


def loss_of(found: Any) -> Tensor:
    """Some columns only: the square of all of them is constant behind a normalisation."""
    loss: Tensor = first_output(found)[..., :5].sum(-1).square().mean()
    return loss


def train(model: nn.Module, run: Any, parameters: Any, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(list(parameters), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(run()).backward()
        optimizer.step()


@pytest.mark.parametrize("mode", ["sharpen", "smooth"])
@pytest.mark.parametrize("clip", ["linear", "square"])
@pytest.mark.parametrize("start", ["nearest", "random"])
def test_the_spectrum_stays_in_its_interval_while_training(
    mode: str, clip: str, start: str
) -> None:
    subject, batch = sized("bert")
    treatment = attoscope.treat(subject.model, "spectral", mode=mode, clip=clip, start=start)
    low, high = (-1, 0) if mode == "sharpen" else (0, 1)
    before = spectra(subject.model, treatment)
    train(subject.model, lambda: subject.run(batch), treatment.parameters())
    after = spectra(subject.model, treatment)
    assert any(not np.allclose(a, b, atol=1e-3) for a, b in zip(before, after, strict=True))
    for values in (*before, *after):
        assert values.real.min() >= low - 1e-5
        assert values.real.max() <= high + 1e-5
        assert np.abs(values.imag).max() < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_parameterised_and_put_back(name: str) -> None:
    subject, batch = sized(name)
    model, data = subject.model, data_of(subject, batch)
    before, names = output(subject, batch), list(model.state_dict())
    parameters = [(p, p.requires_grad) for p in model.parameters()]
    treatment = attoscope.treat(model, "spectral", data)
    for module, (value, out, size) in zip(
        treatment.modules, maps(model, treatment), strict=True
    ):
        eigenvalues, mine = module.spectrum().detach(), module.basis().detach()
        torch.testing.assert_close(value.T @ value, torch.eye(WIDTH), rtol=0, atol=1e-5)
        torch.testing.assert_close(out, eigenvalues[:, None] * mine.T, rtol=0, atol=1e-6)
        # Head by head: the columns of Q that are its own are eigenvectors of its map.
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            head_map = value[:, part] @ out[part]
            wanted = mine[:, part] * eigenvalues[part]
            torch.testing.assert_close(head_map @ mine[:, part], wanted, rtol=0, atol=1e-5)
    train(model, lambda: subject.run(batch), treatment.parameters())
    treatment.undo()
    assert torch.equal(output(subject, batch), before)
    assert list(model.state_dict()) == names
    assert all(p is q and p.requires_grad is f for p, (q, f) in zip(
        model.parameters(), parameters, strict=True))  # fmt: skip
    assert hooks(model) == 0


def test_the_nearest_start_by_hand() -> None:
    """H = [[1, 2], [0, -3]]: symmetric part [[1, 1], [1, -3]], eigenvalues -1 ± sqrt 5."""
    h = torch.tensor([[1.0, 2.0], [0.0, -3.0]])
    for mode, sign in (("sharpen", -1), ("smooth", 1)):
        q, size = nearest_start(h, torch.eye(2), 1, mode)
        near = q @ torch.diag(sign * size) @ q.T
        low, high = (-1, 0) if mode == "sharpen" else (0, 1)
        eigenvalues = np.clip([-1 - 5**0.5, -1 + 5**0.5], low, high)
        np.testing.assert_allclose(
            np.sort(torch.linalg.eigvalsh(near)), np.sort(eigenvalues), atol=1e-12
        )
        # Nothing of that kind nearby is nearer.
        generator, best = torch.Generator().manual_seed(0), float((near - h).norm())
        for _ in range(200):
            turn = torch.linalg.qr(torch.randn(2, 2, generator=generator).double())[0]
            values = torch.rand(2, generator=generator).double() * sign
            assert float((turn @ torch.diag(values) @ turn.T - h).norm()) >= best - 1e-9


def test_a_map_of_that_kind_is_its_own_nearest() -> None:
    torch.manual_seed(0)
    q = torch.linalg.qr(torch.randn(6, 6).double())[0]
    size = torch.linspace(0.1, 0.9, 6).double()
    basis, found = nearest_start(q, -size[:, None] * q.T, 2, "sharpen")
    torch.testing.assert_close(basis @ torch.diag(found) @ basis.T, q @ torch.diag(size) @ q.T)
    # And its heads keep the eigenvectors that they had.
    for head in range(3):
        own, theirs = (x[:, 2 * head : 2 * head + 2] for x in (basis, q))
        torch.testing.assert_close(own @ own.T, theirs @ theirs.T)


def test_a_square_clip_has_no_dead_start() -> None:
    subject, batch = sized("bert")
    treatment = attoscope.treat(subject.model, "spectral", clip="square")
    for module in treatment.modules:
        assert float(-module.spectrum().detach().max()) >= LEAST * (1 - 1e-5)
    loss_of(subject.run(batch)).backward()
    assert all(bool((module.psi.grad != 0).all()) for module in treatment.modules)


@pytest.mark.parametrize("name", ["bert", "gpt2", "nano", "encoder_time_first"])
def test_folding_is_exact(name: str) -> None:
    subject, batch = sized(name)
    model = subject.model
    names, ids = list(model.state_dict()), [id(p) for p in model.parameters()]
    flags = [p.requires_grad for p in model.parameters()]
    treatment = attoscope.treat(model, "spectral", data_of(subject, batch), clip="square")
    train(model, lambda: subject.run(batch), treatment.parameters())
    treated = output(subject, batch)
    treatment.fold()
    assert torch.equal(output(subject, batch), treated)
    assert list(model.state_dict()) == names
    assert [id(p) for p in model.parameters()] == ids
    assert [p.requires_grad for p in model.parameters()] == flags
    for again in (treatment.fold, treatment.undo):
        with pytest.raises(AttoscopeError, match="no longer in the model"):
            again()


def test_no_remedy_but_this_one_folds() -> None:
    subject, _ = sized("bert")
    with pytest.raises(AttoscopeError, match="'neutreno', which no weights"):
        attoscope.treat(subject.model, "neutreno").fold()


def test_the_basis_is_made_once_while_nothing_is_trained(monkeypatch: Any) -> None:
    subject, batch = sized("bert")
    treatment = attoscope.treat(subject.model, "spectral")
    counted, plain = [], torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda x: counted.append(1) or plain(x))
    one, other = output(subject, batch), output(subject, batch)
    assert len(counted) == 3
    assert torch.equal(one, other)
    loss_of(subject.run(batch)).backward()
    assert len(counted) == 6
    # Even where a weight is set behind autograd's back.
    treatment.modules[0].psi.data.fill_(0.25)
    changed = output(subject, batch)
    assert len(counted) == 7
    assert not torch.equal(changed, one)


def test_two_backward_passes_each_have_their_own_graph() -> None:
    subject, batch = sized("bert")
    treatment = attoscope.treat(subject.model, "spectral")
    for _ in range(2):
        loss_of(subject.run(batch)).backward()
    twice = [p.grad.clone() for p in treatment.parameters()]
    subject.model.zero_grad()
    loss_of(subject.run(batch)).backward()
    for double, parameter in zip(twice, treatment.parameters(), strict=True):
        torch.testing.assert_close(double, 2 * parameter.grad)


def test_only_what_is_used_is_trained() -> None:
    """A value weight of its own has nothing left to train; a fused one makes keys and queries."""
    subject, _ = sized("bert")
    attoscope.treat(subject.model, "spectral")
    named = dict(subject.model.named_parameters())
    prefix = "encoder.layer.0.attention"
    assert not named[f"{prefix}.self.value.parametrizations.weight.original"].requires_grad
    assert not named[f"{prefix}.output.dense.parametrizations.weight.original"].requires_grad
    subject, batch = sized("gpt2")
    attoscope.treat(subject.model, "spectral")
    loss_of(subject.run(batch)).backward()
    fused = subject.model.transformer.h[0].attn.c_attn.parametrizations.weight.original
    assert bool((fused.grad[:, : 2 * WIDTH] != 0).any())
    assert not bool(fused.grad[:, 2 * WIDTH :].any())


def test_what_does_not_fit_is_refused() -> None:
    subject, batch = sized("llama")
    before = output(subject, batch)
    with pytest.raises(AttoscopeError, match="2 value heads for 4 query heads"):
        attoscope.treat(subject.model, "spectral")
    assert torch.equal(output(subject, batch), before)

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 48), nn.Linear(16, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.qkv(x).unflatten(-1, (3, 4, 4)).unbind(2)
            heads = nn.functional.scaled_dot_product_attention(
                *(p.transpose(1, 2) for p in parts)
            )
            return x + self.out(heads.transpose(1, 2).flatten(2))

    with pytest.raises(AttoscopeError, match="4 x 4 and a width of 32"):
        attoscope.treat(nn.Sequential(Narrow(), Narrow()), "spectral", torch.randn(2, 5, WIDTH))


def test_biases_stay_and_a_note_says_so() -> None:
    subject, _ = sized("bert")
    layer = subject.model.encoder.layer[0].attention
    with torch.no_grad():
        layer.self.value.bias.fill_(0.5)
    treatment = attoscope.treat(subject.model, "spectral")
    assert bool((layer.self.value.bias == 0.5).all())
    assert any(note.startswith("biases of the value") for note in treatment.notes)


def test_half_precision_and_copies() -> None:
    subject, batch = sized("bert")
    model = subject.model.bfloat16()
    treatment = attoscope.treat(model, "spectral")
    assert {p.dtype for p in treatment.parameters()} == {torch.bfloat16}
    for values in spectra(model, treatment):
        assert values.real.min() >= -1.02
        assert values.real.max() <= 0.02
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(first_output(twin(**batch.inputs)), output(subject, batch))
        twin.encoder.layer[0].attention.self.attoscope_spectral.psi.zero_()
        assert not torch.equal(first_output(twin(**batch.inputs)), output(subject, batch))
    treatment.undo()
    assert isinstance(batch, Batch)
