"""What the readings of heads as max-margin selectors are called, mean, and are compared with."""

from __future__ import annotations

from attoscope.measures.base import Spec

PAPER = "Tarzanagh et al. 2023 (arXiv 2308.16898)"
RANDOM = "a random weight with the head's singular values, on the same keys and queries"

HELD_OUT: tuple[Spec, ...] = (
    Spec(
        name="svm_held_out",
        title="Held-out choices",
        meaning="Share of choices on one half of the documents that the max-margin weight of the "
        "other half's choices predicts, both ways round. First tokens and special tokens are left "
        "out, as queries and as keys: a head that parks its attention there is easy to predict. "
        "Only what is above the null speaks of the head: the rest is in its keys and queries; "
        "what position alone predicts stands beside it.",
        unit="share",
        range=(0.0, 1.0),
        source="attoscope's own definition (docs/heads.md)",
        null="random",
        null_meaning=RANDOM,
        missing="fewer than two documents, or fewer than two keys to choose from",
    ),
    Spec(
        name="svm_held_out_position",
        title="Held-out choices, by position",
        meaning="Share of the same choices that a table predicts which knows only where a key "
        "stands, from the start or from the query. A head at this level selects a place.",
        unit="share",
        range=(0.0, 1.0),
        source="attoscope's own definition (docs/heads.md)",
        null="chance",
        null_meaning="one over the number of keys to choose from",
        missing="fewer than two documents, or fewer than two keys to choose from",
    ),
)

GEOMETRY: tuple[Spec, ...] = (
    Spec(
        name="svm_margin_share",
        title="Margin share",
        meaning="Least margin of the head's weight as a share of the largest possible at the same "
        "Frobenius norm. 1 is the max-margin weight. One near tie makes it small, in trained and "
        "in fresh heads alike: no evidence of training.",
        unit="share",
        range=(0.0, 1.0),
        source=f"{PAPER}, Att-SVM",
        null_meaning=RANDOM,
    ),
    Spec(
        name="svm_alignment",
        title="Alignment with the SVM",
        meaning="Cosine of the head's weight with the max-margin weight of its choices: its mean "
        "margin on the competing keys over the largest possible. Never below the margin share, "
        "and large in fresh heads: no evidence of training.",
        unit="cosine",
        range=(0.0, 1.0),
        source=f"{PAPER}, Att-SVM",
        null_meaning=RANDOM,
    ),
    Spec(
        name="svm_support_share",
        title="Support share",
        meaning="Keys that hold the max-margin weight in place (with a multiplier), as a share of "
        "all that compete. Which they are stands in `data.svm`.",
        unit="share",
        range=(0.0, 1.0),
        source=f"{PAPER}, support of Att-SVM",
        null_meaning=RANDOM,
    ),
    Spec(
        name="svm_rank",
        title="Rank of the max-margin weight, Frobenius",
        meaning="Squared Frobenius over squared spectral norm (stable rank) of the max-margin "
        "weight: over how many directions the choices are spread. Of a sample of queries.",
        unit="dimensions",
        range=(1.0, None),
        source=f"{PAPER}, Att-SVM",
        null_meaning=RANDOM,
    ),
    Spec(
        name="svm_rank_nuclear",
        title="Rank of the max-margin weight, nuclear",
        meaning="The same of the weight of least nuclear norm, to which training of keys and "
        "queries as factors tends. Of the same sample.",
        unit="dimensions",
        range=(1.0, None),
        source=f"{PAPER}, nuclear-norm Att-SVM",
        null_meaning=RANDOM,
    ),
    Spec(
        name="svm_excess",
        title="Excess over the nearest norm",
        meaning="Norm of the head's weight at margin 1 over the least possible one, in the norm "
        "(of Frobenius, nuclear and spectral) in which that is smallest. 1: the head minimises "
        "that norm. Of the same sample; the label stands in `data.svm`.",
        unit="ratio",
        range=(1.0, None),
        source="arXiv 2410.14581, 2502.04664 (norms of optimisers)",
        null_meaning=RANDOM,
    ),
)
SPECS = (*HELD_OUT, *GEOMETRY)
