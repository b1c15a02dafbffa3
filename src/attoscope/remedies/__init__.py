"""Remedies against tokens that become too alike with depth."""

from attoscope.remedies.saving import load_treated as load_treated
from attoscope.remedies.stability import stability as stability
from attoscope.remedies.treating import treat as treat
from attoscope.remedies.treatment import Change as Change
from attoscope.remedies.treatment import Treatment as Treatment
from attoscope.remedies.treatment import treatments_of as treatments_of
