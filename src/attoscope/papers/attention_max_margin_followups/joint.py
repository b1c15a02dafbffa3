"""A prompt by itself and together with its head: which tokens it selects, and by how much."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from attoscope.dynamics import AttentionData, LinearHead, Normalised, locally_optimal, train
from attoscope.dynamics.gradients import Gradient
from attoscope.papers.attention_max_margin_followups._paper import PAPER
from attoscope.papers.base import Control, Evidence, Run
from attoscope.svm.estimator import AttentionSVM
from attoscope.svm.selection import Selection
from attoscope.tasks.instances import Instance
from attoscope.tasks.prompts import prompt_sequences, single_prompt

Array = NDArray[np.float64]
STEPS, STEP = 1000, 0.1
STARTS = (1.0, 0.5, 0.0, -0.5, -1.0, -1.5)
CASES = {"tight": (0.5, 1.0), "relaxed": (0.5, 1.5)}
NEAR, APART = 0.05, 0.15


def value_svm(instance: Instance) -> AttentionSVM:
    """The head of least norm that gives each label to its optimal token with margin 1."""
    row = np.arange(len(instance.labels))
    signed = instance.labels[:, None] * instance.tokens[row, instance.optimal]
    keys = np.stack([signed, np.zeros_like(signed)], axis=1)
    return AttentionSVM().fit(keys, np.ones((len(row), 1)), np.zeros(len(row), np.int64))


def prompt_svm(instance: Instance, margins: Array) -> Array:
    """The prompt of least norm with these token margins, one for each sequence."""
    required = np.repeat(margins[:, None], instance.tokens.shape[1], axis=1)
    selection = Selection.cross(
        instance.tokens, instance.queries, instance.optimal, required=required
    )
    return np.asarray(AttentionSVM().fit_selection(selection).weight_[:, 0])


def joint_margins(instance: Instance) -> Array:
    """Token margins under joint training: 1 for support vectors of the head, 0 for others."""
    margins = np.zeros(len(instance.labels))
    margins[value_svm(instance).support_[:, 0]] = 1.0
    return margins


def train_jointly(item: dict[str, Any]) -> dict[str, Array]:
    """Normalised gradient descent on prompt and head at once, from (0, -1) and (-1, 0)."""
    instance = prompt_sequences(item["third"])
    tokens, labels = instance.tokens[None], instance.labels[None]
    p, v = np.array([0.0, -1.0]), np.array([-1.0, 0.0])
    prompts, heads, selected, confidence = [p], [v], [], []
    for _ in range(item["steps"]):
        head = LinearHead(v[None])
        slope = Gradient(AttentionData.cross(tokens, instance.queries[None], labels, head))
        slope.at(p[None, :, None])
        attention, margin = slope.probabilities()[0], slope.margin()[0]
        selected.append(attention[:, 1].mean())
        confidence.append(np.exp(-np.logaddexp(0.0, -margin)).mean())
        outputs = np.einsum("st,std->sd", attention, instance.tokens)
        # -l' of the logistic loss, relative to its largest: no underflow once all is learned.
        log_slope = -np.logaddexp(0.0, margin)
        down = (np.exp(log_slope - log_slope.max()) * instance.labels) @ outputs
        direction = slope.direction[0, :, 0]
        p = p + STEP * direction / np.linalg.norm(direction)
        v = v + STEP * down / np.linalg.norm(down)
        prompts.append(p)
        heads.append(v)
    return {
        "prompts": np.array(prompts),
        "heads": np.array(heads),
        "selected": np.array(selected),
        "confidence": np.array(confidence),
    }


def angle(a: Array, b: Array) -> float:
    """Angle between two vectors of the plane, in radians."""
    return float(abs(np.angle(complex(*a) * complex(*b).conjugate())))


@PAPER.claim(
    name="joint-max-margin",
    statement="Trained together, the head goes to its max-margin direction and the prompt to the "
    "one that asks a margin only of the head's support vectors.",
    source="arXiv 2306.13596, joint training of the prompt and the head",
    criterion=f"prompt and head end within {NEAR} rad of the predicted directions, both where all "
    "sequences are support vectors of the head and where one is not",
)
def joint_max_margin(run: Run) -> Evidence:
    items = [{"third": third, "steps": STEPS} for third in CASES.values()]
    runs = dict(zip(CASES, run.map(train_jointly, items, label="joint training"), strict=True))
    reported = {"tight": (0.9723, 0.2336), "relaxed": (0.9992, 0.0393)}
    table = []
    for case, third in CASES.items():
        instance, found = prompt_sequences(third), runs[case]
        p, v = found["prompts"][-1], found["heads"][-1]
        full, relaxed = (prompt_svm(instance, m) for m in (np.ones(3), joint_margins(instance)))
        table.append(
            {
                "case": case,
                "prompt": p / np.linalg.norm(p),
                "reported_prompt": reported[case],
                "predicted": relaxed / np.linalg.norm(relaxed),
                "angle": angle(p, relaxed),
                "angle_head": angle(v, value_svm(instance).weight_[:, 0]),
                "angle_all_margins_1": angle(p, full),
                "least_selected": found["selected"].min(),
                "steps_to_selected": int(np.argmax(found["selected"] > 0.99)),
                "steps_to_confident": int(np.argmax(found["confidence"] > 0.99)),
            }
        )
    far = table[1]["angle_all_margins_1"]
    return Evidence(
        measured={
            "angles_prompt": [row["angle"] for row in table],
            "angles_head": [row["angle_head"] for row in table],
            "reported_steps_to_selected": 90,
            "reported_steps_to_confident": 60,
        },
        holds=all(max(row["angle"], row["angle_head"]) < NEAR for row in table),
        control=Control(
            "the prediction with margin 1 for all sequences, where one is no support vector",
            {"angle": far},
            fails=far > APART,
        ),
        figure=_joint_figure(runs),
        table=table,
    )


def follow_starts(item: dict[str, Any]) -> dict[str, Any]:
    """Where prompts (0, y) end, and whether the second token is locally optimal."""
    instance = single_prompt(item["third_score"])
    count = len(STARTS)
    values = np.repeat(instance.tokens[None], count, axis=0)
    data = AttentionData(
        values[..., :2],
        np.ones((count, 1, 1)),
        np.ones((count, 1)),
        LinearHead(np.repeat(instance.head[None], count, axis=0)),
        values=values,
    )
    start = np.stack([np.zeros(count), np.array(STARTS)], axis=1)[:, :, None]
    path = train(data, Normalised(STEP), item["steps"], weight=start)
    second = data.selection(0, np.array([1]))
    return {
        "ends": path.selected()[:, 0],
        "prompts": path.weight[:, :, 0],
        "paths": path.weights[..., 0],
        "locally_optimal": len(locally_optimal(second, instance.scores).offending) == 0,
    }


@PAPER.claim(
    name="prompt-basins",
    statement="A prompt can end at a token that is not the best one only if that token is "
    "locally optimal: it scores higher than its support tokens.",
    source="arXiv 2306.13596, locally optimal tokens; its single-input experiment",
    criterion="where the second token is locally optimal exactly the starts (0, -1) and (0, -1.5) "
    f"end at it, within {NEAR} rad of its max-margin direction, and the other four at the best one",
)
def prompt_basins(run: Run) -> Evidence:
    items = [{"third_score": score, "steps": STEPS} for score in (0.0, 0.9)]
    lower, tied = run.map(follow_starts, items, label="third scores")
    instance = single_prompt(0.0)
    selection = Selection(instance.tokens[..., :2], np.ones((1, 1)), np.array([1]))
    direction = AttentionSVM().fit_selection(selection).weight_[:, 0]
    angles = [angle(p, direction) for p in lower["prompts"]]

    def as_predicted(found: dict[str, Any]) -> bool:
        near = [angle(p, direction) < NEAR for p in found["prompts"]]
        ends = list(zip(found["ends"].tolist(), near, strict=True))
        return bool(
            found["locally_optimal"]
            and ends[4:] == [(1, True)] * 2
            and all(token == 0 for token, _ in ends[:4])
        )

    return Evidence(
        measured={
            "end_token": lower["ends"],
            "reported_end_token": [0, 0, 0, 0, 1, 1],
            "angle_to_second_token": angles[4:],
            "second_token_locally_optimal": lower["locally_optimal"],
        },
        holds=as_predicted(lower),
        control=Control(
            "the third token, a support of the second, scores as high as the second",
            {
                "end_token": tied["ends"],
                "reported_end_token": [0] * 6,
                "second_token_locally_optimal": tied["locally_optimal"],
            },
            fails=not as_predicted(tied),
        ),
        figure=_basin_figure({"locally optimal": lower, "support ties": tied}),
        table=[
            {"start": f"(0, {y:g})", "end_token": int(end), "control_end_token": int(other)}
            for y, end, other in zip(STARTS, lower["ends"], tied["ends"], strict=True)
        ],
    )


def _joint_figure(runs: dict[str, dict[str, Array]]) -> Any:
    rows = [
        {"case": case, "step": step, "what": what, "x": x, "y": y}
        for case, found in runs.items()
        for what, path in (("prompt", found["prompts"]), ("head", found["heads"]))
        for step, (x, y) in enumerate(path.tolist())
        if step <= 200
    ]
    rays = [
        {"ray": name, "x": length * x / np.hypot(x, y), "y": length * y / np.hypot(x, y)}
        for name, (x, y) in {"(4, 1)": (4, 1), "(1, 0)": (1, 0), "(0, 1)": (0, 1)}.items()
        for length in (0.0, 20.0)
    ]
    paths = (
        alt.Chart(alt.Data(values=rows))
        .mark_line()
        .encode(
            x=alt.X("x:Q", title="first coordinate"),
            y=alt.Y("y:Q", title="second coordinate"),
            order="step:Q",
            color=alt.Color("case:N", title="third sequence"),
            strokeDash=alt.StrokeDash("what:N", title="trained"),
        )
    )
    predicted = (
        alt.Chart(alt.Data(values=rays))
        .mark_line(color="grey", strokeWidth=0.7)
        .encode(x="x:Q", y="y:Q", detail="ray:N")
    )
    names = (
        alt.Chart(alt.Data(values=rays[1::2]))
        .mark_text(color="grey", align="left", dx=3, dy=-3)
        .encode(x="x:Q", y="y:Q", text="ray:N")
    )
    return (predicted + paths + names).properties(width=360, height=360)


def _basin_figure(cases: dict[str, dict[str, Any]]) -> Any:
    rows = [
        {"case": case, "start": f"(0, {start:g})", "order": order, "x": x, "y": y}
        for case, found in cases.items()
        for trial, start in enumerate(STARTS)
        for order, (x, y) in enumerate(found["paths"][:, trial].tolist())
        if np.hypot(x, y) < 12.0
    ]
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=alt.OverlayMarkDef(size=12))
        .encode(
            x=alt.X("x:Q", title="first coordinate of the prompt"),
            y=alt.Y("y:Q", title="second coordinate of the prompt"),
            order="order:Q",
            color=alt.Color("start:N", title="start", sort=None),
        )
        .properties(width=240, height=260)
        .facet(column=alt.Column("case:N", title="second token"))
    )
