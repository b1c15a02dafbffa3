"""The twenty papers, and the follow-ups of the first; modules are loaded when asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from attoscope.errors import AttoscopeError
from attoscope.papers.base import Paper, nearest


@dataclass(frozen=True, slots=True)
class Entry:
    """A paper of the list: its slug, title and link, and the module that holds its claims."""

    slug: str
    title: str
    link: str
    module: str | None = None

    @property
    def exists(self) -> bool:
        """Whether its claims can be run."""
        return self.module is not None and find_spec(self.module) is not None

    def load(self) -> Paper:
        """The paper with its claims; AttoscopeError where they are not written yet."""
        if self.module is None or not self.exists:
            raise AttoscopeError(
                f"the claims of {self.slug} cannot be run yet; attoscope papers lists those that "
                "can"
            )
        paper: Paper = import_module(self.module).PAPER
        return paper


def _arxiv(slug: str, number: str, title: str, module: str | None = None) -> Entry:
    return Entry(slug, title, f"https://arxiv.org/abs/{number}", module)


ENTRIES = (
    _arxiv(
        "transformers-as-svms", "2308.16898", "Transformers as Support Vector Machines",
        "attoscope.papers.transformers_as_svms",
    ),
    _arxiv(
        "attention-max-margin-followups", "2306.13596",
        "Max-Margin Token Selection in Attention Mechanism, and the follow-ups",
        "attoscope.papers.attention_max_margin_followups",
    ),
    _arxiv(
        "admin-init", "2004.08249",
        "Understanding the Difficulty of Training Transformers (Admin)",
        "attoscope.papers.admin_init",
    ),
    _arxiv(
        "benign-overfitting-vit", "2409.19345",
        "Unveil Benign Overfitting for Transformer in Vision: Training Dynamics, Convergence, "
        "and Generalization",
    ),
    _arxiv(
        "better-explain", "2401.09972",
        "Better Explain Transformers by Illuminating Important Information (Mask-LRP)",
    ),
    _arxiv(
        "deepscalelm", "2403.09635",
        "Transformers Get Stable: An End-to-End Signal Propagation Theory for Language Models "
        "(DeepScaleLM)",
        "attoscope.papers.deepscalelm",
    ),
    _arxiv(
        "dyck-myopic", "2312.01429",
        "Transformers are uninterpretable with myopic methods: a case study with bounded Dyck "
        "grammars",
    ),
    _arxiv("embedding-space", "2209.02535", "Analyzing Transformers in Embedding Space"),
    _arxiv(
        "expressive-regression", "2402.15478",
        "Transformers are Expressive, But Are They Expressive Enough for Regression?",
    ),
    _arxiv(
        "gd-dynamics", "2411.07538", "Unraveling the Gradient Descent Dynamics of Transformers",
        "attoscope.papers.gd_dynamics",
    ),
    _arxiv(
        "interpretability-illusions", "2312.03656",
        "Interpretability Illusions in the Generalization of Simplified Models",
    ),
    Entry(
        "intrinsic-dimension",
        "An Intrinsic Dimension Perspective of Transformers for Sequential Modeling",
        "https://openreview.net/forum?id=2PKZtPMyvI",
    ),
    _arxiv(
        "math-transformer", "2211.00170",
        "What is my math transformer doing? Three results on interpretability and "
        "generalization",
    ),
    _arxiv(
        "memorization-vs-statistical-biases", "2409.04654",
        "Generalization vs. Memorization in the Presence of Statistical Biases in Transformers "
        "(withdrawn by its author)",
    ),
    _arxiv(
        "need-glasses", "2406.04267",
        "Transformers need glasses! Information over-squashing in language tasks",
    ),
    _arxiv(
        "neutreno", "2312.00751",
        "NeuTRENO: Mitigating Over-smoothing in Transformers via Regularized Nonlocal "
        "Functionals",
        "attoscope.papers.neutreno",
    ),
    _arxiv(
        "oversmoothing-record-straight", "2401.04301",
        "Setting the Record Straight on Transformer Oversmoothing",
        "attoscope.papers.oversmoothing_record_straight",
    ),
    _arxiv(
        "representational-strengths", "2306.02896",
        "Representational Strengths and Limitations of Transformers",
    ),
    _arxiv(
        "slalom", "2405.13536",
        "Attention Mechanisms Don't Learn Additive Models: Rethinking Feature Importance for "
        "Transformers (SLALOM)",
    ),
    _arxiv(
        "sufo", "2305.17588",
        "Diagnosing Transformers: Illuminating Feature Spaces for Clinical Decision-Making "
        "(SUFO)",
    ),
    _arxiv(
        "suppress-oversmoothing", "2104.12753",
        "Improve Vision Transformers Training by Suppressing Over-smoothing",
        "attoscope.papers.suppress_oversmoothing",
    ),
)  # fmt: skip


def find(slug: str) -> Entry:
    """The entry of this slug; an unknown one is an AttoscopeError that suggests the nearest."""
    entries = {entry.slug: entry for entry in ENTRIES}
    if slug not in entries:
        raise AttoscopeError(
            f"paper: there is no paper {slug!r}; did you mean {nearest(slug, entries)}? attoscope "
            "papers lists all"
        )
    return entries[slug]
