"""Made-up diagnoses that look like real ones, with everything that can be awkward in them."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from attoscope.diagnosis import Closeup, Diagnosis, Mark, Text
from attoscope.findings import Evidence, Finding, Remedy
from attoscope.measures.base import Reading

SHUFFLED = "the same tokens in random order"
HOSTILE = (
    "<script>alert('x')</script>",
    "<!--",
    "-->",
    "\"'`&amp;",
    "שלום",
    "\u202eevil",
    "Ġtold",
    "▁the",
    "##ing",
    "\udce2",
    "\x1b[31m",
    " ",
    "\n",
    "",
    "👩‍🔬",
    "</style></main>",
    "{{ 7 * 7 }}",
)


def head_reading(rng, stacks, name, title, *, unit="share", top=1.0, bounds=(0.0, 1.0), gaps=0):
    """A site × head reading over `stacks`: (track prefix, call, layers, heads)."""
    sites = [f"{s}.{i}{c}" for s, c, layers, _ in stacks for i in range(layers)]
    heads = max(h for *_, h in stacks)
    depth = np.linspace(0.1, 0.9, len(sites))[:, None]
    values = top * np.clip(depth + rng.normal(0, 0.2, (len(sites), heads)), 0.005, 0.995)
    row = 0
    for _, _, layers, own in stacks:
        values[row : row + layers, own:] = np.nan
        row += layers
    for _ in range(gaps):
        values[rng.integers(len(sites)), rng.integers(heads)] = np.nan
    width = 0.02 * top * (1 + rng.random(values.shape))
    return Reading(
        name=name,
        title=title,
        meaning=f"{title} of each head's rows, over documents. Low: few keys; high: many.",
        unit=unit,
        range=bounds,
        dims=("site", "head"),
        coords={"site": tuple(sites), "head": tuple(range(heads))},
        values=values,
        low=values - width,
        high=values + width,
        null=values * 0.6 + 0.1 * top,
        null_meaning=SHUFFLED,
        row_error=width / 4,
        reason="no row of this head had a key to choose from" if gaps else "",
        source="Zhai et al. 2023, section 3",
    )


def point_reading(rng, stacks, name, title, unit, bounds=(None, None), scale=1.0, null=True):
    """A reading along the depth, with "in" and "final" points."""
    points, values = [], []
    for stack, _, layers, _ in stacks:
        labels = ["in", *map(str, range(layers)), "final"]
        points += [f"{stack}.{label}" for label in labels]
        steps = rng.normal(0.03, 0.03, len(labels)).cumsum()
        values.append(scale * (0.3 + np.abs(steps)))
    flat = np.concatenate(values)
    if name == "cosine":
        flat[4] = np.nan
    return Reading(
        name=name,
        title=title,
        meaning=f"{title} of the tokens of a document. It rises when depth smooths tokens out.",
        unit=unit,
        range=bounds,
        dims=("point",),
        coords={"point": tuple(points)},
        values=flat,
        low=flat * 0.96,
        high=flat * 1.05,
        null=flat * 1.2 if null else None,
        null_meaning=SHUFFLED if null else "",
        row_error=None,
        reason="a document had one token there",
        source="Nguyen et al. 2023, eq. 7",
    )


def make(stacks, kind, seed=0, hostile=False):
    """A whole diagnosis over `stacks`: (stack, call suffix, layers, heads)."""
    rng = np.random.default_rng(seed)
    selves = [s for s in stacks if not s[1]]
    curves = [
        ("cosine", "Token cosine", "cosine", (-1.0, 1.0), 1.0, True),
        ("effective_rank", "Effective rank", "dimensions", (1.0, None), 90.0, True),
        ("norm", "Norm of the residual stream", "norm", (0.0, None), 30.0, True),
        ("rank_one_residual", "Rank-one residual", "share", (0.0, 1.0), 0.7, False),
    ]
    readings = [
        head_reading(rng, stacks, "normalised_entropy", "Normalised entropy", gaps=3),
        head_reading(rng, stacks, "first_share", "Share of the first token"),
        head_reading(
            rng, stacks, "score_scale", "Score scale", unit="nats", top=9.0, bounds=(0.0, None)
        ),
        *(
            point_reading(rng, selves, n, t, u, b, scale, null)
            for n, t, u, b, scale, null in curves
        ),
    ]
    massive = point_reading(
        rng, selves, "massive_activation", "Massive activation", "ratio", (1.0, None)
    )
    values = np.geomspace(1.2, 900, len(massive.values))
    parts = {**massive.__dict__, "values": values, "low": values * 0.9, "high": values * 1.1}
    readings.append(Reading(**{**parts, "null": np.full(len(values), 1.1)}))
    never = {**readings[3].__dict__, "name": "dirichlet_energy", "title": "Dirichlet energy"}
    never.update(values=np.full(len(massive.values), np.nan), low=None, high=None, null=None)
    readings.append(Reading(**{**never, "reason": "it needs at least three tokens"}))
    stack, _, layers, heads = stacks[-1][0], None, stacks[-1][2], stacks[-1][3]
    name = '<b>SmolLM2</b> & "co"' if hostile else "SmolLM2-135M-Instruct"
    words = ("The captain told the crew that the storm would pass , but the crew did not "
             "believe the captain").split()  # fmt: skip
    tokens = tuple(words) + (HOSTILE if hostile else ())
    text = Text(0, "words", tokens)
    long = Text(3, "words", tuple(f"w{i}" for i in range(600)))
    return Diagnosis(
        model={
            "name": name,
            "architecture": "LlamaForCausalLM",
            "kind": kind,
            "parameters": 134_515_008,
            "layers": sum(s[2] for s in selves),
            "heads": selves[0][3],
            "dtype": "float32",
            "device": "cpu",
            "tied": True,
            "routes": {"registry": layers},
            "stacks": [
                {"name": s[0], "layers": s[2], "heads": s[3], "key_heads": max(1, s[3] // 3)}
                for s in selves
            ],
            "unchanged": {"equal": True, "max_difference": 0.0},
            "notes": [],
        },
        data={
            "documents": 16,
            "tokens": 4_096,
            "max_tokens": 256,
            "truncated_documents": 5,
            "dropped_tokens": 1_234,
            "rows": "128 per sequence",
            "null": "same tokens in random order, 4 of 16 documents",
            "sources": ["news.txt", "<img src=x>"] if hostile else ["news.txt"],
            "notes": ["5 of 16 documents were cut: 1,234 tokens were not read"],
        },
        versions={"attoscope": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
        reading_list=tuple(readings),
        findings=tuple(made_findings(stack, layers, heads, tokens, hostile)),
        closeups=(
            Closeup(f"{stack}.{layers - 1}", heads - 1, text, len(words) - 1,
                    row(rng, len(tokens)), 0.1,
                    why="When captain comes up again, the head looks at what followed it."),
            Closeup(f"{stack}.0", 1, long, 500, row(rng, 600, first=389), 0.1,
                    why="A long document: what lies between is left out."),
            *made_rows(rng, stacks, text),
        ),
        timings={"load": 1.21, "trace": 3.4, "null": 1.1, "total": 5.9},
    )  # fmt: skip


def row(rng, tokens, first=2):
    """A chosen token and three competitors, with weights and margins that fit together."""
    others = rng.choice([i for i in range(tokens) if i != first], 3, replace=False)
    weights = np.sort(rng.dirichlet([4.0, 1, 1, 1]))[::-1] * 0.9
    places = (first, *map(int, others))
    return tuple(
        Mark(p, float(w), float(np.log(weights[0] / w)))
        for p, w in zip(places, weights, strict=True)
    )


def made_rows(rng, stacks, text):
    """What shows the findings, and one row for each head of each call."""
    amount = len(text.tokens)
    stack, _, layers, heads = stacks[-1]
    site = f"{stack}.{layers // 2}"
    place = tuple(Mark(m.position, 100 * m.value) for m in row(rng, amount))
    yield Closeup(f"{stack}.5", None, text, None, place, finding=1, why="A number each.")
    yield Closeup(site, 0, text, 9, row(rng, amount), 0.1, finding=2, why="Most on the first.")
    yield Closeup(site, heads - 1, text, 8, (), None, finding=2, why="Nothing is a number.")
    for stack, call, layers, heads in stacks:
        keys = Text(0, "words", tuple(f"e{i}" for i in range(amount))) if call else None
        for layer in range(layers):
            for head in range(heads):
                marks = row(rng, amount, first=int(rng.integers(amount)))
                query = int(rng.integers(amount))
                yield Closeup(f"{stack}.{layer}{call}", head, text, query, marks, 0.1, keys)


def made_findings(stack, layers, heads, tokens, hostile):
    """One finding of each severity."""
    late = range(layers // 2, layers)
    sites = tuple(f"{stack}.{i}" for i in late)
    sinks = tuple((f"{stack}.{i}", h) for i in late for h in range(0, heads, 2))
    text = " ".join(tokens)
    yield Finding(
        id="tokens-collapsed",
        severity="severe",
        title=f"Tokens collapse to one direction from layer {layers - 2} on",
        sentence="All tokens point the same way, so later layers cannot tell them apart.",
        sites=(f"{stack}.{layers - 2}", f"{stack}.{layers - 1}", f"{stack}.final"),
        heads=(),
        reading="rank_one_residual",
        measured=0.0004,
        unit="share",
        interval=(0.0003, 0.0005),
        null=0.61,
        null_meaning=SHUFFLED,
        evidence=(Evidence(f"{stack}.{layers - 1}", 0.0002, document=3, text=text),),
        paper="Dong et al. 2021 (arXiv 2103.03404)",
        remedy=Remedy(
            "Add a correction that keeps the mean apart.", "treat(model, 'neutreno')"
        ),
    )
    yield Finding(
        id="massive-activation",
        severity="warning",
        title="Massive activation: the first token is 164× the median token at layer 5",
        sentence="Half precision keeps three digits: next to a number this large, small "
        "differences between tokens are lost, and quantising its large channels will hurt.",
        sites=(f"{stack}.5",),
        heads=(),
        reading="massive_activation",
        measured=164.0,
        unit="ratio",
        interval=(159.0, 169.0),
        null=180.0,
        null_meaning=SHUFFLED,
        evidence=tuple(
            Evidence(f"{stack}.5", 164.0 - i, document=i, position=0, token=t)
            for i, t in enumerate(tokens[-6:])
        ),
        paper="Sun et al. 2024",
        remedy=Remedy(
            "Keep this channel in float32, or leave it out when quantising.",
            "from attoscope import diagnose\n\nif 1 < 2 and 'a' > \"b\":\n    diagnose(model)",
        ),
    )
    yield Finding(
        id="attention-sink",
        severity="note",
        title=HOSTILE[0] if hostile else f"{len(sinks)} heads rest on the first token",
        sentence="An attention sink: the head has nothing to say and rests there.",
        sites=sites,
        heads=sinks,
        reading="first_share",
        measured=0.57,
        unit="share",
        interval=None,
        null=None,
        null_meaning="",
        evidence=(
            Evidence(sites[0], 0.88, 4, 0, 17, tokens[17], 3, tokens[2], text),
            Evidence(sites[1], 0.71, 2, 1, 9, tokens[9], 0, tokens[-1]),
        ),
        paper="Xiao et al. 2024 <i>",
        remedy=Remedy("Leave the first token out of maps.", ""),
    )


ENCODER = (("encoder", "", 12, 12),)
DECODER = (("decoder", "", 30, 9),)
BOTH = (("encoder", "", 6, 8), ("decoder", "", 4, 4), ("decoder", ".cross", 4, 4))


@pytest.fixture(scope="session")
def encoder():
    return make(ENCODER, "encoder", hostile=True)


@pytest.fixture(scope="session")
def decoder():
    return make(DECODER, "decoder", seed=1)


@pytest.fixture(scope="session")
def both():
    return make(BOTH, "encoder-decoder", seed=2, hostile=True)


@pytest.fixture(scope="session")
def empty():
    return Diagnosis({}, {}, {}, (), (), (), {})


@pytest.fixture(scope="session")
def chromium():
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    path = path or shutil.which("google-chrome")
    if not path:
        pytest.skip("no Chromium on this machine: pages cannot be looked at")
    return path
