"""Spectra, margins and steps of live models, against numbers known beforehand or got elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attoscope.measures.base import Reading
from attoscope.measures.smoothness import family
from attoscope.prediction.agreement import compare
from attoscope.prediction.documents import Document, cut
from attoscope.prediction.heads import HeadMap, head_maps, random_asymmetry
from attoscope.prediction.maps import value_maps
from attoscope.prediction.smoothing import Smoothing, _steps, cut_all, smoothing_readings
from attoscope.trace import Batch, Subject, watch
from tests.models import EXAMPLES, HEADS, LAYERS, TOKENS, WIDTH, make

SIZE = WIDTH // HEADS


def read(subject: Subject, *batches: Batch, **options: int | bool) -> Smoothing:
    seen = Smoothing(value_maps(subject, batches[0]), **options)  # type: ignore[arg-type]
    for batch in batches:
        watch(subject, batch, seen.visit)
    return seen


def by_name(readings: tuple[Reading, ...]) -> dict[str, Reading]:
    return {reading.name: reading for reading in readings}


def own_map(subject: Subject, strengths: list[float]) -> None:
    """Makes head h of every BERT layer read and write its own channels, times its strength."""
    eye = torch.eye(WIDTH)
    with torch.no_grad():
        for layer in subject.model.encoder.layer:
            attention = layer.attention
            attention.self.value.weight.copy_(eye)
            scale = torch.tensor(strengths).repeat_interleave(SIZE)
            attention.output.dense.weight.copy_(eye * scale)


def test_known_maps_give_known_spectra_and_margins() -> None:
    """V_h O_h = s on 8 channels: eigenvalues s, symmetric; attention's are those of its matrix."""
    strengths = [0.5, -0.5, -3.0, 2.0]
    subject, batch = make("bert")
    own_map(subject, strengths)
    one = replace(batch, inputs={k: v[:1] for k, v in batch.inputs.items()}, documents=(0,),
                  valid=batch.valid[:1] if batch.valid is not None else None)  # fmt: skip
    seen = read(subject, one)
    found = by_name(seen.readings())
    model = EXAMPLES["bert"].build("eager").eval()
    model.load_state_dict(subject.model.state_dict())
    with torch.no_grad():
        weights = model(**one.inputs, output_attentions=True).attentions
    for layer in range(LAYERS):
        for head, strength in enumerate(strengths):
            for name in ("map_largest", "map_smallest"):
                assert found[name].values[layer, head] == pytest.approx(strength, rel=1e-6)
            assert found["map_positive_share"].values[layer, head] == (strength > 0)
            assert found["map_asymmetry"].values[layer, head] == pytest.approx(0, abs=1e-6)
            values = np.linalg.eigvals(weights[layer][0, head].double().numpy())
            others = np.delete(values, np.abs(values - 1).argmin())
            p = max(1.0, abs(1 + strength))
            o = max(1.0, float(np.abs(1 + others * strength).max()))
            assert found["smoothing_margin"].values[layer, head] == pytest.approx(
                math.log(p / o), abs=1e-4
            )
            second = found["attention_second"].values[layer, head]
            assert second == pytest.approx(np.abs(others).max(), abs=1e-4)
    kinds = [seen.kinds["encoder.0", head].most_common(1)[0][0] for head in range(HEADS)]
    # With the head's -0.5 nothing grows: what wins is what the head does not read.
    assert kinds[1] in ("inactive", "undecided")
    assert [kinds[0], *kinds[2:]] == ["smooths"] * 3


