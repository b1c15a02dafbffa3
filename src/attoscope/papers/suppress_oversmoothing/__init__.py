"""Three losses that keep patches of an image distinct: all claims."""

# Importing a module registers its claims; the order is that of the ledger.
# isort: off
from attoscope.papers.suppress_oversmoothing import gradients as gradients
from attoscope.papers.suppress_oversmoothing import trained as trained
from attoscope.papers.suppress_oversmoothing._paper import PAPER as PAPER
