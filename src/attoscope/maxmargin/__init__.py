"""Is a trained head a max-margin selector? Each head beside the SVM of its own choices.

What the numbers say and what they do not: docs/heads.md.
"""

from attoscope.maxmargin.choices import Choices as Choices
from attoscope.maxmargin.choices import collect as collect
from attoscope.maxmargin.geometry import Geometry as Geometry
from attoscope.maxmargin.geometry import geometry as geometry
from attoscope.maxmargin.predictors import HeldOut as HeldOut
from attoscope.maxmargin.predictors import held_out as held_out
from attoscope.maxmargin.readings import MaxMargin as MaxMargin
from attoscope.maxmargin.readings import max_margin as max_margin
