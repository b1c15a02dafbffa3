"""DeepScaleLM: all claims, of components, of whole stacks, of depth and of rank collapse."""

# Importing a module registers its claims; the order is that of the ledger.
# isort: off
from attoscope.papers.deepscalelm import components as components
from attoscope.papers.deepscalelm import attention as attention
from attoscope.papers.deepscalelm import whole as whole
from attoscope.papers.deepscalelm import depth as depth
from attoscope.papers.deepscalelm import collapse as collapse
from attoscope.papers.deepscalelm import training as training
from attoscope.papers.deepscalelm._paper import PAPER as PAPER