def test_a_negative_gain_in_front_turns_the_kind() -> None:
    """One head as wide as the stream with the map +s: a gain of -1 makes it -s, which sharpens."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=64, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, intermediate_size=48,
    )  # fmt: skip
    subject = Subject.of(LlamaModel(config).eval())
    batch = Batch({"input_ids": torch.arange(3, 17).reshape(2, 7)}, (0, 1))
    kinds = {}
    for gain in (1.0, -1.0):
        with torch.no_grad():
            subject.model.embed_tokens.weight.normal_(
                generator=torch.Generator().manual_seed(0)
            )
            for layer in subject.model.layers:
                layer.input_layernorm.weight.fill_(gain)
                layer.self_attn.v_proj.weight.copy_(torch.eye(WIDTH))
                layer.self_attn.o_proj.weight.copy_(0.4 * torch.eye(WIDTH))
        seen = read(subject, batch)
        found = by_name(seen.readings())
        kinds[gain] = seen.kinds["decoder.0", 0].most_common(1)[0][0]
        assert seen.flipped["decoder.0", 0] == (2 if gain < 0 else 0)
        assert np.sign(found["smoothing_margin"].values[0, 0]) == gain
        assert found["smoothing_margin_without_gain"].values[0, 0] > 0.01
        assert found["head_step"].values[0, 0] * gain < 0
        with torch.no_grad():
            x = subject.model.embed_tokens(batch.inputs["input_ids"]).double()
        # In units of the stream: what the norm divides the median token by.
        strengths = 0.4 * gain / (x.square().mean(-1) + 1e-6).sqrt().median(1).values
        assert found["map_largest"].values[0, 0] == pytest.approx(
            float(strengths.mean()), rel=1e-5
        )
        # Causal attention: eigenvalues on the diagonal, the first of them 1.
        diagonal = _eager_diagonal(config, subject, batch)
        margins = [
            math.log(abs(1 + float(h)) / float((1 + h * a[1:]).abs().max()))
            for h, a in zip(strengths, diagonal, strict=True)
        ]
        assert found["smoothing_margin"].values[0, 0] == pytest.approx(
            np.mean(margins), abs=1e-4
        )
        assert found["map_positive_share"].values[0, 0] == (gain > 0)
    assert kinds == {1.0: "smooths", -1.0: "sharpens"}


def _eager_diagonal(config: Any, subject: Subject, batch: Batch) -> torch.Tensor:
    """What each token gives to itself in the first layer, as transformers itself says."""
    from transformers import LlamaModel

    config._attn_implementation = "eager"
    model = LlamaModel(config).eval()
    model.load_state_dict(subject.model.state_dict())
    with torch.no_grad():
        first = model(**batch.inputs, output_attentions=True).attentions[0]
    config._attn_implementation = "sdpa"
    return first[:, 0].diagonal(dim1=1, dim2=2).double()


def test_steps_are_those_that_hidden_states_show() -> None:
    """What enters the LayerNorm behind attention is the stream plus attention's update."""
    subject, batch = make("bert")
    with torch.no_grad():
        for parameter in subject.model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    between: list[torch.Tensor] = []
    hooks = [
        layer.attention.output.LayerNorm.register_forward_pre_hook(
            lambda _, inputs: between.append(inputs[0])
        )
        for layer in subject.model.encoder.layer
    ]
    with torch.no_grad():
        states = subject.model(**batch.inputs, output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    found = by_name(read(subject, batch).readings())
    assert batch.valid is not None
    content = batch.valid.clone()
    content[:, 0] = False

    def logs(x: torch.Tensor) -> torch.Tensor:
        return family(x.double(), content)[1].log()

    for layer in range(LAYERS):
        start, middle, end = map(logs, (states[layer], between[layer], states[layer + 1]))
        for name, expected in (("attention_step", middle - start), ("rest_step", end - middle)):
            assert found[name].values[layer] == pytest.approx(float(expected.mean()), abs=1e-5)
            assert abs(float(expected.mean())) > 1e-3


def test_without_mlp_and_bias_attention_alone_is_the_model() -> None:
    subject, batch = make("nano")
    with torch.no_grad():
        for block in subject.model.h:
            block.mlp[2].weight.zero_(), block.mlp[2].bias.zero_()
            block.c_attn.bias.zero_(), block.c_proj.bias.zero_(), block.ln_1.bias.zero_()
            block.ln_1.weight.copy_(torch.randn(WIDTH))
    found = by_name(read(subject, batch, carried=True).readings())
    for name in ("frequency_ratio", "cosine"):
        alone, real = found[f"attention_only_{name}"], found[f"model_{name}"]
        assert alone.coords["point"] == ("decoder.in", "decoder.0", "decoder.1", "decoder.2")
        np.testing.assert_allclose(alone.values, real.values, rtol=1e-4, atol=1e-5)
        assert alone.null is not None
        assert np.abs(alone.null[1:] - alone.values[1:]).min() > 1e-3
    np.testing.assert_allclose(found["rest_step"].values, 0, atol=1e-6)
    with torch.no_grad():
        subject.model.h[0].mlp[2].weight.copy_(torch.randn(WIDTH, 64))
    found = by_name(read(subject, batch, carried=True).readings())
    alone, real = found["attention_only_cosine"].values, found["model_cosine"].values
    assert abs(alone[0] - real[0]) < 1e-9 and abs(alone[1] - real[1]) > 1e-2


def some_document(rng: np.random.Generator, tokens: int, width: int, heads: int) -> Document:
    weights = torch.from_numpy(rng.dirichlet(np.ones(tokens), (heads, tokens)))
    x = torch.from_numpy(rng.standard_normal((tokens, width)))
    written = torch.zeros(tokens, heads, width, dtype=torch.float64)
    return Document(0, weights, x, x, written, torch.ones(tokens, dtype=torch.bool), 0.0)


def test_the_null_of_a_step_is_that_of_random_maps() -> None:
    """The closed form against the mean energies of 4,000 drawn maps."""
    subject, batch = make("bert")
    maps = value_maps(subject, batch).found["encoder.layer.0.attention.self"]
    spectra = tuple(replace(one, energy=0.7) for one in head_maps(maps))
    rng = np.random.default_rng(0)
    one = some_document(rng, 6, WIDTH, HEADS)
    values, _ = _steps(one, maps, spectra)
    mean = np.full((6, 6), 1 / 6)
    mixed = (one.attention[0] @ one.x).numpy()
    high = low = 0.0
    for _ in range(4000):
        drawn = one.x.numpy() + mixed @ rng.standard_normal((WIDTH, WIDTH)) * math.sqrt(
            0.7 / WIDTH
        )
        low += float(((mean @ drawn) ** 2).sum())
        high += float(((drawn - mean @ drawn) ** 2).sum())
    x = one.x.numpy()
    start = math.log(np.linalg.norm(x - mean @ x) / np.linalg.norm(mean @ x))
    assert values[-1, 0] == pytest.approx(0.5 * math.log(high / low) - start, abs=0.01)


def test_the_nulls_of_spectra_are_those_of_random_maps() -> None:
    width, size, draws = 96, 24, 40
    rng = np.random.default_rng(1)
    largest, positive, asymmetry = [], [], []
    radius = math.nan
    for _ in range(draws):
        value, output = rng.standard_normal((width, size)), rng.standard_normal((size, width))
        small = output @ value
        values = np.linalg.eigvals(small)
        radius = float(np.linalg.norm(value) * np.linalg.norm(output) / math.sqrt(width * size))
        largest.append(np.abs(values).max() / radius)
        positive.append((values.real > 0).mean())
        whole = value @ output
        asymmetry.append(np.linalg.norm(whole - whole.T) / np.linalg.norm(whole))
    assert np.mean(largest) == pytest.approx(1, abs=0.15)
    assert np.mean(positive) == pytest.approx(0.5, abs=0.05)
    assert np.mean(asymmetry) == pytest.approx(random_asymmetry(width), abs=0.02)


def test_energy_and_radius_of_a_head() -> None:
    subject, batch = make("gpt2")
    maps = next(iter(value_maps(subject, batch).found.values()))
    one: HeadMap = next(head_maps(maps))
    value, output = maps.effective()[0], maps.output[0]
    assert one.energy == pytest.approx(float((value @ output).square().sum()) / WIDTH)
    expected = float(value.norm() * output.norm()) / math.sqrt(WIDTH * SIZE)
    assert one.radius == pytest.approx(expected) and one.wider


def test_padding_and_batches_do_not_matter() -> None:
    subject, batch = make("llama")
    together = by_name(smoothing_readings(subject, [batch]))
    assert batch.valid is not None
    alone = []
    for row, count in enumerate(batch.valid.sum(1).tolist()):
        part = {name: value[row : row + 1, :count] for name, value in batch.inputs.items()}
        alone.append(Batch(part, (row,), batch.valid[row : row + 1, :count]))
    apart = by_name(smoothing_readings(subject, alone))
    assert list(together) == list(apart)
    for name, reading in together.items():
        np.testing.assert_allclose(reading.values, apart[name].values, atol=2e-5, err_msg=name)
        if reading.null is not None and name != "layer_dc_share":
            assert np.isfinite(reading.null).all(), name


def test_what_has_no_square_map_says_so() -> None:
    subject, batch = make("t5")
    margin = by_name(smoothing_readings(subject, [batch]))["smoothing_margin"]
    rows = [i for i, site in enumerate(margin.coords["site"]) if str(site).endswith("cross")]
    assert len(rows) == LAYERS and np.isnan(margin.values[rows]).all()
    assert np.isfinite(np.delete(margin.values, rows, 0)).all()
    assert "cross attention" in margin.reason


def test_a_normalised_update_has_no_step_but_a_margin() -> None:
    subject, batch = make("gemma2")
    found = by_name(smoothing_readings(subject, [batch]))
    assert np.isnan(found["attention_step"].values).all()
    assert np.isfinite(found["smoothing_margin"].values).all()


def test_weights_that_are_not_numbers_are_no_crash() -> None:
    subject, batch = make("gpt2")
    with torch.no_grad():
        subject.model.transformer.h[1].attn.c_proj.weight[0, 0] = math.nan
    margin = by_name(smoothing_readings(subject, [batch]))["smoothing_margin"]
    assert np.isfinite(margin.values[0]).all() and np.isnan(margin.values[1:]).all()
    assert "finite" in margin.reason


def test_only_some_layers() -> None:
    subject, batch = make("gpt2")
    some = by_name(smoothing_readings(subject, [batch], layers=(1, 2)))
    assert some["smoothing_margin"].coords["site"] == ("decoder.1",)


def test_a_cut_keeps_the_token_that_closes_a_document() -> None:
    ids = torch.tensor([[1, 5, 6, 7, 8, 2], [1, 9, 2, 0, 0, 0]])
    valid = ids > 0
    special = (ids == 1) | (ids == 2)
    batch = Batch({"input_ids": ids, "attention_mask": valid.long()}, (0, 1), valid, special)
    short = cut(batch, 2, 4)
    assert short.inputs["input_ids"].tolist() == [[1, 5, 6, 2], [1, 9, 2, 0]]
    assert short.inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert cut(batch, 1, 3).inputs["input_ids"].tolist() == [[1, 5, 2]]
    whole = cut(batch, 2, 6)
    assert torch.equal(whole.inputs["input_ids"], ids) and whole.documents == (0, 1)


@pytest.mark.parametrize("name", ["attention", "attention_time_first"])
def test_only_the_first_documents_of_a_tensor_are_read(name: str) -> None:
    subject, batch = make(name)
    (one,) = cut_all(subject, [batch], 2, 4)
    assert one.documents == (0, 1)
    assert sorted(one.inputs.shape) == [2, TOKENS, WIDTH]
    found = by_name(smoothing_readings(subject, [batch], documents=2))
    assert np.isfinite(found["smoothing_margin"].values).all()


def test_agreement_of_ranks_and_signs() -> None:
    margins = np.arange(1.0, 21.0) - 10.5
    same = compare("heads", "a", "b", margins, -(margins**3))
    assert same.same_sign == 1 and same.rank_correlation == pytest.approx(1)
    assert same.beyond_chance and same.rank_null[0] < 0 < same.rank_null[1] < 0.6
    against = compare("heads", "a", "b", margins, margins)
    assert against.same_sign == 0 and against.rank_correlation == pytest.approx(-1)
    assert not against.beyond_chance
    uneven = compare("heads", "a", "b", margins, -margins, ["a"] * 3 + ["b"] * 17)
    assert uneven.rank_correlation == pytest.approx(1) and uneven.rank_null[0] < 0.7
    few = compare("heads", "a", "b", np.array([1.0, math.nan, 2.0]), np.ones(3))
    assert few.count == 2 and math.isnan(few.rank_correlation)


def test_agreement_by_depth_alone_is_within_chance() -> None:
    """Heads differ between layers and agree there, but within a layer nothing is foreseen."""
    rng = np.random.default_rng(5)
    depth = np.repeat(np.arange(6.0), 10)
    margins, steps = depth + rng.normal(0, 0.1, 60), -depth + rng.normal(0, 0.1, 60)
    groups = [str(d) for d in depth]
    free = compare("heads", "a", "b", margins, steps)
    within = compare("heads", "a", "b", margins, steps, groups)
    assert free.rank_correlation == within.rank_correlation > 0.9
    assert free.beyond_chance and not within.beyond_chance
