"""NeuTRENO: all claims, of the functional, of stacked layers, and of what the anchor is for."""

# Importing a module registers its claims; the order is that of the ledger.
# isort: off
from attoscope.papers.neutreno import flow as flow
from attoscope.papers.neutreno import fixed as fixed
from attoscope.papers.neutreno import untrained as untrained
from attoscope.papers.neutreno import trained as trained
from attoscope.papers.neutreno._paper import PAPER as PAPER
