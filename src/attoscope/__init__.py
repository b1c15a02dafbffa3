"""attoscope: see what attention selects, and why.

Public names are loaded on first use, so that `import attoscope` stays light: neither torch nor
transformers nor plotting is imported by it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attoscope.checking import check as check
    from attoscope.diagnosing import diagnose as diagnose
    from attoscope.diagnosis import Diagnosis as Diagnosis
    from attoscope.errors import AttoscopeError as AttoscopeError
    from attoscope.findings import Finding as Finding
    from attoscope.monitor import watch as watch
    from attoscope.monitor.callback import TrainerCallback as TrainerCallback
    from attoscope.papers import reproduce as reproduce
    from attoscope.prediction import Prediction as Prediction
    from attoscope.prediction import predict as predict
    from attoscope.remedies import Treatment as Treatment
    from attoscope.remedies import load_treated as load_treated
    from attoscope.remedies import treat as treat
    from attoscope.remedies import treatments_of as treatments_of
    from attoscope.svm import AttentionSVM as AttentionSVM
    from attoscope.svm import Selection as Selection
    from attoscope.trace import Subject as Subject
    from attoscope.trace import head_selections as head_selections

__version__ = "0.1.0"

# Where each public name lives. No module may bear the name of a public function: importing
# `attoscope.x` would put the module in the place of the function.
_HOMES = {
    "AttoscopeError": "attoscope.errors",
    "Finding": "attoscope.findings",
    "Subject": "attoscope.trace",
    "watch": "attoscope.monitor",
    "TrainerCallback": "attoscope.monitor.callback",
    "Diagnosis": "attoscope.diagnosis",
    "diagnose": "attoscope.diagnosing",
    "check": "attoscope.checking",
    "AttentionSVM": "attoscope.svm",
    "Selection": "attoscope.svm",
    "head_selections": "attoscope.trace",
    "reproduce": "attoscope.papers",
    "predict": "attoscope.prediction",
    "Prediction": "attoscope.prediction",
    "treat": "attoscope.remedies",
    "Treatment": "attoscope.remedies",
    "load_treated": "attoscope.remedies",
    "treatments_of": "attoscope.remedies",
}
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'attoscope' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
